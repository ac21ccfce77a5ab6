"""Parts that the portable attention kernels share: where a program's tile lies, masked loads, scores and masks.

Positions are local to a document (the whole sequence where there are none). With `shift = keys - queries`, query i
stands at key position i + shift (bottom-right alignment): under a causal mask it sees keys j <= i + shift, with a
window also j > i + shift - window.
"""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl


@jit
def locate(tile, cu_rows_ptr, cu_others_ptr, rows, others, documents, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Where tile number `tile` over the row side (the queries, say) lies, and which part of the other side it meets.

    Packed rows: document d owns the tiles from cu[d] // BLOCK + d on. That leaves it at least as many tiles as it
    needs, can be computed without a prefix sum, and needs no longest length. Rows behind the last document form one
    more document, which meets nothing.

    `tile` may be a tensor of numbers.

    Returns:
        (first row of the tile within its document, rows of the document, where they begin in the tensor, others of the
        document, where they begin), all int32. The tile is empty where the first is not below the second.
    """
    if PACKED:
        low = tile * 0
        high = low + documents
        span = documents
        while span > 0:  # the last document that begins at or before the tile, by halves
            middle = (low + high + 1) // 2
            owns = tl.load(cu_rows_ptr + middle) // BLOCK + middle <= tile
            low = tl.where(owns, middle, low)
            high = tl.where(owns, high, tl.maximum(middle - 1, low))
            span = span // 2
        behind = tl.minimum(low + 1, documents)
        row_begin = tl.load(cu_rows_ptr + low)
        row_end = tl.where(low < documents, tl.minimum(tl.load(cu_rows_ptr + behind), rows), rows)
        other_begin = tl.load(cu_others_ptr + low)
        other_end = tl.minimum(tl.load(cu_others_ptr + behind), others)
        first = (tile - row_begin // BLOCK - low) * BLOCK
        return first, row_end - row_begin, row_begin, other_end - other_begin, other_begin
    else:
        zero = tl.full((), 0, tl.int32)
        return tile * BLOCK, zero + rows, zero, zero + others, zero


@jit
def load_tile(
    base,
    row,
    stride,
    col,
    limit,
    MASK_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Rows `row` of a (rows, HEAD_DIM) matrix as [ROWS, BLOCK_D], zero beyond `limit` rows and HEAD_DIM columns."""
    pointers = base + row.to(tl.int64)[:, None] * stride + col[None, :]
    if MASK_ROWS:
        mask = (row < limit)[:, None]
        if BLOCK_D != HEAD_DIM:
            mask = mask & (col < HEAD_DIM)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    elif BLOCK_D != HEAD_DIM:
        tile = tl.load(pointers, mask=(col < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    if UPCAST:  # the interpreter multiplies bf16 tiles as if they were integers
        tile = tile.to(tl.float32)
    return tile


@jit
def store_tile(base, row, stride, col, limit, tile, HEAD_DIM: tl.constexpr, ROUND: tl.constexpr):
    """Stores fp32 [ROWS, BLOCK_D] in base's dtype, leaving out rows beyond `limit` and columns beyond HEAD_DIM."""
    if ROUND and base.dtype.element_ty == tl.bfloat16:
        # The interpreter cuts fp32 off at bf16, a bias that delta would carry on: round to nearest even.
        bits = tile.to(tl.int32, bitcast=True)
        tile = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    pointers = base + row.to(tl.int64)[:, None] * stride + col[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(row < limit)[:, None] & (col < HEAD_DIM)[None, :])


@jit
def tanh(x):
    """tanh to a few ulp: a series near zero, where the quotient would cancel."""
    magnitude = tl.abs(x)
    square = x * x
    series = 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = magnitude + magnitude * square * series
    decay = tl.exp2(magnitude * -2.8853900817779268)  # exp(-2|x|)
    far = (1.0 - decay) / (1.0 + decay)
    result = tl.where(magnitude < 0.25, near, far)
    return tl.where(x < 0.0, -result, result)


@jit
def capped_scores(products, score_scale, cap_scale, SOFTCAP: tl.constexpr):
    """(scores in units of log2(e), the softcap's derivative at each; 1 without a softcap)."""
    if SOFTCAP:
        t = tanh(products * score_scale)
        return t * cap_scale, 1.0 - t * t
    else:
        return products * score_scale, 1.0


@jit
def visible(query, key, keys, shift, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Mask of the keys that a query sees; `query` and `key` broadcast against each other."""
    mask = key < keys
    if CAUSAL:
        mask = mask & (key <= query + shift)
    if WINDOW:
        mask = mask & (key > query + shift - window)
    return mask


@jit
def key_range(
    first,
    queries,
    keys,
    shift,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Key tiles that queries [first, first + BLOCK_M) meet, as (begin, full begin, full end, end).

    Tiles in [full begin, full end) are seen by every query and hold existing keys only; those in [begin, full begin)
    and [full end, end) need a mask; the rest is skipped. All but the end are multiples of BLOCK_N.
    """
    last = tl.minimum(first + BLOCK_M, queries) - 1
    begin = keys * 0
    end = keys
    full_begin = begin
    full_end = keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(tl.minimum(end, last + shift + 1), 0)
        full_end = tl.maximum(tl.minimum(full_end, (first + shift + 1) // BLOCK_N * BLOCK_N), 0)
        # integer division rounds towards zero: a negative quotient is cut off by the maximum all the same
    if WINDOW:
        begin = tl.maximum(first + shift - window + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = (tl.maximum(last + shift - window + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@jit
def query_range(
    first,
    keys,
    queries,
    shift,
    window,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Query tiles that keys [first, first + BLOCK_N) meet, as (begin, full begin, full end, end), like `key_range`."""
    last = tl.minimum(first + BLOCK_N, keys) - 1
    begin = queries * 0
    end = queries
    full_begin = begin
    full_end = queries // BLOCK_M * BLOCK_M
    if CAUSAL:
        begin = tl.maximum(first - shift, 0) // BLOCK_M * BLOCK_M
        full_begin = (tl.maximum(last - shift, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if WINDOW:
        end = tl.maximum(tl.minimum(end, last - shift + window), 0)
        full_end = tl.maximum(tl.minimum(full_end, (first - shift + window) // BLOCK_M * BLOCK_M), 0)
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@jit
def edge_count(begin, full_begin, full_end, end, BLOCK: tl.constexpr):
    """(edge tiles in front, edge tiles in all) of a range."""
    front = tl.maximum(tl.minimum(full_begin, end) - begin + BLOCK - 1, 0) // BLOCK
    return front, front + tl.maximum(end - full_end + BLOCK - 1, 0) // BLOCK
