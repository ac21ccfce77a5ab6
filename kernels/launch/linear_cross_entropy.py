"""Launch choices of linear_cross_entropy: which part of the logits exists at a time."""

from __future__ import annotations

from typing import NamedTuple

_BUFFER_BYTES = 1 << 30
_MAX_ROWS = 5504
_MIN_ROWS = 512
_TILE_ROWS = 128
_FEW_ROWS = 640
_LEAST_COLUMNS = 512


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
    size = row_bytes(vocab, itemsize)
    if memory_budget:
        limit = max(memory_budget // size, 1)
    else:
        limit = min(max((_BUFFER_BYTES + _BUFFER_BYTES // 32) // size, _MIN_ROWS), _MAX_ROWS)
    tile = _TILE_ROWS if limit >= _TILE_ROWS else 1
    limit = limit // tile * tile
    even = -(-rows // -(-rows // limit))
    return min(-(-even // tile) * tile, rows)


class ChunkPlan(NamedTuple):
    """A chunk of logits.

    Attributes:
        rows: of it.
        columns: of it; 0 for the whole vocabulary.
    """

    rows: int
    columns: int = 0


def chunk_plan(rows: int, vocab: int, itemsize: int, chunk_size: int, memory_budget: int, need_dw: bool) -> ChunkPlan:
    """Chunks of rows, or of the vocabulary where the budget leaves few rows.

    Every chunk of rows reads and writes the fp32 dW, 8·V·dim bytes; chunks of the vocabulary do not, but compute the
    logits twice, 2·R·V·dim operations. At 700 TFLOP/s and 4.2 TB/s (an H200) the first costs more below 670 rows.
    """
    if chunk_size:
        return ChunkPlan(min(chunk_size, max(rows, 1)))
    chunk = chunk_rows(rows, vocab, itemsize, memory_budget)
    if memory_budget and need_dw and chunk < min(rows, _FEW_ROWS):
        columns = memory_budget // (rows * itemsize) // _TILE_ROWS * _TILE_ROWS
        if columns >= _LEAST_COLUMNS:
            return ChunkPlan(rows, min(columns, vocab))
    return ChunkPlan(chunk)
