"""Kernels of rms_norm and add_rms_norm for dense rows that start anywhere, as rows of 4,097 elements do: a window of
whole 16-byte vectors around each row.

The window begins at the last 16-byte border (VECTOR elements) at or before the row and takes in the row's end. All of
it is loaded in vectors, and what belongs to the neighbours counts as zero; so the ragged ends come with the rest of the
row, through shared memory too. Whole vectors are stored as such, the few elements at the ends one by one. The row lies
equally deep in the window for all rows of a program, since the number of programs is a multiple of VECTOR (or every
program has one row): the shifted weight is loaded once.

The window is two blocks, positions 0 to BLOCK_N - 1 and BLOCK_TAIL more behind them (0: none).
"""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl


@jit
def _window(first_row, start, size: tl.constexpr, N: tl.constexpr, VECTOR: tl.constexpr):
    """Of the window's positions from `start`: columns [size] (of the row; some outside it), which of them the row has,
    which lie in vectors that are all the row's, and which in vectors that hold any of it."""
    past = (tl.cast(first_row, tl.int64) * N % VECTOR).to(tl.int32)
    position = start + tl.arange(0, size)
    column = position - past
    vector = position // VECTOR * VECTOR - past  # the first column of a position's vector
    inside = (column >= 0) & (column < N)
    whole = (vector >= 0) & (vector + VECTOR <= N)
    touched = (vector + VECTOR > 0) & (vector < N)
    return column, inside, whole, touched


@jit
def _load_weight(weight_ptr, column, inside, offset, HAS_WEIGHT: tl.constexpr):
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        return weight + tl.cast(offset, tl.float32)
    else:
        return tl.full(column.shape, 1.0, tl.float32)


@jit
def _load(pointers, at, inside, touched, total, RAGGED_END: tl.constexpr, VECTOR: tl.constexpr):
    """fp32, zero outside the row. RAGGED_END: the tensor's last vector is no whole one; its elements come singly."""
    if RAGGED_END:
        fits = at // VECTOR * VECTOR + VECTOR <= total
        value = tl.load(pointers, mask=touched & fits, other=0.0)
        last = tl.load(pointers, mask=inside & (fits == 0), other=0.0)
        value = tl.where(fits, value, last)
    else:
        value = tl.load(pointers, mask=touched, other=0.0)
    return tl.where(inside, value.to(tl.float32), 0.0)


@jit
def _store(pointers, value, inside, whole):
    value = value.to(pointers.dtype.element_ty)
    tl.store(pointers, value, mask=whole)
    tl.store(pointers, value, mask=inside & (whole == 0))


