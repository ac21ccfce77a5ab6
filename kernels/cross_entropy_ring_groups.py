"""Cross-entropy of whole rows on Hopper as in cross_entropy_ring_kernels.py, by two groups of warps: readers sum the
next row while writers write the gradient of this one.

The chunks of a row stay in their slots until the writers have them; a row has no more chunks than there are slots. A
row's numbers go from readers to writers in shared memory (`notes`), AHEAD rows of them.

FLAT is for rows of any length that lie side by side, so that most begin where TMA cannot: all logits are then one row
of lines of 64 in the descriptor, a row is loaded from the line on where it begins, and its first and last chunk have
logits of other rows in them. Readers leave those out. Writers store the vectors of 16 bytes that are whole in the row;
what it shares with its neighbours, less than a vector at each end, they load, compute and store element by element, so
that nobody writes another's. In place, others write their rows while these chunks are on their way or in their slots,
but a row's own logits are written by its program alone, after all of them have come.

There is one producer, which waits at an address that ptxas keeps in a uniform register. Forms with two more, for rings
of chunks that did not fit, passed the model of the protocol and hung on an H200. The one difference found in their
machine code, though no proof: those producers waited at an address a lane, and counted and copied in uniform registers.
"""

from __future__ import annotations

from fuselm.kernels._triton import tl
from fuselm.kernels.attention.hopper_common import (
    barrier_ring,
    gl,
    gluon_jit,
    mbarrier,
    ring,
    thread_barrier,
)
from fuselm.kernels.cross_entropy_ring_kernels import (
    bring_rows,
    chunks_of,
    columns_of,
    empty_sum,
    flat_row,
    gradient_of,
    lines_of_last,
    row_inputs,
    row_outputs,
    sum_chunks,
    sum_masked,
    sum_of,
    vectors_of,
    write_chunks,
    write_masked,
)


