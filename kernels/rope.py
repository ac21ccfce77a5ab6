"""Rotary position embedding of queries and keys, half-split, in one launch.

For a token at position p, with x1 and x2 the first and second half of a head, c = cos[p] and s = sin[p]:

    forward    y1 = x1 * c - x2 * s         y2 = x2 * c + x1 * s
    backward   dx1 = dy1 * c + dy2 * s      dx2 = dy2 * c - dy1 * s      (the inverse rotation)

Saved for the backward pass: the tables and the positions, neither q nor k. Bytes that must move in either direction: q
and k once in and once out, plus the rows of the tables that are used. The multiplication is done in fp32, rounded once.

Method: Su et al. 2021, "RoFormer", with the pairing (i, i + head_dim / 2) that Llama weights on Hugging Face use.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from fuselm.kernels._triton import Backend, compute_dtype, device_profile, jit, select_backend, tl, triton
from fuselm.kernels.launch.rope import rope_launch

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


@jit
def _rotate_heads(
    x_ptr,
    out_ptr,
    stride_token,
    stride_head,
    stride_dim,
    tokens,  # [T] int64
    token_mask,  # [T]
    cos,  # [T, 1, HALF] fp32
    sin,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotates all heads of a block of tokens; x_ptr and out_ptr point at the sequence's first token."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tokens[:, None, None]
    column = tl.arange(0, BLOCK_HALF)[None, None, :]
    for start in range(0, HEADS, BLOCK_HEADS):
        head = start + tl.arange(0, BLOCK_HEADS)[None, :, None]
        mask = token_mask[:, None, None] & (head < HEADS) & (column < HALF)  # [T, H, HALF]
        x = x_ptr + token * stride_token + head.to(tl.int64) * stride_head
        x1 = tl.load(x + column.to(tl.int64) * stride_dim, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x + (column + HALF).to(tl.int64) * stride_dim, mask=mask, other=0.0).to(tl.float32)
        out = out_ptr + (token * HEADS + head) * HEAD_DIM + column
        tl.store(out, (x1 * cos - x2 * sin).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(out + HALF, (x2 * cos + x1 * sin).to(out_ptr.dtype.element_ty), mask=mask)


@jit
def _rope_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    q_stride_batch,
    q_stride_token,
    q_stride_head,
    q_stride_dim,
    k_stride_batch,
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    positions_stride_batch,
    positions_stride_token,
    seq_len,
    table_len,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INVERSE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One program: BLOCK_TOKENS tokens of one sequence, all heads of q and of k; 0 heads leave that side out."""
    HALF: tl.constexpr = HEAD_DIM // 2
    blocks = tl.cdiv(seq_len, BLOCK_TOKENS)
    # One grid axis: the second one ends at 65,535, and a decoding batch may be larger.
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_mask = tokens < seq_len
    if HAS_POSITIONS:
        at = positions_ptr + batch * positions_stride_batch + tokens * positions_stride_token
        position = tl.load(at, mask=token_mask, other=0).to(tl.int64)
    else:
        position = tokens + offset
    column = tl.arange(0, BLOCK_HALF)
    # A position outside the table reads nothing and gives NaN: checking it on the host would wait for the device.
    inside = (position >= 0) & (position < table_len)
    table_mask = inside[:, None] & (column < HALF)[None, :]
    row = position[:, None] * HALF + column[None, :]
    cos = tl.load(cos_ptr + row, mask=table_mask, other=float("nan")).to(tl.float32)  # [T, HALF]
    sin = tl.load(sin_ptr + row, mask=table_mask, other=float("nan")).to(tl.float32)
    if INVERSE:
        sin = -sin
    cos, sin = cos[:, None, :], sin[:, None, :]
    if Q_HEADS > 0:
        _rotate_heads(
            q_ptr + batch * q_stride_batch,
            q_out_ptr + batch * seq_len * Q_HEADS * HEAD_DIM,
            q_stride_token,
            q_stride_head,
            q_stride_dim,
            tokens,
            token_mask,
            cos,
            sin,
            Q_HEADS,
            HEAD_DIM,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
    if K_HEADS > 0:
        _rotate_heads(
            k_ptr + batch * k_stride_batch,
            k_out_ptr + batch * seq_len * K_HEADS * HEAD_DIM,
            k_stride_token,
            k_stride_head,
            k_stride_dim,
            tokens,
            token_mask,
            cos,
            sin,
            K_HEADS,
            HEAD_DIM,
            BLOCK_HEADS,
            BLOCK_HALF,
        )


def _launch(
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    *,
    inverse: bool,
) -> tuple[Tensor, Tensor]:
    """Rotates what is not None; an absent side gives an empty tensor."""
    present = q if q is not None else k
    assert present is not None
    batch, seq_len, _, head_dim = present.shape
    q_out = present.new_empty(0 if q is None else q.shape)
    k_out = present.new_empty(0 if k is None else k.shape)
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    q_heads, k_heads = (0 if x is None else x.shape[2] for x in (q, k))
    q_in, k_in = present if q is None else q, present if k is None else k
    cos, sin = cos.contiguous(), sin.contiguous()
    positions_strides = (0, 0)
    if positions is not None:
        positions_strides = (positions.stride(0) if positions.dim() == 2 else 0, positions.stride(-1))
    launch = rope_launch(
        seq_len, max(q_heads, k_heads), head_dim, present.element_size(), device_profile(present.device)
    )
    with torch.cuda.device_of(present):  # Triton launches on the current device
        _rope_kernel[(batch * triton.cdiv(seq_len, launch.block_tokens),)](
            q_in,
            k_in,
            q_out,
            k_out,
            cos,
            sin,
            cos if positions is None else positions,
            *q_in.stride(),
            *k_in.stride(),
            *positions_strides,
            seq_len,
            cos.shape[0],
            offset,
            Q_HEADS=q_heads,
            K_HEADS=k_heads,
            HEAD_DIM=head_dim,
            INVERSE=inverse,
            HAS_POSITIONS=positions is not None,
            BLOCK_TOKENS=launch.block_tokens,
            BLOCK_HEADS=launch.block_heads,
            BLOCK_HALF=launch.block_half,
            num_warps=launch.num_warps,
            num_stages=1,
        )
    return q_out, k_out


@custom_op("fuselm::rope_forward", mutates_args=())
def _rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    return _launch(q, k, cos, sin, positions, offset, inverse=False)


@_rope_forward.register_fake
def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@custom_op("fuselm::rope_backward", mutates_args=())
def _rope_backward(
    dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k; an empty tensor stands for the one whose upstream gradient is None."""
    return _launch(dq, dk, cos, sin, positions, offset, inverse=True)


@_rope_backward.register_fake
def _(
    dq: Tensor | None, dk: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    any_grad = dq if dq is not None else dk
    assert any_grad is not None
    return any_grad.new_empty(0 if dq is None else dq.shape), any_grad.new_empty(0 if dk is None else dk.shape)


def _setup_context(ctx, inputs, output) -> None:
    _, _, cos, sin, positions, offset = inputs
    ctx.save_for_backward(cos, sin, positions)
    ctx.offset = offset
    # An output that nothing used then sends None, and that side is left out of the launch.
    ctx.set_materialize_grads(False)


def _backward(ctx, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    cos, sin, positions = ctx.saved_tensors
    dq = dq if ctx.needs_input_grad[0] else None
    dk = dk if ctx.needs_input_grad[1] else None
    if dq is None and dk is None:
        return (None,) * 6
    q_grad, k_grad = _rope_backward(dq, dk, cos, sin, positions, ctx.offset)
    return None if dq is None else q_grad, None if dk is None else k_grad, None, None, None, None


_rope_forward.register_autograd(_backward, setup_context=_setup_context)


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
        packed_q, packed_k = _rope_forward(q.unsqueeze(0), k.unsqueeze(0), cos, sin, positions, offset)
        return packed_q.squeeze(0), packed_k.squeeze(0)
    return _rope_forward(q, k, cos, sin, positions, offset)
