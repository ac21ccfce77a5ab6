"""Kernels of rms_norm and add_rms_norm for dense rows that start anywhere, as rows of 4,097 elements do: the whole
16-byte vectors of a row in blocks, and the few elements before and behind them (its ends) in a small tensor.

Whole vectors are loaded and stored as such, through shared memory too, though those of a small tail in parts, and the
ends, fewer than two vectors, element by element. Where a program takes several rows, it loads the ends of the next
while it works on one, all but dh's. The number of programs is a multiple of VECTOR then, so that all rows of a program
begin equally deep in a vector: columns, masks and the shifted weight are the same for all of them.
"""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl
from fuselm.kernels.rms_norm_kernels import bring_weight, load, load_weight, store


@jit
def _block(first_row, start, size: tl.constexpr, N: tl.constexpr, VECTOR: tl.constexpr):
    """Columns [size] of the row that positions `start` and on of its whole vectors are, and which the row has."""
    lead = _lead(first_row, N, VECTOR)
    position = start + tl.arange(0, size)
    return lead + position, position < (N - lead) // VECTOR * VECTOR


@jit
def _lead(first_row, N: tl.constexpr, VECTOR: tl.constexpr):
    """Elements of the row before its first whole vector."""
    past = (tl.cast(first_row, tl.int64) * N % VECTOR).to(tl.int32)
    return (VECTOR - past) % VECTOR


@jit
def _ends(first_row, N: tl.constexpr, VECTOR: tl.constexpr):
    """Columns [2 * VECTOR] of the row's elements in no whole vector, and which of them there are."""
    lead = _lead(first_row, N, VECTOR)
    whole = (N - lead) // VECTOR * VECTOR
    index = tl.arange(0, 2 * VECTOR)
    return tl.where(index < lead, index, index + whole), index < N - whole


@jit
def _load_ends(pointer, row, rows, column, is_end, N: tl.constexpr):
    """The ends of `row`, or of the last row where it is past it."""
    start = tl.cast(tl.minimum(row, rows - 1), tl.int64) * N
    return tl.load(pointer + start + column, mask=is_end, other=0.0)


@jit
def _add(value, residual, h_pointers, inside, EVEN: tl.constexpr):
    """value + residual as rounded to h's dtype, which is stored too."""
    value += residual
    store(h_pointers, value, inside, EVEN)
    return value.to(h_pointers.dtype.element_ty).to(tl.float32)


@jit
def rms_norm_unaligned_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    rows,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    VECTOR: tl.constexpr,
    LATE_WEIGHT: tl.constexpr,
    STAGES: tl.constexpr,
):
    # A row has at least N - VECTOR + 1 elements from its first border on.
    EVEN: tl.constexpr = BLOCK_N <= (N - VECTOR + 1) // VECTOR * VECTOR
    first = tl.program_id(0)
    column, inside = _block(first, 0, BLOCK_N, N, VECTOR)
    weight = column.to(tl.float32)
    if LATE_WEIGHT and HAS_WEIGHT:
        bring_weight(weight_ptr, 0, BLOCK_N, N)
    if not LATE_WEIGHT:
        weight = load_weight(weight_ptr, column, inside, offset, HAS_WEIGHT, False)
    tail_column, tail_inside, tail_weight = column, inside, weight
    if BLOCK_TAIL > 0:
        tail_column, tail_inside = _block(first, BLOCK_N, BLOCK_TAIL, N, VECTOR)
        if not LATE_WEIGHT:
            tail_weight = load_weight(weight_ptr, tail_column, tail_inside, offset, HAS_WEIGHT, False)
    end_column, is_end = _ends(first, N, VECTOR)
    end_weight = load_weight(weight_ptr, end_column, is_end, offset, HAS_WEIGHT, False)
    step = tl.num_programs(0)
    next_end = end_weight
    if not LATE_WEIGHT:
        next_end = _load_ends(x_ptr, first, rows, end_column, is_end, N)
    next_residual = next_end
    if HAS_RESIDUAL and not LATE_WEIGHT:
        next_residual = _load_ends(residual_ptr, first, rows, end_column, is_end, N)
    for row in tl.range(first, rows, step, num_stages=STAGES):  # pyright: ignore
        start = tl.cast(row, tl.int64) * N
        at = (start + VECTOR - 1) // VECTOR * VECTOR + tl.arange(0, BLOCK_N)
        end_at = start + end_column
        value = load(x_ptr + at, inside, EVEN)
        if LATE_WEIGHT:
            end = load(x_ptr + end_at, is_end, False)
        else:
            end = next_end.to(tl.float32)
            next_end = _load_ends(x_ptr, row + step, rows, end_column, is_end, N)
        if HAS_RESIDUAL:
            value = _add(value, load(residual_ptr + at, inside, EVEN), h_ptr + at, inside, EVEN)
            if LATE_WEIGHT:
                end_residual = load(residual_ptr + end_at, is_end, False)
            else:
                end_residual = next_residual.to(tl.float32)
                next_residual = _load_ends(residual_ptr, row + step, rows, end_column, is_end, N)
            end = _add(end, end_residual, h_ptr + end_at, is_end, False)
        squares = tl.sum(value * value, 0) + tl.sum(end * end, 0)
        tail_at, tail = at, value
        if BLOCK_TAIL > 0:
            tail_at = (start + VECTOR - 1) // VECTOR * VECTOR + BLOCK_N + tl.arange(0, BLOCK_TAIL)
            tail = load(x_ptr + tail_at, tail_inside, False)
            if HAS_RESIDUAL:
                residual = load(residual_ptr + tail_at, tail_inside, False)
                tail = _add(tail, residual, h_ptr + tail_at, tail_inside, False)
            squares += tl.sum(tail * tail, 0)
        rstd = 1.0 / tl.sqrt_rn(squares / N + tl.cast(eps, tl.float32))
        tl.store(rstd_ptr + row, rstd)
        if LATE_WEIGHT:
            late = load_weight(weight_ptr, column, inside, offset, HAS_WEIGHT, False)
        else:
            late = weight
        store(y_ptr + at, value * rstd * late, inside, EVEN)
        if BLOCK_TAIL > 0:
            if LATE_WEIGHT:
                late_tail = load_weight(weight_ptr, tail_column, tail_inside, offset, HAS_WEIGHT, False)
            else:
                late_tail = tail_weight
            store(y_ptr + tail_at, tail * rstd * late_tail, tail_inside, False)
        store(y_ptr + end_at, end * rstd * end_weight, is_end, False)


