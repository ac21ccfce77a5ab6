"""Launch choices of linear_cross_entropy: which part of the logits exists at a time, and where."""

from __future__ import annotations

from typing import NamedTuple

_BUFFER_BYTES = 1 << 30
_MAX_ROWS = 5504
_MIN_ROWS = 512
_TILE = 128  # rows or columns of a tile of the multiplications
_FEW_ROWS = 640
_FEW_COLUMNS = 2048
_LEAST_COLUMNS = 256
_LENT_TILE = 256
VECTOR_BYTES = 16
LEAST_APART = 1024  # columns below which a slow kernel is no slower than two
AT_ONCE = -1  # in the place of a chunk's size: all rows, and dW in the weight's dtype
_VECTORS = 4  # of 16 bytes that a thread holds
_ONE_WARP = 8192  # bytes of a row


def row_bytes(vocab: int, itemsize: int) -> int:
    """Bytes of one row of logits in the buffer, whose rows start on 16-byte borders."""
    return -(-vocab * itemsize // 16) * 16


def chunk_rows(rows: int, vocab: int, itemsize: int, memory_budget: int = 0) -> int:
    """Rows of a chunk for `rows` rows of `vocab` logits of `itemsize` bytes.

    Large chunks make efficient matrix multiplications and save passes over the fp32 dw (one read and one write each);
    beyond 5504 rows that gain is small and only memory grows: on an H200, bf16, 32768 x 768 x 50304 took 13.09 ms in
    chunks of 5504, 13.14 of 8192, 13.37 of 4096 and 14.60 of 2048; x 50257 13.98, 14.10, 14.38 and 15.58 ms. A
    chunk keeps to about 1 GiB down to 512 rows, below which the multiplications slow down; with a `memory_budget`
    (bytes, 0 for none) it takes what that allows. Chunks are evened out, in multiples of 128 rows (a tile of the
    multiplication) where they are that large.
    """
    rows = max(rows, 1)
    limit = max(memory_budget // row_bytes(vocab, itemsize), 1) if memory_budget else _most_rows(vocab, itemsize)
    tile = _TILE if limit >= _TILE else 1
    limit = limit // tile * tile
    even = -(-rows // -(-rows // limit))
    return min(-(-even // tile) * tile, rows)


def _most_rows(vocab: int, itemsize: int) -> int:
    return min(max((_BUFFER_BYTES + _BUFFER_BYTES // 32) // row_bytes(vocab, itemsize), _MIN_ROWS), _MAX_ROWS)


def rows_at_once(vocab: int, dim: int) -> int:
    """Up to how many rows all logits together, of 16 bits, take no more memory than chunks of them do.

    All at once, each element of dW is complete in one multiplication, which rounds it: 2·R·V bytes of logits and
    2·V·dim of dW. Chunks take 2·C·V and a dW of 4·V·dim in fp32, or 6·V·dim while that is rounded, and write dW once
    more each; a chunk has all rows if it may, else about half of them at most. Where columns of the vocabulary are
    multiplied apart (chunk_products.py), 4·dim bytes a row for an fp32 dx come on top.
    """
    apart = vocab >= LEAST_APART and vocab * 2 % VECTOR_BYTES != 0
    doubled = 4 * vocab * dim // (row_bytes(vocab, 2) + (4 * dim if apart else 0))
    most = _most_rows(vocab, 2)
    return max(most // _TILE * _TILE or most, doubled)


class ChunkPlan(NamedTuple):
    """The logits that exist at a time.

    Attributes:
        rows: of a chunk, or of a block of a chunk of the vocabulary.
        columns: of a chunk of the vocabulary, a multiple of 16; 0 for chunks of rows, which have the whole vocabulary.
        lend: whether the memory of dW holds logits until dW is written to it (`column_chunks`).
    """

    rows: int
    columns: int = 0
    lend: bool = True


def chunk_plan(rows: int, vocab: int, itemsize: int, chunk_size: int, memory_budget: int, need_dw: bool) -> ChunkPlan:
    """Chunks of rows, or of the vocabulary where the budget leaves few rows; all rows for a `chunk_size` of AT_ONCE.

    Every chunk of rows reads and writes the fp32 dW, 8·V·dim bytes; chunks of the vocabulary do not, but compute (most
    of) the logits twice, 2·R·V·dim operations. At 700 TFLOP/s and 4.2 TB/s (an H200) the first costs more below 670
    rows.
    """
    if chunk_size == AT_ONCE and need_dw:  # without a dW chunks save memory
        return ChunkPlan(max(rows, 1))
    if chunk_size > 0:
        return ChunkPlan(min(chunk_size, max(rows, 1)))
    chunk = chunk_rows(rows, vocab, itemsize, memory_budget)
    if memory_budget and need_dw and chunk < min(rows, _FEW_ROWS):
        plan = _block(rows, vocab, memory_budget // itemsize)
        if plan.columns >= min(_LEAST_COLUMNS, vocab):
            return plan
    return ChunkPlan(chunk)


def _block(rows: int, vocab: int, elements: int) -> ChunkPlan:
    """The block of at most `elements` logits: all rows and as many columns as fit, or half of the rows, a quarter...
    until there are 2048 columns or as many as rows.

    A chunk of columns reads and writes the fp32 dx of all rows, 8·R·dim bytes, so few columns are dear; blocks of a
    chunk add to an fp32 dW of its columns, which is small enough for the L2 cache.
    """
    parts = 1
    while True:
        even = -(-rows // parts)
        block = min(-(-even // _TILE) * _TILE, rows)
        columns = elements // block
        columns = columns // _TILE * _TILE or columns // 16 * 16
        if columns >= min(_FEW_COLUMNS, vocab) or block <= max(columns, _TILE):
            return ChunkPlan(block, min(columns, -(-vocab // 16) * 16))
        parts *= 2


class ColumnChunk(NamedTuple):
    """Columns [start, stop) of the logits of all rows.

    Attributes:
        start, stop: the columns.
        lent: None where their logits pass through the buffer, block by block; else they all lie from this element on in
            the memory of dW.
    """

    start: int
    stop: int
    lent: int | None = None


class Rounds(NamedTuple):
    """The chunks of both rounds over the vocabulary, in order.

    Attributes:
        first: of the logsumexp; column 0 comes first.
        second: of the gradients.
        ready: those of the second round whose logits the first one leaves where they belong.
    """

    first: list[ColumnChunk]
    second: list[ColumnChunk]
    ready: list[ColumnChunk]


def column_chunks(rows: int, vocab: int, plan: ChunkPlan, lendable: int) -> Rounds:
    """The chunks of both rounds.

    Until dW is written, its memory is free for logits. The second round lends its end to a chunk as wide as leaves
    room for the dW of all columns up to the chunk's own, then to the next, narrower one, while they are wider than what
    the buffer holds. The first of them is the first chunk of both rounds: its logits stay where they are and are
    computed once (a third of all in 8192 x 4096 x V, a ninth in 16384 x 2048 x V), like those that the first round
    leaves in the buffer, if that has all rows. The first round has the rest of dW's memory too.

    Args:
        rows, vocab: of the logits.
        plan: with columns > 0.
        lendable: elements, of the size of logits, in dW's memory for one class.
    """
    least = max(plan.columns, _LENT_TILE)
    lendable = lendable if plan.lend else 0
    lent: list[ColumnChunk] = []
    start = 0
    while lendable:
        width = ((vocab - start) * lendable - 8) // (rows + lendable) // _LENT_TILE * _LENT_TILE
        if width < least:
            break
        lent.append(ColumnChunk(start, start + width, (vocab * lendable - rows * width) // 8 * 8))
        start += width
    others = _evenly(start, vocab, plan.columns)
    last = others[-1:] if plan.rows >= rows else []
    others = others[:-1] if last else others
    kept = lent[:1]
    start, stop = kept[0].stop if kept else 0, last[0].start if last else vocab
    width = (kept[0].lent or 0 if kept else vocab * lendable) // rows // _LENT_TILE * _LENT_TILE
    middle = _evenly(start, stop, width, 0) if width >= least else _evenly(start, stop, plan.columns)
    return Rounds(kept + middle + last, lent + last + others, kept + last)


def _evenly(start: int, stop: int, columns: int, lent: int | None = None) -> list[ColumnChunk]:
    # as few chunks of at most `columns` as there can be, of one width but for the first
    if start == stop:
        return []
    tile = _TILE if columns % _TILE == 0 else 16
    count = -(-(stop - start) // columns)
    width = -(-(stop - start) // (count * tile)) * tile
    stops = range(stop - (count - 1) * width, stop + 1, width)
    return [ColumnChunk(max(at - width, start), at, lent) for at in stops if at > start]


class BlockLaunch(NamedTuple):
    """Launch of a kernel over a block of logits, one row a program.

    Attributes:
        block: logits that a program handles at a time, a power of two.
        num_warps: warps a program.
    """

    block: int
    num_warps: int


def block_launch(columns: int, itemsize: int, softcap: bool) -> BlockLaunch:
    """One warp for a row of up to 8 KB, two up to 16 KB, then four; four vectors of 16 bytes a thread at a time (two
    with a softcap, whose tanh needs the registers).

    Rows are short beside the latency of their loads. Small programs have 32 rows at once in an SM, 64 KB on their way
    (4.2 TB/s need 40), take no barrier, and steps of 2 KB leave few threads idle in a row's last one: 3072 columns in a
    step of 4096 would raise a third more powers than there are.
    """
    vector = 16 // itemsize
    vectors = _VECTORS // 2 if softcap else _VECTORS
    num_warps = 1 if columns * itemsize <= _ONE_WARP else 2 if columns * itemsize <= 2 * _ONE_WARP else 4
    return BlockLaunch(32 * num_warps * vectors * vector, num_warps)
