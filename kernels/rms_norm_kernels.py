"""Kernels of rms_norm and add_rms_norm; what they compute stands in rms_norm.py.

Rows are numbered over all leading dimensions. A tensor is seen as (outer, inner, N) with strides of its own: row r
starts at (r // inner) * stride_outer + (r % inner) * stride_inner; inner is 1, and compiled away, wherever the leading
dimensions merge. N is a compile-time constant: the width of a model, so that masks and divisions fold.

EVEN means that a tile needs no mask: its rows and its columns all exist.
"""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl


@jit
def _row_offset(row, inner, stride_outer, stride_inner):
    """Where each row starts. The division is in int32: rows are fewer than 2**31, elements need not be."""
    return (row // inner).to(tl.int64) * stride_outer + (row % inner).to(tl.int64) * stride_inner


@jit
def _load_as(pointers, mask, EVEN: tl.constexpr, POLICY: tl.constexpr):
    """fp32. POLICY: an eviction policy or ""."""
    if EVEN:
        return tl.load(pointers, eviction_policy=POLICY).to(tl.float32)  # pyright: ignore[reportArgumentType]
    else:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=POLICY).to(tl.float32)  # pyright: ignore[reportArgumentType]


@jit
def load(pointers, mask, EVEN: tl.constexpr):
    return _load_as(pointers, mask, EVEN, "")


@jit
def store(pointers, value, mask, EVEN: tl.constexpr):
    value = value.to(pointers.dtype.element_ty)
    if EVEN:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=mask)


@jit
def load_weight(weight_ptr, col, mask, offset, HAS_WEIGHT: tl.constexpr, EVEN: tl.constexpr):
    """fp32 [1, C] or [C], as `col` is: offset + weight, or ones."""
    if HAS_WEIGHT:
        return load(weight_ptr + col, mask, EVEN) + tl.cast(offset, tl.float32)
    else:
        return tl.full(col.shape, 1.0, tl.float32)


