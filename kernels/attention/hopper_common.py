"""Parts that the Hopper attention kernels share: Gluon's names across Triton versions, TMA descriptors, tile schedules.

Gluon (triton.experimental.gluon) writes what `tl` leaves to the compiler: which warps load, which multiply, in which
registers. It runs on a GPU only, never in the interpreter. The index arithmetic below is therefore written in operators
that Python's ints understand as well: tests call the functions with ints (`python_function`).
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from fuselm.kernels._triton import HAVE_TRITON, jit, tl, triton
from fuselm.kernels.attention.tiles import locate

HAVE_GLUON = HAVE_TRITON and importlib.util.find_spec("triton.experimental.gluon") is not None

if TYPE_CHECKING or HAVE_GLUON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
else:
    gluon = SimpleNamespace(jit=lambda f=None, **_: f if f is not None else lambda g: g)
    language, hopper, TensorDescriptor = SimpleNamespace(), SimpleNamespace(mbarrier=None, tma=None), None

# Any: a type checker would reject ints passed for constexpr.
gluon_jit: Any = gluon.jit
gl: Any = language
mbarrier: Any = hopper.mbarrier
tma: Any = hopper.tma
fence_async_shared: Any = getattr(hopper, "fence_async_shared", None)
warpgroup_mma: Any = getattr(hopper, "warpgroup_mma", None)
warpgroup_mma_wait: Any = getattr(hopper, "warpgroup_mma_wait", None)
# Triton 3.6 names the copies by where they go; later ones call them loads and stores.
tma_load: Any = getattr(tma, "async_load", None) or getattr(tma, "async_copy_global_to_shared", None)
tma_store: Any = getattr(tma, "async_store", None) or getattr(tma, "async_copy_shared_to_global", None)
constexpr: Any = getattr(tl, "constexpr", int)  # without Triton this file is imported, but never compiled
thread_barrier: Any = getattr(gl, "thread_barrier", None) or getattr(gl, "barrier", None)


LOG2E = 1.4426950408889634
SPREAD = constexpr(HAVE_GLUON and triton.__version__.startswith("3.6."))  # later ones check a view's size
RAGGED = 2**30  # rows that a ragged descriptor counts; also the coordinate that its outermost dimension stays at
_RAGGED_BOUND = 0x7FFF0000
TABLE_COLUMNS = 8  # ints an entry of a tile table: six, padded to 32 bytes
SORTED_TILES = 4096  # at most: each is compared with all, which for 16,384 would take a millisecond or two (counted)


def python_function(function: Any) -> Any:
    """The Python function inside a jitted one, for index arithmetic on plain ints."""
    return getattr(function, "fn", function)


# --- Descriptors -------------------------------------------------------------------------------------------------


def tma_refusal(name: str, x: torch.Tensor) -> str | None:
    """Why TMA cannot address the (batch, rows, heads, head_dim) tensor `x`, or None where it can."""
    if x.stride(-1) != 1:
        return f"the last dimension of {name} has stride {x.stride(-1)}"
    if x.data_ptr() % 16:
        return f"{name} does not begin at a multiple of 16 bytes"
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        # The stride of a dimension of one element is never used; `rows_descriptor` puts another in its place.
        if size > 1 and (stride <= 0 or stride * x.element_size() % 16 or stride * x.element_size() >= 2**40):
            return f"{name} has strides {tuple(x.stride())}: TMA needs multiples of 16 bytes"
    return None


def _descriptor(x: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[x.dtype]
    return TensorDescriptor(x, shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def rows_descriptor(x: torch.Tensor, rows: int, ragged: bool) -> Any:
    """Descriptor of tiles of `rows` rows of one head of a (batch, rows, heads, head_dim) tensor.

    A load beyond the last row gives zeros, a store there is dropped. A ragged descriptor (batch 1) does so at the end
    of each document: rows are addressed from the end, as RAGGED - length + row in a dimension of RAGGED rows, plus
    begin + length in a further dimension of the same stride; an outermost dimension, always at RAGGED, has a stride
    that takes RAGGED rows off again when the address wraps around at 2^64 (the way that triton_kernels does it).
    """
    heads, head_dim = x.shape[2:]
    aligned = 16 // x.element_size()
    strides = [s if n > 1 else aligned for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    if not ragged:
        return _descriptor(x, list(x.shape), [*strides, 1], [1, rows, 1, head_dim])
    shape = [_RAGGED_BOUND, _RAGGED_BOUND, RAGGED, heads, head_dim]
    return _descriptor(x, shape, [2**34 - strides[1], strides[1], *strides[1:], 1], [1, 1, rows, 1, head_dim])


def flat_descriptor(x: torch.Tensor, block: list[int]) -> Any:
    """Descriptor of blocks of a contiguous tensor of one or two dimensions."""
    return _descriptor(x, list(x.shape), list(x.stride()), block)


@gluon_jit
def load_rows(desc, batch, begin, length, row, head, barrier, destination, PACKED: tl.constexpr):
    """Loads a tile of rows; `row` counts within the document of `length` rows that starts at row `begin`."""
    if PACKED:
        tma_load(desc, [1073741824, begin + length, 1073741824 - length + row, head, 0], barrier, destination)
    else:
        tma_load(desc, [batch, row, head, 0], barrier, destination)


@gluon_jit
def store_rows(desc, batch, begin, length, row, head, source, PACKED: tl.constexpr):
    """Stores a tile of rows, leaving out those beyond the document."""
    if PACKED:
        tma_store(desc, [1073741824, begin + length, 1073741824 - length + row, head, 0], source)
    else:
        tma_store(desc, [batch, row, head, 0], source)


@gluon_jit
def ring(desc, COUNT: tl.constexpr):
    """Shared memory for COUNT blocks of a descriptor."""
    lead: tl.constexpr = gl.constexpr([COUNT])
    return gl.allocate_shared_memory(desc.dtype, lead + desc.block_type.shape, desc.layout)


@gluon_jit
def barrier_ring(COUNT: tl.constexpr, ARRIVALS: tl.constexpr):
    """COUNT barriers whose phase ends with ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon_jit
