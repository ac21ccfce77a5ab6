"""Attention backward on Hopper, in Gluon, after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

Formulas as in portable.py, five products instead of seven: a program keeps 128 keys and values, two consumer
warpgroups with 64 of them each, and goes through the queries of all heads that share them:
    Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, so that Pᵀ and dSᵀ are left operands in registers: dV += Pᵀ·dO, dK += dSᵀ·Q;
    dS also goes to shared memory, where both consumers read all of it: each computes one half of dQ = dS·K, which is
    added to an fp32 buffer in device memory.
hopper_backward_rolling.py's kernel adds in any order: the last bits of dQ vary from run to run (dK, dV do not). The one
here, for deterministic calls, adds tile by tile (`wait_for_turn`), and the bits are the same in every run.

A kernel before it computes delta, zeroes the buffer, and writes lse2 and delta in whole blocks: a query that does not
exist or saw no key gets lse2 = +inf, which makes its probabilities 0 without a mask. One behind it casts dQ.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import device_profile, tl
from fuselm.kernels.attention.hopper_backward_rolling import STAGES, hopper_backward_rolling_kernel
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
    tma_refusal,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fuselm.kernels.attention.hopper_dq import (
    add_dq,
    attention_finish_kernel,
    attention_prepare_kernel,
    multiply_dq,
    pass_turn,
    wait_for_turn,
)
from fuselm.kernels.launch.attention_hopper import heads_a_section, hopper_backward_launch


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
    position, buffers, barriers, problem, q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc, table_ptr,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    q_s, do_s, k_s, v_s, lse2_s, delta_s, _ds_s = buffers
    kv_full, q_full, q_empty, do_full, _ds_full, _idle = barriers
    _queries, _keys, kv_heads, group, _instances, _section, _tiles, query_tiles, _window = problem
    instance, first, rows, begin, others, other_begin, document, block_begin, _full_begin, _full_end, count = (
        _locate_keys(position, table_ptr, problem, PACKED, CAUSAL, WINDOW, BLOCK_M)
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
            step = count - 1 - block
            row = (block_begin + step) * BLOCK_M
            slot = done % STAGES
            phase = done // STAGES & 1
            mbarrier.wait(q_empty.index(slot), phase ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + 8 * BLOCK_M)
            tma_load(lse2_desc, [padded + step * BLOCK_M], q_full.index(slot), lse2_s.index(slot))
            tma_load(delta_desc, [padded + step * BLOCK_M], q_full.index(slot), delta_s.index(slot))
            load_rows(q_desc, batch, other_begin, others, row, head, q_full.index(slot), q_s.index(slot), PACKED)
            mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes)
            load_rows(do_desc, batch, other_begin, others, row, head, do_full.index(slot), do_s.index(slot), PACKED)
            done += 1


@gluon_jit
def _consume(
    position, buffers, barriers, problem, outputs, table_ptr, scale, score_scale,
    ME: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    # dQ of a block is computed one block later: the consumers, which need each other's dS for it, need not keep step
    # then. At head_dim 64 there are no registers for that.
    LAGGED: tl.constexpr = HEAD_DIM == 128
    q_s, do_s, k_s, v_s, lse2_s, delta_s, ds_s = buffers
    dq_ptr, turns_ptr, dk_desc, dv_desc = outputs
    kv_full, q_full, q_empty, do_full, ds_full, idle = barriers
    _queries, _keys, kv_heads, group, _instances, _section, _tiles, query_tiles, window = problem
    dtype: tl.constexpr = dk_desc.dtype
    scores: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    gradient: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    half: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: tl.constexpr = gl.DotOperandLayout(0, gradient, 2)
    instance, first, rows, begin, others, other_begin, document, block_begin, full_begin, full_end, count = (
        _locate_keys(position, table_ptr, problem, PACKED, CAUSAL, WINDOW, BLOCK_M)
    )
    batch = instance // kv_heads
    kv_head = instance % kv_heads
    k = matrix(k_s.index(ME))
    v = matrix(v_s.index(ME))
    # Queries from `low` on see a key (which may be below 0), with a window those below low + window; one that does not
    # exist, none.
    key = first + 64 * ME + gl.arange(0, 64, gl.SliceLayout(1, scores))
    if CAUSAL:
        low = gl.where(key < rows, key - (rows - others), 1 << 30)
    else:
        low = gl.where(key < rows, 0, 1 << 30)
    # Zeros that the compiler cannot see through: if it knew that a thread's two rows of -delta are equal, it would copy
    # one to the other between the products' fence and the products, which makes ptxas wait there.
    zero = gl.inline_asm_elementwise("mov.f32 $0, 0f00000000;", "=f,r", [key], dtype=gl.float32, is_pure=True, pack=1)
    no_scores = gl.zeros([64, BLOCK_M], gl.float32, scores)
    dk = gl.zeros([64, HEAD_DIM], gl.float32, gradient)
    dv = gl.zeros([64, HEAD_DIM], gl.float32, gradient)
    statistics = other_begin // BLOCK_M + document
    mbarrier.wait(kv_full.index(ME), 0)
    # One loop over the blocks of all heads of the group. The tiles of keys add to a block of dQ in the order of their
    # numbers, which is that in which programs start: who waits, waits for one that runs. All begin at the last block:
    # those side by side come one after the other.
    tile = first // 128
    block = block_begin + count - 1
    before_end = block_begin
    before_begin, _begin, _end, before_count = query_blocks(
        first - 128, rows, others, window, CAUSAL, WINDOW, 128, BLOCK_M
    )
    if first > 0:
        before_end = before_begin + before_count  # the tile before adds to the blocks below
    padded = ((instance * group) * query_tiles + statistics) * BLOCK_M
    dq_row = padded + block * BLOCK_M
    # Not `= dq_row`: Triton takes a variable for unchanged by a loop that gives it the value it has, and two names of
    # one value have it at the loop's start (test_kernel_sources.py).
    added_row = padded + block * BLOCK_M
    turn = gl.where(block < before_end, tile, 0)
    if LAGGED:  # before the first block, dS is 0
        ds_s.index(ME).store(gl.zeros([64, BLOCK_M], dtype, scores))
        fence_async_shared()
        mbarrier.arrive(ds_full.index(0), count=1)
    for done in range(group * count):
        slot = done % STAGES  # pyright: ignore[reportOperatorIssue]
        phase = done // STAGES & 1
        mbarrier.wait(q_full.index(slot), phase)
        q = matrix(q_s.index(slot))
        # dP starts from -delta instead of 0: the registers of delta are those of the sum.
        dp = zero[:, None] - delta_s.index(slot).load(gl.SliceLayout(0, scores))[None, :]
        s = warpgroup_mma(k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(slot), phase)
        do = matrix(do_s.index(slot))
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        if LAGGED:  # while the products run: both take a way to the L2 cache and back
            pass_turn(turns_ptr, added_row, tile + 1, done > 1, ME, HEAD_DIM)
            wait_for_turn(turns_ptr, dq_row, turn, ME, HEAD_DIM)
            added_row = dq_row
        else:
            pass_turn(turns_ptr, dq_row, tile + 1, done > 0, ME, HEAD_DIM)
            turn = gl.where(block < before_end, tile, 0)
            wait_for_turn(turns_ptr, padded + block * BLOCK_M, turn, ME, HEAD_DIM)
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
                p = gl.where((column & -7) < (low - row + window)[:, None] - (column & 6), p, 0.0)
        dv = warpgroup_mma(gl.convert_layout(p.to(dtype), left, assert_trivial=True), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        ds = (p * dp).to(dtype)
        if LAGGED:
            # Keeps the compiler from computing dS behind the product below, which has no registers beside P and dP.
            ds = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [ds], dtype=ds.dtype, is_pure=False, pack=2)
        ds_left = gl.convert_layout(ds, left, assert_trivial=True)
        if LAGGED:
            # dQ of the block before. Its dS was complete when this pass began, or nearly so: the consumers need not
            # keep step, and one's softmax can meet the other's products.
            mbarrier.wait(ds_full.index(done & 1), done // 2 & 1)
            dq = multiply_dq(ds_s, k_s, done & 1, 0, half, ME, BLOCK_M, HEAD_DIM)
            dk = warpgroup_mma(ds_left, q, dk, is_async=True)
            ds_s.index(2 * (done + 1 & 1) + ME).store(ds)
            fence_async_shared()
            dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
            # Says two things: this dS is there, and the one before has been read.
            mbarrier.arrive(ds_full.index(done + 1 & 1), count=1)
            add_dq(dq_ptr, dq, dq_row, ME, HEAD_DIM)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            mbarrier.arrive(q_empty.index(slot), count=1)
        else:
            # Two buffers: who writes this one has seen the other consumer at the block before, which it reaches only
            # after its product out of this buffer.
            ds_s.index(2 * (done & 1) + ME).store(ds)
            fence_async_shared()
            mbarrier.arrive(ds_full.index(done & 1), count=1)
            mbarrier.wait(ds_full.index(done & 1), done // 2 & 1)
            dq = multiply_dq(ds_s, k_s, done & 1, 0, half, ME, BLOCK_M, HEAD_DIM)
            dk = warpgroup_mma(ds_left, q, dk, is_async=True)
            dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
            add_dq(dq_ptr, dq, padded + block * BLOCK_M, ME, HEAD_DIM)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            mbarrier.arrive(q_empty.index(slot), count=1)
        dq_row = padded + block * BLOCK_M
        turn = gl.where(block < before_end, tile, 0)
        block -= 1
        if block < block_begin:  # on to the next head
            block = block_begin + count - 1
            padded += query_tiles * BLOCK_M
    if LAGGED:
        pairs = group * count
        mbarrier.wait(ds_full.index(pairs & 1), pairs // 2 & 1)
        if count > 0:
            pass_turn(turns_ptr, added_row, tile + 1, pairs > 1, ME, HEAD_DIM)
            wait_for_turn(turns_ptr, dq_row, turn, ME, HEAD_DIM)
            dq = multiply_dq(ds_s, k_s, pairs & 1, 0, half, ME, BLOCK_M, HEAD_DIM)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            add_dq(dq_ptr, dq, dq_row, ME, HEAD_DIM)
    if count > 0:
        pass_turn(turns_ptr, dq_row, tile + 1, count > 0, ME, HEAD_DIM)
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
    q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc, dq_ptr, turns_ptr, dk_desc, dv_desc, table_ptr,
    queries, keys, kv_heads, group, instances, section, tiles, query_tiles, window, scale, score_scale,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
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
    kv_full = barrier_ring(2, 1)
    q_full = barrier_ring(STAGES, 1)
    q_empty = barrier_ring(STAGES, 2)
    do_full = barrier_ring(STAGES, 1)
    ds_full = barrier_ring(2, 2)
    idle = barrier_ring(1, 2)
    buffers = (q_s, do_s, k_s, v_s, lse2_s, delta_s, ds_s)
    barriers = (kv_full, q_full, q_empty, do_full, ds_full, idle)
    problem = (queries, keys, kv_heads, group, instances, section, tiles, query_tiles, window)
    outputs = (dq_ptr, turns_ptr, dk_desc, dv_desc)
    # Programs number themselves as they start, behind the turns of all pieces of dQ.
    pieces = instances * group * query_tiles * (BLOCK_M // 64) * (HEAD_DIM // 64)
    position = gl.atomic_add(turns_ptr + pieces, 1)
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (position, buffers, barriers, problem, outputs, table_ptr, scale, score_scale,
                        0, PACKED, CAUSAL, WINDOW, BLOCK_M, HEAD_DIM)),
            (_consume, (position, buffers, barriers, problem, outputs, table_ptr, scale, score_scale,
                        1, PACKED, CAUSAL, WINDOW, BLOCK_M, HEAD_DIM)),
            (_produce, (position, buffers, barriers, problem, q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc,
                        table_ptr, PACKED, CAUSAL, WINDOW, BLOCK_M)),
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
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launches the three backward kernels; arguments and results as those of `portable_backward`, but that dq has the
    same bits in every run only if `deterministic`.

    What they do not take is kept from them by `hopper_refusal`.
    """
    dout = dout if tma_refusal("dout", dout) is None else dout.contiguous()
    out = out if out.stride(-1) == 1 else out.contiguous()
    lse2 = lse2.contiguous()
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    profile = device_profile(q.device)
    packed = cu_seqlens_q is not None
    block_m = 8192 // head_dim  # dQ of a block is two tiles of 64 x 64, one a consumer
    documents = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    query_tiles = queries // block_m + documents + 1 if packed else -(-queries // block_m)
    padded_rows = batch * heads * query_tiles * block_m
    fp32 = {"dtype": torch.float32, "device": q.device}
    padded_lse2, delta = torch.empty((2, padded_rows), **fp32)
    dq_sum = torch.empty((padded_rows, head_dim), **fp32)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    # The last counts programs that have started, or tiles that were taken.
    turns = torch.empty(dq_sum.numel() // 4096 + 1 if deterministic else 1, dtype=torch.int32, device=q.device)
    given = lse2 if dlse2 is None else dlse2
    blocks = (queries, keys, heads, documents, query_tiles)
    with torch.cuda.device_of(q):
        attention_prepare_kernel[(query_tiles * heads * batch,)](
            out, dout, lse2, given, cu_seqlens_q, cu_seqlens_k, padded_lse2, delta, dq_sum, turns,
            *_strides(out), *_strides(dout), *given.stride(), *blocks,
            HAS_DLSE=dlse2 is not None, PACKED=packed, HEAD_DIM=head_dim, BLOCK_M=block_m, ORDERED=deterministic,
            num_warps=4,
        )  # fmt: skip
        table, tiles = tile_table(
            cu_seqlens_k, cu_seqlens_q, keys, queries, 128,
            by_work=not deterministic, queries=False, causal=causal, window=window,
        )  # fmt: skip
        instances = batch * kv_heads
        kernel, programs, section, choices = _hopper_backward_kernel, instances * tiles, instances, {}
        if not deterministic:
            launch = hopper_backward_launch(head_dim, keys, profile, packed)
            head_bytes = 2 * group * queries * head_dim * q.element_size()
            kernel, programs = hopper_backward_rolling_kernel, min(instances * tiles, profile.num_sms)
            section = heads_a_section(head_bytes, instances, launch.section_bytes)
            choices = {"HELD": launch.held}
        descriptors = (
            rows_descriptor(q, block_m, packed),
            rows_descriptor(k, 64, packed),
            rows_descriptor(v, 64, packed),
            rows_descriptor(dout, block_m, packed),
            flat_descriptor(padded_lse2, [block_m]),
            flat_descriptor(delta, [block_m]),
        )
        outputs = (dk, dv)
        if head_dim == 64 or deterministic:
            outputs = (rows_descriptor(dk, 64, packed), rows_descriptor(dv, 64, packed))
        outputs = (*outputs, lse2 if table is None else table)
        problem = (queries, keys, kv_heads, group, instances, section, tiles, query_tiles, min(window, max(keys, 1)))
        kernel[(programs,)](
            *descriptors, dq_sum, turns, *outputs, *problem, scale, scale * LOG2E,
            PACKED=packed, CAUSAL=causal, WINDOW=window > 0, BLOCK_M=block_m, HEAD_DIM=head_dim, **choices,
            num_warps=4, maxnreg=168,
        )  # fmt: skip
        attention_finish_kernel[(query_tiles * heads * batch,)](
            dq_sum, dq, cu_seqlens_q, cu_seqlens_k, *_strides(dq), *blocks, scale,
            PACKED=packed, HEAD_DIM=head_dim, BLOCK_M=block_m, num_warps=4,
        )  # fmt: skip
    return dq, dk, dv