@jit
def bring_weight(weight_ptr, start: tl.constexpr, SIZE: tl.constexpr, N: tl.constexpr):
    """Reads an element of each 32 bytes, volatile lest it be left out, for nobody waits for it: the weight is then in
    L2 when the first programs, which all come to it at once, ask for it."""
    SECTOR: tl.constexpr = 256 // weight_ptr.dtype.element_ty.primitive_bitwidth  # pyright: ignore
    sector = start + tl.arange(0, SIZE // SECTOR) * SECTOR  # pyright: ignore
    tl.load(weight_ptr + sector, mask=(sector < N) & (tl.program_id(0) < 8), volatile=True)


@jit
def _columns(N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_TAIL: tl.constexpr):
    """Columns of the main block and of the tail, each [1, C], and their masks."""
    col = tl.arange(0, BLOCK_N)[None, :]
    tail_col = col  # not used without a tail
    if BLOCK_TAIL > 0:
        tail_col = BLOCK_N + tl.arange(0, BLOCK_TAIL)[None, :]
    return col, col < N, tail_col, tail_col < N


@jit
def _load_input(
    x, residual, h, mask, HAS_RESIDUAL: tl.constexpr, EVEN: tl.constexpr, LOAD: tl.constexpr
):  # fmt: skip
    """[R, C] fp32: x, or x + residual as rounded to h's dtype, which is stored too."""
    value = _load_as(x, mask, EVEN, LOAD)
    if HAS_RESIDUAL:
        total = (value + _load_as(residual, mask, EVEN, LOAD)).to(h.dtype.element_ty)
        store(h, total, mask, EVEN)
        value = total.to(tl.float32)  # the norm sees the rounded sum, the one that the backward pass reads again
    return value


@jit
def _block(part: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_TAIL: tl.constexpr):
    """Columns of a row's part, [1, C], and their mask: BLOCKS blocks of BLOCK_N, then the tail."""
    if part < BLOCKS:
        col = part * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    else:
        col = BLOCKS * BLOCK_N + tl.arange(0, BLOCK_TAIL)[None, :]
    return col, col < N


@jit
def rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    x_stride_outer,
    x_stride_inner,
    residual_stride_outer,
    residual_stride_inner,
    rows,
    inner,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    N: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    STAGES: tl.constexpr,
    LATE_WEIGHT: tl.constexpr,
    LOAD: tl.constexpr,
):
    """Whole rows in registers: one read, one write. LOAD: what L2 is told of rows that are read."""
    PARTS: tl.constexpr = BLOCKS + (BLOCK_TAIL > 0)
    first = tl.program_id(0) * BLOCK_ROWS
    weights = ()
    if LATE_WEIGHT and HAS_WEIGHT:
        for part in tl.static_range(BLOCKS):  # pyright: ignore
            bring_weight(weight_ptr, part * BLOCK_N, BLOCK_N, N)
    elif not LATE_WEIGHT:
        for part in tl.static_range(PARTS):  # pyright: ignore
            col, exists = _block(part, N, BLOCKS, BLOCK_N, BLOCK_TAIL)
            weights += (load_weight(weight_ptr, col, exists, offset, HAS_WEIGHT, part * BLOCK_N + col.shape[1] <= N),)
    step = tl.num_programs(0) * BLOCK_ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):  # pyright: ignore
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        x = x_ptr + _row_offset(row, inner, x_stride_outer, x_stride_inner)
        residual = residual_ptr + _row_offset(row, inner, residual_stride_outer, residual_stride_inner)
        out = row.to(tl.int64) * N
        values = ()  # [R, C] each
        squares = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        for part in tl.static_range(PARTS):  # pyright: ignore
            col, exists = _block(part, N, BLOCKS, BLOCK_N, BLOCK_TAIL)
            value = _load_input(
                x + col, residual + col, h_ptr + out + col, (row < rows) & exists, HAS_RESIDUAL,
                EVEN_ROWS and part * BLOCK_N + col.shape[1] <= N, LOAD,
            )  # fmt: skip
            values += (value,)
            if part < BLOCKS:
                squares += value * value
        total = tl.sum(squares, 1, keep_dims=True)
        if BLOCK_TAIL > 0:
            total += tl.sum(values[BLOCKS] * values[BLOCKS], 1, keep_dims=True)
        rstd = 1.0 / tl.sqrt_rn(total / N + tl.cast(eps, tl.float32))
        if BLOCKS > 1:
            # By a lane of each row's warp, lest the rows meet in shared memory.
            lane = tl.arange(0, 32)[None, :]
            tl.store(rstd_ptr + row + lane, tl.broadcast_to(rstd, [BLOCK_ROWS, 32]), mask=(row < rows) & (lane == 0))
        else:
            tl.store(rstd_ptr + row, rstd, mask=row < rows)
        factors = weights
        if LATE_WEIGHT:
            for part in tl.static_range(PARTS):  # pyright: ignore
                col, exists = _block(part, N, BLOCKS, BLOCK_N, BLOCK_TAIL)
                if BLOCKS > 1:  # lest its layout be another one than that of the rows, which lie in a warp each
                    col = tl.broadcast_to(col, [BLOCK_ROWS, BLOCK_N])
                factors += (
                    load_weight(weight_ptr, col, exists, offset, HAS_WEIGHT, part * BLOCK_N + col.shape[1] <= N),
                )
        for part in tl.static_range(PARTS):  # pyright: ignore
            col, exists = _block(part, N, BLOCKS, BLOCK_N, BLOCK_TAIL)
            store(
                y_ptr + out + col, values[part] * rstd * factors[part], (row < rows) & exists,
                EVEN_ROWS and part * BLOCK_N + col.shape[1] <= N,
            )  # fmt: skip


