"""SwiGLU on the packed output of a fused gate-up projection.

With [gate | up] = gate_up and sigma the logistic function:

    forward    y = gate * sigma(gate) * up
    backward   dgate = dy * up * sigma(gate) * (1 + gate * (1 - sigma(gate)))
               dup = dy * gate * sigma(gate)

Saved for the backward pass: gate_up alone; the activation is computed again. What must move, in elements of the output:
forward 3 (gate, up, y), backward 5 (gate, up, dy, dgate, dup). Everything is computed in fp32 and rounded once. Where
the caller allows it, the gradient takes the memory of gate_up, which the backward pass needs no longer.

Method: Shazeer 2020, "GLU Variants Improve Transformer".
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fuselm.kernels._triton import Backend, compute_dtype, device_profile, jit, select_backend, tl
from fuselm.kernels.arguments import check_tensors
from fuselm.kernels.direct import check_writable, launch_device, may_skip_dispatcher, needs_grad
from fuselm.kernels.launch.swiglu import SwigluLaunch, swiglu_launch

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """`swiglu` in plain PyTorch: computes in fp32 (fp64 for fp64 inputs), rounds once."""
    gate, up = gate_up.to(compute_dtype(gate_up)).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@jit
def _tile(inner, ffn, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """This program's outer index, rows [R, 1] and columns [1, C] (all int64) and its mask [R, C]."""
    # One grid axis: the others end at 65,535.
    column_blocks = tl.cdiv(ffn, BLOCK_COLUMNS)
    row_blocks = tl.cdiv(inner, BLOCK_ROWS)
    block = tl.program_id(0) // column_blocks
    outer = (block // row_blocks).to(tl.int64)
    rows = (block % row_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    columns = (tl.program_id(0) % column_blocks).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    return outer, rows, columns, (rows < inner) & (columns < ffn)


@jit
def _load(pointers, mask, EVEN: tl.constexpr, LOAD: tl.constexpr):
    """fp32; EVEN: every element of the tile exists. LOAD: an eviction policy or ""."""
    if EVEN:
        return tl.load(pointers, eviction_policy=LOAD).to(tl.float32)  # pyright: ignore[reportArgumentType]
    else:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=LOAD).to(tl.float32)  # pyright: ignore[reportArgumentType]


@jit
def _store(pointers, value, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, value.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@jit
def _swiglu_forward_kernel(
    gate_up_ptr,
    out_ptr,
    stride_outer,
    stride_row,
    stride_column,
    inner,
    ffn,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LOAD: tl.constexpr,
):
    outer, rows, columns, mask = _tile(inner, ffn, BLOCK_ROWS, BLOCK_COLUMNS)
    gate_ptr = gate_up_ptr + outer * stride_outer + rows * stride_row + columns * stride_column
    gate = _load(gate_ptr, mask, EVEN, LOAD)  # [R, C]
    up = _load(gate_ptr + tl.cast(ffn, tl.int64) * stride_column, mask, EVEN, LOAD)
    _store(out_ptr + (outer * inner + rows) * ffn + columns, gate * tl.sigmoid(gate) * up, mask, EVEN)


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
    out_stride_outer,
    out_stride_row,
    out_stride_column,
    inner,
    ffn,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    LOAD: tl.constexpr,
):
    """out may be gate_up itself: a thread reads an element's gate and up before it writes there."""
    outer, rows, columns, mask = _tile(inner, ffn, BLOCK_ROWS, BLOCK_COLUMNS)
    half = tl.cast(ffn, tl.int64)
    gate_ptr = gate_up_ptr + outer * stride_outer + rows * stride_row + columns * stride_column
    gate = _load(gate_ptr, mask, EVEN, LOAD)  # [R, C]
    up = _load(gate_ptr + half * stride_column, mask, EVEN, LOAD)
    at = outer * grad_stride_outer + rows * grad_stride_row + columns * grad_stride_column
    grad = _load(grad_ptr + at, mask, EVEN, LOAD)
    sigma = tl.sigmoid(gate)
    out = out_ptr + outer * out_stride_outer + rows * out_stride_row + columns * out_stride_column
    _store(out, grad * up * (sigma * (1.0 + gate * (1.0 - sigma))), mask, EVEN)
    _store(out + half * out_stride_column, grad * (gate * sigma), mask, EVEN)


def _as_three_dims(x: Tensor) -> Tensor:
    """(outer, inner, columns): a view for up to three dimensions or where the leading ones merge, else one copy."""
    if x.is_contiguous():
        return x.view(1, -1, x.shape[-1])
    inner = x.shape[-2] if x.dim() > 1 else 1
    return x.reshape(math.prod(x.shape[:-2]), inner, x.shape[-1])


def _grid(x: Tensor, launch: SwigluLaunch) -> tuple[tuple[int], bool]:
    """Programs for gate_up as (outer, inner, 2 * ffn), and whether every tile is full."""
    outer, inner, width = x.shape
    ffn = width // 2
    even = inner % launch.block_rows == 0 and ffn % launch.block_columns == 0
    return (outer * -(-inner // launch.block_rows) * -(-ffn // launch.block_columns),), even


def _launch_forward(gate_up: Tensor) -> Tensor:
    ffn = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], ffn))
    if out.numel() == 0:
        return out
    x = _as_three_dims(gate_up)
    launch = swiglu_launch(x.shape[1], ffn, x.element_size(), device_profile(x.device), False)
    grid, even = _grid(x, launch)
    with launch_device(x):
        _swiglu_forward_kernel[grid](
            x,
            out,
            *x.stride(),
            x.shape[1],
            ffn,
            EVEN=even,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_COLUMNS=launch.block_columns,
            LOAD=launch.load,
            num_warps=launch.num_warps,
            num_stages=1,
        )
    return out


