"""A linear layer and cross-entropy in one op, the layer's classes spread over the processes of a group.

linear_cross_entropy.py's chunks with vocab_parallel.py's losses: for each chunk of rows a multiplication gives this
process's logits, two small all-reduces the loss, a launch writes the gradient over the logits, two multiplications give
this process's share of dx and add to dW. dx is a sum over the vocabulary and so over the processes: one all-reduce of
(rows, dim) at the end, in the dtype of the multiplications. dW stays with its process.

Saved: x, W, targets, lse in two parts, dx, dW. With lse saved, a second pass over the chunks (reduction "none",
retain_graph, a gradient of lse) needs no all-reduce but that of dx.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fuselm.kernels._triton import Backend, select_backend
from fuselm.kernels.chunk_products import accumulate_dw, logits_buffer, multiply_dx, multiply_logits
from fuselm.kernels.cross_entropy import KERNEL_DTYPES, Reduction, check_options, row_weight
from fuselm.kernels.cross_entropy_launchers import Options, launch_backward
from fuselm.kernels.launch.linear_cross_entropy import chunk_rows
from fuselm.kernels.linear_cross_entropy import (
    check_linear_inputs,
    folds_count,
    multiplied,
)
from fuselm.kernels.loss_scaling import launch_weighted_sum
from fuselm.kernels.strides import as_rows
from fuselm.kernels.vocab_parallel import (
    all_reduce,
    check_slice,
    parallel_losses,
    vocab_parallel_cross_entropy_reference,
)

RowNumbers = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Loss, lse, its low part, factor of the gradient (NaN for an impossible target) of each row."""


def _run_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    classes: int,
    options: Options,
    group_name: str,
    *,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    want_lse: bool,
    need_dx: bool,
    need_dw: bool,
    scale: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
    known: RowNumbers | None = None,
) -> tuple[RowNumbers, torch.Tensor, torch.Tensor]:
    """The rows' numbers (`known`, or computed), dx (compute dtype), dw (fp32); gradients not asked for are empty.
    `scale`, 0-dim or (rows,), multiplies the gradient of each row's loss."""
    (rows, dim), vocab = x.shape, weight.shape[0]
    numbers = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(4)] if known is None else known
    dx = torch.empty((rows, dim) if need_dx else (0, dim), dtype=dtype, device=x.device)
    dw = torch.empty((vocab, dim) if need_dw else (0, dim), dtype=torch.float32, device=x.device)
    if rows == 0:
        return (numbers[0], numbers[1], numbers[2], numbers[3]), dx, dw.zero_()
    # Processes may hold slices of different sizes: the chunks, and with them the all-reduces, must be everybody's.
    chunk = min(chunk_size, rows) if chunk_size else chunk_rows(rows, classes, dtype.itemsize, memory_budget)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    with torch.autocast(x.device.type, enabled=False):
        weight = weight.to(dtype)
        buffer = logits_buffer(chunk, vocab, dtype, x.device)
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            x_part = x[part].to(dtype)
            logits = buffer[: x_part.shape[0]]
            multiply_logits(x_part, weight, logits)
            if known is None:
                found = parallel_losses(logits.unsqueeze(0), targets[part], classes, options, group_name, want_lse)
                for whole, piece in zip(numbers, found, strict=True):
                    whole[part] = piece
            if not (need_dx or need_dw):
                continue
            _, lse, lse_low, factor = (n[part] for n in numbers)
            launch_backward(
                logits.unsqueeze(0),
                logits.unsqueeze(0),
                targets[part],
                lse,
                lse_low,
                one,
                factor * (scale if scale.dim() == 0 else scale[part]),
                None if grad_lse is None else grad_lse[part],
                options,
                classes=classes,
            )
            if need_dx:
                multiply_dx(logits, weight, dx[part])
            if need_dw:
                accumulate_dw(dw, logits, x_part, first=start == 0)
    if need_dx:
        all_reduce(dx, group_name)
    return (numbers[0], numbers[1], numbers[2], numbers[3]), dx, dw


@torch.library.custom_op("fuselm::vocab_parallel_linear_cross_entropy_forward", mutates_args=())
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group_name: str,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    reduction: str,
    want_lse: bool,
    need_dx: bool,
    need_dw: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    inverse_count = row_weight(targets, ignore_index, reduction)
    (losses, lse, lse_low, factor), dx, dw = _run_chunks(
        x,
        weight,
        targets,
        classes,
        (ignore_index, label_smoothing, z_loss, softcap),
        group_name,
        dtype=dtype,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
        want_lse=want_lse,
        need_dx=need_dx,
        need_dw=need_dw,
        scale=inverse_count if folds_count(dtype) else torch.ones_like(inverse_count),
    )
    loss = losses.clone() if reduction == "none" else launch_weighted_sum(losses, inverse_count)
    return loss, lse, losses, lse_low, factor, inverse_count, dx, dw