@jit
def _load_input(
    x_ptr,
    residual_ptr,
    h_ptr,
    at,
    inside,
    whole,
    touched,
    total,
    HAS_RESIDUAL: tl.constexpr,
    RAGGED_END: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """fp32: x, or x + residual as rounded to h's dtype, which is stored too."""
    value = _load(x_ptr + at, at, inside, touched, total, RAGGED_END, VECTOR)
    if HAS_RESIDUAL:
        value += _load(residual_ptr + at, at, inside, touched, total, RAGGED_END, VECTOR)
        h = value.to(h_ptr.dtype.element_ty)
        _store(h_ptr + at, h, inside, whole)
        value = h.to(tl.float32)
    return value


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
    RAGGED_END: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    RAGGED_MAIN: tl.constexpr = RAGGED_END and BLOCK_N > N  # else a row's last vector lies in the tail
    first = tl.program_id(0)
    total = tl.cast(rows, tl.int64) * N
    column, inside, whole, touched = _window(first, 0, BLOCK_N, N, VECTOR)
    weight = _load_weight(weight_ptr, column, inside, offset, HAS_WEIGHT)
    tail_inside, tail_whole, tail_touched, tail_weight = inside, whole, touched, weight
    if BLOCK_TAIL > 0:
        column, tail_inside, tail_whole, tail_touched = _window(first, BLOCK_N, BLOCK_TAIL, N, VECTOR)
        tail_weight = _load_weight(weight_ptr, column, tail_inside, offset, HAS_WEIGHT)
    for row in tl.range(first, rows, tl.num_programs(0), num_stages=STAGES):  # pyright: ignore
        window = tl.cast(row, tl.int64) * N // VECTOR * VECTOR
        at = window + tl.arange(0, BLOCK_N)
        tail_at = at
        value = _load_input(
            x_ptr,
            residual_ptr,
            h_ptr,
            at,
            inside,
            whole,
            touched,
            total,
            HAS_RESIDUAL,
            RAGGED_MAIN,
            VECTOR,
        )
        squares = tl.sum(value * value, 0)
        tail = value
        if BLOCK_TAIL > 0:
            tail_at = window + BLOCK_N + tl.arange(0, BLOCK_TAIL)
            tail = _load_input(
                x_ptr,
                residual_ptr,
                h_ptr,
                tail_at,
                tail_inside,
                tail_whole,
                tail_touched,
                total,
                HAS_RESIDUAL,
                RAGGED_END,
                VECTOR,
            )
            squares += tl.sum(tail * tail, 0)
        rstd = 1.0 / tl.sqrt_rn(squares / N + tl.cast(eps, tl.float32))
        tl.store(rstd_ptr + row, rstd)
        _store(y_ptr + at, value * rstd * weight, inside, whole)
        if BLOCK_TAIL > 0:
            _store(y_ptr + tail_at, tail * rstd * tail_weight, tail_inside, tail_whole)


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
    RAGGED_END: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx, and one row of partials of dw a program."""
    RAGGED_MAIN: tl.constexpr = RAGGED_END and BLOCK_N > N  # else a row's last vector lies in the tail
    first = tl.program_id(0)
    total = tl.cast(rows, tl.int64) * N
    column, inside, whole, touched = _window(first, 0, BLOCK_N, N, VECTOR)
    weight = _load_weight(weight_ptr, column, inside, offset, HAS_WEIGHT)
    dw = tl.zeros([BLOCK_N], tl.float32)
    tail_column, tail_inside, tail_whole, tail_touched = column, inside, whole, touched
    tail_weight, tail_dw = weight, dw
    if BLOCK_TAIL > 0:
        tail_column, tail_inside, tail_whole, tail_touched = _window(first, BLOCK_N, BLOCK_TAIL, N, VECTOR)
        tail_weight = _load_weight(weight_ptr, tail_column, tail_inside, offset, HAS_WEIGHT)
        tail_dw = tl.zeros([BLOCK_TAIL], tl.float32)
    for row in tl.range(first, rows, tl.num_programs(0), num_stages=STAGES):  # pyright: ignore
        window = tl.cast(row, tl.int64) * N // VECTOR * VECTOR
        at = window + tl.arange(0, BLOCK_N)
        rstd = tl.load(rstd_ptr + row)
        dy = _load(dy_ptr + at, at, inside, touched, total, RAGGED_MAIN, VECTOR)
        x_hat = _load(x_ptr + at, at, inside, touched, total, RAGGED_MAIN, VECTOR) * rstd
        mean = tl.sum(dy * weight * x_hat, 0)
        tail_at, tail_dy, tail_x_hat = at, dy, x_hat
        if BLOCK_TAIL > 0:
            tail_at = window + BLOCK_N + tl.arange(0, BLOCK_TAIL)
            tail_dy = _load(dy_ptr + tail_at, tail_at, tail_inside, tail_touched, total, RAGGED_END, VECTOR)
            tail_x_hat = _load(x_ptr + tail_at, tail_at, tail_inside, tail_touched, total, RAGGED_END, VECTOR) * rstd
            mean += tl.sum(tail_dy * tail_weight * tail_x_hat, 0)
        mean /= N
        dx = rstd * tl.fma(x_hat, -mean, dy * weight)
        if HAS_DH:
            dx += _load(dh_ptr + at, at, inside, touched, total, RAGGED_MAIN, VECTOR)
        _store(dx_ptr + at, dx, inside, whole)
        if NEED_DW:
            dw += dy * x_hat
        if BLOCK_TAIL > 0:
            dx = rstd * tl.fma(tail_x_hat, -mean, tail_dy * tail_weight)
            if HAS_DH:
                dx += _load(dh_ptr + tail_at, tail_at, tail_inside, tail_touched, total, RAGGED_END, VECTOR)
            _store(dx_ptr + tail_at, dx, tail_inside, tail_whole)
            if NEED_DW:
                tail_dw += tail_dy * tail_x_hat
    if NEED_DW:
        partial = partial_ptr + tl.cast(first, tl.int64) * PARTIAL_STRIDE
        tl.store(partial + column, dw.to(partial_ptr.dtype.element_ty), mask=inside)
        if BLOCK_TAIL > 0:
            tl.store(partial + tail_column, tail_dw.to(partial_ptr.dtype.element_ty), mask=tail_inside)
