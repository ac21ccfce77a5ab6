"""Attention in portable Triton, after FlashAttention-2 (Dao 2023, arXiv:2307.08691).

Forward, a tile of queries over tiles of keys, scores in units of log2(e):
    S = Q·Kᵀ·scale (softcap: c·tanh(S/c)); m = running row maximum; P = exp2(S - m); l = running row sum of P
    O = Σ P·V / l                          lse2 = log2(l) + m (the natural lse is lse2·ln 2)
Backward, P = exp2(S - lse2), with a gradient for O and one for lse2:
    delta = rowsum(O·dO) - dlse2·log2(e)   dP = dO·Vᵀ              dS = P·(dP - delta)·(1 - tanh²(S/c) with a softcap)
    dV = Σ Pᵀ·dO                           dK = Σ dSᵀ·Q·scale      dQ = Σ dS·K·scale

Saved: q, k, v, O and lse2 (4 bytes a query and head; in the scores' own units, so that P loses nothing to a
conversion). Three backward kernels: delta; dK and dV for a tile of keys, over the queries of all heads that share it;
dQ for a tile of queries. S and dP are computed twice (7 products instead of 5),
and in return nothing is added across programs: every gradient element is one fp32 sum in a fixed order, so the results
have the same bits in every run.

Bytes that must move for elements of size s: forward (2·Lq·Hq + 2·Lk·Hkv)·D·s, backward (4·Lq·Hq + 4·Lk·Hkv)·D·s; from
some hundred keys on, arithmetic is the bound: 4·D operations forward and 10·D backward for each visible pair of query
and key, and head.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import INTERPRET, device_profile, jit, tl
from fuselm.kernels.attention.tiles import (
    capped_scores,
    edge_count,
    key_range,
    load_tile,
    locate,
    query_range,
    store_tile,
    tanh,
    visible,
)
from fuselm.kernels.launch.attention import forward_launch, key_value_launch, padded_head_dim, query_launch

_LOG2E = 1.4426950408889634
_DELTA_ROWS = 64  # rows a program of the delta kernel; it only streams, so anything that fills a warp's loads will do


@jit
def _forward_step(
    acc, row_max, row_sum, q, k_base, v_base, start, k_stride, v_stride, row, col, keys, shift, window, score_scale,
    cap_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    key = start + tl.arange(0, BLOCK_N)
    k = load_tile(k_base, key, k_stride, col, keys, MASKED, HEAD_DIM, BLOCK_D, UPCAST)  # [N, D]
    products = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
    if SOFTCAP:
        products = tanh(products * score_scale)
        score_scale = cap_scale
    if MASKED:
        mask = visible(row[:, None], key[None, :], keys, shift, window, CAUSAL, WINDOW)
        products = tl.where(mask, products, float("-inf"))
    # The scale is positive, so the maximum may be taken before it: scaling and subtracting then are one instruction.
    new_max = tl.maximum(row_max, tl.max(products, 1) * score_scale)
    offset = new_max
    if MASKED:  # a row that has seen no key yet: -inf minus -inf would be NaN
        offset = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(products * score_scale - offset[:, None])
    decay = tl.exp2(row_max - offset)
    row_sum = row_sum * decay + tl.sum(p, 1)
    v = load_tile(v_base, key, v_stride, col, keys, MASKED, HEAD_DIM, BLOCK_D, UPCAST)  # [N, D]
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@jit
def _attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, cu_q_ptr, cu_k_ptr,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
    queries, keys, heads, group, documents, tiles, window, score_scale, cap_scale,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    score_scale = tl.cast(score_scale, tl.float32)
    cap_scale = tl.cast(cap_scale, tl.float32)
    program = tl.program_id(0)
    # One head's tiles run side by side, so its keys and values are read from L2; the longest causal tile goes first.
    tile = tiles - 1 - program % tiles
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    first, rows, row_begin, others, other_begin = locate(
        tile, cu_q_ptr, cu_k_ptr, queries, keys, documents, PACKED, BLOCK_M
    )
    if first >= rows:
        return
    q_base = q_ptr + batch * q_batch + head * q_head + row_begin.to(tl.int64) * q_row
    o_base = o_ptr + batch * o_batch + head * o_head + row_begin.to(tl.int64) * o_row
    k_base = k_ptr + batch * k_batch + head // group * k_head + other_begin.to(tl.int64) * k_row
    v_base = v_ptr + batch * v_batch + head // group * v_head + other_begin.to(tl.int64) * v_row
    row = first + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    q = load_tile(q_base, row, q_row, col, rows, True, HEAD_DIM, BLOCK_D, UPCAST)  # [M, D]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    shift = others - rows
    begin, full_begin, full_end, end = key_range(first, rows, others, shift, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    for start in range(full_begin, full_end, BLOCK_N):
        acc, row_max, row_sum = _forward_step(
            acc, row_max, row_sum, q, k_base, v_base, start, k_row, v_row, row, col, others, shift, window, score_scale,
            cap_scale,
            False, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_N, BLOCK_D, UPCAST,
        )  # fmt: skip
    front, edges = edge_count(begin, full_begin, full_end, end, BLOCK_N)
    for edge in range(edges):
        start = tl.where(edge < front, begin + edge * BLOCK_N, full_end + (edge - front) * BLOCK_N)
        acc, row_max, row_sum = _forward_step(
            acc, row_max, row_sum, q, k_base, v_base, start, k_row, v_row, row, col, others, shift, window, score_scale,
            cap_scale,
            True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_N, BLOCK_D, UPCAST,
        )  # fmt: skip
    seen = row_sum > 0.0
    acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
    lse2 = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
    store_tile(o_base, row, o_row, col, rows, acc, HEAD_DIM, UPCAST)
    lse2_base = lse2_ptr + (batch * heads + head) * queries + row_begin
    tl.store(lse2_base + row, lse2, mask=row < rows)


@jit
def _attention_delta_kernel(
    o_ptr, do_ptr, lse2_ptr, dlse2_ptr, delta_ptr,
    o_batch, o_row, o_head, do_batch, do_row, do_head, dlse_batch, dlse_head, dlse_row, queries, heads, tiles,
    HAS_DLSE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    row = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    o_base = o_ptr + batch * o_batch + head * o_head
    do_base = do_ptr + batch * do_batch + head * do_head
    o = load_tile(o_base, row, o_row, col, queries, True, HEAD_DIM, BLOCK_D, True)
    do = load_tile(do_base, row, do_row, col, queries, True, HEAD_DIM, BLOCK_D, True)
    delta = tl.sum(o * do, 1)
    rows = (batch * heads + head) * queries + row
    lse2 = tl.load(lse2_ptr + rows, mask=row < queries, other=float("-inf"))
    if HAS_DLSE:
        dlse2 = dlse2_ptr + batch * dlse_batch + head * dlse_head + row.to(tl.int64) * dlse_row
        delta -= tl.load(dlse2, mask=row < queries, other=0.0).to(tl.float32) * 1.4426950408889634
    # Merging formulas send NaN into an lse2 of -inf; such a row has no probabilities for it to act on.
    tl.store(delta_ptr + rows, tl.where(lse2 == float("-inf"), 0.0, delta), mask=row < queries)


@jit
def _key_value_step(
    dk, dv, k, v, q_base, do_base, lse2_base, delta_base, start, q_stride, do_stride, key, col, queries, keys, shift,
    window,
    score_scale, cap_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = start + tl.arange(0, BLOCK_M)
    q = load_tile(q_base, row, q_stride, col, queries, MASKED, HEAD_DIM, BLOCK_D, UPCAST)  # [M, D]
    # A query that is not there, and one that saw no key, get lse2 = +inf: all its probabilities come out as 0.
    if MASKED:
        lse2 = tl.load(lse2_base + row, mask=row < queries, other=float("inf"))
        delta = tl.load(delta_base + row, mask=row < queries, other=0.0)
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
    else:
        lse2 = tl.load(lse2_base + row)
        delta = tl.load(delta_base + row)
    scores, slope = capped_scores(
        tl.dot(k, tl.trans(q), input_precision="ieee"), score_scale, cap_scale, SOFTCAP
    )  # [N, M]
    if MASKED:
        mask = visible(row[None, :], key[:, None], keys, shift, window, CAUSAL, WINDOW)
        scores = tl.where(mask, scores, float("-inf"))
    p = tl.exp2(scores - lse2[None, :])
    do = load_tile(do_base, row, do_stride, col, queries, MASKED, HEAD_DIM, BLOCK_D, UPCAST)  # [M, D]
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")  # [N, M]
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    ds = p * (dp - delta[None, :])
    if SOFTCAP:
        ds *= slope
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@jit
def _attention_key_value_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head, dk_batch, dk_row,
    dk_head,
    queries, keys, kv_heads, group, documents, tiles, window, scale, score_scale, cap_scale,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    score_scale = tl.cast(score_scale, tl.float32)
    cap_scale = tl.cast(cap_scale, tl.float32)
    program = tl.program_id(0)
    head = (program // tiles % kv_heads).to(tl.int64)
    batch = (program // tiles // kv_heads).to(tl.int64)
    first, rows, row_begin, others, other_begin = locate(  # rows are keys here, others are queries
        program % tiles, cu_k_ptr, cu_q_ptr, keys, queries, documents, PACKED, BLOCK_N
    )
    if first >= rows:
        return
    key = first + tl.arange(0, BLOCK_N)
    col = tl.arange(0, BLOCK_D)
    k_base = k_ptr + batch * k_batch + head * k_head + row_begin.to(tl.int64) * k_row
    v_base = v_ptr + batch * v_batch + head * v_head + row_begin.to(tl.int64) * v_row
    k = load_tile(k_base, key, k_row, col, rows, True, HEAD_DIM, BLOCK_D, UPCAST)  # [N, D]
    v = load_tile(v_base, key, v_row, col, rows, True, HEAD_DIM, BLOCK_D, UPCAST)  # [N, D]
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    shift = rows - others
    begin, full_begin, full_end, end = query_range(first, rows, others, shift, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    front, edges = edge_count(begin, full_begin, full_end, end, BLOCK_M)
    # The query heads that share these keys and their tiles form one flat loop, so that loads run ahead from head to
    # head.
    q_base = q_ptr + batch * q_batch + head * group * q_head + other_begin.to(tl.int64) * q_row
    do_base = do_ptr + batch * do_batch + head * group * do_head + other_begin.to(tl.int64) * do_row
    statistics = (batch * kv_heads + head) * group * queries + other_begin
    for step in range(edges * group):
        member = (step // edges).to(tl.int64)
        edge = step % edges
        start = tl.where(edge < front, begin + edge * BLOCK_M, full_end + (edge - front) * BLOCK_M)
        dk, dv = _key_value_step(
            dk, dv, k, v, q_base + member * q_head, do_base + member * do_head, lse2_ptr + statistics + member *
            queries,
            delta_ptr + statistics + member * queries, start, q_row, do_row, key, col, others, rows, shift, window,
            score_scale, cap_scale, True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_M, BLOCK_D, UPCAST,
        )  # fmt: skip
    full = (full_end - full_begin) // BLOCK_M
    for step in range(full * group):
        member = (step // full).to(tl.int64)
        start = full_begin + step % full * BLOCK_M
        dk, dv = _key_value_step(
            dk, dv, k, v, q_base + member * q_head, do_base + member * do_head, lse2_ptr + statistics + member *
            queries,
            delta_ptr + statistics + member * queries, start, q_row, do_row, key, col, others, rows, shift, window,
            score_scale, cap_scale, False, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_M, BLOCK_D, UPCAST,
        )  # fmt: skip
    gradient = batch * dk_batch + head * dk_head + row_begin.to(tl.int64) * dk_row
    store_tile(dk_ptr + gradient, key, dk_row, col, rows, dk * scale, HEAD_DIM, UPCAST)
    store_tile(dv_ptr + gradient, key, dk_row, col, rows, dv, HEAD_DIM, UPCAST)


@jit
def _query_step(
    dq, q, do, lse2, delta, k_base, v_base, start, k_stride, v_stride, row, col, keys, shift, window, score_scale,
    cap_scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    key = start + tl.arange(0, BLOCK_N)
    k = load_tile(k_base, key, k_stride, col, keys, MASKED, HEAD_DIM, BLOCK_D, UPCAST)  # [N, D]
    scores, slope = capped_scores(
        tl.dot(q, tl.trans(k), input_precision="ieee"), score_scale, cap_scale, SOFTCAP
    )  # [M, N]
    if MASKED:
        mask = visible(row[:, None], key[None, :], keys, shift, window, CAUSAL, WINDOW)
        scores = tl.where(mask, scores, float("-inf"))
    p = tl.exp2(scores - lse2[:, None])
    v = load_tile(v_base, key, v_stride, col, keys, MASKED, HEAD_DIM, BLOCK_D, UPCAST)  # [N, D]
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")  # [M, N]
    ds = p * (dp - delta[:, None])
    if SOFTCAP:
        ds *= slope
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@jit
def _attention_query_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, do_batch, do_row, do_head, dq_batch, dq_row,
    dq_head,
    queries, keys, heads, group, documents, tiles, window, scale, score_scale, cap_scale,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    scale = tl.cast(scale, tl.float32)
    score_scale = tl.cast(score_scale, tl.float32)
    cap_scale = tl.cast(cap_scale, tl.float32)
    program = tl.program_id(0)
    tile = tiles - 1 - program % tiles
    head = (program // tiles % heads).to(tl.int64)
    batch = (program // tiles // heads).to(tl.int64)
    first, rows, row_begin, others, other_begin = locate(
        tile, cu_q_ptr, cu_k_ptr, queries, keys, documents, PACKED, BLOCK_M
    )
    if first >= rows:
        return
    row = first + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    q_base = q_ptr + batch * q_batch + head * q_head + row_begin.to(tl.int64) * q_row
    do_base = do_ptr + batch * do_batch + head * do_head + row_begin.to(tl.int64) * do_row
    k_base = k_ptr + batch * k_batch + head // group * k_head + other_begin.to(tl.int64) * k_row
    v_base = v_ptr + batch * v_batch + head // group * v_head + other_begin.to(tl.int64) * v_row
    q = load_tile(q_base, row, q_row, col, rows, True, HEAD_DIM, BLOCK_D, UPCAST)  # [M, D]
    do = load_tile(do_base, row, do_row, col, rows, True, HEAD_DIM, BLOCK_D, UPCAST)  # [M, D]
    statistics = (batch * heads + head) * queries + row_begin + row
    lse2 = tl.load(lse2_ptr + statistics, mask=row < rows, other=float("inf"))
    lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)
    delta = tl.load(delta_ptr + statistics, mask=row < rows, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    shift = others - rows
    begin, full_begin, full_end, end = key_range(first, rows, others, shift, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    for start in range(full_begin, full_end, BLOCK_N):
        dq = _query_step(
            dq, q, do, lse2, delta, k_base, v_base, start, k_row, v_row, row, col, others, shift, window, score_scale,
            cap_scale,
            False, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_N, BLOCK_D, UPCAST,
        )  # fmt: skip
    front, edges = edge_count(begin, full_begin, full_end, end, BLOCK_N)
    for edge in range(edges):
        start = tl.where(edge < front, begin + edge * BLOCK_N, full_end + (edge - front) * BLOCK_N)
        dq = _query_step(
            dq, q, do, lse2, delta, k_base, v_base, start, k_row, v_row, row, col, others, shift, window, score_scale,
            cap_scale,
            True, CAUSAL, WINDOW, SOFTCAP, HEAD_DIM, BLOCK_N, BLOCK_D, UPCAST,
        )  # fmt: skip
    dq_base = dq_ptr + batch * dq_batch + head * dq_head + row_begin.to(tl.int64) * dq_row
    store_tile(dq_base, row, dq_row, col, rows, dq * scale, HEAD_DIM, UPCAST)


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, row and head of a (batch, rows, heads, head_dim) tensor."""
    return x.stride(0), x.stride(1), x.stride(2)


