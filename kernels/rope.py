"""Rotary position embedding of queries and keys, half-split, in one launch; of a packed qkv also in its own memory.

For a token at position p, with x1 and x2 the first and second half of a head, c = cos[p] and s = sin[p]:

    forward    y1 = x1 * c - x2 * s         y2 = x2 * c + x1 * s
    backward   dx1 = dy1 * c + dy2 * s      dx2 = dy2 * c - dy1 * s      (the inverse rotation)

Saved for the backward pass: the tables and the positions, neither q nor k. Bytes that must move in either direction: q
and k once in and once out, plus the rows of the tables that are used. The multiplication is done in fp32, rounded once.
`rope_qkv` takes the packed output of a projection and gives its gradient packed again, v's part copied by the same
launch, where slices would be put together by another pass over all of it.

Method: Su et al. 2021, "RoFormer", with the pairing (i, i + head_dim / 2) that Llama weights on Hugging Face use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fuselm.kernels._triton import Backend, compute_dtype, device_profile, select_backend, triton
from fuselm.kernels.direct import launch_device, may_skip_dispatcher, needs_grad
from fuselm.kernels.launch.rope import rope_launch
from fuselm.kernels.rope_kernels import rope_kernel

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INDEX_DTYPES = (torch.int32, torch.int64)


def _reference_rows(table: Tensor, positions: Tensor | None, offset: int, seq_len: int) -> Tensor:
    """Rows of a table that a call uses, (seq, 1, half) or (batch, seq, 1, half); NaN where a position lies outside."""
    table = table.detach()
    if positions is None:
        return table[offset : offset + seq_len].unsqueeze(-2)
    inside = (positions >= 0) & (positions < table.shape[0])
    rows = table[positions.clamp(0, table.shape[0] - 1)]
    return torch.where(inside.unsqueeze(-1), rows, torch.nan).unsqueeze(-2)


def rope_reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | None = None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """`rope` in plain PyTorch: computes in fp32 (fp64 for fp64 inputs), rounds once."""
    dtype = compute_dtype(q, k)
    c = _reference_rows(cos, positions, offset, q.shape[-3]).to(dtype)
    s = _reference_rows(sin, positions, offset, q.shape[-3]).to(dtype)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.to(dtype).chunk(2, dim=-1)
        return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


def _rotate(
    inputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    inverse: bool,
) -> None:
    """Launches the kernel over what is not None of (q, k, v), each (batch, seq, heads, head_dim); v is copied.

    The outputs' last two dimensions are contiguous, and their batch stride is seq times their token stride.
    """
    present = next(x for x in inputs if x is not None)
    batch, seq_len, _, head_dim = present.shape
    heads = [0 if x is None else x.shape[2] for x in inputs]
    if batch * seq_len * sum(heads) == 0:
        return
    cos, sin = cos.contiguous(), sin.contiguous()
    positions_strides = (0, 0)
    if positions is not None:
        positions_strides = (positions.stride(0) if positions.dim() == 2 else 0, positions.stride(-1))
    sources = [present if x is None else x for x in inputs]
    targets = [present if x is None else x for x in outputs]
    launch = rope_launch(
        seq_len,
        max(heads[0], 1),
        heads[1] or heads[0],
        head_dim,
        present.element_size(),
        device_profile(present.device),
    )
    size = launch.block_heads
    even = (
        seq_len % launch.block_tokens == 0
        and 2 * launch.block_half == head_dim
        and all(count % size == 0 for count in heads)
    )
    programs = batch * triton.cdiv(seq_len, launch.block_tokens) * sum(triton.cdiv(count, size) for count in heads)
    with launch_device(present):
        rope_kernel[(programs,)](
            *sources,
            *targets,
            cos,
            sin,
            cos if positions is None else positions,
            *sources[0].stride(),
            *sources[1].stride(),
            *sources[2].stride(),
            *(x.stride(1) for x in targets),
            *positions_strides,
            seq_len,
            cos.shape[0],
            offset,
            *heads,
            HEAD_DIM=head_dim,
            INVERSE=inverse,
            HAS_POSITIONS=positions is not None,
            EVEN=even,
            BLOCK_TOKENS=launch.block_tokens,
            BLOCK_HEADS=size,
            BLOCK_HALF=launch.block_half,
            num_warps=launch.num_warps,
            num_stages=1,
        )


def _new_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _launch(
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Rotates what is not None; an absent side gives an empty tensor."""
    present = q if q is not None else k
    assert present is not None
    q_out = present.new_empty(0) if q is None else _new_like(q)
    k_out = present.new_empty(0) if k is None else _new_like(k)
    outputs = (None if q is None else q_out, None if k is None else k_out, None)
    _rotate((q, k, None), outputs, cos, sin, positions, offset, inverse)
    return q_out, k_out


@custom_op("fuselm::rope_forward", mutates_args=())
def _rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    return _launch(q, k, cos, sin, positions, offset, False)


