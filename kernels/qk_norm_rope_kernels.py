"""The forward kernel of qk_norm_rope and what both share; what they compute stands in qk_norm_rope.py.

A tile is [T, H, HALF]: tokens of one sequence, heads that all belong to q, to k or to v, and one half of a head. EVEN:
every tile is full, and nothing is masked.
"""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl
from fuselm.kernels.rope_kernels import load_angles, load_positions, turn


@jit
def load_tile(pointers, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers).to(tl.float32)
    else:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@jit
def store_tile(pointers, value, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, value.to(pointers.dtype.element_ty))
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@jit
def load_weight(
    weight_ptr,
    column,
    mask,
    weight_offset,
    EVEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """weight_offset + weight in the shape of the tile, and so in its layout (see load_angles)."""
    at = weight_ptr + tl.broadcast_to(column, [BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF])
    return load_tile(at, mask, EVEN) + tl.cast(weight_offset, tl.float32)


@jit
def inverse_rms(x1, x2, eps, HEAD_DIM: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of each head, [T, H, 1]."""
    squares = tl.sum(x1 * x1, 2, keep_dims=True) + tl.sum(x2 * x2, 2, keep_dims=True)
    return 1.0 / tl.sqrt_rn(squares / HEAD_DIM + tl.cast(eps, tl.float32))


@jit
def _forward_tile(
    x_ptr,
    out_ptr,
    weight_ptr,
    stride_batch,
    stride_token,
    stride_head,
    stride_dim,
    cos_ptr,
    sin_ptr,
    batch,
    tokens,
    position,
    seq_len,
    table_len,
    eps,
    weight_offset,
    first_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    CHECK: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Normalises and rotates, or copies, the heads of a tile; x_ptr points at the first head of q, k or v."""
    HALF: tl.constexpr = HEAD_DIM // 2
    head = (first_head + tl.arange(0, BLOCK_HEADS)[None, :, None]).to(tl.int64)
    column = tl.arange(0, BLOCK_HALF)[None, None, :].to(tl.int64)
    mask = (tokens < seq_len) & (head < HEADS) & (column < HALF)
    x = x_ptr + batch * stride_batch + tokens * stride_token + head * stride_head + column * stride_dim
    out = out_ptr + ((batch * seq_len + tokens) * HEADS + head) * HEAD_DIM + column
    x1 = load_tile(x, mask, EVEN)
    x2 = load_tile(x + tl.cast(HALF, tl.int64) * stride_dim, mask, EVEN)
    if ROTATE:
        cos, sin = load_angles(
            cos_ptr,
            sin_ptr,
            position,
            column,
            mask,
            table_len,
            HALF,
            CHECK,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
        w1 = load_weight(weight_ptr, column, mask, weight_offset, EVEN, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF)
        w2 = load_weight(weight_ptr + HALF, column, mask, weight_offset, EVEN, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF)
        rstd = inverse_rms(x1, x2, eps, HEAD_DIM)
        x1, x2 = turn(x1 * rstd * w1, x2 * rstd * w2, cos, sin)
    store_tile(out, x1, mask, EVEN)
    store_tile(out + HALF, x2, mask, EVEN)


@jit
def qk_norm_rope_forward_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    stride_batch,
    stride_token,
    stride_head,
    stride_dim,
    positions_stride_batch,
    positions_stride_token,
    seq_len,
    table_len,
    offset,
    eps,
    weight_offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    COPY_V: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One tile a program."""
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    K_BLOCKS: tl.constexpr = (K_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + (2 if COPY_V else 1) * K_BLOCKS
    part = tl.program_id(0) % BLOCKS
    block = tl.program_id(0) // BLOCKS
    blocks = tl.cdiv(seq_len, BLOCK_TOKENS)
    batch = (block // blocks).to(tl.int64)
    tokens = (block % blocks).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
    position = load_positions(
        positions_ptr, batch, tokens, seq_len, offset, positions_stride_batch, positions_stride_token, HAS_POSITIONS
    )
    far = tl.cast(stride_head, tl.int64)
    if part < Q_BLOCKS:
        _forward_tile(
            qkv_ptr,
            q_ptr,
            q_weight_ptr,
            stride_batch,
            stride_token,
            stride_head,
            stride_dim,
            cos_ptr,
            sin_ptr,
            batch,
            tokens,
            position,
            seq_len,
            table_len,
            eps,
            weight_offset,
            part * BLOCK_HEADS,
            Q_HEADS,
            HEAD_DIM,
            True,
            HAS_POSITIONS,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
    elif part < Q_BLOCKS + K_BLOCKS:
        _forward_tile(
            qkv_ptr + Q_HEADS * far,
            k_ptr,
            k_weight_ptr,
            stride_batch,
            stride_token,
            stride_head,
            stride_dim,
            cos_ptr,
            sin_ptr,
            batch,
            tokens,
            position,
            seq_len,
            table_len,
            eps,
            weight_offset,
            (part - Q_BLOCKS) * BLOCK_HEADS,
            K_HEADS,
            HEAD_DIM,
            True,
            HAS_POSITIONS,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
    elif COPY_V:
        _forward_tile(
            qkv_ptr + (Q_HEADS + K_HEADS) * far,
            v_ptr,
            k_weight_ptr,
            stride_batch,
            stride_token,
            stride_head,
            stride_dim,
            cos_ptr,
            sin_ptr,
            batch,
            tokens,
            position,
            seq_len,
            table_len,
            eps,
            weight_offset,
            (part - Q_BLOCKS - K_BLOCKS) * BLOCK_HEADS,
            K_HEADS,
            HEAD_DIM,
            False,
            HAS_POSITIONS,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
