"""Cross-entropy of few rows, each shared out over several programs, which one program a row would leave idle.

The parts kernel writes four numbers a part: maximum, sum of exponentials, sum of logits, the target's logit. In the
next launch each program adds up the parts of its row in the same order, so that all have the same logsumexp and every
run the same bits, and writes the gradient of its own part; the row's first program writes loss and lse. From a saved
lse the same kernel is the backward pass.
"""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl
from fuselm.kernels.cross_entropy_kernels import LOWEST, row_sums, write_gradient
from fuselm.kernels.cross_entropy_math import lse_of
from fuselm.kernels.cross_entropy_rows import head_of, row_offset


@jit
def _place(targets_ptr, row, start, width, vocab):
    """The row's target, whether it is a class at all, its place in the part, and whether it lies there."""
    target = tl.load(targets_ptr + row).to(tl.int64)
    local = target - start
    inside = (local >= 0) & (local < width)
    return target, (target >= 0) & (target < vocab), tl.where(inside, local, 0).to(tl.int32), inside


@jit
def cross_entropy_parts_kernel(
    logits_ptr,
    targets_ptr,
    parts_ptr,
    rows,
    inner,
    stride_outer,
    stride_inner,
    shift,
    vocab,
    part_size,
    softcap,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Program p: part p % PARTS of row p // PARTS. parts_ptr: (4, rows, PARTS) fp32."""
    softcap = tl.cast(softcap, tl.float32)
    row = tl.program_id(0) // PARTS
    start = tl.program_id(0) % PARTS * part_size
    width = tl.minimum(part_size, vocab - start)
    offset = row_offset(row, inner, stride_outer, stride_inner) + start
    logits = logits_ptr + offset
    _, _, target, inside = _place(targets_ptr, row, start, width, vocab)
    z_target = tl.load(logits + target).to(tl.float32)
    top, row_sum, total, picked = row_sums(
        logits,
        head_of(offset, shift, width, RAGGED, VECTOR),
        tl.where(inside, target, -1),
        width,
        width,
        softcap,
        RAGGED,
        HAS_SMOOTHING,
        HAS_SOFTCAP,
        BLOCK,
        VECTOR,
    )
    if HAS_SOFTCAP:
        z_target = picked
    at = parts_ptr + tl.program_id(0)
    plane = tl.num_programs(0)
    tl.store(at, top)
    tl.store(at + plane, row_sum)
    tl.store(at + 2 * plane, total)
    tl.store(at + 3 * plane, tl.where(inside, z_target, 0.0))


@jit
def cross_entropy_parts_gradient_kernel(
    logits_ptr,
    targets_ptr,
    parts_ptr,
    loss_ptr,
    lse_ptr,
    lse_low_ptr,
    gradient_ptr,
    scale_ptr,
    weight_ptr,
    grad_lse_ptr,
    scale_stride,
    rows,
    inner,
    stride_outer,
    stride_inner,
    gradient_outer,
    gradient_inner,
    shift,
    vocab,
    part_size,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    COMBINE: tl.constexpr,
    SKIP_IGNORED: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    KEEP_IF_ONE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """COMBINE: loss and lse from the parts, else lse as saved. Program p: part p % PARTS of row p // PARTS; without a
    gradient, row p."""
    if KEEP_IF_ONE:
        if tl.load(scale_ptr) == 1.0:
            return
    label_smoothing = tl.cast(label_smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    row = tl.program_id(0)
    part = 0
    if WRITE_GRADIENT:
        row = tl.program_id(0) // PARTS
        part = tl.program_id(0) % PARTS
    start = part * part_size
    width = tl.minimum(part_size, vocab - start)
    target, in_range, local, inside = _place(targets_ptr, row, start, width, vocab)
    ignored = target == ignore_index
    if COMBINE:
        index = tl.arange(0, BLOCK_PARTS)
        at = parts_ptr + row * PARTS + index
        plane = rows * PARTS
        tops = tl.load(at, mask=index < PARTS, other=LOWEST)
        sums = tl.load(at + plane, mask=index < PARTS, other=0.0)
        top = tl.max(tops, 0)
        lse, lse_low = lse_of(top, tl.sum(sums * tl.exp2(tops - top), 0))
        if SKIP_IGNORED:
            lse = tl.where(ignored, 0.0, lse)
            lse_low = tl.where(ignored, 0.0, lse_low)
        if part == 0:
            z_target = tl.sum(tl.load(at + 3 * plane, mask=index < PARTS, other=0.0), 0)
            loss = (lse - z_target) + lse_low
            loss = tl.where(loss < 0.0, 0.0, loss)  # p <= 1, a rounding aside
            if HAS_SMOOTHING:
                total = tl.sum(tl.load(at + 2 * plane, mask=index < PARTS, other=0.0), 0)
                loss += label_smoothing * (z_target - total / vocab)
            loss += z_loss * lse * lse
            tl.store(loss_ptr + row, tl.where(ignored, 0.0, tl.where(in_range, loss, float("nan"))))
            tl.store(lse_ptr + row, lse)
            tl.store(lse_low_ptr + row, lse_low)
    else:
        lse = tl.load(lse_ptr + row)
        lse_low = tl.load(lse_low_ptr + row)
    if WRITE_GRADIENT:
        offset = row_offset(row, inner, stride_outer, stride_inner) + start
        logits = logits_ptr + offset
        x_target = tl.load(logits + local).to(tl.float32)
        tl.debug_barrier()  # in place: nobody may write before all have read the target's logit
        scale = 1.0
        if HAS_SCALE:
            scale = tl.load(scale_ptr + tl.cast(row, tl.int64) * scale_stride)
        if HAS_WEIGHT:
            scale = scale * tl.load(weight_ptr)
        grad_lse = 0.0
        zero = ignored
        if HAS_GRAD_LSE:
            grad_lse = tl.load(grad_lse_ptr + row)
            zero = False
        write_gradient(
            logits,
            gradient_ptr + row_offset(row, inner, gradient_outer, gradient_inner) + start,
            head_of(offset, shift, width, RAGGED, VECTOR),
            x_target,
            lse,
            lse_low,
            local,
            inside,
            zero,
            tl.where(ignored, 0.0, tl.where(in_range, scale, float("nan"))),
            grad_lse,
            width,
            vocab,
            label_smoothing,
            z_loss,
            softcap,
            RAGGED,
            ALIGNMENT,
            HAS_SMOOTHING,
            HAS_SOFTCAP,
            BLOCK,
            VECTOR,
        )
