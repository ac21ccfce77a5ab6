"""Softmax of the Hopper forward kernel, one block of keys at a time.

What is subtracted from the scores need not be a row's maximum, only near enough for 2 to the power of the rest to stay
small (FlashAttention-4 rescales by such a rule on Blackwell; that it is enough to follow the maximum is from
FlashAttention-2, arXiv:2307.08691). As long as no score of a warp's 16 rows is more than 2^8 times what was subtracted
last, nothing that was summed up is touched: neither the sums, nor the output (or times 1 where a row of the warp has
all its scores far below 0, at every block). P up to 256 loses nothing in 16 bits, whose precision is relative.
"""

from __future__ import annotations

from fuselm.kernels._triton import tl
from fuselm.kernels.attention.hopper_common import execute, gl, gluon_jit


@gluon_jit
def mask_scores(
    s, key, low, high, MASKED: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, scores: tl.constexpr
):
    """Scores of block `key`, -inf for keys that are not in [low, high) of their row; [64, BLOCK_N]."""
    if MASKED:
        # A thread's columns are 8·i + {0, 1} plus one of 0, 2, 4, 6: with that part on the other side, the columns are
        # constants in the instructions instead of registers that live through the loop.
        column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))[None, :]
        s = gl.where((column & -7) < (high - key * BLOCK_N)[:, None] - (column & 6), s, float("-inf"))
        if WINDOW:
            s = gl.where((column & -7) > (low - key * BLOCK_N)[:, None] - (column & 6), s, float("-inf"))
    return s


