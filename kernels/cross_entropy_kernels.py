"""The Triton kernels under cross_entropy and linear_cross_entropy, and their launchers. cross_entropy.py has the
formulas.

One program a row. The forward kernel reads the row for an online logsumexp and, if asked to, reads it again (from L2
for the most part) and writes the gradient, over the logits too. The backward kernel computes the gradient from the
saved logsumexp.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import HAVE_TRITON, device_profile, jit, tl
from fuselm.kernels.launch.cross_entropy import cross_entropy_launch

Options = tuple[int, float, float, float]
"""ignore_index, label_smoothing, z_loss, softcap (0 for none)."""

_LOG2E = tl.constexpr(1.4426950408889634) if HAVE_TRITON else 1.4426950408889634


@jit
def _tanh(x):
    # A polynomial near 0, where the quotient of exponentials cancels; both are right to about 2^-22.
    a = tl.abs(x)
    q = a * a
    series = 0.1333256445 + q * (-0.05385029639 + q * (0.02106413707 + q * -0.006264367955))
    near = a + a * q * (-0.333333168 + q * series)
    e = tl.exp2(a * -2.8853900817779268)
    t = tl.where(a < 0.5, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -t, t)


@jit
def _write_gradient(
    logits,
    gradient,
    lse,
    lse_low,
    target,
    ignored,
    scale,
    grad_lse,
    vocab,
    label_smoothing,
    z_loss,
    softcap,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # scale · dloss/dx + grad_lse · dlse/dx of one row, where p = exp(z - lse - lse_low). p minus the smoothed target
    # comes first: it is exact where p is near 1, and the small terms of z-loss and lse are not lost beside it.
    scale = tl.where(ignored, 0.0, scale)
    p_factor = scale * (2.0 * z_loss * lse) + grad_lse
    uniform = label_smoothing / vocab
    target = tl.where((target >= 0) & (target < vocab), target, -1).to(tl.int32)  # compares faster than 64 bits
    peak = (1.0 - label_smoothing) + uniform
    log2_low = lse_low * _LOG2E
    zero = ignored
    if HAS_GRAD_LSE:
        zero = False
    for start in range(0, vocab, BLOCK):
        col = start + tl.arange(0, BLOCK)  # [BLOCK]
        mask = col < vocab
        if not HAS_GRAD_LSE:
            mask = mask & (ignored == 0)
        z = tl.load(logits + col, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        slope = 1.0
        if HAS_SOFTCAP:
            t = _tanh(z / softcap)
            z = softcap * t
            slope = 1.0 - t * t
        p = tl.exp2((z - lse) * _LOG2E - log2_low)
        d = (scale * (p - tl.where(col == target, peak, uniform)) + p * p_factor) * slope
        d = tl.where(zero, 0.0, d)
        tl.store(gradient + col, d.to(gradient.dtype.element_ty), mask=col < vocab, eviction_policy="evict_first")


@jit
def _cross_entropy_forward_kernel(
    logits_ptr,
    targets_ptr,
    loss_ptr,
    lse_ptr,
    lse_low_ptr,
    gradient_ptr,
    scale_ptr,
    grad_lse_ptr,
    scale_stride,
    inner,
    stride_outer,
    stride_inner,
    gradient_outer,
    gradient_inner,
    vocab,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    SKIP_IGNORED: tl.constexpr,
    WRITE_GRADIENT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    label_smoothing = tl.cast(label_smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + (row // inner) * stride_outer + (row % inner) * stride_inner
    target = tl.load(targets_ptr + row).to(tl.int64)
    ignored = target == ignore_index
    in_range = (target >= 0) & (target < vocab)
    limit = vocab
    if SKIP_IGNORED:
        limit = tl.where(ignored, 0, vocab)

    # One pass for max and Σ exp(z - max), a pair a lane. Of max and z one is the new maximum, so one exponential serves
    # both cases. The maximum starts finite: -inf logits then never meet -inf - -inf.
    m = tl.full([BLOCK], -1.0e38, tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    picked = tl.zeros([BLOCK], tl.float32)
    for start in range(0, limit, BLOCK):
        col = start + tl.arange(0, BLOCK)  # [BLOCK]
        mask = col < vocab
        z = tl.load(logits + col, mask=mask, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if HAS_SOFTCAP:
            z = softcap * _tanh(z / softcap)
            picked += tl.where(col == target, z, 0.0)  # a second evaluation may round otherwise
        if HAS_SMOOTHING:
            total += z  # 0 where masked
        z = tl.where(mask, z, float("-inf"))
        d = z - m
        e = tl.exp2(-tl.abs(d) * _LOG2E)
        s = tl.where(d > 0, s * e + 1.0, s + e)
        m = tl.maximum(m, z)
    maximum = tl.max(m, 0)
    row_sum = tl.sum(s * tl.exp2((m - maximum) * _LOG2E), 0)
    if SKIP_IGNORED:  # a row that was not read gets finite stand-ins
        maximum = tl.where(ignored, 0.0, maximum)
        row_sum = tl.where(ignored, 1.0, row_sum)
    log_sum = tl.log(row_sum)
    lse = maximum + log_sum
    lse_low = (maximum - lse) + log_sum  # pyright: ignore[reportOperatorIssue]

    z_target = tl.load(logits + tl.where(in_range, target, 0)).to(tl.float32)
    if HAS_SOFTCAP:
        z_target = tl.sum(picked, 0)
    loss = (lse - z_target) + lse_low  # exact where the target is likely, and lse - z_target alone would cancel  # pyright: ignore[reportOperatorIssue]
    if HAS_SMOOTHING:
        loss += label_smoothing * (z_target - tl.sum(total, 0) / vocab)
    loss += z_loss * lse * lse
    loss = tl.where(ignored, 0.0, tl.where(in_range, loss, float("nan")))
    tl.store(loss_ptr + row, loss)
    tl.store(lse_ptr + row, lse)
    tl.store(lse_low_ptr + row, lse_low)

    if WRITE_GRADIENT:
        tl.debug_barrier()  # in place: nobody may write before all have read z_target
        scale = 1.0
        if HAS_SCALE:
            scale = tl.load(scale_ptr + row * scale_stride)
        grad_lse = 0.0
        if HAS_GRAD_LSE:
            grad_lse = tl.load(grad_lse_ptr + row)
        _write_gradient(
            logits,
            gradient_ptr + (row // inner) * gradient_outer + (row % inner) * gradient_inner,
            lse,
            lse_low,
            target,
            ignored,
            tl.where(in_range, scale, float("nan")),
            grad_lse,
            vocab,
            label_smoothing,
            z_loss,
            softcap,
            HAS_GRAD_LSE,
            HAS_SOFTCAP,
            BLOCK,
        )


@jit
def _cross_entropy_backward_kernel(
    logits_ptr,
    targets_ptr,
    lse_ptr,
    lse_low_ptr,
    gradient_ptr,
    grad_loss_ptr,
    row_weight_ptr,
    grad_lse_ptr,
    grad_loss_stride,
    inner,
    stride_outer,
    stride_inner,
    gradient_outer,
    gradient_inner,
    vocab,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    KEEP_IF_ONE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    label_smoothing = tl.cast(label_smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    grad_loss = tl.load(grad_loss_ptr + row * grad_loss_stride)
    if KEEP_IF_ONE:
        if grad_loss == 1.0:
            return
    target = tl.load(targets_ptr + row).to(tl.int64)
    lse = tl.load(lse_ptr + row)
    in_range = (target >= 0) & (target < vocab)
    grad_lse = 0.0
    if HAS_GRAD_LSE:
        grad_lse = tl.load(grad_lse_ptr + row)
    _write_gradient(
        logits_ptr + (row // inner) * stride_outer + (row % inner) * stride_inner,
        gradient_ptr + (row // inner) * gradient_outer + (row % inner) * gradient_inner,
        lse,
        tl.load(lse_low_ptr + row),
        target,
        target == ignore_index,
        tl.where(in_range, grad_loss * tl.load(row_weight_ptr), float("nan")),
        grad_lse,
        vocab,
        label_smoothing,
        z_loss,
        softcap,
        HAS_GRAD_LSE,
        HAS_SOFTCAP,
        BLOCK,
    )


def launch_forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    loss: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    *,
    options: Options,
    skip_ignored: bool,
    gradient: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
) -> None:
    """Loss and lse of each row and, in the same launch, the gradient.

    Args:
        logits: (outer, inner, vocab), unit stride in the last dimension.
        targets, loss, lse, lse_low: (outer * inner,) contiguous; the last three are written, fp32.
        options: see Options.
        skip_ignored: leave lse 0 for ignored rows, whose logits are then not read.
        gradient: shape of logits, or logits itself to overwrite them; None writes none.
        scale: fp32, what each row's loss gradient is multiplied by: (rows,) or 0-dim; None for 1.
        grad_lse: (rows,) contiguous fp32, the upstream gradient of lse; None for 0.
    """
    outer, inner, vocab = logits.shape
    if outer * inner == 0:
        return
    ignore_index, label_smoothing, z_loss, softcap = options
    target_of_gradient = logits if gradient is None else gradient
    launch = cross_entropy_launch(vocab, logits.dtype, device_profile(logits.device))
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _cross_entropy_forward_kernel[(outer * inner,)](
            logits,
            targets,
            loss,
            lse,
            lse_low,
            target_of_gradient,
            loss if scale is None else scale,
            loss if grad_lse is None else grad_lse,
            0 if scale is None or scale.dim() == 0 else scale.stride(0),
            inner,
            logits.stride(0),
            logits.stride(1),
            target_of_gradient.stride(0),
            target_of_gradient.stride(1),
            vocab,
            ignore_index,
            label_smoothing,
            z_loss,
            softcap,
            SKIP_IGNORED=skip_ignored and grad_lse is None,
            WRITE_GRADIENT=gradient is not None,
            HAS_SCALE=scale is not None,
            HAS_GRAD_LSE=grad_lse is not None,
            HAS_SMOOTHING=label_smoothing != 0,
            HAS_SOFTCAP=softcap != 0,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
        )


def launch_backward(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    weight: torch.Tensor,
    grad_loss: torch.Tensor,
    grad_lse: torch.Tensor | None,
    options: Options,
    keep_if_one: bool = False,
) -> None:
    """The gradient of each row from its saved lse = lse (high part) + lse_low.

    Args:
        gradient: written; shape of logits, or logits itself to overwrite them.
        logits: (outer, inner, vocab), unit stride in the last dimension.
        targets, lse, lse_low: (outer * inner,) contiguous, as the forward launch had or wrote them.
        weight: 0-dim fp32, multiplies grad_loss.
        grad_loss: fp32 upstream gradient of the loss, 0-dim or (rows,).
        grad_lse: (rows,) fp32 upstream gradient of lse, or None for 0.
        options: see Options.
        keep_if_one: leave `gradient` as it is where grad_loss is exactly 1.
    """
    outer, inner, vocab = logits.shape
    if outer * inner == 0:
        return
    ignore_index, label_smoothing, z_loss, softcap = options
    launch = cross_entropy_launch(vocab, logits.dtype, device_profile(logits.device))
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _cross_entropy_backward_kernel[(outer * inner,)](
            logits,
            targets,
            lse,
            lse_low,
            gradient,
            grad_loss,
            weight,
            lse if grad_lse is None else grad_lse.contiguous(),
            0 if grad_loss.dim() == 0 else grad_loss.stride(0),
            inner,
            logits.stride(0),
            logits.stride(1),
            gradient.stride(0),
            gradient.stride(1),
            vocab,
            ignore_index,
            label_smoothing,
            z_loss,
            softcap,
            KEEP_IF_ONE=keep_if_one,
            HAS_GRAD_LSE=grad_lse is not None,
            HAS_SOFTCAP=softcap != 0,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
        )
