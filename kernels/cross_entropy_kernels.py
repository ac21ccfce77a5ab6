"""The Triton kernels under cross_entropy and linear_cross_entropy. cross_entropy.py has the formulas,
cross_entropy_launchers.py the launches.

One row a program. The first pass reads the row for an online logsumexp; the second, in the same launch where a gradient
is asked for, reads it again (from L1 and L2 for the most part: it runs backwards, so that the newest lines come first)
and writes the gradient, over the logits too. The backward kernel is the second pass from a saved logsumexp.

Both passes are bound by instructions unless they are lean, so:

- A row is cut at 16-byte borders. Its body goes in vectors of 16 bytes without a mask, whatever address the row starts
  at; the last block is masked by whole vectors; the ragged ends, fewer than 16 bytes each, go element by element.
- Exponents are base 2 and one multiply-add: z · log2(e) - reference, rounded once. Each vector of 16 bytes raises the
  running maximum once and rescales the running sum once.
- The second pass writes p · factor. Upstream gradient, z-loss, the gradient of lse and the low part of lse are in the
  factor, computed once a row; the target's element is computed apart and stored after a barrier.
- With `ahead`, a program that writes asks for the row that its SM takes next, so that memory is read during the second
  pass too.
- The loops say num_stages=1: loads go straight to registers and through L1, where the second pass finds a part of the
  row.
"""

from __future__ import annotations

from typing import Any

from fuselm.kernels._triton import HAVE_TRITON, INTERPRET, jit, tl
from fuselm.kernels.cross_entropy_math import expm1_of_negative, fma, lse_of, sum_of_vectors, tanh
from fuselm.kernels.cross_entropy_rows import head_of, lanes_of, prefetch_row, ragged_ends, row_offset

VECTOR_BYTES = 16

if HAVE_TRITON:
    _LOG2E = tl.constexpr(1.4426950216293335)  # log2(e) rounded to fp32
    _INTERPRET = tl.constexpr(INTERPRET)

LOWEST: Any = tl.constexpr(-3.0e38) if HAVE_TRITON else None


@jit
def _capped(z, softcap, HAS_SOFTCAP: tl.constexpr):
    if HAS_SOFTCAP:
        z = softcap * tanh(z * (1.0 / softcap))
    return z


@jit
def _accumulate(
    reference, s, total, picked, z, mask, column, target, softcap, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr
):
    # One block z [N, VECTOR]. s [N] is the sum of 2^(z · log2(e) - reference), reference [N] the running maximum of
    # z · log2(e) rounded. It starts finite: -inf logits then never meet -inf - -inf.
    if SOFTCAP:
        z = tl.where(mask, _capped(z, softcap, SOFTCAP), float("-inf"))
        # from here, as a second evaluation may round otherwise
        picked += sum_of_vectors(tl.where(mask & (column == target), z, 0.0))
    if SMOOTHING:
        total += sum_of_vectors(tl.where(mask, z, 0.0))
    new = tl.maximum(reference, tl.max(z, 1) * _LOG2E)
    s = s * tl.exp2(reference - new) + tl.sum(tl.exp2(fma(z, _LOG2E, -new[:, None])), 1)
    return new, s, total, picked