@jit
def rms_norm_forward_chunked_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    h_ptr,
    rstd_ptr,
    x_stride_outer,
    x_stride_inner,
    residual_stride_outer,
    residual_stride_inner,
    rows,
    inner,
    eps,
    offset,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows wider than registers hold, one a program: read for the norm, then again, out of a cache, to be scaled."""
    EVEN: tl.constexpr = N % BLOCK_N == 0
    row = tl.program_id(0)
    x = x_ptr + _row_offset(row, inner, x_stride_outer, x_stride_inner)
    residual = residual_ptr + _row_offset(row, inner, residual_stride_outer, residual_stride_inner)
    out = row.to(tl.int64) * N
    squares = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        value = _load_input(x + col, residual + col, h_ptr + out + col, col < N, HAS_RESIDUAL, EVEN, "")
        squares += value * value
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / N + tl.cast(eps, tl.float32))
    tl.store(rstd_ptr + row, rstd)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # what another thread has stored of h is read below
        x = h_ptr + out
    for start in range(0, N, BLOCK_N):
        col = start + tl.arange(0, BLOCK_N)
        weight = load_weight(weight_ptr, col, col < N, offset, HAS_WEIGHT, EVEN)
        store(y_ptr + out + col, load(x + col, col < N, EVEN) * rstd * weight, col < N, EVEN)


@jit
def _gradient(dy, x_hat, weight, mean, rstd, dh, mask, HAS_DH: tl.constexpr, EVEN: tl.constexpr):
    """[R, C] fp32: rstd * (g - x_hat * mean(g * x_hat)) with g = dy * weight, plus dh.

    Which of the two products is rounded first is written out, lest it depend on the layouts of what is loaded.
    """
    dx = rstd * tl.fma(x_hat, -mean, dy * weight)
    if HAS_DH:
        dx += load(dh, mask, EVEN)
    return dx


@jit
def _add_rows(total, value, SUM_ROWS: tl.constexpr):
    """total + value; with SUM_ROWS total is [1, C] and the rows of value, which lie in one thread, are summed first."""
    if SUM_ROWS:
        return total + tl.sum(value, 0, keep_dims=True)
    else:
        return total + value


@jit
def rms_norm_backward_kernel(
    dy_ptr,
    dh_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride_outer,
    dy_stride_inner,
    dh_stride_outer,
    dh_stride_inner,
    x_stride_outer,
    x_stride_inner,
    rows,
    inner,
    offset,
    HAS_DH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DW: tl.constexpr,
    N: tl.constexpr,
    PARTIAL_STRIDE: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_TAIL_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Whole rows in registers; a program takes every num_programs-th block of rows and keeps its sum of dw."""
    EVEN: tl.constexpr = EVEN_ROWS and BLOCK_N <= N
    EVEN_TAIL: tl.constexpr = EVEN_ROWS and BLOCK_N + BLOCK_TAIL == N
    WHOLE: tl.constexpr = BLOCK_N <= N  # the columns alone
    WHOLE_TAIL: tl.constexpr = BLOCK_N + BLOCK_TAIL == N
    first = tl.program_id(0) * BLOCK_ROWS
    col, col_mask, tail_col, tail_col_mask = _columns(N, BLOCK_N, BLOCK_TAIL)
    weight = load_weight(weight_ptr, col, col_mask, offset, HAS_WEIGHT, WHOLE)
    dw = tl.zeros([1 if SUM_ROWS else BLOCK_ROWS, BLOCK_N], tl.float32)
    tail_weight, tail_dw = weight, dw
    if BLOCK_TAIL > 0:
        tail_weight = load_weight(weight_ptr, tail_col, tail_col_mask, offset, HAS_WEIGHT, WHOLE_TAIL)
        tail_dw = tl.zeros([1 if SUM_TAIL_ROWS else BLOCK_ROWS, BLOCK_TAIL], tl.float32)
    step = tl.num_programs(0) * BLOCK_ROWS
    for start in tl.range(first, rows, step, num_stages=STAGES):  # pyright: ignore
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        row_mask = row < rows
        x_row = x_ptr + _row_offset(row, inner, x_stride_outer, x_stride_inner)
        dy_row = dy_ptr + _row_offset(row, inner, dy_stride_outer, dy_stride_inner)
        dh_row = dh_ptr + _row_offset(row, inner, dh_stride_outer, dh_stride_inner)
        out = row.to(tl.int64) * N
        mask = row_mask & col_mask
        x = load(x_row + col, mask, EVEN)  # [R, N]
        dy = load(dy_row + col, mask, EVEN)
        tail_x, tail_dy, tail_mask = x, dy, mask
        if BLOCK_TAIL > 0:
            tail_mask = row_mask & tail_col_mask
            tail_x = load(x_row + tail_col, tail_mask, EVEN_TAIL)
            tail_dy = load(dy_row + tail_col, tail_mask, EVEN_TAIL)
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)  # [R, 1]
        x *= rstd  # from here on x_hat
        mean = tl.sum(dy * weight * x, 1, keep_dims=True)
        if BLOCK_TAIL > 0:
            tail_x *= rstd
            mean += tl.sum(tail_dy * tail_weight * tail_x, 1, keep_dims=True)
        mean /= N
        dx = _gradient(dy, x, weight, mean, rstd, dh_row + col, mask, HAS_DH, EVEN)
        store(dx_ptr + out + col, dx, mask, EVEN)
        if NEED_DW:
            dw = _add_rows(dw, dy * x, SUM_ROWS)
        if BLOCK_TAIL > 0:
            dx = _gradient(tail_dy, tail_x, tail_weight, mean, rstd, dh_row + tail_col, tail_mask, HAS_DH, EVEN_TAIL)
            store(dx_ptr + out + tail_col, dx, tail_mask, EVEN_TAIL)
            if NEED_DW:
                tail_dw = _add_rows(tail_dw, tail_dy * tail_x, SUM_TAIL_ROWS)
    if NEED_DW:
        partial = partial_ptr + tl.program_id(0).to(tl.int64) * PARTIAL_STRIDE
        store(partial + col, tl.sum(dw, 0, keep_dims=True), col_mask, WHOLE)
        if BLOCK_TAIL > 0:
            total = tl.sum(tail_dw, 0, keep_dims=True)
            store(partial + tail_col, total, tail_col_mask, WHOLE_TAIL)


