"""What AdamW's kernels are held against, and what runs where they cannot: the step in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fuselm.kernels._triton import compute_dtype
from fuselm.kernels.adamw_rounding import random_words, round_stochastically
from fuselm.kernels.adamw_tables import Entry, Hyper
from fuselm.kernels.adamw_veto import Veto, ask


def adamw_reference(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
    hyper: Hyper,
    scale: torch.Tensor | float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One update of one tensor in plain PyTorch, fp32 inside (fp64 if any input is fp64); nothing is modified.

    Args:
        weight: parameter or its master copy, any shape.
        grad, exp_avg, exp_avg_sq: the same shape.
        step: () the number of this step, from 1.
        hyper: lr, betas, eps, weight decay.
        scale: factor on the gradient, () or a float.

    Returns:
        (weight, exp_avg, exp_avg_sq) after the step, in the dtype of the computation.
    """
    wide = compute_dtype(weight, exp_avg)
    w, m, v = weight.to(wide), exp_avg.to(wide), exp_avg_sq.to(wide)
    t = step.double()  # 1 - β^t cancels for β near 1
    step_size = (hyper.lr / (1.0 - hyper.beta1**t)).to(wide)
    root = (1.0 - hyper.beta2**t).sqrt().to(wide)
    g = grad.to(wide) * (scale.to(wide) if isinstance(scale, torch.Tensor) else scale)
    m = torch.lerp(m, g, 1.0 - hyper.beta1)
    v = torch.lerp(v, g * g, 1.0 - hyper.beta2)
    w = w - (hyper.lr * hyper.weight_decay) * w
    w = w - step_size * (m / (v.sqrt() / root + hyper.eps))
    return w, m, v


def _rounded(
    entry: Entry, step: torch.Tensor, seed: int, new: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> list[torch.Tensor]:
    """(weight, exp_avg, exp_avg_sq) with what is stored in bf16 rounded stochastically."""
    place = entry.place
    # The kernel counts in the order of memory (after a dense copy, where there are gaps).
    number = torch.arange(entry.numel, device=entry.param.device)
    number = number.as_strided(entry.param.shape, torch.empty_like(entry.param).stride())
    index = place.base + number + number // place.run * place.gap
    words = random_words(seed, step, entry.number, index)
    targets = (entry.param if entry.master is None else entry.master, entry.exp_avg, entry.exp_avg_sq)
    return [
        round_stochastically(value, bits) if target.dtype == torch.bfloat16 else value
        for target, value, bits in zip(targets, new, words, strict=True)
    ]


def reference_step(
    entries: Sequence[Entry],
    grads: Sequence[torch.Tensor],
    hypers: Sequence[Hyper],
    *,
    num_classes: int,
    all_reduce: Callable[[torch.Tensor], None] | None,
    veto: Veto | None,
    max_grad_norm: float,
    grad_norm: torch.Tensor,
    skipped_steps: torch.Tensor,
    stochastic: bool,
) -> None:
    """TritonStep.run in plain PyTorch; waits for no device."""
    sums = torch.zeros(num_classes + 1, dtype=torch.float64, device=grad_norm.device)
    squares: list[list[torch.Tensor]] = [[] for _ in range(num_classes)]
    for e, grad in zip(entries, grads, strict=True):
        norm = torch.linalg.vector_norm(grad, dtype=compute_dtype(grad))
        squares[e.shard_class].append(norm.square().double())
    for k, parts in enumerate(squares):
        if parts:
            sums[k] = torch.stack(parts).sum()
    sums[num_classes] = ~sums[:num_classes].isfinite().all()
    if all_reduce is not None:
        all_reduce(sums)
    total = sums[:num_classes].sum()
    go = fine = total.isfinite() & (sums[num_classes] == 0)
    if veto is not None:
        go = fine & ~ask(veto, torch.where(fine, total.sqrt(), math.nan))
    norm = torch.where(fine | ~total.isfinite(), total.sqrt(), math.nan)
    grad_norm.copy_(norm)
    skipped_steps.add_(~go)
    host = grad_norm.device.type == "cpu"
    if host and not bool(go):
        return
    scale = (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    for e, grad in zip(entries, grads, strict=True):
        hyper = hypers[e.group]
        step = e.step + go
        weight = e.param if e.master is None else e.master
        new = adamw_reference(weight, grad, e.exp_avg, e.exp_avg_sq, step, hyper, scale)
        stored = _rounded(e, step, hyper.seed, new) if stochastic else new
        targets = [(weight, stored[0]), (e.exp_avg, stored[1]), (e.exp_avg_sq, stored[2]), (e.step, step)]
        if e.master is not None:
            targets.append((e.param, new[0]))
        for target, value in targets:
            target.copy_(value if host else torch.where(go, value.to(target.dtype), target))