def plan_ring(NUMBERS: tl.constexpr):
    """Two plans of NUMBERS ints in shared memory, in which the producer tells the consumers what a tile is."""
    places: tl.constexpr = gl.constexpr([2 * (NUMBERS + 31), 1])
    return gl.allocate_shared_memory(gl.int32, places, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon_jit
def note(plan, slot, index: tl.constexpr, value):
    """Writes a number of a plan, from a warp; they come in their order.

    Where Triton lets them, the lanes write to a place each, of which the first counts, and the next numbers go over the
    others: what is read was then written by the lane that arrives at the barrier. If all write the same place, they are
    over as well by then, as Triton brings a warp together before its arrival; but compute-sanitizer's racecheck
    takes only what the arriving lane did for done.
    """
    place = plan.index(plan.shape[0] // 2 * slot + index)
    if SPREAD:
        # Lanes 1 and 2 change over: else Triton takes stmatrix, which wants multiples of 16 bytes.
        lanes: tl.constexpr = gl.DistributedLinearLayout([], [[2], [1], [4], [8], [16]], [], [], [32])
        places = place._reinterpret(gl.int32, [32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        places.store(gl.full([32], value, gl.int32, lanes))
    else:
        one: tl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        place.store(gl.zeros([1], gl.int32, one) + value)


@gluon_jit
def noted(plan, slot, index: tl.constexpr):
    """A number of a plan, for a warpgroup."""
    one: tl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    number = plan.index(plan.shape[0] // 2 * slot + index).load(one)
    # All threads have the same number, which ptxas learns from this alone: it then goes to a uniform register.
    number = gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )
    return gl.sum(number, 0)


@gluon_jit
def matrix(buffer):
    """A buffer of a descriptor's block shape, [1, rows, 1, head_dim] or with one more 1, as [rows, head_dim]."""
    rows: tl.constexpr = buffer.shape[len(buffer.shape) - 3]
    columns: tl.constexpr = buffer.shape[len(buffer.shape) - 1]
    layout: tl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], buffer.dtype)
    return buffer._reinterpret(buffer.dtype, [rows, columns], layout)


@gluon_jit
def execute(PTX: tl.constexpr):
    """Executes an instruction for what it does: it gives nothing."""
    gl.inline_asm_elementwise(
        f"{PTX}; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon_jit
def take_turn(ME: tl.constexpr):
    """Waits for `give_turn`, which may come first. Warps arrive at a named barrier (12 to 14; Triton uses those from 0
    on) one by one; before an arrival at an mbarrier, Triton brings those of a warpgroup together."""
    execute(gl.constexpr(f"bar.sync {12 + ME}, 256"))


@gluon_jit
def give_turn(OTHER: tl.constexpr):
    """Lets another consumer issue products: two warpgroups meet at its barrier, and the first one does not wait."""
    execute(gl.constexpr(f"bar.arrive {12 + OTHER}, 256"))


@gluon_jit
def meet(odd, FIRST: tl.constexpr, THREADS: tl.constexpr, WAIT: tl.constexpr):
    """Arrives at named barrier FIRST, or at the next one if `odd` is 1, whose round ends when THREADS threads have;
    waits for that if WAIT. Nobody may arrive twice in a round.

    Warps arrive one by one. At an mbarrier one thread arrives, for which Triton brings those of a partition together,
    and once more where they next touch shared memory. Triton uses the first few of the 16 named barriers.
    """
    verb: tl.constexpr = gl.constexpr("sync" if WAIT else "arrive")
    gl.inline_asm_elementwise(
        f"{{ .reg .pred odd; setp.ne.b32 odd, $1, 0; @!odd bar.{verb} {FIRST}, {THREADS}; "
        f"@odd bar.{verb} {FIRST + 1}, {THREADS}; mov.b32 $0, $1; }}",
        "=r,r", [odd], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon_jit
def release(empty, slot):
    """The slot is read: TMA may overwrite it, once every thread of the partition is here."""
    fence_async_shared()
    mbarrier.arrive(empty.index(slot), count=1)


# --- Schedules ---------------------------------------------------------------------------------------------------


@gluon_jit
def position_at(program, programs, step):
    """The place that a program takes in round `step`. Every second round goes backwards: with the places sorted by
    length, who took the longest of one round takes the shortest of the next."""
    return step * programs + program + step % 2 * (programs - 1 - 2 * program)


@gluon_jit
def tile_and_head(position, heads, section, tiles):
    """(tile, head over all batches) of a place: sections of `section` heads one after the other, so that the keys and
    values in use fit in L2; within a section the heads of a tile side by side. The last section begins with the last
    tile, the one before it with the first, and so on by turns: where a causal mask makes tiles longer and longer, their
    lengths never jump, which would leave programs with unequal work."""
    number = position // (section * tiles)
    inside = position - number * section * tiles
    size = min(section, heads - number * section)
    order = inside // size
    upward = ((heads + section - 1) // section - 1 - number) % 2
    tile = tiles - 1 - order + upward * (2 * order - (tiles - 1))
    return tile, number * section + inside - order * size


@gluon_jit
def key_blocks(
    first,
    rows,
    keys,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Key blocks that queries [first, first + ROWS) meet: (begin, full begin, full end, count), in blocks.

    Blocks begin .. begin + count - 1 are visited; those outside [full begin, full end) need a mask. One block at least,
    all masked where there is no key to see, so that no case needs a path of its own; and one where there are no
    queries, as behind a document's end.
    """
    shift = keys - rows
    last = min(first + ROWS, rows) - 1
    begin = first * 0
    full_begin = first * 0
    end = keys
    full_end = keys // BLOCK_N
    if CAUSAL:
        end = min(end, max(last + shift + 1, 0))
        full_end = min(full_end, max(first + shift + 1, 0) // BLOCK_N)
    if WINDOW:
        begin = max(first + shift - window + 1, 0) // BLOCK_N
        full_begin = (max(last + shift - window + 1, 0) + BLOCK_N - 1) // BLOCK_N
    count = max((end + BLOCK_N - 1) // BLOCK_N - begin, 1)
    some = max(min(rows - first, 1), 0)
    return begin, full_begin, full_end, 1 + (count - 1) * some


@gluon_jit
def split_blocks(begin, full_begin, full_end, count):
    """Visits 0 .. count - 1 go from the last block to the first: those in [from, to) need no mask. The first never is
    among them."""
    full_from = max(min(begin + count - full_end, count), 1)
    full_to = max(min(begin + count - full_begin, count), full_from)
    return full_from, full_to


@gluon_jit
def own_blocks(
    first, rows, keys, window, last, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """What a consumer with queries [first, first + 64) visits of its tile's blocks, which go from `last` downward:
    (blocks that come before, from where and up to where its own need no mask, how many its own are).

    A consumer behind the last query visits one.
    """
    begin, full_begin, full_end, count = key_blocks(first, rows, keys, window, CAUSAL, WINDOW, 64, BLOCK_N)
    full_from, full_to = split_blocks(begin, full_begin, full_end, count)
    some = max(min(rows - first, 1), 0)
    skipped = (last + 1 - begin - count) * some
    return skipped, 1 + (full_from - 1) * some, 1 + (full_to - 1) * some, 1 + (count - 1) * some


@gluon_jit
def query_blocks(
    first,
    rows,
    queries,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Query blocks that keys [first, first + ROWS) meet: (begin, full begin, full end, count), in blocks.

    As `key_blocks`, but count may be 0. Queries beyond the last need no mask, as their lse is +inf; keys beyond the
    last do, in every block.
    """
    shift = rows - queries
    last = min(first + ROWS, rows) - 1
    begin = first * 0
    full_begin = first * 0
    end = queries
    full_end = (queries + BLOCK_M - 1) // BLOCK_M
    if CAUSAL:
        begin = max(first - shift, 0) // BLOCK_M
        full_begin = (max(last - shift, 0) + BLOCK_M - 1) // BLOCK_M
    if WINDOW:
        end = min(end, max(last - shift + window, 0))
        full_end = min(full_end, max(first - shift + window, 0) // BLOCK_M)
    whole = max(min(rows - first - ROWS + 1, 1), 0)
    count = max((end + BLOCK_M - 1) // BLOCK_M - begin, 0)
    return begin, full_begin, full_end * whole, count


@gluon_jit
def place_of(tile, table_ptr, rows, others, PACKED: tl.constexpr, ROWS: tl.constexpr):
    """What `locate` gives for a tile, and the document's number: from the table of `tile_table` with documents."""
    if PACKED:
        entry = table_ptr + tile * 8
        first, length, begin = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
        return first, length, begin, gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)
    else:
        return tile * ROWS, rows, tile * 0, others, tile * 0, tile * 0


@jit
def _work(first, rows, others, window, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """How many of the others a tile meets; -1 where the tile is empty."""
    begin = first * 0
    end = others
    last = tl.minimum(first + BLOCK, rows) - 1
    shift = others - rows
    if QUERIES:
        if CAUSAL:
            end = tl.minimum(end, last + shift + 1)
        if WINDOW:
            begin = tl.maximum(begin, first + shift - window + 1)
    else:
        if CAUSAL:
            begin = tl.maximum(begin, first + shift)
        if WINDOW:
            end = tl.minimum(end, last + shift + window)
    return tl.where(first < rows, tl.maximum(end - begin, 0), -1)


@jit(do_not_specialize=["rows", "others", "documents", "window"])
def _tile_table_kernel(
    table_ptr, cu_rows_ptr, cu_others_ptr, rows, others, documents, window,
    SORTED: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    first, length, begin, other_length, other_begin = locate(
        tile, cu_rows_ptr, cu_others_ptr, rows, others, documents, True, BLOCK
    )
    place = tile
    if SORTED:
        work = _work(first, length, other_length, window, QUERIES, CAUSAL, WINDOW, BLOCK)
        place = tl.zeros((), tl.int32)  # how many tiles have less work
        for start in range(0, tiles, 128):
            each = start + tl.arange(0, 128)
            each_first, each_length, _begin, each_others, _other_begin = locate(
                each, cu_rows_ptr, cu_others_ptr, rows, others, documents, True, BLOCK
            )
            each_work = _work(each_first, each_length, each_others, window, QUERIES, CAUSAL, WINDOW, BLOCK)
            less = (each_work < work) | ((each_work == work) & (each < tile))
            place += tl.sum((less & (each < tiles)).to(tl.int32), 0)
        if not QUERIES:
            place = tiles - 1 - place
    entry = table_ptr + place * 8
    tl.store(entry, first)
    tl.store(entry + 1, length)
    tl.store(entry + 2, begin)
    tl.store(entry + 3, other_length)
    tl.store(entry + 4, other_begin)
    tl.store(entry + 5, tile - begin // BLOCK - first // BLOCK)
    tl.store(table_ptr + tiles * 8, 0, mask=tile == 0)


def tile_table(
    cu_rows: torch.Tensor | None,
    cu_others: torch.Tensor | None,
    rows: int,
    others: int,
    block: int,
    *,
    by_work: bool = True,
    queries: bool,
    causal: bool,
    window: int,
) -> tuple[torch.Tensor | None, int]:
    """The tiles of `block` rows over packed documents, and how many there are.

    Args:
        cu_rows: (documents + 1,) int32, or None for no documents.
        cu_others: the same of the other side.
        rows: over all documents.
        others: over all documents.
        block: rows of a tile.
        by_work: whether to sort them by how many of the others they meet, those of queries with the longest last, those
            of keys with the longest first, both as without documents under a causal mask; else, and where there are
            more than SORTED_TILES, in `locate`'s order.
        queries: whether the rows are queries.
        causal: whether a causal mask cuts the work.
        window: its width, 0 for none.

    Returns:
        (tiles + 1, TABLE_COLUMNS) int32 with first row within the document, rows of the document, where they begin,
        others, where they begin, number of the document, and a last entry that starts with a 0 to count with;
        without documents None. And the number of tiles.
    """
    if cu_rows is None or cu_others is None:
        return None, -(-rows // block)
    tiles = rows // block + cu_rows.shape[0]
    table = torch.empty((tiles + 1, TABLE_COLUMNS), dtype=torch.int32, device=cu_rows.device)
    _tile_table_kernel[(tiles,)](
        table, cu_rows, cu_others, rows, others, cu_rows.shape[0] - 1, window,
        SORTED=by_work and tiles <= SORTED_TILES, QUERIES=queries, CAUSAL=causal, WINDOW=window > 0, BLOCK=block,
        num_warps=1,
    )  # fmt: skip
    return table, tiles