def _unit_last(x: torch.Tensor) -> torch.Tensor:
    """`x` with a contiguous last dimension: itself where it has one, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _tiles(rows: int, block: int, cu_seqlens: torch.Tensor | None) -> int:
    """Tiles that `locate` counts over `rows` rows: with documents an upper bound, whatever their lengths."""
    return -(-rows // block) if cu_seqlens is None else rows // block + cu_seqlens.shape[0]


def _score_scales(scale: float, softcap: float) -> tuple[float, float]:
    """Factors on the products, before and after the tanh, that give scores in units of log2(e)."""
    return (scale / softcap, softcap * _LOG2E) if softcap else (scale * _LOG2E, 1.0)


def _clamped(window: int, keys: int) -> int:
    """A window of more than all keys as one of all keys, so that positions plus the window stay within int32."""
    return min(window, max(keys, 1))


def _options(
    q: torch.Tensor, cu_seqlens: torch.Tensor | None, causal: bool, window: int, softcap: float
) -> dict[str, object]:
    """Compile-time arguments that all three tile kernels take."""
    return {
        "PACKED": cu_seqlens is not None,
        "CAUSAL": causal,
        "WINDOW": window > 0,
        "SOFTCAP": softcap > 0,
        "HEAD_DIM": q.shape[-1],
        "BLOCK_D": padded_head_dim(q.shape[-1]),
        "UPCAST": INTERPRET,
    }


def portable_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the forward kernel.

    Args:
        q: (batch, queries, heads, head_dim).
        k: (batch, keys, kv_heads, head_dim).
        v: like k.
        cu_seqlens_q: (documents + 1,) int32 or None; with documents, batch is 1.
        cu_seqlens_k: likewise, for the keys.
        causal: whether a query sees no key behind it.
        scale: factor on q·k.
        window: keys a query sees, 0 for all.
        softcap: bound of the scores, 0 for none.

    Returns:
        (out like q, contiguous; lse2 (batch, heads, queries) fp32, base 2).
    """
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)
    window = _clamped(window, k.shape[1])
    batch, queries, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse2 = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse2
    launch = forward_launch(q.shape[-1], q.dtype, device_profile(q.device))
    tiles = _tiles(queries, launch.block_m, cu_seqlens_q)
    documents = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    with torch.cuda.device_of(q):
        _attention_forward_kernel[(tiles * heads * batch,)](
            q, k, v, out, lse2, cu_seqlens_q, cu_seqlens_k,
            *_strides(q), *_strides(k), *_strides(v), *_strides(out),
            queries, k.shape[1], heads, heads // k.shape[2], documents, tiles, window, *_score_scales(scale, softcap),
            BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, num_warps=launch.num_warps, num_stages=launch.num_stages,
            **_options(q, cu_seqlens_q, causal, window, softcap),
        )  # fmt: skip
    return out, lse2


