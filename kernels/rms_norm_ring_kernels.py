"""Forward of rms_norm and add_rms_norm on Hopper, in Gluon: rows come by TMA to shared memory, as many at once as it
holds, where the kernel in rms_norm_kernels.py has in flight what its registers hold.

A tile is ROWS rows of LINES x 64 elements, LINES a power of two: a copy fills lines that a row does not have with
zeros, and leaves them out on the way back. Outputs leave from the registers, or (BY_TMA) by way of the slot that their
inputs came in: a thread writes where it has read.

Two kernels. Ring: a persistent grid, whose producer warp fills SLOTS slots in turn; load number m goes to slot
m % SLOTS. Burst: a program for every SLOTS tiles, which loads all of them at once and uses no slot twice: the hardware
gives the next program to whichever SM is done first.

A slot that is read or written by threads (generic proxy) is copied from or to by TMA (async proxy) only after a proxy
fence of every thread and then a barrier of all of them.
"""

from __future__ import annotations

from fuselm.kernels._triton import tl
from fuselm.kernels.attention.hopper_common import (
    barrier_ring,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    release,
    ring,
    thread_barrier,
    tma,
    tma_load,
    tma_store,
)

# --- A tile ------------------------------------------------------------------------------------------------------


@gluon_jit
def bring_tile(slots, others, slot, full, x_desc, residual_desc, row, HAS_RESIDUAL: tl.constexpr):
    """Copies the rows from `row` on of x, and of the residual, to a slot; `full` tells when they are there."""
    mbarrier.expect(full, x_desc.block_type.nbytes * (2 if HAS_RESIDUAL else 1))
    tma_load(x_desc, [row, 0, 0], full, slots.index(slot))
    if HAS_RESIDUAL:
        tma_load(residual_desc, [row, 0, 0], full, others.index(slot))


@gluon_jit
def places(N: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, LAYOUT: tl.constexpr):
    """Rows of a tile [ROWS], elements of a row [1, LINES, 64], and which lines there are."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    line = gl.arange(0, LINES, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    line = gl.expand_dims(gl.expand_dims(line, 0), 2)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    column = line * 64 + gl.expand_dims(gl.expand_dims(column, 0), 1)
    return row, column, line < N // 64


@gluon_jit
def load_weight(weight_ptr, column, exists, offset, HAS_WEIGHT: tl.constexpr):
    """[1, LINES, 64] fp32: offset + weight, or ones."""
    if HAS_WEIGHT:
        return gl.load(weight_ptr + column, mask=exists, other=0.0).to(gl.float32) + gl.cast(offset, gl.float32)
    else:
        return gl.full_like(column, 1.0, dtype=gl.float32)


@gluon_jit
def load_tile(slots, others, slot, HAS_RESIDUAL: tl.constexpr, LAYOUT: tl.constexpr):
    """[ROWS, LINES, 64]: the rows in a slot, or their sum as rounded to the dtype."""
    x = slots.index(slot).load(LAYOUT)
    if HAS_RESIDUAL:
        x = (x.to(gl.float32) + others.index(slot).load(LAYOUT).to(gl.float32)).to(x.dtype)
    return x


@gluon_jit
def rstd_of(h, eps, N: tl.constexpr, LAYOUT: tl.constexpr):
    """[ROWS]."""
    value = h.to(gl.float32)
    squares = gl.sum((value * value).reshape([h.shape[0], h.shape[1] * h.shape[2]]), 1)
    rstd = 1.0 / gl.sqrt_rn(squares / N + gl.cast(eps, gl.float32))
    return gl.convert_layout(rstd, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))


@gluon_jit
def scaled(h, rstd, weight):
    """y, of h's dtype."""
    return (h.to(gl.float32) * gl.expand_dims(gl.expand_dims(rstd, 1), 2) * weight).to(h.dtype)


@gluon_jit
def send_tile(slots, others, slot, h, y, h_desc, y_desc, row, HAS_RESIDUAL: tl.constexpr):
    """Stores by TMA by way of the slot that the inputs came in."""
    slots.index(slot).store(y)
    if HAS_RESIDUAL:
        others.index(slot).store(h)
    fence_async_shared()
    thread_barrier()
    tma_store(y_desc, [row, 0, 0], slots.index(slot))
    if HAS_RESIDUAL:
        tma_store(h_desc, [row, 0, 0], others.index(slot))


@gluon_jit
def write_tile(
    h, y, h_ptr, y_ptr, row, column, mask, N: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVICTION: tl.constexpr
):
    """Stores from the registers; `row`: of the tensor, [ROWS]."""
    at = gl.expand_dims(gl.expand_dims(row.to(gl.int64) * N, 1), 2) + column
    gl.store(y_ptr + at, y, mask=mask, eviction_policy=EVICTION)
    if HAS_RESIDUAL:
        gl.store(h_ptr + at, h, mask=mask, eviction_policy=EVICTION)


# --- Ring --------------------------------------------------------------------------------------------------------