@gluon_jit
def _thread_maxima(s, BLOCK_N: tl.constexpr):
    """[64, 4]: the maxima of the four threads that share a row."""
    return gl.max(gl.max(gl.max(s.reshape([64, 4, BLOCK_N // 32, 4, 2]), 4), 2), 1)


@gluon_jit
def thread_maxima_bits(s, BLOCK_N: tl.constexpr, CHAINS: tl.constexpr):
    """[64, 4] int32: bits of the maxima of the four threads that share a row, or of 0 where all scores are below.

    Floats that are not negative have the order of their bits. Hopper takes the maximum of three integers at a time
    (VIMNMX3), of two floats: half as many instructions, with this 0 as well. CHAINS of them run side by side.
    """
    bits = s.to(gl.int32, bitcast=True).reshape([64, BLOCK_N // 8, 4, 2]).permute((0, 2, 1, 3))
    return gl.maximum(gl.max(gl.max(bits.reshape([64, 4, CHAINS, BLOCK_N // (4 * CHAINS)]), 3), 2), 0)


@gluon_jit
def row_maxima(s, floor, BLOCK_N: tl.constexpr, scores: tl.constexpr):
    """[64]: the rows' maxima, or `floor` where these are below it."""
    maxima = gl.convert_layout(gl.max(_thread_maxima(s, BLOCK_N), 1), gl.SliceLayout(1, scores), assert_trivial=True)
    return gl.maximum(maxima, floor)


@gluon_jit
def _by_row(x, beside):
    """[64] of the rows -> [64, 1] beside a tensor whose rows lie in the same threads."""
    layout: tl.constexpr = beside.type.layout
    return gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]


@gluon_jit
def pin(x):
    """x, floats or their bits; what it depends on stays ahead of the next wait for a product: see `_step` in
    hopper_forward.py. A store that never runs, for no number is above +inf."""
    bits = gl.inline_asm_elementwise(
        """
        {
            .reg .pred never;
            .reg .b32 bits;
            setp.gt.f32 never, $1, 0f7F800000;
            mov.b32 bits, $1;
            @never st.shared.b32 [bits], bits;
            mov.b32 $0, bits;
        }
        """,
        "=r,r",
        [x.to(gl.int32, bitcast=True)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    return bits.to(x.dtype, bitcast=True)


@gluon_jit
def declare_surpassed():
    """The predicate of `surpassed`, once a kernel, ahead of where it specializes its warps."""
    execute(".reg .pred surpassed")


@gluon_jit
def margin_of(score_scale):
    """How far scores may be above the maximum that was left behind: a factor of 2^8 after scaling."""
    return gl.minimum(8.0 / score_scale, 1e30)  # finite, as the limit of a row that saw no key must stay below 0


@gluon_jit
def floor_of(score_scale):
    """The maximum of a row that saw no key: finite, as is what scaling makes of it, so that -inf minus it is -inf."""
    return -1e38 / gl.maximum(score_scale, 1.0)


@gluon_jit
def surpassed(maxima, limit):
    """([64, 4] bits of maxima, whether a row of this warp may have a score above its [64] limit).

    May have: the bits of a limit below 0 are below those of any of these maxima, which are 0 where scores are below it.
    All threads of a warp get the same answer, of other warps maybe another: what depends on it must not wait for them.
    Triton has no such number, so that it passes from one instruction to the next in a register of ours.
    """
    limits = _by_row(limit, maxima).to(gl.int32, bitcast=True)
    maxima = gl.inline_asm_elementwise(
        """
        {
            .reg .pred one, any;
            setp.gt.s32 one, $2, $4;
            setp.gt.or.s32 any, $3, $5, one;
            vote.sync.any.pred surpassed, any, 0xffffffff;
            mov.b32 $0, $2;
            mov.b32 $1, $3;
        }
        """,
        "=r,=r,r,r,r,r",
        [maxima, limits],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )
    answer = gl.inline_asm_elementwise(
        "selp.b32 $0, 1, 0, surpassed;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )
    return maxima, answer != 0


@gluon_jit
def _difference(a, b):
    """a - b, of rounded products: if the compiler fused one with the difference and the other not, rows that are not
    raised would change, a little at each block."""
    return gl.inline_asm_elementwise("sub.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon_jit
def raise_maximum(row_max, row_sum, s, score_scale, BLOCK_N: tl.constexpr, scores: tl.constexpr):
    """Brings the sums to the maxima of a block's scores: (maximum, sum, what the output is still to be scaled by)."""
    raised = row_maxima(s, row_max, BLOCK_N, scores)
    decay = gl.exp2(_difference(row_max * score_scale, raised * score_scale))
    return raised, row_sum * _by_row(decay, row_sum), decay


@gluon_jit
def scale_rows(x, factor):
    """x, each row times its [64] factor."""
    return x * _by_row(factor, x)


@gluon_jit
def halves(x):
    """The first and the second half of the columns; nothing moves."""
    return x.reshape([64, 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon_jit
def _whole(a, b):
    b = gl.convert_layout(b, a.type.layout, assert_trivial=True)
    return gl.join(a, b).permute((0, 2, 1)).reshape([64, 2 * a.shape[1]])


@gluon_jit
def join_quarters(first, second, second_half, layout: tl.constexpr):
    """What `halves` took apart twice."""
    return gl.convert_layout(_whole(_whole(first, second), second_half), layout, assert_trivial=True)


@gluon_jit
def probabilities(s, offset, score_scale):
    """(P, its sums by thread). The scale is positive: scaling and subtracting are one instruction."""
    p = gl.exp2(s * score_scale - _by_row(offset, s))
    return p, gl.sum(gl.sum(p.reshape([64, s.shape[1] // 8, 4, 2]), 3), 1)


@gluon_jit
def add_sums(a, b):
    """Sums by thread of two parts of the columns."""
    return a + gl.convert_layout(b, a.type.layout, assert_trivial=True)


@gluon_jit
def packed(p, dtype: tl.constexpr):
    """P as it goes into the next pass of the loop: two of them in an int32. In fp32 three consumers have no registers
    for it; in 16 bits each it would be taken apart and put together again on the way."""
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )


@gluon_jit
def left_operand(p, dtype: tl.constexpr, left: tl.constexpr):
    """The left operand of P·V out of what `packed` gave."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    pairs = gl.join(low, high).to(dtype, bitcast=True)
    return gl.convert_layout(pairs.reshape([p.shape[0], 2 * p.shape[1]]), left, assert_trivial=True)
