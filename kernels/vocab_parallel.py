"""Cross-entropy where each process of a group holds a slice of the vocabulary (tensor parallelism of the output layer).

The formulas are those of cross_entropy.py. Each process reduces its own logits to a logsumexp, the target's logit and,
with smoothing, the sum of its logits; two all-reduces of these numbers, a few bytes a row, give everybody the loss:

    m = max_r lse_r        lse = m + log Σ_r exp(lse_r - m)        z_t = Σ_r z_t,r (0 where another process has it)

With lse known, the gradient of a slice of the logits needs nothing from the other processes.
vocab_parallel_linear.py has the form with the linear layer.

All processes of the group must call with the same targets and options, and go backward with the same upstream gradient
(the loss is the same number everywhere, so that whatever follows it is, too).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateImportUsage]

from fuselm.kernels._triton import Backend, select_backend
from fuselm.kernels.arguments import check_tensors
from fuselm.kernels.cross_entropy import (
    KERNEL_DTYPES,
    Reduction,
    as_outer_inner,
    check_options,
    cross_entropy_reference,
    row_weight,
)
from fuselm.kernels.cross_entropy_launchers import Options, launch_backward, launch_forward
from fuselm.kernels.loss_scaling import launch_weighted_sum


def all_reduce(x: torch.Tensor, group_name: Any, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduces x in place over the processes of the group of that name (custom ops take names, not groups)."""
    dist.all_reduce(x, operation, group=_resolve_process_group(group_name))
    return x


def parallel_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    classes: int,
    options: Options,
    group_name: str,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, lse, its low part and the factor of the gradient (NaN for an impossible target) of each row.

    `logits` (outer, inner, slice of the vocabulary); `targets` (rows,) and the ignore_index in `options` count from the
    start of the slice.
    """
    ignore_index, label_smoothing, z_loss, _ = options
    picked, total, lse, lse_low = (
        torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(4)
    )
    launch_forward(logits, targets, picked, lse, lse_low, options=options, skip_ignored=not want_lse, total=total)
    top = all_reduce(lse.clone(), group_name, dist.ReduceOp.MAX)
    top = torch.where(top.isfinite(), top, 0.0)  # all logits -inf: no -inf - -inf
    share = torch.exp((lse - top) + lse_low)
    found = ((targets >= 0) & (targets < logits.shape[-1])).float()
    share, picked, found, total = all_reduce(torch.stack([share, picked, found, total]), group_name).unbind()
    log_sum = share.log()
    lse = top + log_sum
    lse_low = torch.where(lse.isfinite(), (top - lse) + log_sum, 0.0)
    loss = (lse - picked) + lse_low
    loss = torch.where(loss < 0, 0.0, loss)  # p <= 1, a rounding aside
    if label_smoothing:
        loss = loss + label_smoothing * (picked - total / classes)
    loss = loss + z_loss * lse.square()
    ignored = targets == ignore_index
    factor = torch.where((found > 0) | ignored, 1.0, math.nan)
    return torch.where(ignored, 0.0, loss * factor), lse, lse_low, factor


def _reduced(losses: torch.Tensor, weight: torch.Tensor, reduction: str) -> torch.Tensor:
    return losses if reduction == "none" else launch_weighted_sum(losses, weight)


@torch.library.custom_op("fuselm::vocab_parallel_cross_entropy_forward", mutates_args=())
def _cross_entropy_forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group_name: str,
    reduction: str,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    options = (ignore_index, label_smoothing, z_loss, softcap)
    losses, lse, lse_low, factor = parallel_losses(logits, targets, classes, options, group_name, want_lse)
    weight = row_weight(targets, ignore_index, reduction)
    return _reduced(losses, weight, reduction), lse, lse_low, factor, weight


@_cross_entropy_forward.register_fake
def _(
    logits: torch.Tensor,
    targets: torch.Tensor,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group_name: str,
    reduction: str,
    want_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    def numbers(*shape: int) -> torch.Tensor:
        return logits.new_empty(shape, dtype=torch.float32)

    rows = targets.shape[0]
    loss = numbers(rows) if reduction == "none" else numbers()
    return loss, numbers(rows), numbers(rows), numbers(rows), numbers()


@torch.library.custom_op("fuselm::vocab_parallel_cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    factor: torch.Tensor,
    weight: torch.Tensor,
    grad_loss: torch.Tensor,
    grad_lse: torch.Tensor | None,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> torch.Tensor:
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    options = (ignore_index, label_smoothing, z_loss, softcap)
    launch_backward(
        gradient, logits, targets, lse, lse_low, weight, grad_loss * factor, grad_lse, options, classes=classes
    )
    return gradient


@_cross_entropy_backward.register_fake
def _(logits: torch.Tensor, *_args: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape)


def _setup_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, targets, *options, _group_name, _reduction, _want_lse = inputs
    _, lse, lse_low, factor, weight = output
    ctx.save_for_backward(logits, targets, lse, lse_low, factor, weight)
    ctx.options = options
    ctx.mark_non_differentiable(lse_low, factor, weight)
    ctx.set_materialize_grads(False)


def _backward_cross_entropy(
    ctx: Any, grad_loss: torch.Tensor | None, grad_lse: torch.Tensor | None, *_: Any
) -> tuple[Any, ...]:
    nothing = (None,) * 9
    if grad_loss is None and grad_lse is None:
        return None, *nothing
    if grad_loss is None:
        grad_loss = torch.zeros_like(ctx.saved_tensors[-1])
    gradient = torch.ops.fuselm.vocab_parallel_cross_entropy_backward(
        *ctx.saved_tensors, grad_loss, grad_lse, *ctx.options
    )
    return gradient, *nothing


torch.library.register_autograd(
    "fuselm::vocab_parallel_cross_entropy_forward", _backward_cross_entropy, setup_context=_setup_cross_entropy
)


class _SumOfSlices(torch.autograd.Function):
    """The whole logits from every process's slice; the slice of their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, start: int, size: int, group_name: str) -> torch.Tensor:
        ctx.place = start, logits.shape[-1]
        whole = logits.new_zeros((*logits.shape[:-1], size))
        whole.narrow(-1, *ctx.place).copy_(logits)
        return all_reduce(whole, group_name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.narrow(-1, *ctx.place).contiguous(), None, None, None


def vocab_parallel_cross_entropy_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    **options: Any,
) -> Any:
    """cross_entropy_reference over the whole logits, which every process puts together from the slices."""
    whole = _SumOfSlices.apply(logits, vocab_start, vocab_size, group.group_name)
    return cross_entropy_reference(whole, targets, **options)  # pyright: ignore[reportArgumentType]


