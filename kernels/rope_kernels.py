"""The rope kernel: the heads of q and k rotated, those of v copied, in one launch."""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl


@jit
def load_positions(positions_ptr, batch, tokens, seq_len, offset, stride_batch, stride_token, GIVEN: tl.constexpr):
    """Positions of tokens, int64, in their shape: read where they are GIVEN, else counted from offset."""
    if GIVEN:
        at = positions_ptr + batch * stride_batch + tokens * stride_token
        return tl.load(at, mask=tokens < seq_len, other=0).to(tl.int64)
    else:
        return tokens + offset


@jit
def load_angles(
    cos_ptr,
    sin_ptr,
    position,  # [T, 1, 1] int64
    column,  # [1, 1, HALF]
    mask,  # [T, 1, HALF] or [T, H, HALF]
    table_len,
    HALF: tl.constexpr,
    CHECK: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """cos and sin of a tile, [T, H, HALF] fp32. CHECK: positions may lie outside the tables.

    The tables are read again for each head, from the L1 cache: a tile without the heads would have another layout than
    x, and the two would meet through shared memory.
    """
    at = tl.broadcast_to(position * HALF + column, [BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF])
    if EVEN and not CHECK:
        cos = tl.load(cos_ptr + at)
        sin = tl.load(sin_ptr + at)
    else:
        # A position outside the table reads nothing and gives NaN: a check on the host would wait for the device.
        inside = mask & (position >= 0) & (position < table_len)
        cos = tl.load(cos_ptr + at, mask=inside, other=float("nan"))
        sin = tl.load(sin_ptr + at, mask=inside, other=float("nan"))
    return cos.to(tl.float32), sin.to(tl.float32)


@jit
def turn(x1, x2, cos, sin):
    """(x1 * cos - x2 * sin, x2 * cos + x1 * sin), fp32.

    Which product is rounded before the sum is written out. Left to the compiler it depends on how the operands were
    loaded, so that a strided gradient came back with other bits than its contiguous copy (Triton 3.6, sm_90).
    """
    # Not -x2, which Triton 3.6 makes a subtraction from 0: 40 registers for 32.
    return tl.fma(-1.0 * x2, sin, x1 * cos), tl.fma(x1, sin, x2 * cos)


@jit
def _heads_tile(
    x_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    stride_batch,
    stride_token,
    stride_head,
    stride_dim,
    out_stride_token,
    batch,
    tokens,  # [T, 1, 1] int64
    position,
    seq_len,
    table_len,
    first_head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    INVERSE: tl.constexpr,
    CHECK: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    LOAD: tl.constexpr,  # an eviction policy or ""
):
    """Rotates, or copies, BLOCK_HEADS heads of a block of tokens."""
    HALF: tl.constexpr = HEAD_DIM // 2
    column = tl.arange(0, BLOCK_HALF)[None, None, :]
    exists = (tokens < seq_len) & (column < HALF)  # [T, 1, HALF]
    head = (first_head + tl.arange(0, BLOCK_HEADS)[None, :, None]).to(tl.int64)
    mask = exists & (head < HEADS)  # [T, H, HALF]
    x = x_ptr + batch * stride_batch + tokens * stride_token + head * stride_head + column.to(tl.int64) * stride_dim
    far = tl.cast(HALF, tl.int64) * stride_dim
    if EVEN:
        x1 = tl.load(x, eviction_policy=LOAD)  # pyright: ignore[reportArgumentType]
        x2 = tl.load(x + far, eviction_policy=LOAD)  # pyright: ignore[reportArgumentType]
    else:
        x1 = tl.load(x, mask=mask, other=0.0, eviction_policy=LOAD)  # pyright: ignore[reportArgumentType]
        x2 = tl.load(x + far, mask=mask, other=0.0, eviction_policy=LOAD)  # pyright: ignore[reportArgumentType]
    if ROTATE:
        # After the heads: these come from memory, the angles of most programs from L2.
        cos, sin = load_angles(
            cos_ptr, sin_ptr, position, column, exists, table_len, HALF, CHECK, EVEN,
            BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip
        if INVERSE:
            sin *= -1.0
        a, b = turn(x1.to(tl.float32), x2.to(tl.float32), cos, sin)
        x1 = a.to(out_ptr.dtype.element_ty)
        x2 = b.to(out_ptr.dtype.element_ty)
    out = out_ptr + (batch * seq_len + tokens) * out_stride_token + head * HEAD_DIM + column
    if EVEN:
        tl.store(out, x1)
        tl.store(out + HALF, x2)
    else:
        tl.store(out, x1, mask=mask)
        tl.store(out + HALF, x2, mask=mask)


@jit
def rope_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
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
    v_stride_batch,
    v_stride_token,
    v_stride_head,
    v_stride_dim,
    q_out_stride_token,
    k_out_stride_token,
    v_out_stride_token,
    positions_stride_batch,
    positions_stride_token,
    seq_len,
    table_len,
    offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INVERSE: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    LOAD: tl.constexpr,
):
    """One program: BLOCK_HEADS heads, all of q, of k, or of v (which is copied), of BLOCK_TOKENS tokens of a sequence.
    0 heads leave a part out. EVEN: every tile is full."""
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    K_BLOCKS: tl.constexpr = (K_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    V_BLOCKS: tl.constexpr = (V_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    part = tl.program_id(0) % (Q_BLOCKS + K_BLOCKS + V_BLOCKS)
    block = tl.program_id(0) // (Q_BLOCKS + K_BLOCKS + V_BLOCKS)
    blocks = tl.cdiv(seq_len, BLOCK_TOKENS)
    batch = (block // blocks).to(tl.int64)
    block = block % blocks
    tokens = block.to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
    position = load_positions(
        positions_ptr, batch, tokens, seq_len, offset, positions_stride_batch, positions_stride_token, HAS_POSITIONS
    )
    if part < Q_BLOCKS:
        _heads_tile(
            q_ptr,
            q_out_ptr,
            cos_ptr,
            sin_ptr,
            q_stride_batch,
            q_stride_token,
            q_stride_head,
            q_stride_dim,
            q_out_stride_token,
            batch,
            tokens,
            position,
            seq_len,
            table_len,
            part * BLOCK_HEADS,
            Q_HEADS,
            HEAD_DIM,
            True,
            INVERSE,
            HAS_POSITIONS,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
            LOAD,
        )
    elif part < Q_BLOCKS + K_BLOCKS:
        _heads_tile(
            k_ptr,
            k_out_ptr,
            cos_ptr,
            sin_ptr,
            k_stride_batch,
            k_stride_token,
            k_stride_head,
            k_stride_dim,
            k_out_stride_token,
            batch,
            tokens,
            position,
            seq_len,
            table_len,
            (part - Q_BLOCKS) * BLOCK_HEADS,
            K_HEADS,
            HEAD_DIM,
            True,
            INVERSE,
            HAS_POSITIONS,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
            LOAD,
        )
    elif V_HEADS > 0:
        _heads_tile(
            v_ptr,
            v_out_ptr,
            cos_ptr,
            sin_ptr,
            v_stride_batch,
            v_stride_token,
            v_stride_head,
            v_stride_dim,
            v_out_stride_token,
            batch,
            tokens,
            position,
            seq_len,
            table_len,
            (part - Q_BLOCKS - K_BLOCKS) * BLOCK_HEADS,
            V_HEADS,
            HEAD_DIM,
            False,
            INVERSE,
            HAS_POSITIONS,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
            LOAD,
        )