@jit
def rms_norm_unaligned_backward_kernel(
    dy_ptr,
    dh_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    rows,
    offset,
    HAS_DH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DW: tl.constexpr,
    N: tl.constexpr,
    PARTIAL_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx, and one row of partials of dw a program."""
    EVEN: tl.constexpr = BLOCK_N <= (N - VECTOR + 1) // VECTOR * VECTOR
    first = tl.program_id(0)
    column, inside = _block(first, 0, BLOCK_N, N, VECTOR)
    weight = load_weight(weight_ptr, column, inside, offset, HAS_WEIGHT, False)
    dw = tl.zeros([BLOCK_N], tl.float32)
    tail_column, tail_inside, tail_weight, tail_dw = column, inside, weight, dw
    if BLOCK_TAIL > 0:
        tail_column, tail_inside = _block(first, BLOCK_N, BLOCK_TAIL, N, VECTOR)
        tail_weight = load_weight(weight_ptr, tail_column, tail_inside, offset, HAS_WEIGHT, False)
        tail_dw = tl.zeros([BLOCK_TAIL], tl.float32)
    end_column, is_end = _ends(first, N, VECTOR)
    end_weight = load_weight(weight_ptr, end_column, is_end, offset, HAS_WEIGHT, False)
    end_dw = tl.zeros([2 * VECTOR], tl.float32)
    step = tl.num_programs(0)
    next_dy = _load_ends(dy_ptr, first, rows, end_column, is_end, N)
    next_x = _load_ends(x_ptr, first, rows, end_column, is_end, N)
    next_rstd = tl.load(rstd_ptr + first)
    for row in tl.range(first, rows, step, num_stages=STAGES):  # pyright: ignore
        start = tl.cast(row, tl.int64) * N
        at = (start + VECTOR - 1) // VECTOR * VECTOR + tl.arange(0, BLOCK_N)
        end_at = start + end_column
        rstd = next_rstd
        next_rstd = tl.load(rstd_ptr + tl.minimum(row + step, rows - 1))
        dy = load(dy_ptr + at, inside, EVEN)
        x_hat = load(x_ptr + at, inside, EVEN) * rstd
        end_dy = next_dy.to(tl.float32)
        end_x_hat = next_x.to(tl.float32) * rstd
        next_dy = _load_ends(dy_ptr, row + step, rows, end_column, is_end, N)
        next_x = _load_ends(x_ptr, row + step, rows, end_column, is_end, N)
        mean = tl.sum(dy * weight * x_hat, 0) + tl.sum(end_dy * end_weight * end_x_hat, 0)
        tail_at, tail_dy, tail_x_hat = at, dy, x_hat
        if BLOCK_TAIL > 0:
            tail_at = (start + VECTOR - 1) // VECTOR * VECTOR + BLOCK_N + tl.arange(0, BLOCK_TAIL)
            tail_dy = load(dy_ptr + tail_at, tail_inside, False)
            tail_x_hat = load(x_ptr + tail_at, tail_inside, False) * rstd
            mean += tl.sum(tail_dy * tail_weight * tail_x_hat, 0)
        mean /= N
        dx = rstd * tl.fma(x_hat, -mean, dy * weight)
        if HAS_DH:
            dx += load(dh_ptr + at, inside, EVEN)
        store(dx_ptr + at, dx, inside, EVEN)
        end_dx = rstd * tl.fma(end_x_hat, -mean, end_dy * end_weight)
        if HAS_DH:
            end_dx += load(dh_ptr + end_at, is_end, False)
        store(dx_ptr + end_at, end_dx, is_end, False)
        if NEED_DW:
            dw += dy * x_hat
            end_dw += end_dy * end_x_hat
        if BLOCK_TAIL > 0:
            dx = rstd * tl.fma(tail_x_hat, -mean, tail_dy * tail_weight)
            if HAS_DH:
                dx += load(dh_ptr + tail_at, tail_inside, False)
            store(dx_ptr + tail_at, dx, tail_inside, False)
            if NEED_DW:
                tail_dw += tail_dy * tail_x_hat
    if NEED_DW:
        partial = partial_ptr + tl.cast(first, tl.int64) * PARTIAL_STRIDE
        store(partial + column, dw, inside, EVEN)
        if BLOCK_TAIL > 0:
            store(partial + tail_column, tail_dw, tail_inside, False)
        store(partial + end_column, end_dw, is_end, False)
