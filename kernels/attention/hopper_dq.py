"""dQ around the main kernel of the Hopper backward pass: what stands before it, behind it, and how it is added up."""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl
from fuselm.kernels.attention.hopper_common import gl, gluon_jit, matrix, thread_barrier, warpgroup_mma
from fuselm.kernels.attention.tiles import load_tile, locate, store_tile


@jit(do_not_specialize=["queries", "keys", "heads", "documents", "tiles"])
def attention_prepare_kernel(
    o_ptr, do_ptr, lse2_ptr, dlse2_ptr, cu_q_ptr, cu_k_ptr, padded_lse2_ptr, delta_ptr, dq_sum_ptr, turns_ptr,
    o_batch, o_row, o_head, do_batch, do_row, do_head, dlse_batch, dlse_head, dlse_row,
    queries, keys, heads, documents, tiles,
    HAS_DLSE: tl.constexpr, PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    ORDERED: tl.constexpr,
):  # fmt: skip
    """Of one block of queries and one head: delta, lse2 in whole blocks, zeros for dQ and turns or the counter.

    The last heads first: what the main kernel begins with is then still in L2.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
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
    if ORDERED:
        PIECES: tl.constexpr = BLOCK_M * HEAD_DIM // 4096
        tl.store(turns_ptr + (instance * tiles + tile) * PIECES + tl.arange(0, PIECES), tl.zeros([PIECES], tl.int32))
        tl.store(turns_ptr + tl.num_programs(0) * PIECES, 0, mask=program == 0)
    else:
        tl.store(turns_ptr, 0, mask=program == 0)


@jit(do_not_specialize=["queries", "keys", "heads", "documents", "tiles"])
def attention_finish_kernel(
    dq_sum_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, dq_batch, dq_row, dq_head,
    queries, keys, heads, documents, tiles, scale,
    PACKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of one block of queries and one head: dQ, scaled, in its dtype; the last heads first, as L2 holds their sums."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = program % tiles
    instance = (program // tiles).to(tl.int64)
    first, rows, row_begin, _others, _other_begin = locate(
        tile, cu_q_ptr, cu_k_ptr, queries, keys, documents, PACKED, BLOCK_M
    )
    row = first + tl.arange(0, BLOCK_M)
    col = tl.arange(0, HEAD_DIM)
    # A block of 64 x 64 lies as the consumer's threads held it: see `add_dq`.
    flat = tl.load(dq_sum_ptr + (instance * tiles + tile) * BLOCK_M * HEAD_DIM + tl.arange(0, BLOCK_M * HEAD_DIM))
    blocks = tl.reshape(flat, [BLOCK_M // 64, HEAD_DIM // 64, 8, 4, 8, 4, 2, 2])
    blocks = tl.permute(blocks, (0, 3, 6, 4, 1, 2, 5, 7))
    dq = tl.reshape(blocks, [BLOCK_M, HEAD_DIM])
    dq_base = dq_ptr + instance // heads * dq_batch + instance % heads * dq_head + row_begin.to(tl.int64) * dq_row
    store_tile(dq_base, row, dq_row, col, rows, dq * scale, HEAD_DIM, False)


@gluon_jit
def _piece(row, ME: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Number of the 64 x 64 numbers of dQ that a consumer adds to, of the block whose first row is `row`."""
    return (row >> 6) * (HEAD_DIM // 64) + ME


@gluon_jit
def wait_for_turn(turns_ptr, row, turn, ME: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Waits until all tiles of keys below number `turn` have added to a consumer's half of a block of dQ."""
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred early;
            .reg .b32 now;
            wait_for_turn:
            ld.acquire.gpu.global.b32 now, [$1];
            setp.lt.s32 early, now, $2;
            @early bra wait_for_turn;
            mov.b32 $0, now;
        }
        """,
        "=r,l,r",
        [turns_ptr + _piece(row, ME, HEAD_DIM), turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon_jit
def pass_turn(turns_ptr, row, turn, active, ME: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Lets tile number `turn` add to a consumer's half of a block of dQ: what was added before is there by then."""
    thread_barrier()
    gl.atomic_xchg(turns_ptr + _piece(row, ME, HEAD_DIM), turn, mask=active, sem="release")


@gluon_jit
def multiply_dq(
    ds_s, k_s, pair, keys, half: tl.constexpr, ME: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Starts a consumer's half of dS·K, from the dS of both consumers in pair `pair` and the keys in pair `keys`."""
    ds_0 = ds_s.index(2 * pair)
    ds_1 = ds_s.index(2 * pair + 1)
    k_0 = matrix(k_s.index(2 * keys))
    k_1 = matrix(k_s.index(2 * keys + 1))
    if HEAD_DIM == 128:  # a half of the columns each
        k_0 = k_0.slice(64 * ME, 64, 1)
        k_1 = k_1.slice(64 * ME, 64, 1)
    if BLOCK_M == 128:  # a half of the queries each
        ds_0 = ds_0.slice(64 * ME, 64, 1)
        ds_1 = ds_1.slice(64 * ME, 64, 1)
    no_half = gl.zeros([64, 64], gl.float32, half)
    dq = warpgroup_mma(ds_0.permute((1, 0)), k_0, no_half, use_acc=False, is_async=True)
    return warpgroup_mma(ds_1.permute((1, 0)), k_1, dq, is_async=True)


@gluon_jit
def add_dq(dq_ptr, dq, row, ME: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Adds a consumer's half of a block of dQ, whose first row in the padded array is `row`, to what is there.

    Straight from the registers, four numbers a thread at a time: the 64 x 64 numbers then lie in the order (column / 8,
    warp, row % 8, column / 2 % 4, row / 8 % 2, column % 2), in which a warp's 32 x 4 are next to each other. A TMA
    would take them through shared memory, which is what the products of this kernel wait for.
    """
    pieces = dq.reshape([4, 2, 8, 8, 4, 2])  # warp, row / 8 % 2, row % 8, column / 8, column / 2 % 4, column % 2
    flat = pieces.permute((3, 0, 2, 4, 1, 5)).reshape([4096])
    order: tl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    flat = gl.convert_layout(flat, order, assert_trivial=True)
    pointers = dq_ptr + _piece(row, ME, HEAD_DIM).to(gl.int64) * 4096 + gl.arange(0, 4096, order)
    # All 128 threads, also in a first pass that has only zeros to add: a predicate costs ptxas 900 bytes of spills.
    gl.atomic_add(pointers, flat, sem="relaxed")
