"""Cross-entropy of whole rows on Hopper, in Gluon: loss and gradient in one launch, the row in shared memory between
the two passes of cross_entropy_kernels.py.

A program takes rows in turn. A producer warp brings a row by TMA in chunks of TILE x 64 logits to a ring of slots; a
chunk leaves its slot when its last reader is done, and what takes its place may belong to the next row: memory is then
read while this row's gradient is written, which programs that read first and write then leave to chance. Load number m
goes to slot m % SLOTS.

Here one group of warps does both passes; in cross_entropy_ring_groups.py two share them. The first KEPT chunks of a row
stay in the registers of its readers between the passes. Chunks for which there is no room at all are loaded once more,
out of L2. Loads of a row, in order: its chunks 0 .. n - 1, then KEPT .. KEPT + again - 1 a second time, where again =
max(n - KEPT - SLOTS, 0). The slots are freed in the order of the loads: the first pass frees the first KEPT + again
chunks, the second pass the others, then those that came twice.

Slots are read by the generic proxy and overwritten by the async one. A thread that has asked for a slot's logits may
not have them yet when it arrives at a barrier: only a proxy fence of each reader, before a barrier of all of them,
orders the reads before the copy that the arrival at `empty` allows (`release`).
"""

from __future__ import annotations

from fuselm.kernels._triton import tl
from fuselm.kernels.attention.hopper_common import (
    barrier_ring,
    gl,
    gluon_jit,
    mbarrier,
    release,
    ring,
    thread_barrier,
    tma_load,
)
from fuselm.kernels.cross_entropy_math import expm1_of_negative, lse_of

# --- Producers ---------------------------------------------------------------------------------------------------


