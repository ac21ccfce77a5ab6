"""linear + cross-entropy in chunks of the vocabulary, for the little memory that chunks of rows waste their time in.

A chunk of few rows reads and writes the whole fp32 dW for a small multiplication. Chunks of the vocabulary go through
all rows instead: a first round computes each logsumexp, a second the logits again, their gradient, dx (+)= and
a part of dW that is complete at once, in the weight's own dtype. Four multiplications for three, and no fp32 dW:

    lse = log Σ_c exp(lse_c)        dW_c = dlogits_cᵀ · x        dx = Σ_c dlogits_c · W_c

`launch.linear_cross_entropy.chunk_plan` says from when on that is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from fuselm.kernels.chunk_products import multiply_in_fp32, multiply_logits
from fuselm.kernels.cross_entropy_launchers import Options, launch_backward, launch_forward


def run_vocab_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: Options,
    *,
    columns: int,
    want_lse: bool,
    need_dx: bool,
    dw_dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and lse of each row, dx, dW.

    Args:
        x: (rows, dim), rows >= 1, in the compute dtype.
        weight: (vocab, dim), the same dtype.
        targets: (rows,).
        options: ignore_index, label_smoothing, z_loss, softcap (0 for none).
        columns: of a chunk of logits.
        want_lse: whether lse of rows that are ignored matters.
        need_dx: otherwise dx is empty.
        dw_dtype: of dW.
        scale: fp32, (rows,) or 0-dim, multiplies the gradient of each row's loss; None for 1.
        grad_lse: (rows,) fp32 upstream gradient of lse; None for 0.
    """
    (rows, dim), vocab = x.shape, weight.shape[0]
    parts = [slice(start, min(start + columns, vocab)) for start in range(0, vocab, columns)]
    memory = torch.empty((rows * min(columns, vocab),), dtype=x.dtype, device=x.device)

    def logits_of(part: slice) -> torch.Tensor:
        width = part.stop - part.start
        logits = memory[: rows * width].view(rows, width)
        multiply_logits(x, weight[part], logits)
        return logits

    def shifted(part: slice) -> tuple[torch.Tensor, Options]:
        ignore_index, *others = options
        return targets - part.start, (ignore_index - part.start, others[0], others[1], others[2])

    loss, lse, lse_low, factor = _losses(
        targets, vocab, options, parts, logits_of, shifted, want_lse or grad_lse is not None
    )
    upstream = factor if scale is None else factor * scale
    one = torch.ones((), dtype=torch.float32, device=x.device)
    dx = torch.empty((rows, dim) if need_dx else (0, dim), dtype=torch.float32, device=x.device)
    dw = torch.empty((vocab, dim), dtype=dw_dtype, device=x.device)
    for part in parts:
        logits = logits_of(part)
        places, own = shifted(part)
        gradient = logits.unsqueeze(0)
        launch_backward(gradient, gradient, places, lse, lse_low, one, upstream, grad_lse, own, classes=vocab)
        if need_dx:
            multiply_in_fp32(logits, weight[part], dx, first=part.start == 0)
        if dw_dtype == x.dtype:
            torch.mm(logits.t(), x, out=dw[part])
        else:
            multiply_in_fp32(logits.t(), x, dw[part], first=True)
    return loss, lse, dx.to(x.dtype), dw


def _losses(
    targets: torch.Tensor,
    vocab: int,
    options: Options,
    parts: list[slice],
    logits_of: Callable[[slice], torch.Tensor],
    shifted: Callable[[slice], tuple[torch.Tensor, Options]],
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    # loss, lse, what lse lacks to fp64, and 1 or, for an impossible target, NaN
    ignore_index, label_smoothing, z_loss, _ = options
    lse = torch.full(targets.shape, -math.inf, dtype=torch.float64, device=targets.device)
    picked, total = torch.zeros_like(lse), torch.zeros_like(lse)
    numbers = [torch.empty(targets.shape, dtype=torch.float32, device=targets.device) for _ in range(4)]
    for part in parts:
        places, own = shifted(part)
        launch_forward(
            logits_of(part).unsqueeze(0),
            places,
            numbers[0],
            numbers[1],
            numbers[2],
            options=own,
            skip_ignored=not want_lse,
            total=numbers[3],
        )
        picked += numbers[0]
        lse = torch.logaddexp(lse, torch.where(numbers[1].isfinite(), numbers[1].double() + numbers[2], numbers[1]))
        if label_smoothing:
            total += numbers[3]
    ignored = targets == ignore_index
    if not want_lse:  # rows that were not read
        lse = torch.where(ignored, 0.0, lse)
    loss = (lse - picked).clamp(min=0)  # p <= 1, a rounding aside
    if label_smoothing:
        loss = loss + label_smoothing * (picked - total / vocab)
    loss = loss + z_loss * lse.square()
    factor = torch.where(((targets >= 0) & (targets < vocab)) | ignored, 1.0, math.nan).float()
    high = lse.float()
    low = torch.where(high.isfinite(), (lse - high).float(), 0.0)
    return torch.where(ignored, 0.0, loss * factor).float(), high, low, factor
