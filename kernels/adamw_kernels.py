"""The Triton kernels of AdamW. They reach all parameters through one table, which adamw_step.py fills and describes.

A chunk that is whole, of a tensor whose addresses are all multiples of 16 bytes, takes 16-byte loads and stores
without a mask; tails and views at odd offsets take the masked path, which assumes nothing and writes nothing past the
end.
"""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl


@jit
def _pointer(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype))  # pyright: ignore[reportArgumentType]


@jit
def squares_kernel(
    table, num_tensors, chunks, partials, DTYPE: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr
):
    """One fp32 sum of squares a chunk. chunks: int32, rows (tensor, chunk, slot), one column a program."""
    tensor = tl.load(chunks + tl.program_id(0))
    chunk = tl.load(chunks + tl.num_programs(0) + tl.program_id(0))
    slot = tl.load(chunks + 2 * tl.num_programs(0) + tl.program_id(0))
    grad = _pointer(tl.load(table + num_tensors + tensor), DTYPE)
    numel = tl.load(table + 6 * num_tensors + tensor)
    aligned = tl.load(table + 7 * num_tensors + tensor)
    start = chunk.to(tl.int64) * (BLOCK * ITERATIONS)
    grad += start
    count = tl.minimum(numel - start, BLOCK * ITERATIONS).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    if (aligned != 0) & (count == BLOCK * ITERATIONS):
        for i in range(ITERATIONS):
            # Addresses that come out of a table carry no alignment; without the hint every element is its own load.
            g = tl.load(tl.multiple_of(grad + (i * BLOCK + tl.arange(0, BLOCK)), [16])).to(tl.float32)
            total += g * g
    else:
        for begin in range(0, count, BLOCK):
            offsets = begin + tl.arange(0, BLOCK)
            g = tl.load(grad + offsets, mask=offsets < count, other=0.0).to(tl.float32)
            total += g * g
    tl.store(partials + slot, tl.sum(total, 0))


@jit
def class_sums_kernel(partials, bounds, sums, num_classes, BLOCK: tl.constexpr):
    """sums[k] = Σ partials[bounds[k]:bounds[k + 1]], fp64, in a fixed order; sums[num_classes] = 1 if one is not
    finite."""
    broken = tl.full((), 0.0, tl.float64)
    for k in range(num_classes):
        end = tl.load(bounds + k + 1)
        total = tl.zeros([BLOCK], tl.float64)
        for begin in range(tl.load(bounds + k), end, BLOCK):
            offsets = begin + tl.arange(0, BLOCK)
            total += tl.load(partials + offsets, mask=offsets < end, other=0.0).to(tl.float64)
        class_sum = tl.sum(total, 0)
        tl.store(sums + k, class_sum)
        broken = tl.where(tl.abs(class_sum) < float("inf"), broken, 1.0)
    tl.store(sums + num_classes, broken)


