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

from fuselm.kernels._triton import Backend, compute_dtype, device_profile, select_backend
from fuselm.kernels.arguments import check_tensors
from fuselm.kernels.direct import check_writable, launch_device, may_skip_dispatcher, needs_grad
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
    profile, itemsize = device_profile(present.device), present.element_size()
    launch = rope_launch(seq_len, max(heads[0], 1), heads[1] or heads[0], head_dim, itemsize, profile)
    size = launch.block_heads
    even = (
        seq_len % launch.block_tokens == 0
        and 2 * launch.block_half == head_dim
        and all(count % size == 0 for count in heads)
    )
    parts, blocks = sum(-(-count // size) for count in heads), -(-seq_len // launch.block_tokens)
    with launch_device(present):
        rope_kernel[(parts * batch * blocks,)](
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
            LOAD=launch.load,
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


def check_rope_inputs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int) -> None:
    check_tensors({"q": q, "k": k, "cos": cos, "sin": sin}, {"positions": positions})
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
    check_rope_inputs(q, k, cos, sin, positions, offset)
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


def split_heads(x: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of (batch, seq, heads, head_dim)."""
    end = num_heads + num_kv_heads
    return x[:, :, :num_heads], x[:, :, num_heads:end], x[:, :, end:]


def _launch_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    num_heads: int,
    num_kv_heads: int,
    inplace: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q, rotated k, and v: each in new memory, or views of qkv after q and k were rotated there."""
    q, k, v = split_heads(qkv.detach(), num_heads, num_kv_heads)
    batch, seq_len, _, head_dim = qkv.shape
    dense = qkv.stride()[2:] == (head_dim, 1) and (batch == 1 or qkv.stride(0) == seq_len * qkv.stride(1))
    if inplace and dense:
        _rotate((q, k, None), (q, k, None), cos, sin, positions, offset, False)
        torch.autograd.graph.increment_version(qkv)  # an op that saved qkv then says so, instead of wrong numbers
        return q, k, v
    outputs = _new_like(q), _new_like(k), _new_like(v)
    _rotate((q, k, v), outputs, cos, sin, positions, offset, False)
    return outputs


def _launch_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> Tensor:
    """d(qkv), packed: the gradients of q and k rotated back and that of v copied, in one launch."""
    batch, seq_len, num_heads, head_dim = dq.shape
    shape = batch, seq_len, num_heads + 2 * dk.shape[2], head_dim
    gradient = torch.empty(shape, dtype=dq.dtype, device=dq.device)
    parts = split_heads(gradient, num_heads, dk.shape[2])
    _rotate((dq, dk, dv), parts, cos, sin, positions, offset, True)
    return gradient


@custom_op("fuselm::rope_qkv_forward", mutates_args=())
def _rope_qkv_forward(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _launch_qkv(qkv, cos, sin, positions, offset, num_heads, num_kv_heads)


@_rope_qkv_forward.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_heads(qkv, num_heads, num_kv_heads)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@custom_op("fuselm::rope_qkv_backward", mutates_args=())
def _rope_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> Tensor:
    return _launch_qkv_backward(dq, dk, dv, cos, sin, positions, offset)


@_rope_qkv_backward.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int) -> Tensor:
    batch, seq_len, num_heads, head_dim = dq.shape
    return dq.new_empty((batch, seq_len, num_heads + 2 * dk.shape[2], head_dim))


def _setup_qkv(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin, positions, offset, _, _ = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.offset = offset


def _backward_qkv(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin, positions = ctx.saved_tensors
    # With gradients recorded (create_graph) the op says that it has no second derivative.
    direct = not torch.is_grad_enabled() and may_skip_dispatcher(dq, dk, dv)
    backward = _launch_qkv_backward if direct else _rope_qkv_backward
    return backward(dq, dk, dv, cos, sin, positions, ctx.offset), None, None, None, None, None, None


_rope_qkv_forward.register_autograd(_backward_qkv, setup_context=_setup_qkv)


class _RopeQkv(torch.autograd.Function):
    """rope_qkv without the dispatcher, in qkv's memory where `inplace`."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        offset: int,
        num_heads: int,
        num_kv_heads: int,
        inplace: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        outputs = _launch_qkv(qkv, cos, sin, positions, offset, num_heads, num_kv_heads, inplace)
        _setup_qkv(ctx, (qkv, cos, sin, positions, offset, num_heads, num_kv_heads), outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return *_backward_qkv(ctx, *grad_outputs), None


def rope_qkv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    positions: Tensor | None = None,
    offset: int = 0,
    inplace: bool = False,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a packed projection into q, k and v and rotates q and k (see `rope`); one launch each way.

    Args:
        qkv: (batch, seq, num_heads + 2 * num_kv_heads, head_dim) or packed (tokens, heads, head_dim), heads of q, then
            k, then v; fp32/bf16/fp16 (fp64: reference), any strides.
        cos: (max_seq, head_dim // 2), fp32. No gradient flows to it.
        sin: as cos.
        num_heads: heads of q.
        num_kv_heads: heads of k and of v.
        positions: as for `rope`.
        offset: as for `rope`.
        inplace: lets q and k be rotated in the memory of qkv, which then holds the three results: no memory is
            allocated and v is not read. qkv must not be used afterwards (an op that has saved it raises). It is a
            permission: the reference, and torch.compile, which plans memory itself, take new memory.
        backend: "auto", "triton" or "reference".

    Returns:
        q (batch, seq, num_heads, head_dim), k and v (batch, seq, num_kv_heads, head_dim), in the input dtype:
        contiguous, or views of qkv. The gradient of qkv is packed, whatever the strides of the upstream ones.

    Raises:
        ValueError: shapes, head counts or devices do not fit, offset + seq exceeds the tables; with inplace=True qkv is
            a leaf that requires a gradient, or its elements share memory.
        TypeError: a dtype is not supported.
        RuntimeError: backend="triton" where it cannot run.
    """
    check_tensors({"qkv": qkv})
    if qkv.dim() not in (3, 4) or num_heads < 1 or num_kv_heads < 1 or qkv.shape[-2] != num_heads + 2 * num_kv_heads:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)} with num_heads={num_heads} and num_kv_heads={num_kv_heads}: expected "
            f"(batch, seq, {num_heads + 2 * num_kv_heads}, head_dim) or (tokens, heads, head_dim), heads of q, k, v"
        )
    whole = qkv if qkv.dim() == 4 else qkv.unsqueeze(0)
    q, k, v = split_heads(whole, num_heads, num_kv_heads)
    if qkv.dim() == 3:
        check_rope_inputs(q[0], k[0], cos, sin, positions, offset)
    else:
        check_rope_inputs(q, k, cos, sin, positions, offset)
    if qkv.dtype not in _KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(f"qkv is {qkv.dtype}: backend='triton' takes float32, bfloat16, float16")
        backend = "reference"
    if inplace and not torch.compiler.is_compiling():
        check_writable("qkv", qkv)
    arguments = whole, cos, sin, positions, offset, num_heads, num_kv_heads
    if select_backend(backend, qkv.device) == "reference":
        outputs = *rope_reference(q, k, cos, sin, positions=positions, offset=offset), v
    elif not may_skip_dispatcher(qkv, cos, sin, positions):
        outputs = _rope_qkv_forward(*arguments)
    elif needs_grad(qkv):
        outputs = _RopeQkv.apply(*arguments, inplace)
    else:
        outputs = _launch_qkv(*arguments, inplace)
    q, k, v = outputs
    return (q, k, v) if qkv.dim() == 4 else (q.squeeze(0), k.squeeze(0), v.squeeze(0))