@jit
def rms_norm_backward_chunked_kernel(
    dy_ptr,
    dh_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride_outer,
    dy_stride_inner,
    dh_stride_outer,
    dh_stride_inner,
    x_stride_outer,
    x_stride_inner,
    rows,
    inner,
    offset,
    HAS_DH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    NEED_DW: tl.constexpr,
    N: tl.constexpr,
    PARTIAL_STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Rows wider than registers hold: two passes in chunks over BLOCK_ROWS rows. The sum of dw of a program is its row
    of partials itself, read and written once a block of rows; it stays in the L2 cache."""
    first = tl.program_id(0) * BLOCK_ROWS
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * PARTIAL_STRIDE
    for start in range(first, rows, tl.num_programs(0) * BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        row_mask = row < rows
        x_row = x_ptr + _row_offset(row, inner, x_stride_outer, x_stride_inner)
        dy_row = dy_ptr + _row_offset(row, inner, dy_stride_outer, dy_stride_inner)
        dh_row = dh_ptr + _row_offset(row, inner, dh_stride_outer, dh_stride_inner)
        out = row.to(tl.int64) * N
        products = tl.zeros([BLOCK_ROWS, BLOCK_N], tl.float32)
        for chunk in range(0, N, BLOCK_N):
            col = chunk + tl.arange(0, BLOCK_N)[None, :]
            mask = row_mask & (col < N)
            x = load(x_row + col, mask, False)
            weight = load_weight(weight_ptr, col, col < N, offset, HAS_WEIGHT, N % BLOCK_N == 0)
            products += load(dy_row + col, mask, False) * weight * x
        rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)
        mean = tl.sum(products, 1, keep_dims=True) * rstd / N
        tl.debug_barrier()  # what another thread has stored of the partial is read below
        for chunk in range(0, N, BLOCK_N):
            col = chunk + tl.arange(0, BLOCK_N)[None, :]
            mask = row_mask & (col < N)
            x_hat = load(x_row + col, mask, False) * rstd
            dy = load(dy_row + col, mask, False)
            weight = load_weight(weight_ptr, col, col < N, offset, HAS_WEIGHT, N % BLOCK_N == 0)
            dx = _gradient(dy, x_hat, weight, mean, rstd, dh_row + col, mask, HAS_DH, False)
            store(dx_ptr + out + col, dx, mask, False)
            if NEED_DW:
                before = tl.load(partial + col, mask=(col < N) & (start != first), other=0.0)
                tl.store(partial + col, before + tl.sum(dy * x_hat, 0, keep_dims=True), mask=col < N)


@jit
def sum_partials_kernel(
    partial_ptr,
    dw_ptr,
    partials,
    N: tl.constexpr,
    PARTIAL_STRIDE: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dw[n] = sum of partial[:, n] in fp32, in an order that depends on the launch alone."""
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros([BLOCK_PARTIALS, BLOCK_N], tl.float32)
    for start in range(0, partials, BLOCK_PARTIALS):
        row = start + tl.arange(0, BLOCK_PARTIALS)[:, None]
        at = partial_ptr + row.to(tl.int64) * PARTIAL_STRIDE + col
        # Also the unused columns up to the stride, whose sums are not stored: N may cut a vector, the stride does not.
        total += tl.load(at, mask=(row < partials) & (col < PARTIAL_STRIDE), other=0.0)
    dw = tl.sum(total, 0, keep_dims=True)
    tl.store(dw_ptr + col, dw.to(dw_ptr.dtype.element_ty), mask=col < N)
