"""A linear layer and cross-entropy over its outputs in one op; of the logits there is a part at a time.

    logits = x · Wᵀ        loss, dlogits as in cross_entropy.py        dx = dlogits · W        dW = dlogitsᵀ · x

Rows go through in chunks, one buffer of logits for all: a matrix multiplication fills it, one launch computes the loss
and writes the gradient over the logits, two more multiplications give dx and add to dW in fp32 (the first chunk writes
it). In bf16 all rows go through at once where that takes no more memory, and dW is rounded as it is written. So "sum"
and "mean" do all of their work in the forward pass, for an upstream gradient of 1; in fp16 the 1/n of "mean" waits for
the backward pass, so that dlogits stay within ±1 and do not underflow. The backward pass multiplies dx and dW by the
upstream gradient, on the device: nothing is touched where that is 1, and of an fp32 dW the multiplication is the
rounding to W's dtype. It writes in place because the two buffers are handed out once: a second backward pass
(retain_graph), a gradient of lse, and the reduction "none" (whose upstream gradient differs by row) run the chunks
again, a fourth multiplication, with the gradients known beforehand.

A memory budget of few rows has the chunks cut the vocabulary instead, in blocks of rows: vocab_chunks.py.

Saved: x, W, targets (the caller's own tensors); dx in the compute dtype, dW in fp32 or, of all rows at once, in W's.
Floor: three multiplications, 6·R·dim·V floating-point operations forward and backward together. Memory: one chunk of
logits, dx, dW.

Under torch.autocast the multiplications run in the autocast dtype; dx and dW have the dtypes of x and W.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from fuselm.kernels._triton import Backend, select_backend
from fuselm.kernels.arguments import autocast_dtype, check_tensors
from fuselm.kernels.chunk_products import accumulate_dw, logits_buffer, multiply_dw, multiply_dx, multiply_logits
from fuselm.kernels.cross_entropy import (
    KERNEL_DTYPES,
    Reduction,
    check_options,
    cross_entropy_reference,
    row_weight,
)
from fuselm.kernels.cross_entropy_launchers import Options, launch_forward
from fuselm.kernels.launch.linear_cross_entropy import AT_ONCE, chunk_plan, row_bytes, rows_at_once
from fuselm.kernels.loss_scaling import launch_multiply, launch_weighted_sum
from fuselm.kernels.strides import as_rows
from fuselm.kernels.vocab_chunks import run_vocab_chunks


def linear_cross_entropy_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
) -> Any:
    """Plain PyTorch linear_cross_entropy with the same arguments: whole logits in the inputs' dtype (or autocast's),
    the loss in fp32 (fp64 for fp64 inputs)."""
    return cross_entropy_reference(
        torch.nn.functional.linear(x, weight),
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
        return_lse=return_lse,
    )


def _run_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: Options,
    *,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    want_lse: bool,
    need_dx: bool,
    need_dw: bool,
    scale: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and lse of each row, dx (compute dtype), dw (see `_dw_dtype`); gradients not asked for are empty. `scale`,
    `grad_lse`: as in launch_forward."""
    device = x.device
    (rows, dim), vocab = x.shape, weight.shape[0]
    plan = chunk_plan(rows, vocab, dtype.itemsize, chunk_size, memory_budget, need_dw)
    chunk = plan.rows
    if plan.columns:
        with torch.autocast(device.type, enabled=False):
            return run_vocab_chunks(
                x.to(dtype),
                weight.to(dtype),
                targets,
                options,
                plan=plan,
                want_lse=want_lse,
                need_dx=need_dx,
                dw_dtype=weight.dtype,
                scale=scale,
                grad_lse=grad_lse,
            )
    loss, lse, lse_low = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
    dx = torch.empty((rows, dim) if need_dx else (0, dim), dtype=dtype, device=device)
    dw_dtype = _dw_dtype(x, weight, dtype, chunk_size, memory_budget, need_dw)
    dw = torch.empty((vocab, dim) if need_dw else (0, dim), dtype=dw_dtype, device=device)
    if rows == 0:
        return loss, lse, dx, dw.zero_()
    with torch.autocast(device.type, enabled=False):
        weight = weight.to(dtype)
        buffer = logits_buffer(chunk, vocab, dtype, device)
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            x_part = x[part].to(dtype)
            logits = buffer[: x_part.shape[0]]
            multiply_logits(x_part, weight, logits)
            launch_forward(
                logits.unsqueeze(0),
                targets[part],
                loss[part],
                lse[part],
                lse_low[part],
                options=options,
                skip_ignored=not want_lse,
                gradient=logits.unsqueeze(0) if need_dx or need_dw else None,
                scale=scale if scale is None or scale.dim() == 0 else scale[part],
                grad_lse=None if grad_lse is None else grad_lse[part],
            )
            if need_dx:
                multiply_dx(logits, weight, dx[part])
            if need_dw and chunk >= rows:
                multiply_dw(dw, logits, x_part)
            elif need_dw:
                accumulate_dw(dw, logits, x_part, first=start == 0)
    return loss, lse, dx, dw


