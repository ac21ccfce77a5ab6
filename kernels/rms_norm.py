"""RMSNorm and residual-add + RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467).

Forward, a row x of n elements:    rstd = 1 / sqrt(mean(x²) + eps)       y = x · rstd · w
With a residual:                   h = x + residual, rounded to its dtype, takes the place of x; h is a second output.
Backward, x̂ = x · rstd, g = dy · w: dx = rstd · (g - x̂ · mean(g · x̂)) [+ dh]       dw = Σ_rows dy · x̂

Saved: x (or h), w, rstd (4 bytes a row). Bytes that must move, for elements of size s and R rows: forward 2·R·n·s,
backward 3·R·n·s; with a residual 4·R·n·s each way (backward: dy, dh, h in, one gradient out, which both inputs share).

dw is summed in fp32: each program of a persistent grid keeps one partial row, and a second step adds the partials in a
fixed order, so that the result has the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch

from fuselm.kernels._triton import Backend, compute_dtype, device_profile, jit, select_backend, tl
from fuselm.kernels.launch.rms_norm import backward_launch, forward_launch
from fuselm.kernels.strides import as_rows

MAX_WIDTH = 65536
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6) -> torch.Tensor:
    """Plain PyTorch RMSNorm over the last dimension, fp32 inside (fp64 for fp64 input), result in x's dtype."""
    wide = x.to(compute_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide.dtype)
    return y.to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain PyTorch h = x + residual; (rms_norm(h), h)."""
    wide = compute_dtype(x, residual)
    h = (x.to(wide) + residual.to(wide)).to(residual.dtype)
    return rms_norm_reference(h, weight, eps=eps).to(x.dtype), h


@jit
def _rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    rows,
    n,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    col = tl.arange(0, BLOCK_N)
    row_mask = row < rows
    mask = row_mask[:, None] & (col < n)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)  # [ROWS, N]
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row[:, None] * residual_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row[:, None] * n + col[None, :], h, mask=mask)
        x = h.to(tl.float32)  # the norm sees the rounded sum, the one that the backward pass reads again
    mean_square = tl.sum(x * x, 1) / n
    rstd = 1.0 / tl.sqrt_rn(mean_square + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd, mask=row_mask)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + col, mask=col < n, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row[:, None] * n + col[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _rms_norm_backward_kernel(
    dy_ptr,
    dh_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dw_partial_ptr,
    dy_stride,
    dh_stride,
    x_stride,
    rows,
    n,
    HAS_DH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    col = tl.arange(0, BLOCK_N)
    col_mask = col < n
    dw = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
    w = tl.full([BLOCK_N], 1.0, tl.float32)
    if HAS_WEIGHT:
        w = tl.load(weight_ptr + col, mask=col_mask, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * BLOCK_ROWS, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS).to(tl.int64)
        row_mask = row < rows
        mask = row_mask[:, None] & col_mask[None, :]
        dy = tl.load(dy_ptr + row[:, None] * dy_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row[:, None] * x_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)
        x_hat = x * rstd[:, None]  # [ROWS, N]
        if NEED_DW:
            dw += dy * x_hat
        g = dy * w[None, :]
        mean = tl.sum(g * x_hat, 1) / n
        dx = rstd[:, None] * (g - x_hat * mean[:, None])
        if HAS_DH:
            dx += tl.load(dh_ptr + row[:, None] * dh_stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row[:, None] * n + col[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        partial = dw_partial_ptr + tl.program_id(0).to(tl.int64) * n + col
        tl.store(partial, tl.sum(dw, 0), mask=col_mask)


def _launch_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_rows = as_rows(x)
    residual_rows = x_rows if residual is None else as_rows(residual)
    rows, n = x_rows.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = y if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if rows == 0:
        return y, h, rstd
    launch = forward_launch(n, device_profile(x.device))
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _rms_norm_forward_kernel[(-(-rows // launch.block_rows),)](
            x_rows,
            residual_rows,
            x_rows if weight is None else weight.contiguous(),
            y,
            h,
            rstd,
            x_rows.stride(0),
            residual_rows.stride(0),
            rows,
            n,
            eps,
            HAS_RESIDUAL=residual is not None,
            HAS_WEIGHT=weight is not None,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_N=launch.block_n,
            num_warps=launch.num_warps,
        )
    return y, h, rstd


@torch.library.custom_op("fuselm::rms_norm_forward", mutates_args=())
def _rms_norm_forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = _launch_forward(x, None, weight, eps)
    return y, rstd


@torch.library.custom_op("fuselm::add_rms_norm_forward", mutates_args=())
def _add_rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _launch_forward(x, residual, weight, eps)


@torch.library.custom_op("fuselm::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dy_rows, x_rows = as_rows(dy), as_rows(x)
    dh_rows = dy_rows if dh is None else as_rows(dh)
    rows, n = x_rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return dx, torch.zeros(n if need_dw else 0, dtype=torch.float32, device=x.device)
    launch = backward_launch(rows, n, device_profile(x.device))
    partial = torch.empty((launch.programs, n) if need_dw else (0, n), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _rms_norm_backward_kernel[(launch.programs,)](
            dy_rows,
            dh_rows,
            x_rows,
            x_rows if weight is None else weight.contiguous(),
            rstd,
            dx,
            partial,
            dy_rows.stride(0),
            dh_rows.stride(0),
            x_rows.stride(0),
            rows,
            n,
            HAS_DH=dh is not None,
            HAS_WEIGHT=weight is not None,
            NEED_DW=need_dw,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_N=launch.block_n,
            num_warps=launch.num_warps,
        )
    return dx, partial.sum(0) if need_dw else partial.new_empty(0)


@_rms_norm_forward.register_fake
def _(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_add_rms_norm_forward.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), residual.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@_rms_norm_backward.register_fake
def _(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1] if need_dw else 0, dtype=torch.float32)


def _setup_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward_rms_norm(ctx: Any, dy: torch.Tensor | None, _drstd: Any) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return None, None, None
    x, weight, rstd = ctx.saved_tensors
    need_dw = ctx.needs_input_grad[1]
    dx, dw = torch.ops.fuselm.rms_norm_backward(dy, None, x, weight, rstd, need_dw)
    return dx, dw.to(weight.dtype) if need_dw else None, None


def _setup_add_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight, _ = inputs
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.dtypes = x.dtype, residual.dtype
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward_add_rms_norm(
    ctx: Any, dy: torch.Tensor | None, dh: torch.Tensor | None, _drstd: Any
) -> tuple[torch.Tensor | None, ...]:
    h, weight, rstd = ctx.saved_tensors
    x_dtype, residual_dtype = ctx.dtypes
    if dy is None:  # only the residual output was used: the norm contributes nothing
        return (None, None, None, None) if dh is None else (dh.to(x_dtype), dh.to(residual_dtype), None, None)
    need_dw = ctx.needs_input_grad[2]
    dx, dw = torch.ops.fuselm.rms_norm_backward(dy, dh, h, weight, rstd, need_dw)
    return dx.to(x_dtype), dx.to(residual_dtype), dw.to(weight.dtype) if need_dw else None, None


torch.library.register_autograd("fuselm::rms_norm_forward", _backward_rms_norm, setup_context=_setup_rms_norm)
torch.library.register_autograd(
    "fuselm::add_rms_norm_forward", _backward_add_rms_norm, setup_context=_setup_add_rms_norm
)


def _check(x: torch.Tensor, weight: torch.Tensor | None, eps: float, backend: Backend) -> bool:
    """Validates the arguments; True if the kernels run, False for the reference."""
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
    x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6, backend: Backend = "auto"
) -> torch.Tensor:
    """RMSNorm over the last dimension: y = x / sqrt(mean(x²) + eps) · weight.

    Args:
        x: (..., dim), bf16/fp16/fp32, any strides (a last dimension that is not contiguous is copied once).
        weight: (dim,) or None for no scale; may be of another dtype than x (fp32 weight, bf16 x).
        eps: added to the mean of squares.
        backend: "auto", "triton" or "reference".

    Returns:
        (..., dim) in x's dtype, contiguous. Computed in fp32; dw is summed in fp32 in a fixed order.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message names the argument.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    if not _check(x, weight, eps, backend):
        return rms_norm_reference(x, weight, eps=eps)
    return torch.ops.fuselm.rms_norm_forward(x, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """h = x + residual and its RMSNorm in one pass; the gradients of both outputs meet in one backward pass.

    Args:
        x: (..., dim), a block's output.
        residual: the shape of x; the running sum, whose dtype h takes.
        weight: (dim,) or None.
        eps: added to the mean of squares.
        backend: "auto", "triton" or "reference".

    Returns:
        (rms_norm(h) in x's dtype, h in residual's dtype), both (..., dim) and contiguous.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message names the argument.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    if residual.shape != x.shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}: expected x's shape {tuple(x.shape)}")
    if residual.device != x.device:
        raise ValueError(f"residual is on {residual.device}, x on {x.device}: move them to one device")
    if not residual.is_floating_point():
        raise TypeError(f"residual has dtype {residual.dtype}: expected a floating-point tensor")
    use_kernels = _check(x, weight, eps, backend)
    if not use_kernels or residual.dtype not in _KERNEL_DTYPES:
        return add_rms_norm_reference(x, residual, weight, eps=eps)
    y, h, _ = torch.ops.fuselm.add_rms_norm_forward(x, residual, weight, eps)
    return y, h
