"""Cross-entropy of whole rows on Hopper as in cross_entropy_ring_kernels.py, by two groups of warps: readers sum the
next row while writers write the gradient of this one.

The chunks of a row stay in their slots until the writers have them; a row has no more chunks than there are slots. A
row's numbers go from readers to writers in shared memory (`notes`), AHEAD rows of them.

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
    lines_of_last,
    row_inputs,
    row_outputs,
    sum_chunks,
    sum_last,
    sum_of,
    write_chunks,
    write_last,
)


@gluon_jit
def _note(notes, place, value, WARPS: tl.constexpr):
    notes.index(place).store(gl.full([1], value, gl.float32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon_jit
def _noted(notes, place, WARPS: tl.constexpr):
    return gl.sum(notes.index(place).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon_jit
def _read(
    slots, full, notes, ready, taken, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr, scale_ptr,
    grad_lse_ptr, scale_stride, rows, stride, vocab, ignore_index, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr,
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
        last = base + chunks - 1
        reference, s = sum_chunks(slots, full, full, base, last, reference, s, False, TILE, SLOTS, WARPS)
        reference, s = sum_last(slots, full, full, last, reference, s, exists, False, TILE, SLOTS, WARPS)
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
    slots, full, empty, notes, ready, taken, gradient_ptr, rows, gradient_stride, vocab,
    TILE: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    chunks = chunks_of(vocab, TILE)
    columns = columns_of(TILE, WARPS)
    exists = lines_of_last(vocab, chunks, TILE, WARPS)
    base = gl.program_id(0) * 0
    turn = base
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        stage = turn % AHEAD
        mbarrier.wait(ready.index(stage), turn // AHEAD & 1)
        rounded = _noted(notes, stage * 4, WARPS)
        factor = _noted(notes, stage * 4 + 1, WARPS)
        d_target = _noted(notes, stage * 4 + 2, WARPS)
        place = _noted(notes, stage * 4 + 3, WARPS).to(gl.int32, bitcast=True)
        mbarrier.arrive(taken.index(stage), count=1)
        zero = place == -2
        sink = gradient_ptr + gl.cast(row, gl.int64) * gradient_stride
        tail = sink + (chunks - 1) * (TILE * 64)
        last = base + chunks - 1
        write_chunks(slots, full, empty, base, last, sink, columns, rounded, factor, zero, True, TILE, SLOTS, WARPS)
        write_last(
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
    TILE: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr,
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
                     SKIP_IGNORED, HAS_SCALE, HAS_GRAD_LSE, TILE, SLOTS, AHEAD, READERS)),
            (_write, (slots, full, empty, notes, ready, taken, gradient_ptr, rows, gradient_stride, vocab,
                      TILE, SLOTS, AHEAD, WRITERS)),
            (bring_rows, (slots, full, empty, logits_desc, rows, vocab, TILE, SLOTS, 0)),
        ],
        [WRITERS, 1],
        [REGISTERS, 24],
    )
    # fmt: on