def _dw_dtype(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, chunk_size: int, memory_budget: int, need_dw: bool
) -> torch.dtype:
    # fp32, to which chunks of rows add; the weight's own from all rows at once, and from chunks of the vocabulary, each
    # of which is complete
    if chunk_size == AT_ONCE and need_dw:
        return weight.dtype
    if chunk_size or not memory_budget:  # not to look at sizes that torch.compile may hold symbolic
        return torch.float32
    columns = chunk_plan(x.shape[0], weight.shape[0], dtype.itemsize, 0, memory_budget, need_dw).columns
    return weight.dtype if columns else torch.float32


def _known(condition: Any) -> bool:
    # the condition; False if it is about a size that torch.compile leaves open, which it must not bound
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # takes 0.4 s to import

    return statically_known_true(condition)


def folds_count(dtype: torch.dtype) -> bool:
    # whether the gradients of "mean" hold their 1/n from the start; fp16 would underflow
    return dtype != torch.float16


@torch.library.custom_op("fuselm::linear_cross_entropy_forward", mutates_args=())
def _linear_cross_entropy_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    want_lse: bool,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    inverse_count = row_weight(targets, ignore_index, reduction)
    loss, lse, dx, dw = _run_chunks(
        x,
        weight,
        targets,
        (ignore_index, label_smoothing, z_loss, softcap),
        dtype=dtype,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
        want_lse=want_lse,
        need_dx=need_dx,
        need_dw=need_dw,
        scale=inverse_count if folds_count(dtype) else None,
    )
    return loss if reduction == "none" else launch_weighted_sum(loss, inverse_count), lse, inverse_count, dx, dw