@gluon_jit
def chunks_of(vocab, TILE: tl.constexpr):
    """Chunks of a row."""
    return (vocab // 64 + TILE - 1) // TILE


@gluon_jit
def flat_row(row, vocab, TILE: tl.constexpr):
    """Of a row of flat logits: the line of 64 where it begins, how many logits are in front of it there, its chunks."""
    begin = gl.cast(row, gl.int64) * vocab
    first = gl.cast(begin & 63, gl.int32)
    return gl.cast(begin >> 6, gl.int32), first, (first + vocab + TILE * 64 - 1) // (TILE * 64)


@gluon_jit
def bring_rows(
    slots, full, empty, desc, rows, vocab,
    TILE: tl.constexpr, SLOTS: tl.constexpr, KEPT: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """The chunks of each of the program's rows, then those that do not stay once more."""
    chunks = chunks_of(vocab, TILE)
    again = max(chunks - KEPT - SLOTS, 0)
    number = gl.program_id(0) * 0  # loads so far, over all rows
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        at, line = row, 0
        if FLAT:
            line, _, chunks = flat_row(row, vocab, TILE)
            at = 0
        for step in range(chunks + again):
            slot = number % SLOTS
            mbarrier.wait(empty.index(slot), number // SLOTS & 1 ^ 1)
            mbarrier.expect(full.index(slot), desc.block_type.nbytes)
            chunk = gl.where(step < chunks, step, step - chunks + KEPT)
            tma_load(desc, [at, line + chunk * TILE, 0], full.index(slot), slots.index(slot))
            number += 1


# --- Both passes -------------------------------------------------------------------------------------------------


@gluon_jit
def load_chunk(slots, slot, TILE: tl.constexpr, WARPS: tl.constexpr):
    """The logits of a slot, [TILE, 8, 8], of which a thread has whole vectors."""
    dtype: tl.constexpr = slots.dtype
    layout: tl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, 64], dtype)
    flat: tl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    vectors: tl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    z = slots.index(slot)._reinterpret(dtype, [TILE, 64], layout).load(flat)
    return gl.convert_layout(z.reshape([TILE, 8, 8]), vectors, assert_trivial=True)


@gluon_jit
def lines_of_last(vocab, chunks, TILE: tl.constexpr, WARPS: tl.constexpr):
    """Which lines of 64 logits the last chunk of a row has, [TILE, 1, 1]."""
    vectors: tl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    line = gl.arange(0, TILE, layout=gl.SliceLayout(1, gl.SliceLayout(2, vectors)))
    return gl.expand_dims(gl.expand_dims(line, 1), 2) < vocab // 64 - (chunks - 1) * TILE


@gluon_jit
def accumulate(reference, s, z):
    # As in cross_entropy_kernels.py: a running maximum and a sum of 2^(z · log2(e) - reference) for each vector.
    new = gl.maximum(reference, gl.max(z, 2) * 1.4426950216293335)
    powers = gl.exp2(gl.fma(z, 1.4426950216293335, -gl.expand_dims(new, 2)))
    return new, s * gl.exp2(reference - new) + gl.sum(powers, 2)


@gluon_jit
def empty_sum(TILE: tl.constexpr, WARPS: tl.constexpr):
    vectors: tl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    states: tl.constexpr = gl.SliceLayout(2, vectors)
    return gl.full([TILE, 8], -3.0e38, gl.float32, states), gl.full([TILE, 8], 0.0, gl.float32, states)


@gluon_jit
def sum_chunks(
    slots, full, empty, begin, end, reference, s,
    RELEASE: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The first pass over loads begin .. end - 1 of a ring, all of whole chunks."""
    for number in range(begin, end):
        slot = number % SLOTS  # pyright: ignore[reportOperatorIssue]
        mbarrier.wait(full.index(slot), number // SLOTS & 1)
        z = load_chunk(slots, slot, TILE, WARPS)
        if RELEASE:
            release(empty, slot)
        reference, s = accumulate(reference, s, z.to(gl.float32))
    return reference, s


@gluon_jit
def sum_masked(
    slots, full, empty, number, reference, s, exists,
    RELEASE: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The first pass over a chunk, of which the row has what `exists`."""
    slot = number % SLOTS
    mbarrier.wait(full.index(slot), number // SLOTS & 1)
    z = load_chunk(slots, slot, TILE, WARPS)
    if RELEASE:
        release(empty, slot)
    return accumulate(reference, s, gl.where(exists, z.to(gl.float32), float("-inf")))


@gluon_jit
def row_inputs(
    row, logits_ptr, targets_ptr, scale_ptr, grad_lse_ptr, scale_stride, stride, vocab, ignore_index,
    HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """What a row has beside its logits, the target's logit among it."""
    target = gl.load(targets_ptr + row).to(gl.int64)
    ignored = target == ignore_index
    in_range = (target >= 0) & (target < vocab)
    target = gl.where(in_range, target, 0)
    x_target = gl.load(logits_ptr + gl.cast(row, gl.int64) * stride + target).to(gl.float32)
    scale = 1.0
    if HAS_SCALE:
        scale = gl.load(scale_ptr + gl.cast(row, gl.int64) * scale_stride)
    scale = gl.where(ignored, 0.0, gl.where(in_range, scale, float("nan")))
    grad_lse = 0.0
    if HAS_GRAD_LSE:
        grad_lse = gl.load(grad_lse_ptr + row)
    return target, ignored, in_range, x_target, scale, grad_lse


@gluon_jit
def sum_of(reference, s):
    """The maximum and the sum beside it of all vectors."""
    top = gl.max(gl.max(reference, 1), 0)
    return top, gl.sum(gl.sum(s * gl.exp2(reference - top), 1), 0)


@gluon_jit
def row_outputs(
    row, top, total, ignored, in_range, x_target, scale, grad_lse, loss_ptr, lse_ptr, lse_low_ptr, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """Writes loss and lse. What the second pass needs: p · factor = 2^(z · log2(e) - rounded) · factor,
    whether the gradient is 0 whatever the logits hold, and the target's element."""
    lse, lse_low = lse_of(top, total)
    if SKIP_IGNORED:
        lse = gl.where(ignored, 0.0, lse)
        lse_low = gl.where(ignored, 0.0, lse_low)
    nll = (lse - x_target) + lse_low  # exact where the target is likely, and lse - x_target alone would cancel
    nll = gl.where(nll < 0.0, 0.0, nll)  # p <= 1, a rounding aside
    loss = nll + z_loss * lse * lse
    gl.store(loss_ptr + row, gl.where(ignored, 0.0, gl.where(in_range, loss, float("nan"))))
    gl.store(lse_ptr + row, lse)
    gl.store(lse_low_ptr + row, lse_low)

    # p = 2^(z · log2(e) - rounded - low): what the rounded number lacks goes into the factor
    rounded = lse * 1.4426950216293335
    low = gl.fma(lse, 1.4426950216293335, -rounded) + lse_low * 1.4426950216293335
    low = gl.where(gl.abs(lse) < float("inf"), low, 0.0)
    p_factor = scale * (2.0 * z_loss * lse) + grad_lse
    factor = (scale + p_factor) * gl.exp2(-low)
    zero = ignored
    if HAS_GRAD_LSE:
        zero = row < 0
    # p - 1 is small beside p where the model is confident: from the loss, which keeps its digits there
    p_minus_one = expm1_of_negative(nll)
    d_target = scale * p_minus_one + (1.0 + p_minus_one) * p_factor
    return rounded, factor, zero, d_target


@gluon_jit
def gradient_of(z, reference, factor, zero):
    if zero:  # whatever the logits hold
        d = gl.full_like(z, 0.0)
    else:
        d = gl.exp2(gl.fma(z, 1.4426950216293335, -reference)) * factor
    return d


@gluon_jit
def vectors_of(TILE: tl.constexpr, WARPS: tl.constexpr):
    """Places of a chunk's vectors, [TILE, 8, 1]."""
    vectors: tl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    states: tl.constexpr = gl.SliceLayout(2, vectors)
    line = gl.arange(0, TILE, layout=gl.SliceLayout(1, states))
    in_line = gl.arange(0, 8, layout=gl.SliceLayout(0, states))
    return gl.expand_dims(gl.expand_dims(line, 1) * 64 + gl.expand_dims(in_line, 0) * 8, 2)


@gluon_jit
def columns_of(TILE: tl.constexpr, WARPS: tl.constexpr):
    """Places of a chunk's logits, [TILE, 8, 8]."""
    vectors: tl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    in_vector = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, vectors)))
    return vectors_of(TILE, WARPS) + gl.expand_dims(gl.expand_dims(in_vector, 0), 1)


@gluon_jit
def write_chunk(z, sink, columns, reference, factor, zero):
    """The gradient of a whole chunk of logits."""
    d = gradient_of(z.to(gl.float32), reference, factor, zero)
    gl.store(sink + columns, d.to(sink.dtype.element_ty), eviction_policy="evict_first")


@gluon_jit
def write_chunks(
    slots, full, empty, begin, end, sink, columns, reference, factor, zero,
    WAIT: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The second pass over loads begin .. end - 1 of a ring, all of whole chunks, the first of which goes to `sink`."""
    for number in range(begin, end):
        slot = number % SLOTS  # pyright: ignore[reportOperatorIssue]
        if WAIT:
            mbarrier.wait(full.index(slot), number // SLOTS & 1)
        z = load_chunk(slots, slot, TILE, WARPS)
        release(empty, slot)
        write_chunk(z, sink + (number - begin) * (TILE * 64), columns, reference, factor, zero)


@gluon_jit
def write_masked(
    slots, full, empty, number, sink, columns, reference, factor, zero, exists,
    WAIT: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The second pass over a chunk, of which the row has what `exists`; the chunk goes to `sink`."""
    slot = number % SLOTS
    if WAIT:
        mbarrier.wait(full.index(slot), number // SLOTS & 1)
    z = load_chunk(slots, slot, TILE, WARPS)
    release(empty, slot)
    d = gradient_of(z.to(gl.float32), reference, factor, zero)
    gl.store(sink + columns, d.to(sink.dtype.element_ty), mask=exists, eviction_policy="evict_first")


# --- One group of warps ------------------------------------------------------------------------------------------


@gluon_jit
def _consume(
    slots, full, empty, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr, gradient_ptr, scale_ptr, grad_lse_ptr,
    scale_stride, rows, stride, gradient_stride, vocab, ignore_index, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, KEPT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    chunks = chunks_of(vocab, TILE)
    again = max(chunks - KEPT - SLOTS, 0)
    columns = columns_of(TILE, WARPS)
    exists = lines_of_last(vocab, chunks, TILE, WARPS)
    base = gl.program_id(0) * 0  # loads used so far, over all rows
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        target, ignored, in_range, x_target, scale, grad_lse = row_inputs(
            row, logits_ptr, targets_ptr, scale_ptr, grad_lse_ptr, scale_stride, stride, vocab, ignore_index,
            HAS_SCALE, HAS_GRAD_LSE,
        )  # fmt: skip
        last = base + chunks - 1
        begin = base + KEPT + again  # from here on they stay in their slots
        reference, s = empty_sum(TILE, WARPS)
        kept = ()
        for i in gl.static_range(KEPT):
            slot = (base + i) % SLOTS
            mbarrier.wait(full.index(slot), (base + i) // SLOTS & 1)
            z = load_chunk(slots, slot, TILE, WARPS)
            release(empty, slot)
            reference, s = accumulate(reference, s, z.to(gl.float32))
            kept = kept + (z,)  # noqa: RUF005 - Triton takes no star
        reference, s = sum_chunks(
            slots, full, empty, base + KEPT, begin, reference, s, True, TILE, SLOTS, WARPS
        )  # fmt: skip
        reference, s = sum_chunks(
            slots, full, empty, begin, last, reference, s, False, TILE, SLOTS, WARPS
        )  # fmt: skip
        reference, s = sum_masked(
            slots, full, empty, last, reference, s, exists, False, TILE, SLOTS, WARPS
        )  # fmt: skip
        top, total = sum_of(reference, s)
        rounded, factor, zero, d_target = row_outputs(
            row, top, total, ignored, in_range, x_target, scale, grad_lse, loss_ptr, lse_ptr, lse_low_ptr, z_loss,
            SKIP_IGNORED, HAS_GRAD_LSE,
        )  # fmt: skip
        sink = gradient_ptr + gl.cast(row, gl.int64) * gradient_stride
        thread_barrier()  # in place: nobody may write before all have read the target's logit
        for i in gl.static_range(KEPT):
            write_chunk(kept[i], sink + i * (TILE * 64), columns, rounded, factor, zero)
        write_chunks(
            slots, full, empty, begin, last, sink + (KEPT + again) * (TILE * 64), columns, rounded, factor, zero,
            False, TILE, SLOTS, WARPS,
        )  # fmt: skip
        write_masked(
            slots, full, empty, last, sink + (chunks - 1) * (TILE * 64), columns, rounded, factor, zero, exists,
            False, TILE, SLOTS, WARPS,
        )  # fmt: skip
        base = last + 1 + again
        write_chunks(
            slots, full, empty, last + 1, base, sink + KEPT * (TILE * 64), columns, rounded, factor, zero,
            True, TILE, SLOTS, WARPS,
        )  # fmt: skip
        thread_barrier()  # after the vector that holds the target's element
        gl.store(sink + target, d_target.to(gradient_ptr.dtype.element_ty), mask=in_range & (zero == 0))


@gluon_jit(do_not_specialize=["rows", "vocab", "scale_stride", "ignore_index"])
def cross_entropy_ring_kernel(
    logits_desc, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr, gradient_ptr, scale_ptr, grad_lse_ptr,
    scale_stride, rows, stride, gradient_stride, vocab, ignore_index, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, KEPT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    slots = ring(logits_desc, SLOTS)
    full = barrier_ring(SLOTS, 1)
    empty = barrier_ring(SLOTS, 1)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    slots, full, empty, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr, gradient_ptr,
                    scale_ptr, grad_lse_ptr, scale_stride, rows, stride, gradient_stride, vocab, ignore_index, z_loss,
                    SKIP_IGNORED, HAS_SCALE, HAS_GRAD_LSE, TILE, SLOTS, KEPT, WARPS,
                ),
            ),
            (bring_rows, (slots, full, empty, logits_desc, rows, vocab, TILE, SLOTS, KEPT, False)),
        ],
        [1],
        [24],
    )  # fmt: skip