@_forward.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group_name: str,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    reduction: str,
    want_lse: bool,
    need_dx: bool,
    need_dw: bool,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    def numbers(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    rows, dim = x.shape
    dx = x.new_empty((rows if need_dx else 0, dim), dtype=dtype)
    dw = numbers(weight.shape[0] if need_dw else 0, dim)
    loss = numbers(rows) if reduction == "none" else numbers()
    return loss, numbers(rows), numbers(rows), numbers(rows), numbers(rows), numbers(), dx, dw


@torch.library.custom_op("fuselm::vocab_parallel_linear_cross_entropy_backward", mutates_args=())
def _recompute(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    grad_lse: torch.Tensor | None,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group_name: str,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, dx, dw = _run_chunks(
        x,
        weight,
        targets,
        classes,
        (ignore_index, label_smoothing, z_loss, softcap),
        group_name,
        dtype=dtype,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
        want_lse=False,
        need_dx=need_dx,
        need_dw=need_dw,
        scale=scale,
        grad_lse=grad_lse,
        known=(losses, lse, lse_low, factor),
    )
    return dx, dw


@_recompute.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    losses: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    grad_lse: torch.Tensor | None,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    group_name: str,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, dim), vocab = x.shape, weight.shape[0]
    dx = x.new_empty((rows if need_dx else 0, dim), dtype=dtype)
    return dx, x.new_empty((vocab if need_dw else 0, dim), dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, targets, *options, _reduction, _want_lse, need_dx, need_dw = inputs
    _, lse, losses, lse_low, factor, inverse_count, dx, dw = output
    ctx.save_for_backward(x, weight, targets, losses, lse, lse_low, factor, inverse_count)
    ctx.options = options
    ctx.count_folded = folds_count(dx.dtype)
    # Attributes, not saved tensors: the buffers are handed to the first backward pass, which scales them in place.
    ctx.buffers = (dx, dw) if need_dx or need_dw else None
    ctx.mark_non_differentiable(losses, lse_low, factor, inverse_count, dx, dw)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: torch.Tensor | None, grad_lse: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * 14
    if grad_loss is None and grad_lse is None:
        return None, None, *nothing
    *saved, inverse_count = ctx.saved_tensors
    x, weight = saved[:2]
    need_dx, need_dw = ctx.needs_input_grad[:2]
    if grad_loss is None:
        grad_loss = torch.zeros_like(inverse_count)
    again = torch.ops.fuselm.vocab_parallel_linear_cross_entropy_backward
    if grad_loss.dim() == 1 or grad_lse is not None or torch.is_grad_enabled():
        # With create_graph=True this op raises when differentiated, where the buffers would count as constants.
        dx, dw = again(*saved, grad_loss * inverse_count, grad_lse, *ctx.options, need_dx, need_dw)
        dx, dw = dx.to(x.dtype), dw.to(weight.dtype)
    else:
        if ctx.buffers is None:  # handed out before: the same gradients for an upstream gradient of 1, computed again
            once = inverse_count if ctx.count_folded else torch.ones_like(inverse_count)
            ctx.buffers = again(*saved, once, None, *ctx.options, need_dx, need_dw)
        (dx, dw), ctx.buffers = ctx.buffers, None
        factor = grad_loss if ctx.count_folded else grad_loss * inverse_count
        dx, dw = multiplied(dx, factor, x.dtype), multiplied(dw, factor, weight.dtype)
    return dx if need_dx else None, dw if need_dw else None, *nothing


torch.library.register_autograd("fuselm::vocab_parallel_linear_cross_entropy_forward", _backward, setup_context=_setup)


class _SumOfGradients(torch.autograd.Function):
    """x as it is; the sum of its gradients over the processes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str) -> torch.Tensor:
        ctx.group_name = group_name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(gradient.clone(memory_format=torch.contiguous_format), ctx.group_name), None


def vocab_parallel_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
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
    chunk_size: int | None = None,
    memory_budget: int | None = None,
    backend: Backend = "auto",
) -> Any:
    """linear_cross_entropy with the rows of `weight`, the classes, spread over the processes of `group`.

    All processes of the group call together, with the same x, targets and options, and go backward with the same
    upstream gradient. The slices together are the vocabulary, each class in one of them; they may differ in size.

    Args:
        x: (..., dim), bf16/fp16/fp32, any strides.
        weight: (classes of this process, dim): the rows of the classes from `vocab_start` on.
        targets: (...), int64 or int32: class indices in [0, vocab_size) or `ignore_index`; others make their row's loss
            and gradient NaN.
        group: the processes that hold the vocabulary.
        vocab_start: the first class of this process.
        vocab_size: classes of all processes together.
        chunk_size: rows of logits that exist at a time, the same on every process; by default as many as make about
            1 GiB of the whole vocabulary's logits, at most 5504.
        memory_budget: instead of chunk_size, bytes that one chunk of the whole vocabulary's logits may take; this
            process's slice takes its share of them.
        ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse, backend: as for linear_cross_entropy.

    Returns:
        As linear_cross_entropy: the loss over the whole vocabulary and, with return_lse, lse, the same on every
        process. The gradient of x is complete (summed over the processes), that of weight this process's.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    dtype = check_linear_inputs(x, weight, chunk_size, memory_budget, vocab_size)
    check_options(targets, x.shape[:-1], x.device, label_smoothing, z_loss, softcap, reduction)
    check_slice(weight.shape[0], vocab_start, vocab_size)
    use_kernels = select_backend(backend, x.device) == "triton"
    if use_kernels and dtype not in KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(f"x has dtype {x.dtype}: the kernels take fp32, bf16 and fp16; pass backend='auto'")
        use_kernels = False
    if not use_kernels:
        copies = _SumOfGradients.apply(x, group.group_name)
        return vocab_parallel_cross_entropy_reference(
            torch.nn.functional.linear(copies, weight),  # pyright: ignore[reportArgumentType]
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
    at_once = torch.is_grad_enabled() and reduction != "none"
    loss, lse, *_ = torch.ops.fuselm.vocab_parallel_linear_cross_entropy_forward(
        as_rows(x),
        weight,
        targets.reshape(-1).long() - vocab_start,
        vocab_size,
        ignore_index - vocab_start,
        float(label_smoothing),
        float(z_loss),
        float(softcap or 0.0),
        group.group_name,
        dtype,
        chunk_size or 0,
        memory_budget or 0,
        reduction,
        return_lse,
        at_once and x.requires_grad,
        at_once and weight.requires_grad,
    )
    if reduction == "none":
        loss = loss.view(targets.shape)
    return (loss, lse.view(targets.shape)) if return_lse else loss