@gluon_jit
def share_of(tiles, RUNS: tl.constexpr):
    """(first, step, count) of a program's tiles: every num_programs-th, or a run of neighbours."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    count = tiles // programs
    rest = tiles - count * programs
    if RUNS:
        first = program * count + min(program, rest)
        step = 1
    else:
        first = program
        step = programs
    return first, step, count + max(min(rest - program, 1), 0)


@gluon_jit
def _bring(
    slots, others, full, empty, x_desc, residual_desc, tiles,
    HAS_RESIDUAL: tl.constexpr, RUNS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    first, step, count = share_of(tiles, RUNS)
    for number in range(count):
        slot = number % SLOTS  # pyright: ignore[reportOperatorIssue]
        mbarrier.wait(empty.index(slot), number // SLOTS & 1 ^ 1)
        row = (first + number * step) * ROWS
        bring_tile(slots, others, slot, full.index(slot), x_desc, residual_desc, row, HAS_RESIDUAL)


@gluon_jit
def _consume(
    slots, others, full, empty, h_desc, y_desc, weight_ptr, h_ptr, y_ptr, rstd_ptr, rows, tiles, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, N: tl.constexpr, RUNS: tl.constexpr, BY_TMA: tl.constexpr,
    EVICTION: tl.constexpr, BEHIND: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    stores: tl.constexpr = 2 if HAS_RESIDUAL else 1  # pyright: ignore[reportAssignmentType]
    in_tile, column, exists = places(N, ROWS, LINES, LAYOUT)
    weight = load_weight(weight_ptr, column, exists, offset, HAS_WEIGHT)
    first, step, count = share_of(tiles, RUNS)
    for number in range(count):
        slot = number % SLOTS  # pyright: ignore[reportOperatorIssue]
        row = (first + number * step) * ROWS
        mbarrier.wait(full.index(slot), number // SLOTS & 1)
        h = load_tile(slots, others, slot, HAS_RESIDUAL, LAYOUT)
        if not BY_TMA:
            release(empty, slot)
        rstd = rstd_of(h, eps, N, LAYOUT)
        y = scaled(h, rstd, weight)
        here = row + in_tile
        gl.store(rstd_ptr + here, rstd, mask=here < rows)
        if BY_TMA:
            send_tile(slots, others, slot, h, y, h_desc, y_desc, row, HAS_RESIDUAL)
            tma.store_wait(BEHIND * stores)
            if number >= BEHIND:  # the outputs of that tile have left its slot
                mbarrier.arrive(empty.index((number - BEHIND) % SLOTS), count=1)
        else:
            mask = gl.expand_dims(gl.expand_dims(here < rows, 1), 2) & exists
            write_tile(h, y, h_ptr, y_ptr, here, column, mask, N, HAS_RESIDUAL, EVICTION)
    if BY_TMA:
        tma.store_wait(0)


@gluon_jit(do_not_specialize=["rows", "tiles"])
def rms_norm_ring_kernel(
    x_desc, residual_desc, h_desc, y_desc, weight_ptr, h_ptr, y_ptr, rstd_ptr, rows, tiles, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, N: tl.constexpr, BY_TMA: tl.constexpr,
    EVICTION: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr, LAYOUT: tl.constexpr,
    RUNS: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    slots = ring(x_desc, SLOTS)
    others = slots
    if HAS_RESIDUAL:
        others = ring(residual_desc, SLOTS)
    full = barrier_ring(SLOTS, 1)
    empty = barrier_ring(SLOTS, 1)
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (slots, others, full, empty, h_desc, y_desc, weight_ptr, h_ptr, y_ptr, rstd_ptr, rows, tiles,
                        eps, offset, HAS_RESIDUAL, HAS_WEIGHT, N, RUNS, BY_TMA, EVICTION, BEHIND, ROWS, LINES, SLOTS,
                        LAYOUT)),
            (_bring, (slots, others, full, empty, x_desc, residual_desc, tiles, HAS_RESIDUAL, RUNS, ROWS, SLOTS)),
        ],
        [1],
        [24],
    )
    # fmt: on


# --- Burst -------------------------------------------------------------------------------------------------------


@gluon_jit(do_not_specialize=["rows", "tiles"])
def rms_norm_burst_kernel(
    x_desc, residual_desc, h_desc, y_desc, weight_ptr, h_ptr, y_ptr, rstd_ptr, rows, tiles, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, N: tl.constexpr, BY_TMA: tl.constexpr,
    EVICTION: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, SLOTS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    slots = ring(x_desc, SLOTS)
    others = slots
    if HAS_RESIDUAL:
        others = ring(residual_desc, SLOTS)
    full = barrier_ring(SLOTS, 1)
    fence_async_shared()
    thread_barrier()
    first = gl.program_id(0) * SLOTS
    count = min(tiles - first, SLOTS)
    for number in range(count):
        row = (first + number) * ROWS
        bring_tile(slots, others, number, full.index(number), x_desc, residual_desc, row, HAS_RESIDUAL)
    in_tile, column, exists = places(N, ROWS, LINES, LAYOUT)
    for number in range(count):
        row = (first + number) * ROWS
        mbarrier.wait(full.index(number), 0)
        h = load_tile(slots, others, number, HAS_RESIDUAL, LAYOUT)
        rstd = rstd_of(h, eps, N, LAYOUT)
        # Out of L1 for every tile: the registers that would keep it are those of one more program.
        y = scaled(h, rstd, load_weight(weight_ptr, column, exists, offset, HAS_WEIGHT))
        here = row + in_tile
        gl.store(rstd_ptr + here, rstd, mask=here < rows)
        if BY_TMA:
            send_tile(slots, others, number, h, y, h_desc, y_desc, row, HAS_RESIDUAL)
        else:
            mask = gl.expand_dims(gl.expand_dims(here < rows, 1), 2) & exists
            write_tile(h, y, h_ptr, y_ptr, here, column, mask, N, HAS_RESIDUAL, EVICTION)
    if BY_TMA:
        tma.store_wait(0)