def portable_backward(
    dout: torch.Tensor,
    dlse2: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse2: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the three backward kernels.

    Args:
        dout: gradient of out, any strides.
        dlse2: gradient of lse2 (batch, heads, queries), any strides, or None.
        q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, window, softcap: as given to `portable_forward`.
        out, lse2: what it returned.
        deterministic: changes nothing: these kernels always give the same bits.

    Returns:
        (dq, dk, dv), contiguous, in the inputs' dtype.
    """
    q, k, v, dout, out = (_unit_last(x) for x in (q, k, v, dout, out))
    lse2 = lse2.contiguous()
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    window = _clamped(window, keys)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = torch.empty_like(lse2)
    profile = device_profile(q.device)
    options = _options(q, cu_seqlens_q, causal, window, softcap)
    documents = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    scales = (scale, *_score_scales(scale, softcap))
    with torch.cuda.device_of(q):
        if dq.numel():
            tiles = -(-queries // _DELTA_ROWS)
            given = lse2 if dlse2 is None else dlse2
            _attention_delta_kernel[(tiles * heads * batch,)](
                out, dout, lse2, given, delta,
                *_strides(out), *_strides(dout), *given.stride(), queries, heads, tiles,
                HAS_DLSE=dlse2 is not None, HEAD_DIM=head_dim, BLOCK_M=_DELTA_ROWS, BLOCK_D=options["BLOCK_D"],
                num_warps=4,
            )  # fmt: skip
        if dk.numel():
            launch = key_value_launch(head_dim, q.dtype, profile)
            tiles = _tiles(keys, launch.block_n, cu_seqlens_k)
            _attention_key_value_kernel[(tiles * kv_heads * batch,)](
                q, k, v, dout, lse2, delta, dk, dv, cu_seqlens_q, cu_seqlens_k,
                *_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_strides(dk),
                queries, keys, kv_heads, heads // kv_heads, documents, tiles, window, *scales,
                BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, num_warps=launch.num_warps,
                num_stages=launch.num_stages, **options,
            )  # fmt: skip
        if dq.numel():
            launch = query_launch(head_dim, q.dtype, profile)
            tiles = _tiles(queries, launch.block_m, cu_seqlens_q)
            _attention_query_kernel[(tiles * heads * batch,)](
                q, k, v, dout, lse2, delta, dq, cu_seqlens_q, cu_seqlens_k,
                *_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_strides(dq),
                queries, keys, heads, heads // kv_heads, documents, tiles, window, *scales,
                BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, num_warps=launch.num_warps,
                num_stages=launch.num_stages, **options,
            )  # fmt: skip
    return dq, dk, dv
