"""Where a row of logits lies, and the pieces that the kernels in cross_entropy_kernels.py cut it into."""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl


@jit
def row_offset(row, inner, stride_outer, stride_inner):
    return tl.cast(row // inner, tl.int64) * stride_outer + tl.cast(row % inner, tl.int64) * stride_inner


@jit
def head_of(offset, shift, vocab, RAGGED: tl.constexpr, VECTOR: tl.constexpr):
    # elements before the row's first 16-byte border; `shift` is what the base pointer is beyond one
    head = 0
    if RAGGED:
        head = tl.minimum((-(offset + shift) & (VECTOR - 1)).to(tl.int32), vocab)
    return head


@jit
def lanes_of(BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    return tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]  # [BLOCK / VECTOR, VECTOR]


@jit
def prefetch_row(row, count, THREADS: tl.constexpr):
    # asks for the first `count` elements of a row, in lines of 128 bytes, one a thread at a time; they come to L2
    LINE: tl.constexpr = 128 // (row.dtype.element_ty.primitive_bitwidth // 8)
    lines = tl.arange(0, THREADS) * LINE
    for start in range(0, count, THREADS * LINE):
        address = (row + tl.minimum(start + lines, count - 1)).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@jit
def ragged_ends(head, vocab, VECTOR: tl.constexpr):
    # columns of both ragged ends, the front in the first half, and which of them exist
    index = tl.arange(0, 2 * VECTOR)  # [2 VECTOR]
    end = head + (vocab - head) // VECTOR * VECTOR
    column = tl.where(index < VECTOR, index, end + index - VECTOR)
    return column, tl.where(index < VECTOR, index < head, column < vocab)
