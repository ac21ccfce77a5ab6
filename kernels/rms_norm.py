"""RMSNorm and residual-add + RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467).

Forward, a row x of n elements:    rstd = 1 / sqrt(mean(x²) + eps)       y = x · rstd · (offset + w)
With a residual:                   h = x + residual, rounded to its dtype, takes the place of x; h is a second output.
Backward, x̂ = x · rstd, g = dy · (offset + w):
                                   dx = rstd · (g - x̂ · mean(g · x̂)) [+ dh]       dw = Σ_rows dy · x̂

Saved: x (or h), w, rstd (4 bytes a row). Bytes that must move, for elements of size s and R rows: forward 2·R·n·s,
backward 3·R·n·s; with a residual 4·R·n·s each way (backward: dy, dh, h in, one gradient out, which both inputs share).

dw is summed in fp32: each program of a persistent grid keeps one partial row, and a second kernel adds the partials in
a fixed order, so that the result has the same bits in every run; a single program writes dw itself. The kernels are in
rms_norm_kernels.py and rms_norm_unaligned_kernels.py, their launches in rms_norm_launchers.py.
"""

from __future__ import annotations

from typing import Any

import torch

from fuselm.kernels._triton import Backend, compute_dtype, select_backend
from fuselm.kernels.arguments import check_tensors
from fuselm.kernels.direct import may_skip_dispatcher, needs_grad
from fuselm.kernels.rms_norm_launchers import launch_backward, launch_forward