@jit
def row_sums(
    logits,
    head,
    target,
    vocab,
    limit,
    softcap,
    RAGGED: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    # Of one row, of which the first `limit` logits z count, all or none: the maximum of z · log2(e), the sum of
    # 2^(z · log2(e) - maximum), the sum of z (with smoothing), the target's capped logit (with softcap)
    N: tl.constexpr = BLOCK // VECTOR
    lanes = lanes_of(BLOCK, VECTOR)
    body = logits + head
    chunks = (limit - tl.minimum(head, limit)) // VECTOR
    full = chunks // N
    reference = tl.full([N], LOWEST, tl.float32)
    s = tl.zeros([N], tl.float32)
    total = tl.zeros([N], tl.float32)
    picked = tl.zeros([N], tl.float32)
    for i in tl.range(0, full, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        pointers = tl.multiple_of(body + i * BLOCK + lanes, [1, 16])
        z = tl.load(pointers, eviction_policy="evict_last").to(tl.float32)
        column = head + i * BLOCK + lanes
        reference, s, total, picked = _accumulate(
            reference, s, total, picked, z, True, column, target, softcap, HAS_SOFTCAP, HAS_SMOOTHING
        )
    if full * N < chunks:
        mask = (full * N + tl.arange(0, N) < chunks)[:, None]
        pointers = tl.multiple_of(body + full * BLOCK + lanes, [1, 16])
        z = tl.load(pointers, mask=mask, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        reference, s, total, picked = _accumulate(
            reference,
            s,
            total,
            picked,
            z,
            mask,
            head + full * BLOCK + lanes,
            target,
            softcap,
            HAS_SOFTCAP,
            HAS_SMOOTHING,
        )
    top = tl.max(reference, 0)
    row_sum = tl.sum(s * tl.exp2(reference - top), 0)
    row_total = tl.sum(total, 0)
    row_picked = tl.sum(picked, 0)
    if RAGGED:
        column, exists = ragged_ends(head, vocab, VECTOR)
        exists = exists & (limit > 0)
        z = tl.load(logits + column, mask=exists, other=float("-inf")).to(tl.float32)
        z = tl.where(exists, _capped(z, softcap, HAS_SOFTCAP), float("-inf"))
        new = tl.maximum(top, tl.max(z, 0) * _LOG2E)
        row_sum = row_sum * tl.exp2(top - new) + tl.sum(tl.exp2(fma(z, _LOG2E, -new)), 0)
        top = new
        if HAS_SMOOTHING:
            row_total += tl.sum(tl.where(exists, z, 0.0), 0)
        if HAS_SOFTCAP:
            row_picked += tl.sum(tl.where(exists & (column == target), z, 0.0), 0)
    return top, row_sum, row_total, row_picked


@jit
def _gradient_of(z, reference, factor, uniform, softcap, HAS_SMOOTHING: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    # factor · 2^(z · log2(e) - reference) - uniform, times dz/dx
    t = 0.0
    if HAS_SOFTCAP:
        t = tanh(z * (1.0 / softcap))
        z = softcap * t
    d = tl.exp2(fma(z, _LOG2E, -reference)) * factor
    if HAS_SMOOTHING:
        d -= uniform
    if HAS_SOFTCAP:
        d *= 1.0 - t * t
    return d


@jit
def write_gradient(
    logits,
    gradient,
    head,
    x_target,
    lse,
    lse_low,
    target,
    in_range,
    zero,
    scale,
    grad_lse,
    vocab,
    classes,
    label_smoothing,
    z_loss,
    softcap,
    RAGGED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    # scale · dloss/dx + grad_lse · dlse/dx of one row, where p = exp(z - lse - lse_low); zeros, without reading the
    # row, where `zero`. x_target is the target's logit, read before anybody could write over it.
    N: tl.constexpr = BLOCK // VECTOR
    dtype = gradient.dtype.element_ty
    lanes = lanes_of(BLOCK, VECTOR)
    source = logits + head
    sink = gradient + head
    chunks = (vocab - head) // VECTOR
    full = chunks // N
    mask = (full * N + tl.arange(0, N) < chunks)[:, None]
    if zero:
        nothing = tl.zeros([N, VECTOR], dtype)
        for i in range(0, full):
            tl.store(tl.multiple_of(sink + i * BLOCK + lanes, [1, ALIGNMENT]), nothing, eviction_policy="evict_first")
        tl.store(tl.multiple_of(sink + full * BLOCK + lanes, [1, ALIGNMENT]), nothing, mask=mask)
        if RAGGED:
            column, exists = ragged_ends(head, vocab, VECTOR)
            tl.store(gradient + column, tl.zeros([2 * VECTOR], dtype), mask=exists)
    else:
        # p = 2^(z · log2(e) - reference - low): the reference is a rounded number, what it lacks goes into the factor
        reference = lse * _LOG2E
        low = fma(lse, _LOG2E, -reference) + lse_low * _LOG2E
        low = tl.where(tl.abs(lse) < float("inf"), low, 0.0)
        p_factor = scale * (2.0 * z_loss * lse) + grad_lse
        factor = (scale + p_factor) * tl.exp2(-low)
        uniform = scale * (label_smoothing / classes)
        if full * N < chunks:
            pointers = tl.multiple_of(source + full * BLOCK + lanes, [1, 16])
            z = tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            d = _gradient_of(z, reference, factor, uniform, softcap, HAS_SMOOTHING, HAS_SOFTCAP)
            pointers = tl.multiple_of(sink + full * BLOCK + lanes, [1, ALIGNMENT])
            tl.store(pointers, d.to(dtype), mask=mask, eviction_policy="evict_first")
        for i in tl.range(0, full, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            start = (full - 1 - i) * BLOCK
            pointers = tl.multiple_of(source + start + lanes, [1, 16])
            z = tl.load(pointers, eviction_policy="evict_first").to(tl.float32)
            d = _gradient_of(z, reference, factor, uniform, softcap, HAS_SMOOTHING, HAS_SOFTCAP)
            pointers = tl.multiple_of(sink + start + lanes, [1, ALIGNMENT])
            tl.store(pointers, d.to(dtype), eviction_policy="evict_first")
        if RAGGED:
            column, exists = ragged_ends(head, vocab, VECTOR)
            z = tl.load(logits + column, mask=exists, other=0.0).to(tl.float32)
            d = _gradient_of(z, reference, factor, uniform, softcap, HAS_SMOOTHING, HAS_SOFTCAP)
            tl.store(gradient + column, d.to(dtype), mask=exists)
        # p - 1 is small beside p where the model is confident: from the loss, which keeps its digits there
        slope = 1.0
        if HAS_SOFTCAP:
            t = tanh(x_target * (1.0 / softcap))
            x_target = softcap * t
            slope = 1.0 - t * t
        nll = (lse - x_target) + lse_low
        p_minus_one = expm1_of_negative(tl.where(nll < 0.0, 0.0, nll))
        smoothing = label_smoothing - label_smoothing / classes
        d_target = (scale * (p_minus_one + smoothing) + (1.0 + p_minus_one) * p_factor) * slope
        tl.debug_barrier()  # after the vector that holds the target's element
        tl.store(gradient + target, d_target.to(dtype), mask=in_range)


@jit
def cross_entropy_forward_kernel(
    logits_ptr,
    targets_ptr,
    loss_ptr,
    lse_ptr,
    lse_low_ptr,
    total_ptr,
    gradient_ptr,
    scale_ptr,
    grad_lse_ptr,
    scale_stride,
    inner,
    stride_outer,
    stride_inner,
    gradient_outer,
    gradient_inner,
    shift,
    vocab,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    ahead,
    PARTIAL: tl.constexpr,
    SKIP_IGNORED: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    label_smoothing = tl.cast(label_smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    row = tl.program_id(0)
    offset = row_offset(row, inner, stride_outer, stride_inner)
    logits = logits_ptr + offset
    target = tl.load(targets_ptr + row).to(tl.int64)
    ignored = target == ignore_index
    in_range = (target >= 0) & (target < vocab)
    target = tl.where(in_range, target, 0).to(tl.int32)
    x_target = tl.load(logits + target).to(tl.float32)
    head = head_of(offset, shift, vocab, RAGGED, VECTOR)
    limit = vocab
    if SKIP_IGNORED:
        limit = tl.where(ignored, 0, vocab)
    top, row_sum, total, picked = row_sums(
        logits,
        head,
        target,
        vocab,
        limit,
        softcap,
        RAGGED,
        HAS_SMOOTHING,
        HAS_SOFTCAP,
        BLOCK,
        VECTOR,
    )
    lse, lse_low = lse_of(top, tl.where(limit > 0, row_sum, 1.0))
    if SKIP_IGNORED:  # a row that was not read
        lse = tl.where(ignored, 0.0, lse)
        lse_low = tl.where(ignored, 0.0, lse_low)
    z_target = x_target
    if HAS_SOFTCAP:
        z_target = picked
    if PARTIAL:  # the loss needs the other parts of the vocabulary
        tl.store(loss_ptr + row, tl.where(in_range, z_target, 0.0))
        tl.store(total_ptr + row, total)
    else:
        loss = (lse - z_target) + lse_low  # exact where the target is likely, and lse - z_target alone would cancel
        loss = tl.where(loss < 0.0, 0.0, loss)  # p <= 1, a rounding aside
        if HAS_SMOOTHING:
            loss += label_smoothing * (z_target - total / vocab)
        loss += z_loss * lse * lse
        loss = tl.where(ignored, 0.0, tl.where(in_range, loss, float("nan")))
        tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)
    tl.store(lse_low_ptr + row, lse_low)

    if WRITE_GRADIENT:
        tl.debug_barrier()  # in place: nobody may write before all have read the target's logit
        if AHEAD > 0 and not _INTERPRET:
            later = row + ahead
            if later < tl.num_programs(0):
                later_row = logits_ptr + row_offset(later, inner, stride_outer, stride_inner)
                prefetch_row(later_row, tl.minimum(vocab, AHEAD), THREADS)
        scale = 1.0
        if HAS_SCALE:
            scale = tl.load(scale_ptr + row.to(tl.int64) * scale_stride)
        grad_lse = 0.0
        if HAS_GRAD_LSE:
            grad_lse = tl.load(grad_lse_ptr + row)
        zero = ignored
        if HAS_GRAD_LSE:
            zero = False
        write_gradient(
            logits,
            gradient_ptr + row_offset(row, inner, gradient_outer, gradient_inner),
            head,
            x_target,
            lse,
            lse_low,
            target,
            in_range,
            zero,
            tl.where(ignored, 0.0, tl.where(in_range, scale, float("nan"))),
            grad_lse,
            vocab,
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


@jit
def cross_entropy_backward_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    lse_low_ptr,
    gradient_ptr,
    grad_loss_ptr,
    row_weight_ptr,
    grad_lse_ptr,
    grad_loss_stride,
    rows,
    inner,
    stride_outer,
    stride_inner,
    gradient_outer,
    gradient_inner,
    shift,
    vocab,
    classes,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    KEEP_IF_ONE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PARTIAL: tl.constexpr,
    RAGGED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    label_smoothing = tl.cast(label_smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    if KEEP_IF_ONE:
        if tl.load(grad_loss_ptr) == 1.0:
            return
    weight = tl.load(row_weight_ptr)
    # A grid of as many programs as run at once, each with many rows: where nothing is to be done, that is cheap.
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offset = row_offset(row, inner, stride_outer, stride_inner)
        logits = logits_ptr + offset
        target = tl.load(targets_ptr + row).to(tl.int64)
        ignored = target == ignore_index
        in_range = (target >= 0) & (target < vocab)
        target = tl.where(in_range, target, 0).to(tl.int32)
        x_target = tl.load(logits + target).to(tl.float32)
        scale = tl.load(grad_loss_ptr + tl.cast(row, tl.int64) * grad_loss_stride) * weight
        if not PARTIAL:
            scale = tl.where(in_range, scale, float("nan"))
        grad_lse = 0.0
        zero = ignored
        if HAS_GRAD_LSE:
            grad_lse = tl.load(grad_lse_ptr + row)
            zero = False
        tl.debug_barrier()  # in place: nobody may write before all have read the target's logit
        write_gradient(
            logits,
            gradient_ptr + row_offset(row, inner, gradient_outer, gradient_inner),
            head_of(offset, shift, vocab, RAGGED, VECTOR),
            x_target,
            tl.load(lse_ptr + row),
            tl.load(lse_low_ptr + row),
            target,
            in_range,
            zero,
            tl.where(ignored, 0.0, scale),
            grad_lse,
            vocab,
            classes,
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
