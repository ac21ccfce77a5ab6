"""Attention backward on Hopper, in Gluon, after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

Formulas as in portable.py, five products instead of seven: a program keeps 128 keys and values, two consumer
warpgroups with 64 of them each, and goes through the queries of all heads that share them:
    Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, so that Pᵀ and dSᵀ are left operands in registers: dV += Pᵀ·dO, dK += dSᵀ·Q;
    dS also goes to shared memory, where both consumers read all of it: each computes one half of dQ = dS·K, which is
    added to an fp32 buffer in device memory by TMA.
These additions come in any order: the last bits of dQ vary from run to run (dK, dV do not).

A kernel before it computes delta, zeroes the buffer, and writes lse2 and delta in whole blocks: a query that does not
exist or saw no key gets lse2 = +inf, which makes its probabilities 0 without a mask. One behind it casts dQ.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import device_profile, jit, tl
from fuselm.kernels.attention.hopper_common import (
    LOG2E,
    barrier_ring,
    fence_async_shared,
    flat_descriptor,
    gl,
    gluon_jit,
    load_rows,
    matrix,
    mbarrier,
    place_of,
    query_blocks,
    ring,
    rows_descriptor,
    store_rows,
    tile_and_head,
    tile_table,
    tma,
    tma_load,
    tma_reduce_add,
    tma_refusal,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fuselm.kernels.attention.tiles import load_tile, locate, store_tile
from fuselm.kernels.launch.attention_hopper import heads_a_section, hopper_backward_launch


@jit(do_not_specialize=["queries", "keys", "heads", "documents", "tiles"])
def _prepare_kernel(
    o_ptr, do_ptr, lse2_ptr, dlse2_ptr, cu_q_ptr, cu_k_ptr, padded_lse2_ptr, delta_ptr, dq_sum_ptr,
    o_batch, o_row, o_head, do_batch, do_row, do_head, dlse_batch, dlse_head, dlse_row,
    queries, keys, heads, documents, tiles,
    HAS_DLSE: tl.constexpr, PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of one block of queries and one head: delta, lse2 in whole blocks, zeros for dQ."""
    program = tl.program_id(0)
    tile = program % tiles
    instance = (program // tiles).to(tl.int64)
    head = instance % heads
    batch = instance // heads
    first, rows, row_begin, _others, _other_begin = locate(
        tile, cu_q_ptr, cu_k_ptr, queries, keys, documents, PACKED, BLOCK_M
    )
    row = first + tl.arange(0, BLOCK_M)
    col = tl.arange(0, HEAD_DIM)
    begin = row_begin.to(tl.int64)
    o_base = o_ptr + batch * o_batch + head * o_head + begin * o_row
    do_base = do_ptr + batch * do_batch + head * do_head + begin * do_row
    o = load_tile(o_base, row, o_row, col, rows, True, HEAD_DIM, HEAD_DIM, True)
    do = load_tile(do_base, row, do_row, col, rows, True, HEAD_DIM, HEAD_DIM, True)
    delta = tl.sum(o * do, 1)
    lse2 = tl.load(lse2_ptr + instance * queries + begin + row, mask=row < rows, other=float("-inf"))
    if HAS_DLSE:
        dlse2 = dlse2_ptr + batch * dlse_batch + head * dlse_head + (begin + row) * dlse_row
        delta -= tl.load(dlse2, mask=row < rows, other=0.0).to(tl.float32) * 1.4426950408889634
    # Merging formulas send NaN into an lse2 of -inf; such a row has no probabilities for it to act on.
    blind = lse2 == float("-inf")
    padded = (instance * tiles + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(delta_ptr + padded, tl.where(blind, 0.0, delta))
    tl.store(padded_lse2_ptr + padded, tl.where(blind, float("inf"), lse2))
    zeros = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    tl.store(dq_sum_ptr + padded[:, None] * HEAD_DIM + col[None, :], zeros)


@jit(do_not_specialize=["queries", "keys", "heads", "documents", "tiles"])
def _finish_kernel(
    dq_sum_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, dq_batch, dq_row, dq_head,
    queries, keys, heads, documents, tiles,
    PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of one block of queries and one head: dQ in its dtype."""
    program = tl.program_id(0)
    tile = program % tiles
    instance = (program // tiles).to(tl.int64)
    first, rows, row_begin, _others, _other_begin = locate(
        tile, cu_q_ptr, cu_k_ptr, queries, keys, documents, PACKED, BLOCK_M
    )
    row = first + tl.arange(0, BLOCK_M)
    col = tl.arange(0, HEAD_DIM)
    padded = (instance * tiles + tile) * BLOCK_M + tl.arange(0, BLOCK_M)
    dq = tl.load(dq_sum_ptr + padded[:, None] * HEAD_DIM + col[None, :])
    dq_base = dq_ptr + instance // heads * dq_batch + instance % heads * dq_head + row_begin.to(tl.int64) * dq_row
    store_tile(dq_base, row, dq_row, col, rows, dq, HEAD_DIM, False)


@gluon_jit
def _locate_keys(position, table_ptr, problem, PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                 BLOCK_M: tl.constexpr):  # fmt: skip
    """What a program works on; both partitions compute it."""
    queries, keys, _kv_heads, _group, instances, section, tiles, _query_tiles, window = problem
    tile, instance = tile_and_head(position, instances, section, tiles)
    # The first keys meet the most queries: they go first.
    first, rows, begin, others, other_begin, document = place_of(
        tiles - 1 - tile, table_ptr, keys, queries, PACKED, 128
    )
    block_begin, full_begin, full_end, count = query_blocks(first, rows, others, window, CAUSAL, WINDOW, 128, BLOCK_M)
    return instance, first, rows, begin, others, other_begin, document, block_begin, full_begin, full_end, count


@gluon_jit
def _produce(
    buffers, barriers, problem, q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc, table_ptr,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    q_s, do_s, k_s, v_s, lse2_s, delta_s, _ds_s, _dq_s = buffers
    kv_full, q_full, q_empty, do_full, do_empty, _ds_full, _idle = barriers
    _queries, _keys, kv_heads, group, _instances, _section, _tiles, query_tiles, _window = problem
    instance, first, rows, begin, others, other_begin, document, block_begin, _full_begin, _full_end, count = (
        _locate_keys(gl.program_id(0), table_ptr, problem, PACKED, CAUSAL, WINDOW, BLOCK_M)
    )
    batch = instance // kv_heads
    kv_head = instance % kv_heads
    for c in gl.static_range(2):
        mbarrier.expect(kv_full.index(c), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        load_rows(k_desc, batch, begin, rows, first + 64 * c, kv_head, kv_full.index(c), k_s.index(c), PACKED)
        load_rows(v_desc, batch, begin, rows, first + 64 * c, kv_head, kv_full.index(c), v_s.index(c), PACKED)
    statistics = other_begin // BLOCK_M + document + block_begin  # block in the padded arrays
    done = count * 0
    for member in range(group):
        head = kv_head * group + member
        padded = ((batch * kv_heads * group + head) * query_tiles + statistics) * BLOCK_M
        for block in range(count):
            row = (block_begin + block) * BLOCK_M
            slot = done % STAGES
            phase = done // STAGES & 1
            mbarrier.wait(q_empty.index(slot), phase ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + 8 * BLOCK_M)
            tma_load(lse2_desc, [padded + block * BLOCK_M], q_full.index(slot), lse2_s.index(slot))
            tma_load(delta_desc, [padded + block * BLOCK_M], q_full.index(slot), delta_s.index(slot))
            load_rows(q_desc, batch, other_begin, others, row, head, q_full.index(slot), q_s.index(slot), PACKED)
            mbarrier.wait(do_empty.index(slot), phase ^ 1)
            mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes)
            load_rows(do_desc, batch, other_begin, others, row, head, do_full.index(slot), do_s.index(slot), PACKED)
            done += 1


@gluon_jit
def _add_dq(dq_desc, buffer, dq, row, ME: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Adds a consumer's half of a block of dQ, whose first row in the padded array is `row`, to what is there."""
    tma.store_wait(0)  # the block before has left the buffer
    buffer.store(dq)
    fence_async_shared()
    if HEAD_DIM == 128:
        tma_reduce_add(dq_desc, [row, 64 * ME], buffer)
    else:
        tma_reduce_add(dq_desc, [row + 64 * ME, 0], buffer)


@gluon_jit
def _consume(
    buffers, barriers, problem, dq_desc, dk_desc, dv_desc, table_ptr, scale, score_scale,
    ME: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, DEFERRED: tl.constexpr,
):  # fmt: skip
    q_s, do_s, k_s, v_s, lse2_s, delta_s, ds_s, dq_s = buffers
    kv_full, q_full, q_empty, do_full, do_empty, ds_full, idle = barriers
    _queries, _keys, kv_heads, group, _instances, _section, _tiles, query_tiles, window = problem
    dtype: tl.constexpr = dk_desc.dtype
    scores: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    gradient: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    half: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: tl.constexpr = gl.DotOperandLayout(0, gradient, 2)
    instance, first, rows, begin, others, other_begin, document, block_begin, full_begin, full_end, count = (
        _locate_keys(gl.program_id(0), table_ptr, problem, PACKED, CAUSAL, WINDOW, BLOCK_M)
    )
    batch = instance // kv_heads
    kv_head = instance % kv_heads
    k = matrix(k_s.index(ME))
    v = matrix(v_s.index(ME))
    dq_half = dq_s.index(ME)
    # A key sees queries [low, high); one that does not exist, none.
    key = first + 64 * ME + gl.arange(0, 64, gl.SliceLayout(1, scores))
    low = gl.where(key < rows, 0, 1 << 30)
    high = key
    if CAUSAL:
        low = gl.maximum(low, key - (rows - others))
    if WINDOW:
        high = key + (others - rows + window)
    # Zeros that the compiler cannot see through: if it knew that a thread's two rows of -delta are equal, it would copy
    # one to the other between the products' fence and the products, which makes ptxas wait there.
    zero = gl.inline_asm_elementwise("mov.f32 $0, 0f00000000;", "=f,r", [key], dtype=gl.float32, is_pure=True, pack=1)
    no_scores = gl.zeros([64, BLOCK_M], gl.float32, scores)
    no_half = gl.zeros([64, 64], gl.float32, half)
    dk = gl.zeros([64, HEAD_DIM], gl.float32, gradient)
    dv = gl.zeros([64, HEAD_DIM], gl.float32, gradient)
    statistics = other_begin // BLOCK_M + document
    mbarrier.wait(kv_full.index(ME), 0)
    # One loop over the blocks of all heads of the group. With DEFERRED, dQ of a block leaves the registers in the next
    # pass, beside a product of that pass; the first pass adds zeros.
    block = block_begin
    padded = ((instance * group) * query_tiles + statistics) * BLOCK_M
    dq = gl.zeros([64, 64], gl.float32, half)
    dq_row = padded + block * BLOCK_M
    for done in range(group * count):
        slot = done % STAGES  # pyright: ignore[reportOperatorIssue]
        phase = done // STAGES & 1
        mbarrier.wait(q_full.index(slot), phase)
        q = matrix(q_s.index(slot))
        # dP starts from -delta instead of 0: the registers of delta are those of the sum.
        dp = zero[:, None] - delta_s.index(slot).load(gl.SliceLayout(0, scores))[None, :]
        s = warpgroup_mma(k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        if DEFERRED:
            _add_dq(dq_desc, dq_half, dq, dq_row, ME, HEAD_DIM)
        mbarrier.wait(do_full.index(slot), phase)
        do = matrix(do_s.index(slot))
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        lse2 = lse2_s.index(slot).load(gl.SliceLayout(0, scores))
        p = gl.exp2(s * score_scale - lse2[None, :])
        edge = block < full_begin
        edge = edge | (block >= full_end)
        if edge:
            # As in the forward kernel: a thread's columns are constants but for their bits 1 and 2.
            column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores))[None, :]
            row = block * BLOCK_M
            p = gl.where((column & -7) >= (low - row)[:, None] - (column & 6), p, 0.0)
            if WINDOW:
                p = gl.where((column & -7) < (high - row)[:, None] - (column & 6), p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), left, assert_trivial=True), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * dp).to(dtype)
        dk = warpgroup_mma(gl.convert_layout(ds, left, assert_trivial=True), q, dk, is_async=True)
        # Two buffers: who writes this one has seen the other consumer at the block before, which it reaches only
        # after its product out of this buffer.
        pair = done & 1
        ds_s.index(2 * pair + ME).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(pair), count=1)
        mbarrier.wait(ds_full.index(pair), done // 2 & 1)
        ds_0 = ds_s.index(2 * pair)
        ds_1 = ds_s.index(2 * pair + 1)
        k_0 = matrix(k_s.index(0))
        k_1 = matrix(k_s.index(1))
        if HEAD_DIM == 128:  # a half of the columns each
            k_0 = k_0.slice(64 * ME, 64, 1)
            k_1 = k_1.slice(64 * ME, 64, 1)
        if BLOCK_M == 128:  # a half of the queries each
            ds_0 = ds_0.slice(64 * ME, 64, 1)
            ds_1 = ds_1.slice(64 * ME, 64, 1)
        dq = warpgroup_mma(ds_0.permute((1, 0)), k_0, no_half, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds_1.permute((1, 0)), k_1, dq, is_async=True)
        dv = warpgroup_mma_wait(3, deps=(dv,))
        mbarrier.arrive(do_empty.index(slot), count=1)
        dk = warpgroup_mma_wait(2, deps=(dk,))
        mbarrier.arrive(q_empty.index(slot), count=1)
        dq_row = padded + block * BLOCK_M
        block += 1
        if block == block_begin + count:  # on to the next head
            block = block_begin
            padded += query_tiles * BLOCK_M
        # Scaled here rather than at the end: ptxas would wait for the next product before it lets the registers of this
        # one out; those of a result of other arithmetic it lets go.
        dq = warpgroup_mma_wait(0, deps=(dq,)) * scale
        if not DEFERRED:
            _add_dq(dq_desc, dq_half, dq, dq_row, ME, HEAD_DIM)
    if DEFERRED:
        if count > 0:
            _add_dq(dq_desc, dq_half, dq, dq_row, ME, HEAD_DIM)
    v.store(dv.to(dtype))
    fence_async_shared()
    store_rows(dv_desc, batch, begin, rows, first + 64 * ME, kv_head, v_s.index(ME), PACKED)
    mbarrier.arrive(idle.index(0), count=1)
    mbarrier.wait(idle.index(0), 0)  # the other consumer's last product has read these keys
    k.store((dk * scale).to(dtype))
    fence_async_shared()
    store_rows(dk_desc, batch, begin, rows, first + 64 * ME, kv_head, k_s.index(ME), PACKED)
    tma.store_wait(0)


@gluon_jit(
    do_not_specialize=["queries", "keys", "kv_heads", "group", "instances", "section", "tiles", "query_tiles", "window"]
)
def _hopper_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc, dq_desc, dk_desc, dv_desc, table_ptr,
    queries, keys, kv_heads, group, instances, section, tiles, query_tiles, window, scale, score_scale,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr, DEFERRED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = q_desc.dtype
    q_s = ring(q_desc, STAGES)
    do_s = ring(do_desc, STAGES)
    k_s = ring(k_desc, 2)
    v_s = ring(v_desc, 2)
    lse2_s = ring(lse2_desc, STAGES)
    delta_s = ring(delta_desc, STAGES)
    ds_layout: tl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], dtype)
    ds_s = gl.allocate_shared_memory(dtype, [4, 64, BLOCK_M], ds_layout)
    dq_s = ring(dq_desc, 2)
    kv_full = barrier_ring(2, 1)
    q_full = barrier_ring(STAGES, 1)
    q_empty = barrier_ring(STAGES, 2)
    do_full = barrier_ring(STAGES, 1)
    do_empty = barrier_ring(STAGES, 2)
    ds_full = barrier_ring(2, 2)
    idle = barrier_ring(1, 2)
    buffers = (q_s, do_s, k_s, v_s, lse2_s, delta_s, ds_s, dq_s)
    barriers = (kv_full, q_full, q_empty, do_full, do_empty, ds_full, idle)
    problem = (queries, keys, kv_heads, group, instances, section, tiles, query_tiles, window)
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (buffers, barriers, problem, dq_desc, dk_desc, dv_desc, table_ptr, scale, score_scale,
                        0, PACKED, CAUSAL, WINDOW, BLOCK_M, HEAD_DIM, STAGES, DEFERRED)),
            (_consume, (buffers, barriers, problem, dq_desc, dk_desc, dv_desc, table_ptr, scale, score_scale,
                        1, PACKED, CAUSAL, WINDOW, BLOCK_M, HEAD_DIM, STAGES, DEFERRED)),
            (_produce, (buffers, barriers, problem, q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc, table_ptr,
                        PACKED, CAUSAL, WINDOW, BLOCK_M, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Strides of batch, row and head of a (batch, rows, heads, head_dim) tensor."""
    return x.stride(0), x.stride(1), x.stride(2)


def hopper_backward(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the three backward kernels; arguments and results as those of `portable_backward`.

    What they do not take is kept from them by `hopper_refusal`.
    """
    dout = dout if tma_refusal("dout", dout) is None else dout.contiguous()
    out = out if out.stride(-1) == 1 else out.contiguous()
    lse2 = lse2.contiguous()
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    launch = hopper_backward_launch(head_dim, device_profile(q.device))
    block_m, block_n = launch.block_m, launch.block_n
    packed = cu_seqlens_q is not None
    documents = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    query_tiles = queries // block_m + documents + 1 if packed else -(-queries // block_m)
    padded_rows = batch * heads * query_tiles * block_m
    fp32 = {"dtype": torch.float32, "device": q.device}
    padded_lse2, delta = torch.empty((2, padded_rows), **fp32)
    dq_sum = torch.empty((padded_rows, head_dim), **fp32)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    given = lse2 if dlse2 is None else dlse2
    blocks = (queries, keys, heads, documents, query_tiles)
    with torch.cuda.device_of(q):
        _prepare_kernel[(query_tiles * heads * batch,)](
            out, dout, lse2, given, cu_seqlens_q, cu_seqlens_k, padded_lse2, delta, dq_sum,
            *_strides(out), *_strides(dout), *given.stride(), *blocks,
            HAS_DLSE=dlse2 is not None, PACKED=packed, HEAD_DIM=head_dim, BLOCK_M=block_m, num_warps=4,
        )  # fmt: skip
        table, tiles = tile_table(cu_seqlens_k, cu_seqlens_q, keys, queries, block_n)
        instances = batch * kv_heads
        section = heads_a_section(2 * group * queries * head_dim * q.element_size(), instances, launch.section_bytes)
        _hopper_backward_kernel[(instances * tiles,)](
            rows_descriptor(q, block_m, packed),
            rows_descriptor(k, 64, packed),
            rows_descriptor(v, 64, packed),
            rows_descriptor(dout, block_m, packed),
            flat_descriptor(padded_lse2, [block_m]),
            flat_descriptor(delta, [block_m]),
            flat_descriptor(dq_sum, [64, 64]),
            rows_descriptor(dk, 64, packed),
            rows_descriptor(dv, 64, packed),
            lse2 if table is None else table,
            queries, keys, kv_heads, group, instances, section, tiles, query_tiles, min(window, max(keys, 1)), scale,
            scale * LOG2E,
            PACKED=packed, CAUSAL=causal, WINDOW=window > 0, BLOCK_M=block_m, HEAD_DIM=head_dim,
            STAGES=launch.stages, DEFERRED=launch.deferred, num_warps=4, maxnreg=168,
        )  # fmt: skip
        _finish_kernel[(query_tiles * heads * batch,)](
            dq_sum, dq, cu_seqlens_q, cu_seqlens_k, *_strides(dq), *blocks,
            PACKED=packed, HEAD_DIM=head_dim, BLOCK_M=block_m, num_warps=4,
        )  # fmt: skip
    return dq, dk, dv