MAX_WIDTH = 65536
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6, offset: float = 0.0
) -> torch.Tensor:
    """Plain PyTorch RMSNorm over the last dimension, fp32 inside (fp64 for fp64 input), result in x's dtype."""
    wide = x.to(compute_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * (offset + weight.to(wide.dtype))
    return y.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch h = x + residual; (rms_norm(h), h)."""
    wide = compute_dtype(x, residual)
    h = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return rms_norm_reference(h, weight, eps=eps, offset=offset).to(x.dtype), h


@torch.library.custom_op("fuselm::rms_norm_forward", mutates_args=())
def _rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = launch_forward(x, None, weight, eps, offset)
    return y, rstd


@torch.library.custom_op("fuselm::add_rms_norm_forward", mutates_args=())
def _add_rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return launch_forward(x, residual, weight, eps, offset)


@torch.library.custom_op("fuselm::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_backward(dy, dh, x, weight, rstd, offset, need_dw)


@_rms_norm_forward.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_add_rms_norm_forward.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), residual.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_rms_norm_backward.register_fake
def _(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dw_dtype = torch.float32 if weight is None else weight.dtype
    return x.new_empty(x.shape), x.new_empty(x.shape[-1] if need_dw else 0, dtype=dw_dtype)


def _save(
    ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, rstd: torch.Tensor, offset: float, *dtypes: torch.dtype
) -> None:
    """What backward reads; for add_rms_norm `dtypes` are those of x and residual, whose sum the saved x is."""
    ctx.save_for_backward(x, weight, rstd)
    ctx.offset, ctx.dtypes = offset, dtypes
    ctx.set_materialize_grads(False)  # an output that nothing used sends None


def _gradients(ctx: Any, dy: torch.Tensor, dh: torch.Tensor | None, need_dw: bool) -> tuple[torch.Tensor, Any]:
    x, weight, rstd = ctx.saved_tensors
    # With gradients recorded (create_graph) the op says that it has no second derivative.
    direct = not torch.is_grad_enabled() and may_skip_dispatcher(dy, dh, x, weight)
    backward = launch_backward if direct else torch.ops.fuselm.rms_norm_backward
    dx, dw = backward(dy, dh, x, weight, rstd, ctx.offset, need_dw)
    return dx, dw if need_dw else None


def _setup_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _, offset = inputs
    _save(ctx, x, weight, output[1], offset)
    ctx.mark_non_differentiable(output[1])


def _backward_rms_norm(ctx: Any, dy: torch.Tensor | None, _drstd: Any = None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return None, None, None, None
    dx, dw = _gradients(ctx, dy, None, ctx.needs_input_grad[1])
    return dx, dw, None, None


def _setup_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight, _, offset = inputs
    _save(ctx, output[1], weight, output[2], offset, x.dtype, residual.dtype)
    ctx.mark_non_differentiable(output[2])


def _backward_add_rms_norm(
    ctx: Any, dy: torch.Tensor | None, dh: torch.Tensor | None, _drstd: Any = None
) -> tuple[torch.Tensor | None, ...]:
    x_dtype, residual_dtype = ctx.dtypes
    if dy is None:  # only the residual output was used: the norm contributes nothing
        dx, dw = dh, None
    else:
        dx, dw = _gradients(ctx, dy, dh, ctx.needs_input_grad[2])
    if dx is None:
        return (None,) * 5
    return dx.to(x_dtype), dx.to(residual_dtype), dw, None, None


torch.library.register_autograd("fuselm::rms_norm_forward", _backward_rms_norm, setup_context=_setup_rms_norm)
torch.library.register_autograd(
    "fuselm::add_rms_norm_forward", _backward_add_rms_norm, setup_context=_setup_add_rms_norm
)


class _RmsNorm(torch.autograd.Function):
    """rms_norm without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
        y, _, rstd = launch_forward(x, None, weight, eps, offset)
        _save(ctx, x, weight, rstd, offset)
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _backward_rms_norm(ctx, *grad_outputs)


class _AddRmsNorm(torch.autograd.Function):
    """add_rms_norm without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, h, rstd = launch_forward(x, residual, weight, eps, offset)
        _save(ctx, h, weight, rstd, offset, x.dtype, residual.dtype)
        return y, h

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _backward_add_rms_norm(ctx, *grad_outputs)


def _check(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, backend: Backend) -> bool:
    """Validates the arguments; True if the kernels run, False for the reference."""
    check_tensors({"x": x}, {"weight": weight})
    if not x.is_floating_point():
        raise TypeError(f"x has dtype {x.dtype}: expected a floating-point tensor")
    if x.dim() == 0:
        raise ValueError("x is a scalar: expected at least one dimension, the last one being normalised")
    n = x.shape[-1]
    if weight is not None and weight.shape != (n,):
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: expected ({n},), the last dimension of x {tuple(x.shape)}"
        )
    if weight is not None and weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}, x on {x.device}: move them to one device")
    if not eps >= 0:
        raise ValueError(f"eps={eps}: expected a number >= 0")
    if weight is None and offset != 0:
        raise ValueError(f"offset={offset} without a weight: it is added to the weight; pass one, or leave offset at 0")
    if select_backend(backend, x.device) == "reference":
        return False
    if x.dtype not in _KERNEL_DTYPES or n == 0 or n > MAX_WIDTH:
        if backend == "triton":
            raise ValueError(
                f"x has dtype {x.dtype} and last dimension {n}: the kernels take fp32, bf16 and fp16 with 1 to "
                f"{MAX_WIDTH} elements a row; pass backend='auto' to run the reference"
            )
        return False
    return True


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    backend: Backend = "auto",
) -> torch.Tensor:
    """RMSNorm over the last dimension: y = x / sqrt(mean(x²) + eps) · (offset + weight).

    Args:
        x: (..., dim), bf16/fp16/fp32, any strides: also (batch, seq, heads, head_dim) as a view of a packed projection,
            for a norm over each head. Copied once where the last dimension is not contiguous, or where the dimensions
            before the last two do not merge.
        weight: (dim,) or None for no scale; may be of another dtype than x (fp32 weight, bf16 x).
        eps: added to the mean of squares.
        offset: added to the weight; 1 for weights that are stored as their distance from one, as Gemma's are.
        backend: "auto", "triton" or "reference".

    Returns:
        (..., dim) in x's dtype, contiguous. Computed in fp32; dw is summed in fp32 in a fixed order.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message names the argument.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    if not _check(x, weight, eps, offset, backend):
        return rms_norm_reference(x, weight, eps=eps, offset=offset)
    if not may_skip_dispatcher(x, weight):
        return torch.ops.fuselm.rms_norm_forward(x, weight, eps, offset)[0]
    if needs_grad(x, weight):
        return _RmsNorm.apply(x, weight, eps, offset)
    return launch_forward(x, None, weight, eps, offset)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual and its RMSNorm in one pass; the gradients of both outputs meet in one backward pass.

    Args:
        x: (..., dim), a block's output.
        residual: the shape of x; the running sum, whose dtype h takes.
        weight: (dim,) or None.
        eps: added to the mean of squares.
        offset: added to the weight; 1 for weights that are stored as their distance from one, as Gemma's are.
        backend: "auto", "triton" or "reference".

    Returns:
        (rms_norm(h) in x's dtype, h in residual's dtype), both (..., dim) and contiguous.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message names the argument.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    check_tensors({"x": x, "residual": residual})
    if residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}: expected x's shape {tuple(x.shape)}")
    if residual.device != x.device:
        raise ValueError(f"residual is on {residual.device}, x on {x.device}: move them to one device")
    if not residual.is_floating_point():
        raise TypeError(f"residual has dtype {residual.dtype}: expected a floating-point tensor")
    use_kernels = _check(x, weight, eps, offset, backend)
    if not use_kernels or residual.dtype not in _KERNEL_DTYPES:
        return add_rms_norm_reference(x, residual, weight, eps=eps, offset=offset)
    if not may_skip_dispatcher(x, residual, weight):
        y, h, _ = torch.ops.fuselm.add_rms_norm_forward(x, residual, weight, eps, offset)
    elif needs_grad(x, residual, weight):
        y, h = _AddRmsNorm.apply(x, residual, weight, eps, offset)
    else:
        y, h, _ = launch_forward(x, residual, weight, eps, offset)
    return y, h