@gluon_jit
def _note(notes, place, value, WARPS: tl.constexpr):
    notes.index(place).store(gl.full([1], value, gl.float32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon_jit
def _noted(notes, place, WARPS: tl.constexpr):
    return gl.sum(notes.index(place).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


# --- Rows that begin anywhere ------------------------------------------------------------------------------------


@gluon_jit
def _of_row(places, first, vocab, WIDTH: tl.constexpr):
    """Which pieces of WIDTH logits lie in a row that begins at `first`; in its chunk, as `places` are."""
    return (places >= first) & (places + WIDTH <= first + vocab)


@gluon_jit
def _ends_of_row(first, vocab, WARPS: tl.constexpr):
    """Columns of a row's logits outside of its whole vectors, [16], and which of them exist."""
    index = gl.arange(0, 16, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    head = min(-first & 7, vocab)
    column = gl.where(index < 8, index, head + (vocab - head) // 8 * 8 + index - 8)
    return column, (index < head) | (index >= 8) & (column < vocab)


@gluon_jit
def _sum_flat(
    slots, full, base, row, vocab, reference, s, TILE: tl.constexpr, SLOTS: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    """The first pass over a row of flat logits, from load `base` on; its last load too."""
    _, first, chunks = flat_row(row, vocab, TILE)
    columns = columns_of(TILE, WARPS)
    last = base + chunks - 1
    if chunks > 1:
        exists = _of_row(columns, first, vocab, 1)
        reference, s = sum_masked(slots, full, full, base, reference, s, exists, False, TILE, SLOTS, WARPS)
        reference, s = sum_chunks(slots, full, full, base + 1, last, reference, s, False, TILE, SLOTS, WARPS)
    exists = _of_row(columns, first - (chunks - 1) * (TILE * 64), vocab, 1)
    reference, s = sum_masked(slots, full, full, last, reference, s, exists, False, TILE, SLOTS, WARPS)
    return reference, s, last


@gluon_jit
def _write_flat(
    slots, full, empty, base, row, gradient_ptr, columns, vocab, rounded, factor, zero,
    TILE: tl.constexpr, SLOTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The second pass over a row of flat logits, but for its ends; its last load."""
    line, first, chunks = flat_row(row, vocab, TILE)
    vectors = vectors_of(TILE, WARPS)
    sink = gradient_ptr + gl.cast(line, gl.int64) * 64
    last = base + chunks - 1
    if chunks > 1:
        exists = _of_row(vectors, first, vocab, 8)
        write_masked(slots, full, empty, base, sink, columns, rounded, factor, zero, exists, True, TILE, SLOTS, WARPS)
        write_chunks(
            slots, full, empty, base + 1, last, sink + TILE * 64, columns, rounded, factor, zero,
            True, TILE, SLOTS, WARPS,
        )  # fmt: skip
    done = (chunks - 1) * (TILE * 64)
    exists = _of_row(vectors, first - done, vocab, 8)
    write_masked(
        slots, full, empty, last, sink + done, columns, rounded, factor, zero, exists, True, TILE, SLOTS, WARPS
    )  # fmt: skip
    return last


# --- The two groups ----------------------------------------------------------------------------------------------


@gluon_jit
def _read(
    slots, full, notes, ready, taken, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr, scale_ptr,
    grad_lse_ptr, scale_stride, rows, stride, vocab, ignore_index, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr, FLAT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    chunks = chunks_of(vocab, TILE)
    exists = lines_of_last(vocab, chunks, TILE, WARPS)
    base = gl.program_id(0) * 0  # loads used so far, over all rows
    turn = base
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        target, ignored, in_range, x_target, scale, grad_lse = row_inputs(
            row, logits_ptr, targets_ptr, scale_ptr, grad_lse_ptr, scale_stride, stride, vocab, ignore_index,
            HAS_SCALE, HAS_GRAD_LSE,
        )  # fmt: skip
        reference, s = empty_sum(TILE, WARPS)
        if FLAT:
            reference, s, last = _sum_flat(slots, full, base, row, vocab, reference, s, TILE, SLOTS, WARPS)
        else:
            last = base + chunks - 1
            reference, s = sum_chunks(slots, full, full, base, last, reference, s, False, TILE, SLOTS, WARPS)
            reference, s = sum_masked(slots, full, full, last, reference, s, exists, False, TILE, SLOTS, WARPS)
        base = last + 1
        top, total = sum_of(reference, s)
        rounded, factor, zero, d_target = row_outputs(
            row, top, total, ignored, in_range, x_target, scale, grad_lse, loss_ptr, lse_ptr, lse_low_ptr, z_loss,
            SKIP_IGNORED, HAS_GRAD_LSE,
        )  # fmt: skip
        # where the target's element is; -1 for nowhere, -2 for a row of zeros
        place = gl.where(zero, -2, gl.where(in_range, target.to(gl.int32), -1))
        stage = turn % AHEAD
        mbarrier.wait(taken.index(stage), turn // AHEAD & 1 ^ 1)
        _note(notes, stage * 4, rounded, WARPS)
        _note(notes, stage * 4 + 1, factor, WARPS)
        _note(notes, stage * 4 + 2, d_target, WARPS)
        _note(notes, stage * 4 + 3, place.to(gl.float32, bitcast=True), WARPS)
        mbarrier.arrive(ready.index(stage), count=1)
        turn += 1


@gluon_jit
def _write(
    slots, full, empty, notes, ready, taken, logits_ptr, gradient_ptr, rows, gradient_stride, vocab,
    TILE: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr, FLAT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    chunks = chunks_of(vocab, TILE)
    columns = columns_of(TILE, WARPS)
    exists = lines_of_last(vocab, chunks, TILE, WARPS)
    base = gl.program_id(0) * 0
    turn = base
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        if FLAT:  # asked for before the wait; in place, none but this group writes them
            _, first, _ = flat_row(row, vocab, TILE)
            column, mine = _ends_of_row(first, vocab, WARPS)
            ends = gl.load(logits_ptr + gl.cast(row, gl.int64) * vocab + column, mask=mine, other=0.0)
        stage = turn % AHEAD
        mbarrier.wait(ready.index(stage), turn // AHEAD & 1)
        rounded = _noted(notes, stage * 4, WARPS)
        factor = _noted(notes, stage * 4 + 1, WARPS)
        d_target = _noted(notes, stage * 4 + 2, WARPS)
        place = _noted(notes, stage * 4 + 3, WARPS).to(gl.int32, bitcast=True)
        mbarrier.arrive(taken.index(stage), count=1)
        zero = place == -2
        sink = gradient_ptr + gl.cast(row, gl.int64) * gradient_stride
        if FLAT:
            last = _write_flat(
                slots, full, empty, base, row, gradient_ptr, columns, vocab, rounded, factor, zero, TILE, SLOTS, WARPS
            )
            z = ends.to(gl.float32)  # pyright: ignore[reportPossiblyUnboundVariable]
            d = gradient_of(z, rounded, factor, zero).to(gradient_ptr.dtype.element_ty)
            gl.store(sink + column, d, mask=mine)  # pyright: ignore[reportPossiblyUnboundVariable]
        else:
            tail = sink + (chunks - 1) * (TILE * 64)
            last = base + chunks - 1
            write_chunks(slots, full, empty, base, last, sink, columns, rounded, factor, zero, True, TILE, SLOTS, WARPS)
            write_masked(
                slots, full, empty, last, tail, columns, rounded, factor, zero, exists, True, TILE, SLOTS, WARPS
            )  # fmt: skip
        base = last + 1
        thread_barrier()  # after the vector that holds the target's element
        gl.store(sink + place, d_target.to(gradient_ptr.dtype.element_ty), mask=place >= 0)
        turn += 1


@gluon_jit(do_not_specialize=["rows", "vocab", "scale_stride", "ignore_index"])
def cross_entropy_groups_kernel(
    logits_desc, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr, gradient_ptr, scale_ptr, grad_lse_ptr,
    scale_stride, rows, stride, gradient_stride, vocab, ignore_index, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr, FLAT: tl.constexpr,
    READERS: tl.constexpr, WRITERS: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    slots = ring(logits_desc, SLOTS)
    full = barrier_ring(SLOTS, 1)
    empty = barrier_ring(SLOTS, 1)
    notes = gl.allocate_shared_memory(gl.float32, [AHEAD * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = barrier_ring(AHEAD, 1)
    taken = barrier_ring(AHEAD, 1)
    # fmt: off
    gl.warp_specialize(
        [
            (_read, (slots, full, notes, ready, taken, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr,
                     scale_ptr, grad_lse_ptr, scale_stride, rows, stride, vocab, ignore_index, z_loss,
                     SKIP_IGNORED, HAS_SCALE, HAS_GRAD_LSE, TILE, SLOTS, AHEAD, FLAT, READERS)),
            (_write, (slots, full, empty, notes, ready, taken, logits_ptr, gradient_ptr, rows, gradient_stride, vocab,
                      TILE, SLOTS, AHEAD, FLAT, WRITERS)),
            (bring_rows, (slots, full, empty, logits_desc, rows, vocab, TILE, SLOTS, 0, FLAT)),
        ],
        [WRITERS, 1],
        [REGISTERS, 24],
    )
    # fmt: on
