"""Cross-entropy over logits, with label smoothing, z-loss (PaLM, arXiv:2204.02311) and softcap (Gemma 2,
arXiv:2408.00118).

For a row x of V logits with target t, smoothing ε and z-loss weight ζ:

    z = c · tanh(x / c) with a softcap c, else x           lse = log Σ_j exp(z_j)           p_j = exp(z_j - lse)
    loss = lse - (1 - ε) · z_t - ε · mean(z) + ζ · lse²
    dloss/dz_j = p_j · (1 + 2ζ · lse) - (1 - ε) · [j = t] - ε / V       dlse/dz_j = p_j       dz/dx = 1 - (z / c)²

A row whose target is `ignore_index` has loss 0 and gradient 0. A target outside [0, V) that is not `ignore_index`
cannot raise on the device without a synchronisation: its row's loss and gradient are NaN, so that it shows; nothing is
read out of bounds.

"mean" and "sum" write the gradient for an upstream gradient of 1 in the launch that computes the loss: each row is read
from memory once, a second time from L2, and written once. Bytes that must move for R rows of element size s: 2·R·V·s
forward and backward together. The backward pass looks at the upstream gradient on the device: if it is 1 the buffer
stands, otherwise it is computed anew from the logits (never scaled: one rounding, and no fp16 underflow under a loss
scale). The buffer is handed out once; a second backward pass (retain_graph) computes its own. "none", fp16 and
`inplace=True` compute the gradient in the backward pass only: R·V·s forward, 2·R·V·s backward. torch.compile:
cross_entropy_inductor.py.

Saved: logits, targets, lse in two fp32 parts (their sum keeps p exact where lse is large), the gradient buffer.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch

from fuselm.kernels._triton import Backend, compute_dtype, select_backend
from fuselm.kernels.arguments import check_tensors
from fuselm.kernels.cross_entropy_inductor import install_lowering, is_traced, taken
from fuselm.kernels.cross_entropy_launchers import Options, launch_backward, launch_forward
from fuselm.kernels.direct import may_skip_dispatcher
from fuselm.kernels.loss_scaling import launch_row_weight, launch_weighted_sum

Reduction = Literal["none", "sum", "mean"]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cross_entropy_reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
) -> Any:
    """Plain PyTorch cross_entropy with the same arguments; inside and in its results fp32 (fp64 for fp64 logits)."""
    z = logits.to(compute_dtype(logits))
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    vocab = z.shape[-1]
    ignored = targets == ignore_index
    in_range = (targets >= 0) & (targets < vocab)
    lse = torch.logsumexp(z, -1)
    # log_softmax keeps the digits of small losses that lse - z_t would lose
    log_p = torch.log_softmax(z, -1)
    loss = -log_p.gather(-1, torch.where(in_range, targets, 0).long().unsqueeze(-1)).squeeze(-1)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * log_p.mean(-1)
    if z_loss:
        loss = loss + z_loss * lse.square()
    # times NaN, not replaced by NaN: the gradient of a row with an impossible target is NaN too
    loss = torch.where(ignored, 0.0, loss * torch.where(in_range | ignored, 1.0, math.nan))
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / (~ignored).sum().clamp(min=1)
    return (loss, lse) if return_lse else loss


def row_weight(targets: torch.Tensor, ignore_index: int, reduction: str) -> torch.Tensor:
    """What "mean" divides by, inverted: 1 / max(valid targets, 1) as a 0-dim fp32 tensor on the device; 1 otherwise."""
    if reduction != "mean":
        return torch.ones((), dtype=torch.float32, device=targets.device)
    return launch_row_weight(targets, ignore_index)


def _forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    options: Options,
    reduction: str,
    want_lse: bool,
    want_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, lse, lse_low, weight, gradient for an upstream gradient of 1 or an empty tensor)."""
    loss, lse, lse_low = (torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    weight = row_weight(targets, options[0], reduction)
    gradient = torch.empty(logits.shape if want_gradient else (0,), dtype=logits.dtype, device=logits.device)
    launch_forward(
        logits,
        targets,
        loss,
        lse,
        lse_low,
        options=options,
        skip_ignored=not want_lse,
        gradient=gradient if want_gradient else None,
        scale=weight,
    )
    return loss if reduction == "none" else launch_weighted_sum(loss, weight), lse, lse_low, weight, gradient


@torch.library.custom_op("fuselm::cross_entropy_forward", mutates_args=())
def _cross_entropy_forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    want_lse: bool,
    want_gradient: bool,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    options = (ignore_index, label_smoothing, z_loss, softcap)
    return _forward(logits, targets, options, reduction, want_lse, want_gradient)


@_cross_entropy_forward.register_fake
def _(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    want_lse: bool,
    want_gradient: bool,
    inplace: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = logits.new_empty(targets.shape, dtype=torch.float32)
    scalar = logits.new_empty((), dtype=torch.float32)
    gradient = logits.new_empty(logits.shape if want_gradient else (0,))
    return (
        rows if reduction == "none" else scalar,
        torch.empty_like(rows),
        torch.empty_like(rows),
        scalar.clone(),
        gradient,
    )


@torch.library.custom_op("fuselm::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    weight: torch.Tensor,
    grad_loss: torch.Tensor,
    grad_lse: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> torch.Tensor:
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    options = (ignore_index, label_smoothing, z_loss, softcap)
    launch_backward(gradient, logits, targets, lse, lse_low, weight, grad_loss, grad_lse, options)
    return gradient


@_cross_entropy_backward.register_fake
def _(logits: torch.Tensor, *_args: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape)


@torch.library.custom_op("fuselm::cross_entropy_backward_inplace", mutates_args=("logits",))
def _cross_entropy_backward_inplace(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    weight: torch.Tensor,
    grad_loss: torch.Tensor,
    grad_lse: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> None:
    options = (ignore_index, label_smoothing, z_loss, softcap)
    launch_backward(logits, logits, targets, lse, lse_low, weight, grad_loss, grad_lse, options)


@torch.library.custom_op("fuselm::cross_entropy_backward_unless_one", mutates_args=("gradient",))
def _cross_entropy_backward_unless_one(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    weight: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> None:
    """`gradient` holds the result for an upstream gradient of 1; rewrites it if `grad_loss` is anything else."""
    options = (ignore_index, label_smoothing, z_loss, softcap)
    launch_backward(gradient, logits, targets, lse, lse_low, weight, grad_loss, None, options, keep_if_one=True)


@_cross_entropy_backward_inplace.register_fake
@_cross_entropy_backward_unless_one.register_fake
def _(*_args: Any) -> None:
    return None


@torch.library.custom_op("fuselm::cross_entropy_backward_of_saved", mutates_args=())
def _cross_entropy_backward_of_saved(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    weight: torch.Tensor,
    grad_loss: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> torch.Tensor:
    """As cross_entropy_backward_unless_one, for graphs that know no mutation; see cross_entropy_inductor.py."""
    options = (ignore_index, label_smoothing, z_loss, softcap)
    result = gradient.clone()
    launch_backward(result, logits, targets, lse, lse_low, weight, grad_loss, None, options, keep_if_one=True)
    return result


def _cross_entropy_backward_take(gradient: torch.Tensor, *arguments: Any) -> torch.Tensor:
    # The result may be `gradient`, which a custom_op may not return: this operator stands in Inductor's code alone.
    logits, targets, lse, lse_low, weight, grad_loss = arguments[:6]
    result = taken(gradient)
    launch_backward(result, logits, targets, lse, lse_low, weight, grad_loss, None, arguments[6:], keep_if_one=True)
    return result


_library = torch.library.Library("fuselm", "FRAGMENT")
_schema = str(torch.ops.fuselm.cross_entropy_backward_of_saved.default._schema)
_library.define("cross_entropy_backward_take" + _schema[_schema.index("(") :])
_library.impl("cross_entropy_backward_take", _cross_entropy_backward_take, "CompositeExplicitAutograd")


@_cross_entropy_backward_of_saved.register_fake
@torch.library.register_fake("fuselm::cross_entropy_backward_take", lib=_library)
def _(gradient: torch.Tensor, *_args: Any) -> torch.Tensor:
    ops = torch.ops.fuselm
    install_lowering(ops.cross_entropy_backward_of_saved.default, ops.cross_entropy_backward_take.default)
    return torch.empty_like(gradient)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, targets, *options, _reduction, _want_lse, want_gradient, inplace = inputs
    _, lse, lse_low, weight, gradient = output
    ctx.save_for_backward(logits, targets, lse, lse_low, weight)
    ctx.options, ctx.inplace = options, inplace
    # An attribute, not a saved tensor: the buffer is handed to the first backward pass, which may rewrite it.
    ctx.gradient = gradient if want_gradient else None
    ctx.mark_non_differentiable(lse_low, weight, gradient)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_loss: torch.Tensor | None, grad_lse: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    nothing = (None,) * 9
    if grad_loss is None and grad_lse is None:
        return None, *nothing
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = ctx.saved_tensors
    logits = saved[0]
    if grad_loss is None:
        grad_loss = logits.new_zeros((), dtype=torch.float32)
    if ctx.inplace:
        torch.ops.fuselm.cross_entropy_backward_inplace(*saved, grad_loss, grad_lse, *ctx.options)
        return logits.detach(), *nothing
    direct = not torch.is_grad_enabled() and may_skip_dispatcher(grad_loss, grad_lse, *saved)
    if ctx.gradient is None or grad_lse is not None or torch.is_grad_enabled():
        if direct:
            gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
            launch_backward(gradient, *saved, grad_loss, grad_lse, ctx.options)
            return gradient, *nothing
        # With create_graph=True this op raises when differentiated, where a buffer would count as a constant.
        return torch.ops.fuselm.cross_entropy_backward(*saved, grad_loss, grad_lse, *ctx.options), *nothing
    gradient, ctx.gradient = ctx.gradient, None
    if direct:
        launch_backward(gradient, *saved, grad_loss, None, ctx.options, keep_if_one=True)
    elif is_traced(gradient):
        return torch.ops.fuselm.cross_entropy_backward_of_saved(gradient, *saved, grad_loss, *ctx.options), *nothing
    else:
        torch.ops.fuselm.cross_entropy_backward_unless_one(gradient, *saved, grad_loss, *ctx.options)
    return gradient, *nothing


torch.library.register_autograd("fuselm::cross_entropy_forward", _backward, setup_context=_setup)


class _CrossEntropy(torch.autograd.Function):
    """cross_entropy without the dispatcher: (loss, lse)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        options: Options,
        reduction: str,
        want_lse: bool,
        want_gradient: bool,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, lse, lse_low, weight, gradient = _forward(logits, targets, options, reduction, want_lse, want_gradient)
        ctx.save_for_backward(logits, targets, lse, lse_low, weight)
        ctx.options, ctx.inplace = options, inplace
        ctx.gradient = gradient if want_gradient else None
        ctx.set_materialize_grads(False)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _backward(ctx, *grad_outputs)[0], None, None, None, None, None, None


def check_options(
    targets: torch.Tensor,
    shape: torch.Size,
    device: torch.device,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> None:
    """Validates what cross_entropy and linear_cross_entropy share; `shape` is what targets must have.

    Raises:
        ValueError, TypeError: names the argument, its value and what is allowed.
    """
    check_tensors({"targets": targets})
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets has dtype {targets.dtype}: expected int64 or int32 class indices")
    if targets.shape != shape:
        raise ValueError(f"targets has shape {tuple(targets.shape)}: expected {tuple(shape)}, one target a row")
    if targets.device != device:
        raise ValueError(f"targets is on {targets.device}, the input on {device}: move them to one device")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing}: expected a number from 0 to 1")
    if not 0.0 <= z_loss < math.inf:
        raise ValueError(f"z_loss={z_loss}: expected a finite number >= 0")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap}: expected None or a finite number > 0")
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(map(repr, get_args(Reduction)))}")


def as_outer_inner(logits: torch.Tensor) -> torch.Tensor:
    """`logits` as (outer, inner, vocab) with unit last stride: a view for up to three dimensions, logits[:, :-1] among
    them, a copy only where there is no such view."""
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        logits = logits.contiguous()
    vocab = logits.shape[-1]
    if logits.dim() <= 2:
        return logits.view(1, -1, vocab) if logits.dim() == 1 else logits.unsqueeze(0)
    return logits if logits.dim() == 3 else logits.reshape(-1, logits.shape[-2], vocab)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    return_lse: bool = False,
    inplace: bool = False,
    backend: Backend = "auto",
) -> Any:
    """Cross-entropy between rows of logits and class indices, as torch.nn.functional.cross_entropy, computed in fp32.

    Args:
        logits: (..., vocab), bf16/fp16/fp32, any strides (a last dimension that is not contiguous is copied once).
        targets: (...), int64 or int32: class indices in [0, vocab) or `ignore_index`. Any other value makes its row's
            loss and gradient NaN on the device; there is no synchronisation that could raise.
        ignore_index: rows with this target have loss 0 and gradient 0; it may lie in [0, vocab).
        label_smoothing: weight of the uniform distribution in the target, from 0 to 1.
        z_loss: weight of lse², added to the loss of each row that is not ignored.
        softcap: if given, logits become softcap · tanh(logits / softcap) first.
        reduction: "none" for (...), "sum", or "mean" = sum / max(rows that are not ignored, 1).
        return_lse: also return the logsumexp of the (capped) logits of every row, ignored ones too; differentiable.
        inplace: the backward pass writes the gradient over the memory of `logits`, whose values are lost then; a second
            backward pass raises. No effect in the reference and under torch.compile, which plans memory itself.
        backend: "auto", "triton" or "reference".

    Returns:
        The loss, fp32 (fp64 for fp64 logits); with return_lse a pair (loss, lse), lse (...) of the same dtype. If all
        rows are ignored the loss is 0 and so is the gradient. The gradient has logits' dtype and is contiguous (in
        place: logits' strides). Second derivatives are not implemented and raise.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    check_tensors({"logits": logits, "targets": targets})
    if not logits.is_floating_point():
        raise TypeError(f"logits has dtype {logits.dtype}: expected a floating-point tensor")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits has shape {tuple(logits.shape)}: expected (..., vocab) with vocab >= 1")
    check_options(targets, logits.shape[:-1], logits.device, label_smoothing, z_loss, softcap, reduction)
    use_kernels = select_backend(backend, logits.device) == "triton"
    if use_kernels and logits.dtype not in KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(
                f"logits has dtype {logits.dtype}: the kernels take fp32, bf16 and fp16; pass backend='auto'"
            )
        use_kernels = False
    if not use_kernels:
        return cross_entropy_reference(
            logits,
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            reduction=reduction,
            return_lse=return_lse,
        )
    rows = as_outer_inner(logits)
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    compiling = torch.compiler.is_compiling()
    inplace = inplace and needs_gradient and not compiling
    if inplace:
        overlaps = any(size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True))
        if overlaps or rows.data_ptr() != logits.data_ptr():
            raise ValueError(
                "inplace=True needs logits with a contiguous last dimension and no overlap: logits has shape "
                f"{tuple(logits.shape)}, strides {logits.stride()}; call logits.contiguous() or leave inplace=False"
            )
    fused = needs_gradient and not (inplace or reduction == "none" or logits.dtype == torch.float16)
    flat = targets.reshape(-1).contiguous()
    options = (ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))
    if not may_skip_dispatcher(logits, targets):
        arguments = (rows, flat, *options, reduction, return_lse, fused, inplace)
        loss, lse, *_ = torch.ops.fuselm.cross_entropy_forward(*arguments)
    elif needs_gradient:
        loss, lse = _CrossEntropy.apply(rows, flat, options, reduction, return_lse, fused, inplace)
    else:
        loss, lse, *_ = _forward(rows, flat, options, reduction, return_lse, False)
    if reduction == "none":
        loss = loss.view(targets.shape)
    return (loss, lse.view(targets.shape)) if return_lse else loss