@_rope_forward.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@custom_op("fuselm::rope_backward", mutates_args=())
def _rope_backward(
    dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k; an empty tensor stands for the one whose upstream gradient is None."""
    return _launch(dq, dk, cos, sin, positions, offset, True)


@_rope_backward.register_fake
def _(
    dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    any_grad = dq if dq is not None else dk
    assert any_grad is not None
    return any_grad.new_empty(0 if dq is None else dq.shape), any_grad.new_empty(0 if dk is None else dk.shape)


def _save(ctx: Any, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int) -> None:
    ctx.save_for_backward(cos, sin, positions)
    ctx.offset = offset
    # An output that nothing used then sends None, and that side is left out of the launch.
    ctx.set_materialize_grads(False)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, *inputs[2:])


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin, positions = ctx.saved_tensors
    dq = dq if ctx.needs_input_grad[0] else None
    dk = dk if ctx.needs_input_grad[1] else None
    if dq is None and dk is None:
        return (None,) * 6
    # With gradients recorded (create_graph) the op says that it has no second derivative.
    if torch.is_grad_enabled() or not may_skip_dispatcher(dq, dk):
        q_grad, k_grad = _rope_backward(dq, dk, cos, sin, positions, ctx.offset)
    else:
        q_grad, k_grad = _launch(dq, dk, cos, sin, positions, ctx.offset, True)
    return None if dq is None else q_grad, None if dk is None else k_grad, None, None, None, None


_rope_forward.register_autograd(_backward, setup_context=_setup_context)


class _Rope(torch.autograd.Function):
    """rope without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
    ) -> tuple[Tensor, Tensor]:
        _save(ctx, cos, sin, positions, offset)
        return _launch(q, k, cos, sin, positions, offset, False)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _backward(ctx, *grad_outputs)


def _check_inputs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int) -> None:
    if q.dim() not in (3, 4) or k.dim() != q.dim():
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected (batch, seq, heads, head_dim) for both, or "
            "(tokens, heads, head_dim) for both"
        )
    if q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: all sizes but the number of heads must be equal"
        )
    head_dim, seq_len = q.shape[-1], q.shape[-3]
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"q has head_dim {head_dim}: expected an even number, at least 2")
    if q.dtype != k.dtype or q.dtype not in (*_KERNEL_DTYPES, torch.float64):
        raise TypeError(
            f"q is {q.dtype} and k {k.dtype}: expected the same of float32, bfloat16, float16 (float64: reference)"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} is {table.dtype}: expected float32 (16-bit tables confuse positions from 257 on)")
        if table.dim() != 2 or table.shape[1] != head_dim // 2 or table.shape[0] != cos.shape[0]:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)}: expected (max_seq, {head_dim // 2}) for head_dim {head_dim}, "
                f"the same for cos and sin"
            )
    for name, x in (("k", k), ("cos", cos), ("sin", sin), ("positions", positions)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device}: expected {q.device}, where q is")
    if positions is None:
        if offset < 0 or offset + seq_len > cos.shape[0]:
            raise ValueError(
                f"offset={offset} with {seq_len} tokens needs positions {offset} to {offset + seq_len - 1}: the tables "
                f"cos and sin have positions 0 to {cos.shape[0] - 1}"
            )
        return
    if offset != 0:
        raise ValueError(f"offset={offset} together with positions: pass one of them (add the offset to positions)")
    if positions.dtype not in _INDEX_DTYPES:
        raise TypeError(f"positions is {positions.dtype}: expected int32 or int64")
    allowed = [tuple(q.shape[-3:-2])] + ([tuple(q.shape[:2])] if q.dim() == 4 else [])
    if tuple(positions.shape) not in allowed:
        raise ValueError(f"positions has shape {tuple(positions.shape)}: expected {' or '.join(map(str, allowed))}")


def _apply(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    if not may_skip_dispatcher(q, k, cos, sin, positions):
        return _rope_forward(q, k, cos, sin, positions, offset)
    if needs_grad(q, k):
        return _Rope.apply(q, k, cos, sin, positions, offset)
    return _launch(q, k, cos, sin, positions, offset, False)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    offset: int = 0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions (half-split rotary embedding).

    Args:
        q: (batch, seq, heads, head_dim) or packed (tokens, heads, head_dim), fp32/bf16/fp16 (fp64: reference), any
            strides, so also a view of a packed qkv projection; head_dim even. Never copied.
        k: (batch, seq, kv_heads, head_dim) or (tokens, kv_heads, head_dim), dtype of q, any strides.
        cos: (max_seq, head_dim // 2), fp32: cosines of position times frequency. No gradient flows to it.
        sin: as cos.
        positions: (seq,) or (batch, seq), for packed inputs (tokens,); int32 or int64: each token's row of the tables.
            A value below 0 or from max_seq on gives NaN for that token: to raise, the host would wait for the device.
        offset: without `positions`, the position of the first token; the next ones are offset + 1, offset + 2, ...
        backend: "auto", "triton" or "reference".

    Returns:
        The rotated q and k, contiguous, in the input dtype.

    Raises:
        ValueError: shapes or devices do not fit, head_dim is odd, or offset + seq exceeds the tables.
        TypeError: a dtype is not supported.
        RuntimeError: backend="triton" where it cannot run.
    """
    _check_inputs(q, k, cos, sin, positions, offset)
    if q.dtype not in _KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(f"q is {q.dtype}: backend='triton' takes float32, bfloat16, float16")
        backend = "reference"
    if select_backend(backend, q.device) == "reference":
        return rope_reference(q, k, cos, sin, positions=positions, offset=offset)
    if q.dim() == 3:
        packed_q, packed_k = _apply(q.unsqueeze(0), k.unsqueeze(0), cos, sin, positions, offset)
        return packed_q.squeeze(0), packed_k.squeeze(0)
    return _apply(q, k, cos, sin, positions, offset)
