"""The backward kernels of qk_norm_rope: a persistent grid over the tiles of q, k and v, and the sum of its partials."""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl
from fuselm.kernels.qk_norm_rope_kernels import inverse_rms, load_tile, load_weight, store_tile
from fuselm.kernels.rope_kernels import load_angles, load_positions, turn


@jit
def _backward_tiles(
    dy_ptr,
    x_ptr,
    dx_ptr,
    weight_ptr,
    partial_ptr,
    dy_stride_batch,
    dy_stride_token,
    dy_stride_head,
    dy_stride_dim,
    stride_batch,
    stride_token,
    stride_head,
    stride_dim,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    positions_stride_batch,
    positions_stride_token,
    first,
    step,
    batches,
    seq_len,
    table_len,
    offset,
    eps,
    weight_offset,
    HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATE: tl.constexpr,
    NEED_DW: tl.constexpr,
    CHECK: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Tiles first, first + step, ... of q, of k or of v; the sum of dw goes to the row partial_ptr."""
    HALF: tl.constexpr = HEAD_DIM // 2
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    blocks = tl.cdiv(seq_len, BLOCK_TOKENS)
    column = tl.arange(0, BLOCK_HALF)[None, None, :].to(tl.int64)
    half = tl.cast(HALF, tl.int64)
    dw1 = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF], tl.float32)
    dw2 = tl.zeros([BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF], tl.float32)
    for tile in range(first, batches * blocks * HEAD_BLOCKS, step):
        block = tile // HEAD_BLOCKS
        batch = (block // blocks).to(tl.int64)
        tokens = (block % blocks).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)[:, None, None]
        head = ((tile - block * HEAD_BLOCKS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[None, :, None]).to(tl.int64)
        mask = (tokens < seq_len) & (head < HEADS) & (column < HALF)
        dy = dy_ptr + batch * dy_stride_batch + tokens * dy_stride_token + head * dy_stride_head
        dy += column * dy_stride_dim
        g1 = load_tile(dy, mask, EVEN)
        g2 = load_tile(dy + half * dy_stride_dim, mask, EVEN)
        dx = dx_ptr + ((batch * seq_len + tokens) * ALL_HEADS + head) * HEAD_DIM + column
        if ROTATE:
            x = x_ptr + batch * stride_batch + tokens * stride_token + head * stride_head + column * stride_dim
            x1 = load_tile(x, mask, EVEN)
            x2 = load_tile(x + half * stride_dim, mask, EVEN)
            position = load_positions(
                positions_ptr, batch, tokens, seq_len, offset, positions_stride_batch, positions_stride_token, CHECK
            )
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
            if not EVEN:  # what is masked must add nothing to dw, not the NaN that stands outside the tables
                cos = tl.where(mask, cos, 0.0)
                sin = tl.where(mask, sin, 0.0)
            w1 = load_weight(weight_ptr, column, mask, weight_offset, EVEN, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF)
            w2 = load_weight(
                weight_ptr + HALF, column, mask, weight_offset, EVEN, BLOCK_TOKENS, BLOCK_HEADS, BLOCK_HALF
            )
            rstd = inverse_rms(x1, x2, eps, HEAD_DIM)
            if not EVEN:  # with eps = 0 a masked head would give 0 * inf
                rstd = tl.where((tokens < seq_len) & (head < HEADS), rstd, 0.0)
            x1 *= rstd  # from here on x_hat
            x2 *= rstd
            g1, g2 = turn(g1, g2, cos, -sin)
            dw1 += g1 * x1
            dw2 += g2 * x2
            g1 *= w1
            g2 *= w2
            mean = (tl.sum(g1 * x1, 2, keep_dims=True) + tl.sum(g2 * x2, 2, keep_dims=True)) / HEAD_DIM
            # Fused as written: which of two products is rounded first must not depend on layouts (see turn).
            g1 = rstd * tl.fma(x1, -mean, g1)
            g2 = rstd * tl.fma(x2, -mean, g2)
        store_tile(dx, g1, mask, EVEN)
        store_tile(dx + HALF, g2, mask, EVEN)
    if ROTATE and NEED_DW:
        at = partial_ptr + tl.arange(0, BLOCK_HALF)
        tl.store(at, tl.sum(tl.sum(dw1, 0), 0), mask=tl.arange(0, BLOCK_HALF) < HALF)
        tl.store(at + HALF, tl.sum(tl.sum(dw2, 0), 0), mask=tl.arange(0, BLOCK_HALF) < HALF)


@jit
def qk_norm_rope_backward_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    qkv_ptr,
    dqkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    partial_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    dq_stride_batch,
    dq_stride_token,
    dq_stride_head,
    dq_stride_dim,
    dk_stride_batch,
    dk_stride_token,
    dk_stride_head,
    dk_stride_dim,
    dv_stride_batch,
    dv_stride_token,
    dv_stride_head,
    dv_stride_dim,
    stride_batch,
    stride_token,
    stride_head,
    stride_dim,
    positions_stride_batch,
    positions_stride_token,
    q_programs,
    k_programs,
    batches,
    seq_len,
    table_len,
    offset,
    eps,
    weight_offset,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NEED_DW: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """The first q_programs programs share the tiles of q, the next k_programs those of k, the rest copy dv."""
    ALL_HEADS: tl.constexpr = Q_HEADS + 2 * K_HEADS
    program = tl.program_id(0)
    far = tl.cast(stride_head, tl.int64)
    partial = partial_ptr + program.to(tl.int64) * HEAD_DIM
    if program < q_programs:
        _backward_tiles(
            dq_ptr,
            qkv_ptr,
            dqkv_ptr,
            q_weight_ptr,
            partial,
            dq_stride_batch,
            dq_stride_token,
            dq_stride_head,
            dq_stride_dim,
            stride_batch,
            stride_token,
            stride_head,
            stride_dim,
            cos_ptr,
            sin_ptr,
            positions_ptr,
            positions_stride_batch,
            positions_stride_token,
            program,
            q_programs,
            batches,
            seq_len,
            table_len,
            offset,
            eps,
            weight_offset,
            Q_HEADS,
            ALL_HEADS,
            HEAD_DIM,
            True,
            NEED_DW,
            HAS_POSITIONS,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
    elif program < q_programs + k_programs:
        _backward_tiles(
            dk_ptr,
            qkv_ptr + Q_HEADS * far,
            dqkv_ptr + Q_HEADS * HEAD_DIM,
            k_weight_ptr,
            partial,
            dk_stride_batch,
            dk_stride_token,
            dk_stride_head,
            dk_stride_dim,
            stride_batch,
            stride_token,
            stride_head,
            stride_dim,
            cos_ptr,
            sin_ptr,
            positions_ptr,
            positions_stride_batch,
            positions_stride_token,
            program - q_programs,
            k_programs,
            batches,
            seq_len,
            table_len,
            offset,
            eps,
            weight_offset,
            K_HEADS,
            ALL_HEADS,
            HEAD_DIM,
            True,
            NEED_DW,
            HAS_POSITIONS,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
        )
    else:
        _backward_tiles(
            dv_ptr,
            qkv_ptr,
            dqkv_ptr + (Q_HEADS + K_HEADS) * HEAD_DIM,
            k_weight_ptr,
            partial,
            dv_stride_batch,
            dv_stride_token,
            dv_stride_head,
            dv_stride_dim,
            stride_batch,
            stride_token,
            stride_head,
            stride_dim,
            cos_ptr,
            sin_ptr,
            positions_ptr,
            positions_stride_batch,
            positions_stride_token,
            program - q_programs - k_programs,
            tl.num_programs(0) - q_programs - k_programs,
            batches,
            seq_len,
            table_len,
            offset,
            eps,
            weight_offset,
            K_HEADS,
            ALL_HEADS,
            HEAD_DIM,
            False,
            NEED_DW,
            HAS_POSITIONS,
            EVEN,
            BLOCK_TOKENS,
            BLOCK_HEADS,
            BLOCK_HALF,
        )


@jit
def sum_weight_gradients_kernel(
    partial_ptr,
    dq_weight_ptr,
    dk_weight_ptr,
    q_programs,
    k_programs,
    HEAD_DIM: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds the partials of one weight, the second grid axis, in an order that depends on the launch alone."""
    of_k = tl.program_id(1)
    first = of_k * q_programs
    end = q_programs + of_k * k_programs
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_PARTIALS, BLOCK_N], tl.float32)
    for start in range(first, end, BLOCK_PARTIALS):
        row = start + tl.arange(0, BLOCK_PARTIALS)[:, None]
        total += tl.load(partial_ptr + row * HEAD_DIM + col, mask=(row < end) & (col < HEAD_DIM), other=0.0)
    dw = tl.sum(total, 0, keep_dims=True)
    if of_k == 0:
        tl.store(dq_weight_ptr + col, dw.to(dq_weight_ptr.dtype.element_ty), mask=col < HEAD_DIM)
    else:
        tl.store(dk_weight_ptr + col, dw.to(dk_weight_ptr.dtype.element_ty), mask=col < HEAD_DIM)
