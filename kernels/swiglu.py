"""SwiGLU on the packed output of a fused gate-up projection.

With [gate | up] = gate_up and sigma the logistic function:

    forward    y = gate * sigma(gate) * up
    backward   dgate = dy * up * sigma(gate) * (1 + gate * (1 - sigma(gate)))
               dup = dy * gate * sigma(gate)

Saved for the backward pass: gate_up alone; the activation is computed again. What must move, in elements of the output:
forward 3 (gate, up, y), backward 5 (gate, up, dy, dgate, dup). Everything is computed in fp32 and rounded once.

Method: Shazeer 2020, "GLU Variants Improve Transformer".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op

from fuselm.kernels._triton import Backend, compute_dtype, device_profile, jit, select_backend, tl, triton
from fuselm.kernels.launch.swiglu import swiglu_launch

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """`swiglu` in plain PyTorch: computes in fp32 (fp64 for fp64 inputs), rounds once."""
    gate, up = gate_up.to(compute_dtype(gate_up)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@jit
def _tile(inner, ffn, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """This program's outer index, rows [R, 1], columns [1, C] (all int64) and mask [R, C]."""
    # One grid axis: the others end at 65,535.
    column_blocks = tl.cdiv(ffn, BLOCK_COLUMNS)
    row_blocks = tl.cdiv(inner, BLOCK_ROWS)
    block = tl.program_id(0) // column_blocks
    outer = (block // row_blocks).to(tl.int64)
    rows = (block % row_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    columns = (tl.program_id(0) % column_blocks).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    return outer, rows, columns, (rows < inner) & (columns < ffn)


@jit
def _swiglu_forward_kernel(
    gate_up_ptr,
    out_ptr,
    stride_outer,
    stride_row,
    stride_column,
    inner,
    ffn,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    outer, rows, columns, mask = _tile(inner, ffn, BLOCK_ROWS, BLOCK_COLUMNS)
    row_ptr = gate_up_ptr + outer * stride_outer + rows * stride_row
    gate = tl.load(row_ptr + columns * stride_column, mask=mask, other=0.0).to(tl.float32)  # [R, C]
    up = tl.load(row_ptr + (columns + ffn) * stride_column, mask=mask, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + (outer * inner + rows) * ffn + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _swiglu_backward_kernel(
    grad_ptr,
    gate_up_ptr,
    out_ptr,
    grad_stride_outer,
    grad_stride_row,
    grad_stride_column,
    stride_outer,
    stride_row,
    stride_column,
    inner,
    ffn,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    outer, rows, columns, mask = _tile(inner, ffn, BLOCK_ROWS, BLOCK_COLUMNS)
    row_ptr = gate_up_ptr + outer * stride_outer + rows * stride_row
    gate = tl.load(row_ptr + columns * stride_column, mask=mask, other=0.0).to(tl.float32)  # [R, C]
    up = tl.load(row_ptr + (columns + ffn) * stride_column, mask=mask, other=0.0).to(tl.float32)
    grad_row_ptr = grad_ptr + outer * grad_stride_outer + rows * grad_stride_row
    grad = tl.load(grad_row_ptr + columns * grad_stride_column, mask=mask, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(gate)
    dgate = grad * up * (sigma * (1.0 + gate * (1.0 - sigma)))
    dup = grad * (gate * sigma)
    out = out_ptr + (outer * inner + rows) * (2 * ffn) + columns
    tl.store(out, dgate.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + ffn, dup.to(out_ptr.dtype.element_ty), mask=mask)


def _as_three_dims(x: Tensor) -> Tensor:
    """(outer, inner, columns): a view for up to three dimensions or where the leading ones merge, else one copy."""
    inner = x.shape[-2] if x.dim() > 1 else 1
    return x.reshape(math.prod(x.shape[:-2]), inner, x.shape[-1])


@custom_op("fuselm::swiglu_forward", mutates_args=())
def _swiglu_forward(gate_up: Tensor) -> Tensor:
    ffn = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], ffn))
    if out.numel() == 0:
        return out
    x = _as_three_dims(gate_up)
    outer, inner, _ = x.shape
    launch = swiglu_launch(inner, ffn, x.element_size(), device_profile(x.device))
    grid = (outer * triton.cdiv(inner, launch.block_rows) * triton.cdiv(ffn, launch.block_columns),)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _swiglu_forward_kernel[grid](
            x,
            out,
            *x.stride(),
            inner,
            ffn,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_COLUMNS=launch.block_columns,
            num_warps=launch.num_warps,
            num_stages=1,
        )
    return out


@_swiglu_forward.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@custom_op("fuselm::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    ffn = gate_up.shape[-1] // 2
    out = gate_up.new_empty(gate_up.shape)
    if out.numel() == 0:
        return out
    x, dy = _as_three_dims(gate_up), _as_three_dims(grad)
    outer, inner, _ = x.shape
    launch = swiglu_launch(inner, ffn, x.element_size(), device_profile(x.device))
    grid = (outer * triton.cdiv(inner, launch.block_rows) * triton.cdiv(ffn, launch.block_columns),)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _swiglu_backward_kernel[grid](
            dy,
            x,
            out,
            *dy.stride(),
            *x.stride(),
            inner,
            ffn,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_COLUMNS=launch.block_columns,
            num_warps=launch.num_warps,
            num_stages=1,
        )
    return out


@_swiglu_backward.register_fake
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor) -> Tensor:
    return _swiglu_backward(grad, *ctx.saved_tensors)


_swiglu_forward.register_autograd(_backward, setup_context=_setup_context)


def swiglu(gate_up: Tensor, *, backend: Backend = "auto") -> Tensor:
    """silu(gate) * up of a packed [gate | up].

    Args:
        gate_up: (..., 2 * ffn), fp32/bf16/fp16 (fp64: reference), any strides. It is copied only where more than three
            dimensions do not merge to three. Fast where the last dimension is contiguous and ffn a multiple of 16.
        backend: "auto", "triton" or "reference".

    Returns:
        (..., ffn), contiguous, in the input dtype.

    Raises:
        ValueError: gate_up has no dimension, or the last one is odd.
        TypeError: the dtype is not supported.
        RuntimeError: backend="triton" where it cannot run.
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}: expected (..., 2 * ffn), gate and up side by side")
    if gate_up.dtype not in (*_KERNEL_DTYPES, torch.float64):
        raise TypeError(f"gate_up is {gate_up.dtype}: expected float32, bfloat16, float16 (float64: reference)")
    if gate_up.dtype not in _KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(f"gate_up is {gate_up.dtype}: backend='triton' takes float32, bfloat16, float16")
        backend = "reference"
    if select_backend(backend, gate_up.device) == "reference":
        return swiglu_reference(gate_up)
    return _swiglu_forward(gate_up)