def check_slice(size: int, vocab_start: int, vocab_size: int) -> None:
    """Validates where a slice of `size` classes lies.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    if not 0 <= vocab_start <= vocab_size - size:
        raise ValueError(
            f"vocab_start={vocab_start}: expected 0 to {vocab_size - size}, so that this process's {size} classes lie "
            f"within vocab_size={vocab_size}"
        )


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_start: int,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Any:
    """cross_entropy over logits whose vocabulary is spread over the processes of `group`.

    All processes of the group call together, with the same targets and options, and go backward with the same upstream
    gradient. The slices together are the vocabulary, each class in one of them; they may differ in size.

    Args:
        logits: (..., classes of this process), bf16/fp16/fp32, any strides: those of the classes from `vocab_start` on.
        targets: (...), int64 or int32: class indices in [0, vocab_size) or `ignore_index`; others make their row's loss
            and gradient NaN.
        group: the processes that hold the vocabulary.
        vocab_start: the first class of this process.
        vocab_size: classes of all processes together.
        ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse, backend: as for cross_entropy.

    Returns:
        As cross_entropy: the loss over the whole vocabulary, the same on every process; with return_lse also lse. The
        gradient is that of this process's logits.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    check_tensors({"logits": logits, "targets": targets})
    if not logits.is_floating_point():
        raise TypeError(f"logits has dtype {logits.dtype}: expected a floating-point tensor")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}: expected (..., classes) with at least one class")
    check_options(targets, logits.shape[:-1], logits.device, label_smoothing, z_loss, softcap, reduction)
    check_slice(logits.shape[-1], vocab_start, vocab_size)
    use_kernels = select_backend(backend, logits.device) == "triton"
    if use_kernels and logits.dtype not in KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(
                f"logits has dtype {logits.dtype}: the kernels take fp32, bf16 and fp16; pass backend='auto'"
            )
        use_kernels = False
    if not use_kernels:
        return vocab_parallel_cross_entropy_reference(
            logits,
            targets,
            group=group,
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            reduction=reduction,
            return_lse=return_lse,
        )
    loss, lse, *_ = torch.ops.fuselm.vocab_parallel_cross_entropy_forward(
        as_outer_inner(logits),
        targets.reshape(-1).long() - vocab_start,
        vocab_size,
        ignore_index - vocab_start,
        float(label_smoothing),
        float(z_loss),
        float(softcap or 0.0),
        group.group_name,
        reduction,
        return_lse,
    )
    if reduction == "none":
        loss = loss.view(targets.shape)
    return (loss, lse.view(targets.shape)) if return_lse else loss
