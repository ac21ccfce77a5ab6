"""Cross-entropy of whole rows on Hopper, in Gluon: loss and gradient in one launch, the row in shared memory between
the two passes of cross_entropy_kernels.py.

A program takes rows in turn. A producer warp brings a row by TMA in chunks of TILE x 64 logits to a ring of slots; a
chunk leaves its slot when the second pass has read it, and what takes its place belongs to the next row: memory is then
read while this row's gradient is written, which programs that read first and write then leave to chance. Of a row with
more chunks than there are slots the last ones stay for the second pass; the first ones are loaded once more, out of L2.

Loads of a row, in order: its chunks 0 .. n - 1, then 0 .. again - 1 a second time, where again = max(n - SLOTS, 0).
Load number m of a program goes to slot m % SLOTS, and the slots are freed in the order of the loads: the first pass
frees the first `again` chunks, the second pass the others, then those that came twice.

It knows neither smoothing nor softcap, nor rows off a border of 32 bytes: those have the portable kernel.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import DeviceProfile, tl
from fuselm.kernels.attention.hopper_common import (
    HAVE_GLUON,
    TensorDescriptor,
    barrier_ring,
    gl,
    gluon_jit,
    mbarrier,
    ring,
    thread_barrier,
    tma_load,
)
from fuselm.kernels.cross_entropy_math import expm1_of_negative, lse_of
from fuselm.kernels.launch.cross_entropy import RING_COLUMNS, RingLaunch


@gluon_jit
def _chunks_of(vocab, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """Chunks of a row, and how many of them are loaded twice."""
    chunks = (vocab // 64 + TILE - 1) // TILE
    return chunks, max(chunks - SLOTS, 0)


@gluon_jit
def _produce(slots, full, empty, desc, rows, vocab, TILE: tl.constexpr, SLOTS: tl.constexpr):
    chunks, again = _chunks_of(vocab, TILE, SLOTS)
    number = gl.program_id(0) * 0  # loads so far, over all rows
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
        for step in range(chunks + again):
            slot = number % SLOTS
            mbarrier.wait(empty.index(slot), number // SLOTS & 1 ^ 1)
            mbarrier.expect(full.index(slot), desc.block_type.nbytes)
            chunk = gl.where(step < chunks, step, step - chunks)
            tma_load(desc, [row, chunk * TILE, 0], full.index(slot), slots.index(slot))
            number += 1


@gluon_jit
def _chunk(slots, slot, TILE: tl.constexpr, WARPS: tl.constexpr, VECTORS: tl.constexpr):
    """The logits of a slot, [TILE, 8, 8], of which a thread has whole vectors."""
    dtype: tl.constexpr = slots.dtype
    layout: tl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, 64], dtype)
    flat: tl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    z = slots.index(slot)._reinterpret(dtype, [TILE, 64], layout).load(flat)
    return gl.convert_layout(z.reshape([TILE, 8, 8]), VECTORS, assert_trivial=True)


@gluon_jit
def _accumulate(reference, s, z):
    # As in cross_entropy_kernels.py: a running maximum and a sum of 2^(z · log2(e) - reference) for each vector.
    new = gl.maximum(reference, gl.max(z, 2) * 1.4426950216293335)
    powers = gl.exp2(gl.fma(z, 1.4426950216293335, -gl.expand_dims(new, 2)))
    return new, s * gl.exp2(reference - new) + gl.sum(powers, 2)


@gluon_jit
def _gradient_of(z, reference, factor, zero):
    if zero:  # whatever the logits hold
        d = gl.full_like(z, 0.0)
    else:
        d = gl.exp2(gl.fma(z, 1.4426950216293335, -reference)) * factor
    return d


@gluon_jit
def _consume(
    slots, full, empty, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr, gradient_ptr, scale_ptr, grad_lse_ptr,
    scale_stride, rows, stride, gradient_stride, vocab, ignore_index, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    VECTORS: tl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 8, 1], [WARPS, 1, 1], [2, 1, 0])
    STATES: tl.constexpr = gl.SliceLayout(2, VECTORS)
    CHUNK: tl.constexpr = TILE * 64
    dtype: tl.constexpr = gradient_ptr.dtype.element_ty
    chunks, again = _chunks_of(vocab, TILE, SLOTS)
    line = gl.arange(0, TILE, layout=gl.SliceLayout(1, STATES))  # [TILE]
    in_line = gl.arange(0, 8, layout=gl.SliceLayout(0, STATES))
    in_vector = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, VECTORS)))
    vector = gl.expand_dims(line, 1) * 64 + gl.expand_dims(in_line, 0) * 8
    columns = gl.expand_dims(vector, 2) + gl.expand_dims(gl.expand_dims(in_vector, 0), 1)  # [TILE, 8, 8]
    # of the last chunk: whole lines
    exists = gl.expand_dims(gl.expand_dims(line, 1), 2) < vocab // 64 - (chunks - 1) * TILE

    base = gl.program_id(0) * 0  # loads used so far, over all rows
    for row in range(gl.program_id(0), rows, gl.num_programs(0)):
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

        reference = gl.full([TILE, 8], -3.0e38, gl.float32, STATES)
        s = gl.full([TILE, 8], 0.0, gl.float32, STATES)
        for i in range(again):
            number = base + i
            slot = number % SLOTS
            mbarrier.wait(full.index(slot), number // SLOTS & 1)
            z = _chunk(slots, slot, TILE, WARPS, VECTORS)
            mbarrier.arrive(empty.index(slot), count=1)
            reference, s = _accumulate(reference, s, z.to(gl.float32))
        last = base + chunks - 1
        for i in range(again, chunks - 1):
            number = base + i
            slot = number % SLOTS
            mbarrier.wait(full.index(slot), number // SLOTS & 1)
            reference, s = _accumulate(reference, s, _chunk(slots, slot, TILE, WARPS, VECTORS).to(gl.float32))
        mbarrier.wait(full.index(last % SLOTS), last // SLOTS & 1)
        z_last = _chunk(slots, last % SLOTS, TILE, WARPS, VECTORS).to(gl.float32)
        reference, s = _accumulate(reference, s, gl.where(exists, z_last, float("-inf")))

        top = gl.max(gl.max(reference, 1), 0)
        lse, lse_low = lse_of(top, gl.sum(gl.sum(s * gl.exp2(reference - top), 1), 0))
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
        sink = gradient_ptr + gl.cast(row, gl.int64) * gradient_stride
        thread_barrier()  # in place: nobody may write before all have read the target's logit
        for i in range(again, chunks - 1):
            slot = (base + i) % SLOTS
            z = _chunk(slots, slot, TILE, WARPS, VECTORS)
            mbarrier.arrive(empty.index(slot), count=1)
            d = _gradient_of(z.to(gl.float32), rounded, factor, zero)
            gl.store(sink + i * CHUNK + columns, d.to(dtype), eviction_policy="evict_first")
        z_last = _chunk(slots, last % SLOTS, TILE, WARPS, VECTORS).to(gl.float32)
        mbarrier.arrive(empty.index(last % SLOTS), count=1)
        d_last = _gradient_of(z_last, rounded, factor, zero).to(dtype)
        gl.store(sink + (chunks - 1) * CHUNK + columns, d_last, mask=exists, eviction_policy="evict_first")
        for i in range(again):
            number = last + 1 + i
            slot = number % SLOTS
            mbarrier.wait(full.index(slot), number // SLOTS & 1)
            z = _chunk(slots, slot, TILE, WARPS, VECTORS)
            mbarrier.arrive(empty.index(slot), count=1)
            d = _gradient_of(z.to(gl.float32), rounded, factor, zero)
            gl.store(sink + i * CHUNK + columns, d.to(dtype), eviction_policy="evict_first")
        base += chunks + again

        # p - 1 is small beside p where the model is confident: from the loss, which keeps its digits there
        p_minus_one = expm1_of_negative(nll)
        d_target = scale * p_minus_one + (1.0 + p_minus_one) * p_factor
        thread_barrier()  # after the vector that holds the target's element
        gl.store(sink + target, d_target.to(dtype), mask=in_range & (zero == 0))


@gluon_jit(do_not_specialize=["rows", "vocab", "scale_stride", "ignore_index"])
def cross_entropy_ring_kernel(
    logits_desc, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr, gradient_ptr, scale_ptr, grad_lse_ptr,
    scale_stride, rows, stride, gradient_stride, vocab, ignore_index, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    TILE: tl.constexpr, SLOTS: tl.constexpr, WARPS: tl.constexpr,
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
                    SKIP_IGNORED, HAS_SCALE, HAS_GRAD_LSE, TILE, SLOTS, WARPS,
                ),
            ),
            (_produce, (slots, full, empty, logits_desc, rows, vocab, TILE, SLOTS)),
        ],
        [1],
        [24],
    )  # fmt: skip


def ring_refusal(
    logits: torch.Tensor, gradient: torch.Tensor, profile: DeviceProfile, smoothing: bool, softcap: bool
) -> str | None:
    """Why the ring kernel cannot take (outer, inner, vocab) logits and their gradient, or None where it can."""
    if not HAVE_GLUON or profile.arch != 90:
        return "it is written for compute capability 9.0, with Gluon"
    if smoothing or softcap or logits.element_size() != 2:
        return "it knows neither smoothing, softcap nor fp32"
    outer, inner, vocab = logits.shape
    if vocab % RING_COLUMNS:
        return f"rows of {vocab} logits are no multiple of {RING_COLUMNS}"
    for x in (logits, gradient):
        if x.data_ptr() % 32 or (outer * inner > 1 and _row_stride(x) * x.element_size() % 32):
            return "rows do not begin at multiples of 32 bytes, or at no constant distance"
    return None


def _row_stride(x: torch.Tensor) -> int:
    # of (outer, inner, vocab) as one dimension of rows; 1 where there is no such view
    outer, inner, vocab = x.shape
    if outer * inner == 1:
        return vocab
    if outer > 1 and inner > 1 and x.stride(0) != inner * x.stride(1):
        return 1
    return x.stride(1) if inner > 1 else x.stride(0)


def launch_ring(
    launch: RingLaunch,
    logits: torch.Tensor,
    targets: torch.Tensor,
    loss: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    gradient: torch.Tensor,
    scale: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    ignore_index: int,
    z_loss: float,
    skip_ignored: bool,
    num_sms: int,
) -> None:
    """Loss, lse and gradient as `launch_forward` writes them; `ring_refusal` says for what. On the current device."""
    rows, vocab = logits.shape[0] * logits.shape[1], logits.shape[2]
    dtype = gl.bfloat16 if logits.dtype == torch.bfloat16 else gl.float16
    block = [1, launch.tile, RING_COLUMNS]
    stride = _row_stride(logits)
    desc = TensorDescriptor(
        logits,
        [rows, vocab // RING_COLUMNS, RING_COLUMNS],
        [stride, RING_COLUMNS, 1],
        block,
        gl.NVMMASharedLayout.get_default_for(block, dtype),
    )
    cross_entropy_ring_kernel[(min(rows, num_sms * launch.programs),)](
        desc,
        logits,
        targets,
        loss,
        lse,
        lse_low,
        gradient,
        loss if scale is None else scale,
        loss if grad_lse is None else grad_lse,
        0 if scale is None or scale.dim() == 0 else scale.stride(0),
        rows,
        stride,
        _row_stride(gradient),
        vocab,
        ignore_index,
        z_loss,
        SKIP_IGNORED=skip_ignored,
        HAS_SCALE=scale is not None,
        HAS_GRAD_LSE=grad_lse is not None,
        TILE=launch.tile,
        SLOTS=launch.slots,
        WARPS=launch.num_warps,
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )
