"""Attention forward on Hopper, in Gluon, after FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).

A producer warp loads tiles by TMA into rings of shared memory; two or three consumer warpgroups of 64 queries each
multiply, and take turns at issuing products, so that one's softmax meets the other's. The product Q·Kᵀ of a block is
issued before P·V of the one before, so that the softmax of one block runs beside a product of its own consumer, too. P
stays in registers as the left operand. Which blocks its queries meet, each consumer is told; what only others need it
passes over. One program an SM takes tiles in turn, the longest first; which tile, the producer finds out and tells the
consumers. Documents make tiles of any length: there programs take them from a counter.

Formulas, outputs and units as in portable.py.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import device_profile, tl
from fuselm.kernels.attention.hopper_common import (
    LOG2E,
    barrier_ring,
    fence_async_shared,
    give_turn,
    gl,
    gluon_jit,
    key_blocks,
    load_rows,
    matrix,
    mbarrier,
    note,
    noted,
    own_blocks,
    place_of,
    plan_ring,
    position_at,
    ring,
    rows_descriptor,
    split_blocks,
    store_rows,
    take_turn,
    tile_and_head,
    tile_table,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from fuselm.kernels.attention.hopper_softmax import (
    add_sums,
    declare_surpassed,
    floor_of,
    halves,
    join_quarters,
    left_operand,
    margin_of,
    mask_scores,
    packed,
    pin,
    probabilities,
    raise_maximum,
    row_maxima,
    scale_rows,
    surpassed,
    thread_maxima_bits,
)
from fuselm.kernels.launch.attention_hopper import heads_a_section, hopper_forward_launch


@gluon_jit
def _next_place(counter_ptr, step, COUNTED: tl.constexpr):
    """The place of a program's next tile: from a counter, or the program's share by position."""
    if COUNTED:
        return gl.atomic_add(counter_ptr, 1, sem="relaxed")
    else:
        return position_at(gl.program_id(0), gl.num_programs(0), step)


@gluon_jit
def _produce(
    buffers, barriers, problem, q_desc, k_desc, v_desc, table_ptr, group,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONSUMERS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, JOINT: tl.constexpr, Q_BUFFERS: tl.constexpr, OWN_BLOCKS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = 64 * CONSUMERS
    q_s, k_s, v_s, _o_s, plan = buffers
    plan_full, plan_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    queries, keys, heads, instances, section, tiles, window = problem
    counter_ptr = table_ptr + tiles * 8
    done = gl.program_id(0) * 0  # key blocks loaded so far, over all tiles: it gives the ring's slot and phase
    step = gl.program_id(0) * 0
    position = _next_place(counter_ptr, step, PACKED)
    while position < instances * tiles:
        tile, instance = tile_and_head(position, instances, section, tiles)
        first, rows, begin, others, other_begin, _document = place_of(tile, table_ptr, queries, keys, PACKED, ROWS)
        batch = instance // heads
        head = instance - batch * heads
        block_begin, full_begin, full_end, count = key_blocks(
            first, rows, others, window, CAUSAL, WINDOW, ROWS, BLOCK_N
        )
        slot = step & 1
        mbarrier.wait(plan_empty.index(slot), step // 2 & 1 ^ 1)
        note(plan, slot, 0, count)
        note(plan, slot, 1, batch)
        note(plan, slot, 2, head)
        note(plan, slot, 3, first)
        note(plan, slot, 4, rows)
        note(plan, slot, 5, begin)
        note(plan, slot, 6, others)
        last = block_begin + count - 1
        note(plan, slot, 7, last)
        if OWN_BLOCKS:
            for c in gl.static_range(CONSUMERS):
                skipped, full_from, full_to, own_count = own_blocks(
                    first + 64 * c, rows, others, window, last, CAUSAL, WINDOW, BLOCK_N
                )
                note(plan, slot, 8 + 4 * c, full_from)
                note(plan, slot, 9 + 4 * c, full_to)
                note(plan, slot, 10 + 4 * c, skipped)
                note(plan, slot, 11 + 4 * c, own_count)
        else:
            full_from, full_to = split_blocks(block_begin, full_begin, full_end, count)
            note(plan, slot, 8, full_from)
            note(plan, slot, 9, full_to)
        mbarrier.arrive(plan_full.index(slot), count=1)
        for i in range(count):
            row = (last - i) * BLOCK_N
            slot = done % STAGES
            phase = done // STAGES & 1
            if JOINT:
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
            else:
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            load_rows(
                k_desc, batch, other_begin, others, row, head // group, k_full.index(slot), k_s.index(slot), PACKED
            )
            if i == 0:
                for c in gl.static_range(CONSUMERS):
                    own = step % Q_BUFFERS * CONSUMERS + c
                    mbarrier.wait(q_empty.index(own), step // Q_BUFFERS & 1 ^ 1)
                    mbarrier.expect(q_full.index(own), q_desc.block_type.nbytes)
                    load_rows(
                        q_desc, batch, begin, rows, first + 64 * c, head, q_full.index(own), q_s.index(own), PACKED
                    )
            if not JOINT:
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            load_rows(
                v_desc, batch, other_begin, others, row, head // group, v_full.index(slot), v_s.index(slot), PACKED
            )
            done += 1
        step += 1
        position = _next_place(counter_ptr, step, PACKED)
    mbarrier.wait(plan_empty.index(step & 1), step // 2 & 1 ^ 1)
    note(plan, step & 1, 0, 0)
    mbarrier.arrive(plan_full.index(step & 1), count=1)


@gluon_jit
def _pass_over(
    blocks, done, k_empty, v_empty,
    ME: tl.constexpr, CONSUMERS: tl.constexpr, STAGES: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """Hands back `blocks` blocks that only other consumers need. Gives the number of blocks done.

    It does not wait for them. By taking its turns it stays near enough to the others: who still reads what was in the
    slot before is waited for by the producer, for its queries if not for this slot. With two stages this takes two
    consumers and one buffer of queries (HopperForwardLaunch).
    """
    for _ in range(blocks):
        slot = done % STAGES
        take_turn(ME)
        give_turn((ME + 1) % CONSUMERS)
        if not JOINT:
            mbarrier.arrive(k_empty.index(slot), count=1)
        mbarrier.arrive(v_empty.index(slot), count=1)
        done += 1
    return done


@gluon_jit
def _step(
    acc, p, row_max, limit, row_sum, before, before_phase, q, k_s, v_s, k_full, k_empty, v_full, v_empty,
    key, low, high, score_scale, margin,
    MASKED: tl.constexpr, ME: tl.constexpr, WINDOW: tl.constexpr, CONSUMERS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, JOINT: tl.constexpr, scores: tl.constexpr, output: tl.constexpr, left: tl.constexpr,
):  # fmt: skip
    """Q·Kᵀ of block `key` beside P·V of the block before it, which lies in slot `before`."""
    slot = before + 1
    phase = before_phase
    if slot == STAGES:
        slot = slot * 0
        phase = phase ^ 1
    mbarrier.wait(k_full.index(slot), phase)
    take_turn(ME)
    no_scores = gl.zeros([64, BLOCK_N], gl.float32, scores)
    s = warpgroup_mma(q, matrix(k_s.index(slot)).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    p_left = left_operand(p, v_s.dtype, left)
    mbarrier.wait(v_full.index(before), before_phase)
    acc = warpgroup_mma(p_left, matrix(v_s.index(before)), acc, is_async=True)
    give_turn((ME + 1) % CONSUMERS)
    s = warpgroup_mma_wait(1, deps=(s,))
    if not JOINT:
        mbarrier.arrive(k_empty.index(slot), count=1)
    s = mask_scores(s, key, low, high, MASKED, WINDOW, BLOCK_N, scores)
    maxima, above = surpassed(thread_maxima_bits(s, BLOCK_N, 4 if CONSUMERS == 2 else 2), limit)
    # ptxas moves a wait ahead of all arithmetic that does not depend on it: P·V would run beside next to nothing. It
    # does not move it ahead of a store to shared memory, which is what `pin` writes, and that needs what is pinned. The
    # product that is retired here reads the registers of the P before, which must not be written sooner (Triton up to
    # 3.6 does not see that by itself): what becomes P behind the wait passes through it, or that P itself does.
    if CONSUMERS == 2:  # a quarter of P before the wait
        decay = gl.zeros([64], gl.float32, gl.SliceLayout(1, scores)) + 1.0
        if above:
            row_max, row_sum, decay = raise_maximum(row_max, row_sum, s, score_scale, BLOCK_N, scores)
            limit = row_max + margin
        offset = row_max * score_scale
        first_half, second_half = halves(s)
        first, second = halves(first_half)
        p, sums = probabilities(first, offset, score_scale)
        sums = pin(sums)
        acc, second, second_half, p_left = warpgroup_mma_wait(0, deps=(acc, second, second_half, p_left))
        mbarrier.arrive(v_empty.index(before), count=1)
        if above:
            acc = scale_rows(acc, decay)
        more, more_sums = probabilities(second, offset, score_scale)
        most, most_sums = probabilities(second_half, offset, score_scale)
        p = join_quarters(p, more, most, scores)
        sums = add_sums(row_sum, add_sums(add_sums(sums, more_sums), most_sums))
    else:
        maxima = pin(maxima)
        acc, s = warpgroup_mma_wait(0, deps=(acc, s))
        mbarrier.arrive(v_empty.index(before), count=1)
        if above:
            row_max, row_sum, decay = raise_maximum(row_max, row_sum, s, score_scale, BLOCK_N, scores)
            limit = row_max + margin
            acc = scale_rows(acc, decay)
        p, sums = probabilities(s, row_max * score_scale, score_scale)
        sums = add_sums(row_sum, sums)
    return acc, packed(p, v_s.dtype), row_max, limit, sums, slot, phase


@gluon_jit
def _consume(
    buffers, barriers, queries, heads, window, o_desc, lse2_ptr, score_scale,
    ME: tl.constexpr, PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONSUMERS: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, JOINT: tl.constexpr, Q_BUFFERS: tl.constexpr,
    OWN_BLOCKS: tl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s, o_s, plan = buffers
    plan_full, plan_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    dtype: tl.constexpr = o_desc.dtype
    scores: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    output: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    left: tl.constexpr = gl.DotOperandLayout(0, output, 2)
    OWN: tl.constexpr = 8 + (4 * ME if OWN_BLOCKS else 0)  # where the plan begins to tell of this consumer's blocks
    o = o_s.index(ME)
    offs_m = 64 * ME + gl.arange(0, 64, gl.SliceLayout(1, scores))
    done = gl.program_id(0) * 0
    margin = margin_of(score_scale)
    if ME == CONSUMERS - 1:
        give_turn(0)
    step = gl.program_id(0) * 0
    mbarrier.wait(plan_full.index(0), 0)
    count = noted(plan, 0, 0)
    while count > 0:
        first = noted(plan, step & 1, 3)
        rows = noted(plan, step & 1, 4)
        others = noted(plan, step & 1, 6)
        last = noted(plan, step & 1, 7)
        full_from = noted(plan, step & 1, OWN)
        full_to = noted(plan, step & 1, OWN + 1)
        own_count = count
        if OWN_BLOCKS:
            skipped = noted(plan, step & 1, OWN + 2)
            own_count = noted(plan, step & 1, OWN + 3)
            last -= skipped
            done = _pass_over(skipped, done, k_empty, v_empty, ME, CONSUMERS, STAGES, JOINT)
        row = first + offs_m
        high = gl.zeros([64], gl.int32, gl.SliceLayout(1, scores)) + others
        low = high
        if CAUSAL:
            high = gl.minimum(high, row + (others - rows + 1))
        if WINDOW:
            low = row + (others - rows - window)
        acc = gl.zeros([64, HEAD_DIM], gl.float32, output)
        before = done % STAGES
        before_phase = done // STAGES & 1
        own = step % Q_BUFFERS * CONSUMERS + ME
        q = matrix(q_s.index(own))
        mbarrier.wait(q_full.index(own), step // Q_BUFFERS & 1)
        mbarrier.wait(k_full.index(before), before_phase)
        no_scores = gl.zeros([64, BLOCK_N], gl.float32, scores)
        s = warpgroup_mma(q, matrix(k_s.index(before)).permute((1, 0)), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if not JOINT:
            mbarrier.arrive(k_empty.index(before), count=1)
        s = mask_scores(s, last, low, high, True, WINDOW, BLOCK_N, scores)
        row_max = row_maxima(s, floor_of(score_scale), BLOCK_N, scores)
        p, row_sum = probabilities(s, row_max * score_scale, score_scale)
        limit = row_max + margin
        p = packed(p, dtype)
        if CAUSAL:
            for i in range(1, full_from):
                acc, p, row_max, limit, row_sum, before, before_phase = _step(
                    acc, p, row_max, limit, row_sum, before, before_phase, q, k_s, v_s, k_full, k_empty, v_full,
                    v_empty, last - i, low, high, score_scale, margin,
                    True, ME, WINDOW, CONSUMERS, BLOCK_N, STAGES, JOINT, scores, output, left,
                )  # fmt: skip
        for i in range(full_from, full_to):
            acc, p, row_max, limit, row_sum, before, before_phase = _step(
                acc, p, row_max, limit, row_sum, before, before_phase, q, k_s, v_s, k_full, k_empty, v_full,
                v_empty, last - i, low, high, score_scale, margin,
                False, ME, WINDOW, CONSUMERS, BLOCK_N, STAGES, JOINT, scores, output, left,
            )  # fmt: skip
        if WINDOW:
            for i in range(full_to, own_count):
                acc, p, row_max, limit, row_sum, before, before_phase = _step(
                    acc, p, row_max, limit, row_sum, before, before_phase, q, k_s, v_s, k_full, k_empty, v_full,
                    v_empty, last - i, low, high, score_scale, margin,
                    True, ME, WINDOW, CONSUMERS, BLOCK_N, STAGES, JOINT, scores, output, left,
                )  # fmt: skip
        mbarrier.arrive(q_empty.index(own), count=1)
        mbarrier.wait(v_full.index(before), before_phase)
        done += own_count
        p_left = left_operand(p, dtype, left)
        acc = warpgroup_mma(p_left, matrix(v_s.index(before)), acc, is_async=True)
        total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, scores), assert_trivial=True)
        seen = total > 0.0
        inverse = gl.where(seen, 1.0 / total, 0.0)
        lse2 = gl.where(seen, row_max * score_scale + gl.log2(total), float("-inf"))
        # Again, as there are no registers to hold them through the tile.
        batch = noted(plan, step & 1, 1)
        head = noted(plan, step & 1, 2)
        first = noted(plan, step & 1, 3)
        rows = noted(plan, step & 1, 4)
        begin = noted(plan, step & 1, 5)
        left_over = 0
        if OWN_BLOCKS:
            left_over = noted(plan, step & 1, 0) - noted(plan, step & 1, OWN + 2) - noted(plan, step & 1, OWN + 3)
        mbarrier.arrive(plan_empty.index(step & 1), count=1)
        row = first + offs_m
        gl.store(lse2_ptr + (gl.cast(batch * heads + head, gl.int64) * queries + begin) + row, lse2, mask=row < rows)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, output))[:, None]
        tma.store_wait(0)  # the tile before has left the buffer
        matrix(o).store(acc.to(dtype))
        fence_async_shared()
        store_rows(o_desc, batch, begin, rows, first + 64 * ME, head, o, PACKED)
        if OWN_BLOCKS:
            done = _pass_over(left_over, done, k_empty, v_empty, ME, CONSUMERS, STAGES, JOINT)
        step += 1
        mbarrier.wait(plan_full.index(step & 1), step // 2 & 1)
        count = noted(plan, step & 1, 0)
    tma.store_wait(0)


@gluon_jit(do_not_specialize=["queries", "keys", "heads", "group", "instances", "section", "tiles", "window"])
def _hopper_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse2_ptr, table_ptr,
    queries, keys, heads, group, instances, section, tiles, window, score_scale,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONSUMERS: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, JOINT: tl.constexpr, Q_BUFFERS: tl.constexpr,
    PRODUCER_REGISTERS: tl.constexpr, CONSUMER_REGISTERS: tl.constexpr,
):  # fmt: skip
    declare_surpassed()
    # Two consumers of 64 queries mostly meet the same blocks of 128 keys, but where a window or a document ends.
    OWN_BLOCKS: tl.constexpr = CONSUMERS == 3 or PACKED or WINDOW
    q_s = ring(q_desc, Q_BUFFERS * CONSUMERS)
    o_s = ring(o_desc, CONSUMERS)
    k_s = ring(k_desc, STAGES)
    v_s = ring(v_desc, STAGES)
    plan = plan_ring(20)
    plan_full = barrier_ring(2, 1)
    plan_empty = barrier_ring(2, CONSUMERS)
    q_full = barrier_ring(Q_BUFFERS * CONSUMERS, 1)
    q_empty = barrier_ring(Q_BUFFERS * CONSUMERS, 1)
    k_full = barrier_ring(STAGES, 1)
    k_empty = barrier_ring(STAGES, CONSUMERS)
    v_full = barrier_ring(STAGES, 1)
    v_empty = barrier_ring(STAGES, CONSUMERS)
    buffers = (q_s, k_s, v_s, o_s, plan)
    barriers = (plan_full, plan_empty, q_full, q_empty, k_full, k_empty, v_full, v_empty)
    problem = (queries, keys, heads, instances, section, tiles, window)
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (buffers, barriers, queries, heads, window, o_desc, lse2_ptr, score_scale,
                            0, PACKED, CAUSAL, WINDOW, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES,
                            JOINT, Q_BUFFERS, OWN_BLOCKS)),
                (_consume, (buffers, barriers, queries, heads, window, o_desc, lse2_ptr, score_scale,
                            1, PACKED, CAUSAL, WINDOW, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES,
                            JOINT, Q_BUFFERS, OWN_BLOCKS)),
                (_produce, (buffers, barriers, problem, q_desc, k_desc, v_desc, table_ptr, group,
                            PACKED, CAUSAL, WINDOW, CONSUMERS, BLOCK_N, STAGES, JOINT, Q_BUFFERS, OWN_BLOCKS)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (buffers, barriers, queries, heads, window, o_desc, lse2_ptr, score_scale,
                            0, PACKED, CAUSAL, WINDOW, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES,
                            JOINT, Q_BUFFERS, OWN_BLOCKS)),
                (_consume, (buffers, barriers, queries, heads, window, o_desc, lse2_ptr, score_scale,
                            1, PACKED, CAUSAL, WINDOW, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES,
                            JOINT, Q_BUFFERS, OWN_BLOCKS)),
                (_consume, (buffers, barriers, queries, heads, window, o_desc, lse2_ptr, score_scale,
                            2, PACKED, CAUSAL, WINDOW, CONSUMERS, BLOCK_N, HEAD_DIM, STAGES,
                            JOINT, Q_BUFFERS, OWN_BLOCKS)),
                (_produce, (buffers, barriers, problem, q_desc, k_desc, v_desc, table_ptr, group,
                            PACKED, CAUSAL, WINDOW, CONSUMERS, BLOCK_N, STAGES, JOINT, Q_BUFFERS, OWN_BLOCKS)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on


def hopper_forward(
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
    """Launches the forward kernel; arguments and results as those of `portable_forward`.

    What the kernel does not take is kept from it by `hopper_refusal` (dispatch.py): it knows no softcap.
    """
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    profile = device_profile(q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse2 = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    packed = cu_seqlens_k is not None
    documents = cu_seqlens_k.shape[0] - 1 if packed else 1
    launch = hopper_forward_launch(head_dim, keys // max(documents, 1), profile)
    head_bytes = 2 * keys * head_dim * q.element_size() // group
    with torch.cuda.device_of(q):
        table, tiles = tile_table(
            cu_seqlens_q, cu_seqlens_k, queries, keys, launch.block_m, queries=True, causal=causal, window=window
        )
        _hopper_forward_kernel[(min(batch * heads * tiles, profile.num_sms),)](
            rows_descriptor(q, 64, packed),
            rows_descriptor(k, launch.block_n, packed),
            rows_descriptor(v, launch.block_n, packed),
            rows_descriptor(out, 64, packed),
            lse2,
            lse2 if table is None else table,
            queries,
            keys,
            heads,
            group,
            batch * heads,
            batch * heads if packed else heads_a_section(head_bytes, batch * heads, launch.section_bytes, group),
            tiles,
            min(window, max(keys, 1)),
            scale * LOG2E,
            PACKED=packed,
            CAUSAL=causal,
            WINDOW=window > 0,
            CONSUMERS=launch.consumers,
            BLOCK_N=launch.block_n,
            HEAD_DIM=head_dim,
            STAGES=launch.stages,
            JOINT=launch.joint,
            Q_BUFFERS=launch.query_buffers,
            PRODUCER_REGISTERS=launch.producer_registers,
            CONSUMER_REGISTERS=launch.consumer_registers,
            num_warps=4,
            maxnreg=launch.max_registers,
        )
    return out, lse2