@jit
def scalars_kernel(
    sums, num_classes, table, num_tensors, corrections, control, norm_ptr, skipped, max_norm, BLOCK: tl.constexpr
):
    """norm, control = (clip factor, 1 to step or 0 to skip); then for every tensor step += 1, and bias corrections."""
    total = tl.full((), 0.0, tl.float64)
    for k in range(num_classes):
        total += tl.load(sums + k)
    finite = tl.abs(total) < float("inf")
    go = finite & (tl.load(sums + num_classes) == 0.0)
    # A rank whose own sum is finite but whose peers' is not still reports a norm that is not finite.
    norm = tl.where(go | (finite == 0), tl.sqrt(total).to(tl.float32), float("nan"))
    tl.store(norm_ptr, norm)
    tl.store(control, tl.minimum(tl.div_rn(tl.cast(max_norm, tl.float32), norm + 1e-6), 1.0))
    tl.store(control + 1, go.to(tl.float32))
    tl.store(skipped, tl.load(skipped) + 1 - go.to(tl.int64))
    for first in range(0, num_tensors, BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = index < num_tensors
        counter = _pointer(tl.load(table + 5 * num_tensors + index, mask=mask, other=0), tl.float32)
        step = tl.load(counter, mask=mask, other=0.0) + go.to(tl.float32)
        tl.store(counter, step, mask=mask)
        # fp64: 1 - β^t cancels for β near 1. The table has log β as the bits of a double.
        log_beta1 = tl.load(table + 8 * num_tensors + index, mask=mask, other=0).to(tl.float64, bitcast=True)
        log_beta2 = tl.load(table + 9 * num_tensors + index, mask=mask, other=0).to(tl.float64, bitcast=True)
        correction1 = 1.0 - tl.exp(log_beta1 * step.to(tl.float64))
        correction2 = tl.sqrt(1.0 - tl.exp(log_beta2 * step.to(tl.float64)))
        tl.store(corrections + index, correction1.to(tl.float32), mask=mask)
        tl.store(corrections + num_tensors + index, correction2.to(tl.float32), mask=mask)


@jit
def _adamw_block(
    param, grad, exp_avg, exp_avg_sq, master, offsets, count, scale, decay, step_size, root, weight1, weight2, eps,
    HAS_MASTER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The update of one block of offsets; see the formulas in adamw.py."""
    param, grad, exp_avg, exp_avg_sq = param + offsets, grad + offsets, exp_avg + offsets, exp_avg_sq + offsets
    weight = master + offsets if HAS_MASTER else param
    if ALIGNED:
        # Addresses that come out of a table carry no alignment; without these hints every element is its own load.
        param, grad = tl.multiple_of(param, [16]), tl.multiple_of(grad, [16])
        exp_avg, exp_avg_sq = tl.multiple_of(exp_avg, [16]), tl.multiple_of(exp_avg_sq, [16])
        weight = tl.multiple_of(weight, [16])
        w = tl.load(weight).to(tl.float32)
        g = tl.load(grad).to(tl.float32)
        m = tl.load(exp_avg).to(tl.float32)
        v = tl.load(exp_avg_sq).to(tl.float32)
    else:
        mask = offsets < count
        w = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(exp_avg, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq, mask=mask, other=0.0).to(tl.float32)
    g *= scale
    m += weight1 * (g - m)
    v += weight2 * (g * g - v)
    w -= decay * w
    w -= step_size * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    if ALIGNED:
        if HAS_MASTER:
            tl.store(weight, w)
        tl.store(param, w.to(param.dtype.element_ty))
        tl.store(exp_avg, m.to(exp_avg.dtype.element_ty))
        tl.store(exp_avg_sq, v.to(exp_avg_sq.dtype.element_ty))
    else:
        mask = offsets < count
        if HAS_MASTER:
            tl.store(weight, w, mask=mask)
        tl.store(param, w.to(param.dtype.element_ty), mask=mask)
        tl.store(exp_avg, m.to(exp_avg.dtype.element_ty), mask=mask)
        tl.store(exp_avg_sq, v.to(exp_avg_sq.dtype.element_ty), mask=mask)


@jit
def adamw_kernel(
    table, num_tensors, chunks, corrections, control, lr, weight1, weight2, eps, weight_decay,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, HAS_MASTER: tl.constexpr, LR_TENSOR: tl.constexpr,
    BLOCK: tl.constexpr, ITERATIONS: tl.constexpr,
):  # fmt: skip
    """One chunk of one parameter. chunks: int32, rows (tensor, chunk), one column a program; weight1 = 1 - β1."""
    if tl.load(control + 1) == 0.0:
        return
    tensor = tl.load(chunks + tl.program_id(0))
    chunk = tl.load(chunks + tl.num_programs(0) + tl.program_id(0))
    table += tensor
    param = _pointer(tl.load(table), PARAM)
    grad = _pointer(tl.load(table + num_tensors), GRAD)
    exp_avg = _pointer(tl.load(table + 2 * num_tensors), STATE)
    exp_avg_sq = _pointer(tl.load(table + 3 * num_tensors), STATE)
    master = _pointer(tl.load(table + 4 * num_tensors), tl.float32)
    numel = tl.load(table + 6 * num_tensors)
    aligned = tl.load(table + 7 * num_tensors)
    if LR_TENSOR:
        rate = tl.load(lr).to(tl.float32)
    else:
        rate = tl.cast(lr, tl.float32)
    step_size = tl.div_rn(rate, tl.load(corrections + tensor))
    root = tl.load(corrections + num_tensors + tensor)
    decay = rate * tl.cast(weight_decay, tl.float32)
    scale = tl.load(control)
    weight1 = tl.cast(weight1, tl.float32)
    weight2 = tl.cast(weight2, tl.float32)
    eps = tl.cast(eps, tl.float32)
    start = chunk.to(tl.int64) * (BLOCK * ITERATIONS)
    param, grad, exp_avg, exp_avg_sq = param + start, grad + start, exp_avg + start, exp_avg_sq + start
    if HAS_MASTER:
        master += start
    # From here on offsets are small: int32, which saves registers.
    count = tl.minimum(numel - start, BLOCK * ITERATIONS).to(tl.int32)
    if (aligned != 0) & (count == BLOCK * ITERATIONS):
        for i in range(ITERATIONS):
            _adamw_block(
                param, grad, exp_avg, exp_avg_sq, master, i * BLOCK + tl.arange(0, BLOCK), count,
                scale, decay, step_size, root, weight1, weight2, eps, HAS_MASTER, True,
            )  # fmt: skip
    else:
        for begin in range(0, count, BLOCK):
            _adamw_block(
                param, grad, exp_avg, exp_avg_sq, master, begin + tl.arange(0, BLOCK), count,
                scale, decay, step_size, root, weight1, weight2, eps, HAS_MASTER, False,
            )  # fmt: skip