def _launch_backward(grad: Tensor, gate_up: Tensor, inplace: bool = False) -> Tensor:
    """d(gate_up), contiguous, or in gate_up's own memory (a copy of it where its dimensions do not merge)."""
    out = gate_up if inplace else gate_up.new_empty(gate_up.shape)
    if gate_up.numel() == 0:
        return out
    x, dy = _as_three_dims(gate_up), _as_three_dims(grad)
    if dy.shape[:2] != x.shape[:2]:  # one of them is contiguous, with all leading dimensions in one
        shape = min(dy.shape[:2], x.shape[:2], key=lambda lead: lead[1])
        x, dy = x.view(*shape, x.shape[-1]), dy.view(*shape, dy.shape[-1])
    target = x if inplace else out.view(x.shape)
    launch = swiglu_launch(x.shape[1], dy.shape[-1], x.element_size(), device_profile(x.device), True)
    grid, even = _grid(x, launch)
    with launch_device(x):
        _swiglu_backward_kernel[grid](
            dy,
            x,
            target,
            *dy.stride(),
            *x.stride(),
            *target.stride(),
            x.shape[1],
            dy.shape[-1],
            EVEN=even,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_COLUMNS=launch.block_columns,
            LOAD=launch.load,
            num_warps=launch.num_warps,
            num_stages=1,
        )
    return target.view(gate_up.shape)


@custom_op("fuselm::swiglu_forward", mutates_args=())
def _swiglu_forward(gate_up: Tensor) -> Tensor:
    return _launch_forward(gate_up)


@_swiglu_forward.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@custom_op("fuselm::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    return _launch_backward(grad, gate_up)


@_swiglu_backward.register_fake
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return _swiglu_backward(grad, *ctx.saved_tensors)


_swiglu_forward.register_autograd(_backward, setup_context=_setup_context)


class _Swiglu(torch.autograd.Function):
    """swiglu without the dispatcher; with `inplace` its first backward pass writes into gate_up."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, inplace: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.inplace, ctx.overwritten = inplace, False
        return _launch_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (grad,) = grad_outputs
        if ctx.overwritten:
            raise RuntimeError(
                "swiglu(gate_up, inplace=True): a second backward pass, but the first one has written the gradient "
                "over gate_up; pass inplace=False where backward runs more than once (retain_graph=True)"
            )
        (gate_up,) = ctx.saved_tensors
        # With gradients recorded (create_graph) the op says that it has no second derivative.
        if torch.is_grad_enabled() or not may_skip_dispatcher(grad, gate_up):
            return _swiglu_backward(grad, gate_up), None
        if not ctx.inplace:
            return _launch_backward(grad, gate_up), None
        ctx.overwritten = True
        gradient = _launch_backward(grad, gate_up.detach(), inplace=True)
        torch.autograd.graph.increment_version(gate_up)  # another op that saved gate_up then says so, not wrong numbers
        return gradient, None


def swiglu(gate_up: Tensor, *, inplace: bool = False, backend: Backend = "auto") -> Tensor:
    """silu(gate) * up of a packed [gate | up].

    Args:
        gate_up: (..., 2 * ffn), fp32/bf16/fp16 (fp64: reference), any strides. It is copied only where more than three
            dimensions do not merge to three. Fast where the last dimension is contiguous and ffn a multiple of 16.
        inplace: lets the backward pass write the gradient over gate_up, which saves that much memory at its peak.
            gate_up must not be used after that (an op that has saved it raises), and backward runs once (a second pass
            raises). It is a permission: the reference, and torch.compile, which plans memory itself, take new memory.
        backend: "auto", "triton" or "reference".

    Returns:
        (..., ffn), contiguous, in the input dtype.

    Raises:
        ValueError: gate_up has no dimension, or the last one is odd; with inplace=True gate_up is a leaf that requires
            a gradient, or its elements share memory.
        TypeError: the dtype is not supported.
        RuntimeError: backend="triton" where it cannot run.
    """
    check_tensors({"gate_up": gate_up})
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}: expected (..., 2 * ffn), gate and up side by side")
    if gate_up.dtype not in (*_KERNEL_DTYPES, torch.float64):
        raise TypeError(f"gate_up is {gate_up.dtype}: expected float32, bfloat16, float16 (float64: reference)")
    if inplace and not torch.compiler.is_compiling():
        check_writable("gate_up", gate_up)
    if gate_up.dtype not in _KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(f"gate_up is {gate_up.dtype}: backend='triton' takes float32, bfloat16, float16")
        backend = "reference"
    if select_backend(backend, gate_up.device) == "reference":
        return swiglu_reference(gate_up)
    if not may_skip_dispatcher(gate_up):
        return _swiglu_forward(gate_up)
    if needs_grad(gate_up):
        return _Swiglu.apply(gate_up, inplace)
    return _launch_forward(gate_up)
