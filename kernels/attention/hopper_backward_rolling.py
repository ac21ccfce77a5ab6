"""Attention backward on Hopper without a pause between tiles; what is multiplied, hopper_backward.py says.

A program takes tile after tile. dQ of a block is computed one block later: the consumers, which need each other's dS
for it, need not keep step then. Keys and values have two buffers, so that those of the next tile arrive while this one
is multiplied, and dQ of a tile's last block is computed in the first pass of the next tile, from the keys of before:
between two tiles a consumer only puts dK and dV into a buffer, from which they leave by TMA while it goes on. At
head_dim 128 the two buffers of keys and values leave no room for that one: there they leave from the registers.
"""

from __future__ import annotations

from fuselm.kernels._triton import tl
from fuselm.kernels.attention.hopper_common import (
    barrier_ring,
    constexpr,
    fence_async_shared,
    gl,
    gluon_jit,
    load_rows,
    matrix,
    mbarrier,
    meet,
    note,
    noted,
    place_of,
    plan_ring,
    query_blocks,
    ring,
    store_rows,
    tile_and_head,
    tma,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fuselm.kernels.attention.hopper_dq import add_dq, multiply_dq

STAGES = constexpr(2)  # of queries; the waits below count on two
# Named barriers, two each: a block of queries has been read; a consumer's dS of a block is there.
READ = constexpr(8)
DS = constexpr(10)  # consumer 1: the two after these


@gluon_jit
def short_tiles_last(position, heads, section, tiles, HELD: tl.constexpr):
    """(tile, head) of a place, tile 0 the one with the most work. Sections of `section` heads one after the other, as
    in `tile_and_head`, but in each the longest tiles first, and without the shortest HELD eighths of the tiles: those
    of all heads come at the end. The last section takes the heads that would not fill one more. Programs then finish
    with short tiles, and at nearly the same time."""
    long = tiles - tiles * HELD // 8
    head = position * 0
    size = heads
    begin = heads * long
    tile = long
    if position < heads * long:
        last = heads // section - 1
        number = min(position // (section * long), last)
        head = number * section
        size = section
        if number == last:
            size = heads - head
        begin = head * long
        tile = long * 0
    order = (position - begin) // size
    return tile + order, head + position - begin - order * size


@gluon_jit
def _wait_for_read(known, blocks):
    """Waits until both consumers have read the first `blocks` blocks of queries, of which it is known of `known`.
    Gives of how many it is known then."""
    while known < blocks:
        meet(known & 1, READ, 288, True)
        known += 1
    return known


@gluon_jit
def _produce(
    buffers, barriers, problem, q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc, table_ptr, counter_ptr,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    q_s, do_s, k_s, v_s, lse2_s, delta_s, _ds_s, _out_s, plan = buffers
    plan_full, plan_empty, kv_full, q_full, do_full = barriers
    queries, keys, kv_heads, group, instances, section, tiles, query_tiles, window = problem
    number = gl.program_id(0) * 0  # tiles so far
    used = gl.program_id(0) * 0  # those that had blocks
    done = gl.program_id(0) * 0  # blocks so far
    passed = gl.program_id(0) * 0  # blocks before the last tile that had some
    read = gl.program_id(0) * 0  # blocks that both consumers have read
    position = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    while position < instances * tiles:
        # The first keys meet the most queries: they go first.
        if HELD > 0:
            tile, instance = short_tiles_last(position, instances, section, tiles, HELD)
        else:
            tile, instance = tile_and_head(position, instances, section, tiles)
            tile = tiles - 1 - tile
        first, rows, begin, others, other_begin, document = place_of(tile, table_ptr, keys, queries, PACKED, 128)
        block_begin, full_begin, full_end, count = query_blocks(
            first, rows, others, window, CAUSAL, WINDOW, 128, BLOCK_M
        )
        batch = instance // kv_heads
        kv_head = instance - batch * kv_heads
        statistics = other_begin // BLOCK_M + document  # block in the padded arrays
        slot = number & 1
        mbarrier.wait(plan_empty.index(slot), number // 2 & 1 ^ 1)
        note(plan, slot, 0, count)
        note(plan, slot, 1, batch)
        note(plan, slot, 2, kv_head)
        note(plan, slot, 3, first)
        note(plan, slot, 4, rows)
        note(plan, slot, 5, begin)
        note(plan, slot, 6, others)
        note(plan, slot, 7, block_begin)
        note(plan, slot, 8, full_begin)
        note(plan, slot, 9, full_end)
        note(plan, slot, 10, (instance * group * query_tiles + statistics) * BLOCK_M)
        mbarrier.arrive(plan_full.index(slot), count=1)
        number += 1
        if count > 0:
            pair = used & 1
            # The keys in this buffer are those of the tile before the last, and used until the first pass of the last
            # tile is over.
            if used > 1:
                read = _wait_for_read(read, passed + 1)
            for c in gl.static_range(2):
                full = kv_full.index(2 * pair + c)
                mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
                load_rows(k_desc, batch, begin, rows, first + 64 * c, kv_head, full, k_s.index(2 * pair + c), PACKED)
                load_rows(v_desc, batch, begin, rows, first + 64 * c, kv_head, full, v_s.index(2 * pair + c), PACKED)
            used += 1
            passed = done
        for member in range(group):
            head = kv_head * group + member
            padded = ((instance * group + member) * query_tiles + statistics + block_begin) * BLOCK_M
            for block in range(count):
                row = (block_begin + block) * BLOCK_M
                slot = done % STAGES
                read = _wait_for_read(read, done + 1 - STAGES)
                mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes + 8 * BLOCK_M)
                tma_load(lse2_desc, [padded + block * BLOCK_M], q_full.index(slot), lse2_s.index(slot))
                tma_load(delta_desc, [padded + block * BLOCK_M], q_full.index(slot), delta_s.index(slot))
                load_rows(q_desc, batch, other_begin, others, row, head, q_full.index(slot), q_s.index(slot), PACKED)
                mbarrier.expect(do_full.index(slot), do_desc.block_type.nbytes)
                load_rows(do_desc, batch, other_begin, others, row, head, do_full.index(slot), do_s.index(slot), PACKED)
                done += 1
        position = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    _wait_for_read(read, done)
    mbarrier.wait(plan_empty.index(number & 1), number // 2 & 1 ^ 1)
    note(plan, number & 1, 0, -1)
    mbarrier.arrive(plan_full.index(number & 1), count=1)


@gluon_jit
def _not_before(number):
    """The number, so that what is computed from it is not computed before the loop that this is in."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon_jit
def _store_registers(pointer, value, row, rows, stride, layout: tl.constexpr):
    """Stores a [64, head_dim] product from where it is in registers: the rows below `rows`, `stride` elements apart."""
    column = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    gl.store(pointer + row.to(gl.int64)[:, None] * stride + column[None, :], value, mask=(row < rows)[:, None])


@gluon_jit
def _consume(
    buffers, barriers, problem, outputs, scale, score_scale,
    ME: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    q_s, do_s, k_s, v_s, lse2_s, delta_s, ds_s, out_s, plan = buffers
    dq_ptr, dk_out, dv_out = outputs
    plan_full, plan_empty, kv_full, q_full, do_full = barriers
    _queries, keys_a_batch, kv_heads, group, _instances, _section, _tiles, query_tiles, window = problem
    dtype: tl.constexpr = ds_s.dtype
    scores: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    gradient: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    half: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    left: tl.constexpr = gl.DotOperandLayout(0, gradient, 2)
    no_scores = gl.zeros([64, BLOCK_M], gl.float32, scores)
    offsets = 64 * ME + gl.arange(0, 64, gl.SliceLayout(1, scores))
    # Zeros that the compiler cannot see through: if it knew that a thread's two rows of -delta are equal, it would copy
    # one to the other between the products' fence and the products, which makes ptxas wait there.
    zero = gl.inline_asm_elementwise(
        "mov.f32 $0, 0f00000000;", "=f,r", [offsets], dtype=gl.float32, is_pure=True, pack=1
    )
    number = gl.program_id(0) * 0  # tiles so far
    used = gl.program_id(0) * 0  # those that had blocks
    passed = gl.program_id(0) * 0  # blocks of the tiles before
    dq_row = gl.program_id(0) * 0
    # Before the first block, dS is 0.
    ds_s.index(ME).store(gl.zeros([64, BLOCK_M], dtype, scores))
    fence_async_shared()
    mbarrier.wait(plan_full.index(0), 0)
    count = noted(plan, 0, 0)
    while count >= 0:
        slot = number & 1
        first = noted(plan, slot, 3)
        rows = noted(plan, slot, 4)
        others = noted(plan, slot, 6)
        block_begin = noted(plan, slot, 7)
        full_begin = noted(plan, slot, 8)
        full_end = noted(plan, slot, 9)
        padded = noted(plan, slot, 10)
        # Queries from `low` on see a key (which may be below 0), with a window those below low + window; one that does
        # not exist, none.
        key = first + offsets
        if CAUSAL:
            low = gl.where(key < rows, key - (rows - others), 1 << 30)
        else:
            low = gl.where(key < rows, 0, 1 << 30)
        dk = gl.zeros([64, HEAD_DIM], gl.float32, gradient)
        dv = gl.zeros([64, HEAD_DIM], gl.float32, gradient)
        pair = used & 1
        block = block_begin
        if count > 0:
            mbarrier.wait(kv_full.index(2 * pair + ME), used // 2 & 1)
            if passed == 0:  # this consumer's keys are there, which a product with dS = 0 must not find full of NaN
                meet(passed & 1, DS + 2 * ME, 256, False)
                dq_row = padded + block * BLOCK_M
        for i in range(group * count):
            done = passed + i  # pyright: ignore[reportOperatorIssue]
            slot = done & 1
            phase = done >> 1 & 1
            # Or the addresses of keys and values, of which each product has its own, would spill.
            here = _not_before(pair)
            k = matrix(k_s.index(2 * here + ME))
            v = matrix(v_s.index(2 * here + ME))
            mbarrier.wait(q_full.index(slot), phase)
            q = matrix(q_s.index(slot))
            # dP starts from -delta instead of 0: the registers of delta are those of the sum.
            dp = zero[:, None] - delta_s.index(slot).load(gl.SliceLayout(0, scores))[None, :]
            s = warpgroup_mma(k, q.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            mbarrier.wait(do_full.index(slot), phase)
            do = matrix(do_s.index(slot))
            dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
            # Where there are registers for them, before the wait.
            if HEAD_DIM == 128:
                lse2 = lse2_s.index(slot).load(gl.SliceLayout(0, scores))
            s = warpgroup_mma_wait(1, deps=(s,))
            if HEAD_DIM == 64:
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
            # Keeps the compiler from computing dS behind the product below, which has no registers beside P and dP.
            ds = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [ds], dtype=ds.dtype, is_pure=False, pack=2)
            ds_left = gl.convert_layout(ds, left, assert_trivial=True)
            # dQ of the block before, which may be the last of the tile before. Its dS was complete when this pass
            # began, or nearly so: the consumers need not keep step, and one's softmax can meet the other's products.
            behind = (i == 0) & (used > 0)  # pyright: ignore[reportOperatorIssue]
            keys = gl.where(behind, pair ^ 1, pair)
            # A named barrier: ptxas moves arithmetic across it, but not across the loop that waits at an mbarrier, with
            # which the kernel takes 1.5 % longer at head_dim 128 and 2 to 15 at 64.
            meet(done & 1, DS + 2 - 2 * ME, 256, True)
            # dS is stored before the products at head_dim 64, behind them at 128: each was faster there.
            if HEAD_DIM == 64:
                ds_s.index(2 * (done + 1 & 1) + ME).store(ds)
                fence_async_shared()
            dq = multiply_dq(ds_s, k_s, done & 1, keys, half, ME, BLOCK_M, HEAD_DIM)
            dk = warpgroup_mma(ds_left, q, dk, is_async=True)
            if HEAD_DIM == 128:
                ds_s.index(2 * (done + 1 & 1) + ME).store(ds)
                fence_async_shared()
            dq, dv = warpgroup_mma_wait(1, deps=(dq, dv))
            # Says two things: this dS is there, and the one before has been read.
            meet(done + 1 & 1, DS + 2 * ME, 256, False)
            add_dq(dq_ptr, dq, dq_row, ME, HEAD_DIM)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            meet(slot, READ, 288, False)
            dq_row = padded + block * BLOCK_M
            block += 1
            if block == block_begin + count:  # on to the next head
                block = block_begin
                padded += query_tiles * BLOCK_M
        passed += group * count
        used += gl.where(count > 0, 1, 0)
        if HEAD_DIM == 64:
            tma.store_wait(0)  # dK and dV of the tile before have left their buffers
            matrix(out_s.index(2 * ME)).store(dv.to(dtype))
            matrix(out_s.index(2 * ME + 1)).store((dk * scale).to(dtype))
            fence_async_shared()
        # Again, as there are no registers to hold them through the tile.
        batch = noted(plan, number & 1, 1)
        kv_head = noted(plan, number & 1, 2)
        first = noted(plan, number & 1, 3)
        rows = noted(plan, number & 1, 4)
        begin = noted(plan, number & 1, 5)
        mbarrier.arrive(plan_empty.index(number & 1), count=1)
        if HEAD_DIM == 64:
            store_rows(dv_out, batch, begin, rows, first + 64 * ME, kv_head, out_s.index(2 * ME), PACKED)
            store_rows(dk_out, batch, begin, rows, first + 64 * ME, kv_head, out_s.index(2 * ME + 1), PACKED)
        else:
            row = first + 64 * ME + gl.arange(0, 64, gl.SliceLayout(1, gradient))
            start = ((gl.cast(batch, gl.int64) * keys_a_batch + begin) * kv_heads + kv_head) * HEAD_DIM
            _store_registers(dv_out + start, dv.to(dtype), row, rows, kv_heads * HEAD_DIM, gradient)
            _store_registers(dk_out + start, (dk * scale).to(dtype), row, rows, kv_heads * HEAD_DIM, gradient)
        number += 1
        mbarrier.wait(plan_full.index(number & 1), number // 2 & 1)
        count = noted(plan, number & 1, 0)
    if passed > 0:
        meet(passed & 1, DS + 2 - 2 * ME, 256, True)
        dq = multiply_dq(ds_s, k_s, passed & 1, (used - 1) & 1, half, ME, BLOCK_M, HEAD_DIM)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        add_dq(dq_ptr, dq, dq_row, ME, HEAD_DIM)
    if HEAD_DIM == 64:
        tma.store_wait(0)


@gluon_jit(
    do_not_specialize=["queries", "keys", "kv_heads", "group", "instances", "section", "tiles", "query_tiles", "window"]
)
def hopper_backward_rolling_kernel(
    q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc, dq_ptr, counter_ptr, dk_out, dv_out, table_ptr,
    queries, keys, kv_heads, group, instances, section, tiles, query_tiles, window, scale, score_scale,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = q_desc.dtype
    q_s = ring(q_desc, STAGES)
    do_s = ring(do_desc, STAGES)
    k_s = ring(k_desc, 4)
    v_s = ring(v_desc, 4)
    lse2_s = ring(lse2_desc, STAGES)
    delta_s = ring(delta_desc, STAGES)
    out_s = k_s  # unused at head_dim 128, where dk_out and dv_out are pointers instead of descriptors
    if HEAD_DIM == 64:
        out_s = ring(dk_out, 4)
    ds_layout: tl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], dtype)
    ds_s = gl.allocate_shared_memory(dtype, [4, 64, BLOCK_M], ds_layout)
    plan = plan_ring(11)
    plan_full = barrier_ring(2, 1)
    plan_empty = barrier_ring(2, 2)
    kv_full = barrier_ring(4, 1)
    q_full = barrier_ring(STAGES, 1)
    do_full = barrier_ring(STAGES, 1)
    buffers = (q_s, do_s, k_s, v_s, lse2_s, delta_s, ds_s, out_s, plan)
    barriers = (plan_full, plan_empty, kv_full, q_full, do_full)
    problem = (queries, keys, kv_heads, group, instances, section, tiles, query_tiles, window)
    outputs = (dq_ptr, dk_out, dv_out)
    # fmt: off
    gl.warp_specialize(
        [
            (_consume, (buffers, barriers, problem, outputs, scale, score_scale,
                        0, PACKED, CAUSAL, WINDOW, BLOCK_M, HEAD_DIM)),
            (_consume, (buffers, barriers, problem, outputs, scale, score_scale,
                        1, PACKED, CAUSAL, WINDOW, BLOCK_M, HEAD_DIM)),
            (_produce, (buffers, barriers, problem, q_desc, k_desc, v_desc, do_desc, lse2_desc, delta_desc,
                        table_ptr, counter_ptr, PACKED, CAUSAL, WINDOW, BLOCK_M, HELD)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