@_linear_cross_entropy_forward.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    want_lse: bool,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    def empty(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    rows, dim = x.shape
    dx = x.new_empty((rows if need_dx else 0, dim), dtype=dtype)
    loss = empty(rows) if reduction == "none" else empty()
    dw_dtype = _dw_dtype(x, weight, dtype, chunk_size, memory_budget, need_dw)
    return loss, empty(rows), empty(), dx, x.new_empty((weight.shape[0] if need_dw else 0, dim), dtype=dw_dtype)


@torch.library.custom_op("fuselm::linear_cross_entropy_backward", mutates_args=())
def _linear_cross_entropy_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    grad_loss: torch.Tensor,
    grad_lse: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, dx, dw = _run_chunks(
        x,
        weight,
        targets,
        (ignore_index, label_smoothing, z_loss, softcap),
        dtype=dtype,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
        want_lse=False,
        need_dx=need_dx,
        need_dw=need_dw,
        scale=grad_loss,
        grad_lse=None if grad_lse is None else grad_lse.contiguous(),
    )
    return dx, dw


@_linear_cross_entropy_backward.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    grad_loss: torch.Tensor,
    grad_lse: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    dtype: torch.dtype,
    chunk_size: int,
    memory_budget: int,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    (rows, dim), vocab = x.shape, weight.shape[0]
    dx = x.new_empty((rows if need_dx else 0, dim), dtype=dtype)
    dw_dtype = _dw_dtype(x, weight, dtype, chunk_size, memory_budget, need_dw)
    return dx, x.new_empty((vocab if need_dw else 0, dim), dtype=dw_dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, weight, targets, *options, _reduction, dtype, chunk_size, memory_budget, _want_lse, need_dx, need_dw = inputs
    _, _, inverse_count, dx, dw = output
    ctx.save_for_backward(x, weight, targets, inverse_count)
    ctx.options = (*options, dtype, chunk_size, memory_budget)
    ctx.count_folded = folds_count(dtype)
    # Attributes, not saved tensors: the buffers are handed to the first backward pass, which scales them in place.
    ctx.buffers = (dx, dw) if need_dx or need_dw else None
    ctx.mark_non_differentiable(inverse_count, dx, dw)
    ctx.set_materialize_grads(False)


def multiplied(buffer: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """buffer · factor in `dtype`, in the memory of `buffer` where that fits; a factor of 1 then costs nothing."""
    result = buffer if buffer.dtype == dtype else torch.empty_like(buffer, dtype=dtype)
    if type(buffer) is torch.Tensor:
        launch_multiply(buffer, result, factor)
        return result
    # A tensor of a tracer (torch.compile). A factor of one dimension: one without would be rounded to 16 bits first.
    return buffer.mul_(factor.reshape(1)) if result is buffer else torch.mul(buffer, factor.reshape(1), out=result)


def _backward(ctx: Any, grad_loss: torch.Tensor | None, grad_lse: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * 12
    if grad_loss is None and grad_lse is None:
        return None, None, *nothing
    x, weight, targets, inverse_count = ctx.saved_tensors
    need_dx, need_dw = ctx.needs_input_grad[:2]
    if grad_loss is None:
        grad_loss = torch.zeros_like(inverse_count)
    if grad_loss.dim() == 1 or grad_lse is not None or torch.is_grad_enabled():
        # With create_graph=True this op raises when differentiated, where the buffers would count as constants.
        dx, dw = torch.ops.fuselm.linear_cross_entropy_backward(
            x, weight, targets, grad_loss * inverse_count, grad_lse, *ctx.options, need_dx, need_dw
        )
        dx, dw = dx.to(x.dtype), dw.to(weight.dtype)
    else:
        if ctx.buffers is None:  # handed out before: the same gradients for an upstream gradient of 1, computed again
            once = inverse_count if ctx.count_folded else torch.ones_like(inverse_count)
            ctx.buffers = torch.ops.fuselm.linear_cross_entropy_backward(
                x, weight, targets, once, None, *ctx.options, need_dx, need_dw
            )
        (dx, dw), ctx.buffers = ctx.buffers, None
        factor = grad_loss if ctx.count_folded else grad_loss * inverse_count
        dx, dw = multiplied(dx, factor, x.dtype), multiplied(dw, factor, weight.dtype)
    return dx if need_dx else None, dw if need_dw else None, *nothing


torch.library.register_autograd("fuselm::linear_cross_entropy_forward", _backward, setup_context=_setup)


def check_linear_inputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    chunk_size: int | None,
    memory_budget: int | None,
    vocab_size: int | None = None,
) -> torch.dtype:
    """Validates the linear layer's part; the dtype to multiply in."""
    check_tensors({"x": x, "weight": weight})
    for name, tensor in (("x", x), ("weight", weight)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected a floating-point tensor")
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: expected (vocab, dim) with vocab >= 1")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has shape {tuple(x.shape)}: expected (..., {weight.shape[1]}), the dim of weight")
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}, x on {x.device}: move them to one device")
    for name, value in (("chunk_size", chunk_size), ("memory_budget", memory_budget)):
        if value is not None and not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r}, of type {type(value).__name__}: expected None or an int")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: expected None or a number of rows >= 1")
    dtype = x.dtype
    autocast = autocast_dtype(x.device)
    if autocast is not None and torch.float64 not in (x.dtype, weight.dtype):
        dtype = autocast
    elif x.dtype != weight.dtype:
        raise TypeError(
            f"weight has dtype {weight.dtype}, x {x.dtype}: outside torch.autocast both need one dtype; cast one"
        )
    if memory_budget is not None:
        if chunk_size is not None:
            raise ValueError(f"chunk_size={chunk_size} and memory_budget={memory_budget}: give one of the two")
        least = row_bytes(vocab_size or weight.shape[0], dtype.itemsize)
        if memory_budget < least:
            raise ValueError(f"memory_budget={memory_budget} bytes: expected at least {least}, one row of logits")
    return dtype


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
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
    """cross_entropy(x @ weight.T, targets) with a part of the logits at a time.

    Args:
        x: (..., dim), bf16/fp16/fp32, any strides.
        weight: (vocab, dim), the output layer; x's dtype, or any under torch.autocast.
        targets: (...), int64 or int32, as for cross_entropy: class indices, or `ignore_index`; others make the loss
        NaN.
        ignore_index: rows with this target have loss 0 and gradient 0; it may lie in [0, vocab).
        label_smoothing: weight of the uniform distribution in the target, from 0 to 1.
        z_loss: weight of lse², added to the loss of each row that is not ignored.
        softcap: if given, logits become softcap · tanh(logits / softcap) first.
        reduction: "none" for (...), "sum", or "mean" = sum / max(rows that are not ignored, 1). "none" computes the
            logits a second time in the backward pass.
        return_lse: also return the logsumexp of the (capped) logits of every row; differentiable, at the price of
            computing the logits a second time where its gradient is used.
        chunk_size: rows of logits that exist at a time; by default as many as make about 1 GiB, at most 5504, or in
            bf16 all where that takes no more memory. dweight is then rounded to bf16 as it is computed, instead of
            summed in fp32, and rounded again by an upstream gradient that is no power of two. Under torch.compile only
            a number of rows that is not dynamic goes through at once.
        memory_budget: instead of chunk_size, bytes that the buffer of logits may take. What else there is does not
            shrink with it: dx in the dtype of the multiplications, dweight in fp32. Where only few rows of logits fit,
            blocks of chunks of the vocabulary take their place: most logits are computed twice, dx is summed in fp32
            (4 bytes an element of x beside the result), and of dweight only the sums of one chunk are fp32, if any.
        backend: "auto", "triton" or "reference"; the reference holds all logits.

    Returns:
        The loss, fp32 (fp64 for fp64 inputs); with return_lse a pair (loss, lse). Logits are rounded to the inputs' (or
        autocast's) dtype, as a linear layer's output is; dweight is summed in fp32 over chunks. What is frozen gets no
        gradient and costs no work; without gradients (torch.no_grad) only the loss is computed. Second derivatives are
        not implemented and raise.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    dtype = check_linear_inputs(x, weight, chunk_size, memory_budget)
    check_options(targets, x.shape[:-1], x.device, label_smoothing, z_loss, softcap, reduction)
    use_kernels = select_backend(backend, x.device) == "triton"
    if use_kernels and dtype not in KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(f"x has dtype {x.dtype}: the kernels take fp32, bf16 and fp16; pass backend='auto'")
        use_kernels = False
    if not use_kernels:
        return linear_cross_entropy_reference(
            x,
            weight,
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            reduction=reduction,
            return_lse=return_lse,
        )
    at_once = torch.is_grad_enabled() and reduction != "none"
    x = as_rows(x)
    # Not in fp16, which the sums of a dW without its 1/n may exceed.
    if chunk_size is None and memory_budget is None and x.dtype == weight.dtype == dtype == torch.bfloat16:
        chunk_size = AT_ONCE if _known(x.shape[0] <= rows_at_once(*weight.shape)) else None
    loss, lse, *_ = torch.ops.fuselm.linear_cross_entropy_forward(
        x,
        weight,
        targets.reshape(-1).contiguous(),
        ignore_index,
        float(label_smoothing),
        float(z_loss),
        float(softcap or 0.0),
        reduction,
        dtype,
        chunk_size or 0,
        memory_budget or 0,
        return_lse,
        at_once and x.requires_grad,
        at_once and weight.requires_grad,
    )
    if reduction == "none":
        loss = loss.view(targets.shape)
    return (loss, lse.view(targets.shape)) if return_lse else loss
