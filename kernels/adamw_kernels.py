"""The Triton kernels of AdamW. They reach all parameters through one table, which adamw_tables.py fills and describes.

Addresses that come out of a table carry no alignment: without hints every element is its own load. So a program takes
one of three paths. A whole chunk of a tensor whose addresses are multiples of 16 bytes moves 16 bytes an access,
without a mask. Where only the gradient lies elsewhere (FSDP2's gradients are views of one buffer, at any element of
it), only the gradient is read element by element. Tails, and parameters that are views at odd offsets, take the masked
path, which assumes nothing and writes nothing past an end.
"""

from __future__ import annotations

from fuselm.kernels._triton import jit, tl
from fuselm.kernels.adamw_rounding import first_word, key_word, round_bits, second_word


@jit
def _pointer(address, dtype: tl.constexpr):
    return address.to(tl.pointer_type(dtype))  # pyright: ignore[reportArgumentType]


@jit
def squares_kernel(
    table, chunks, partials,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """One fp32 sum of squares a chunk. chunks: int32, rows (tensor, chunk, slot), one column a program.

    Chunks begin at the multiple of 16 bytes at or before the tensor, so that all but the first and the last are whole
    and aligned wherever the gradient lies."""
    tensor = tl.load(chunks + tl.program_id(0))
    chunk = tl.load(chunks + tl.num_programs(0) + tl.program_id(0))
    slot = tl.load(chunks + 2 * tl.num_programs(0) + tl.program_id(0))
    table += tensor.to(tl.int64) * RECORD
    address = tl.load(table + 1)
    numel = tl.load(table + 6)
    grad = _pointer(address, DTYPE)
    WIDTH: tl.constexpr = grad.dtype.element_ty.primitive_bitwidth // 8
    start = chunk.to(tl.int64) * (BLOCK * ITERATIONS) - (address % 16) // WIDTH
    grad += start
    if (start >= 0) & (start + BLOCK * ITERATIONS <= numel):
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(ITERATIONS):
            g = tl.load(tl.multiple_of(grad + (i * BLOCK + tl.arange(0, BLOCK)), [16])).to(tl.float32)
            total += g * g
        tl.store(partials + slot, tl.sum(total, 0))
    else:
        first = tl.maximum(-start, 0).to(tl.int32)
        count = tl.minimum(numel - start, BLOCK * ITERATIONS).to(tl.int32)
        total = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, count, BLOCK):
            offsets = begin + tl.arange(0, BLOCK)
            g = tl.load(grad + offsets, mask=(offsets >= first) & (offsets < count), other=0.0).to(tl.float32)
            total += g * g
        tl.store(partials + slot, tl.sum(total, 0))


@jit
def _sum(partials, begin, end, BLOCK: tl.constexpr):
    """Σ partials[begin:end], fp64, in a fixed order."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(begin, end, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        total += tl.load(partials + offsets, mask=offsets < end, other=0.0).to(tl.float64)
    return tl.sum(total, 0)


@jit
def class_sums_kernel(partials, bounds, sums, num_classes, BLOCK: tl.constexpr):
    """sums[k] = Σ partials[bounds[k]:bounds[k + 1]]; sums[num_classes] = 1 if one is not finite."""
    broken = tl.full((), 0.0, tl.float64)
    for k in range(num_classes):
        class_sum = _sum(partials, tl.load(bounds + k), tl.load(bounds + k + 1), BLOCK)
        tl.store(sums + k, class_sum)
        broken = tl.where(tl.abs(class_sum) < float("inf"), broken, 1.0)
    tl.store(sums + num_classes, broken)


@jit
def _total(sums, num_classes):
    """Σ sums[:num_classes], and how many ranks saw a sum that is not finite."""
    total = tl.full((), 0.0, tl.float64)
    for k in range(num_classes):
        total += tl.load(sums + k)
    return total, tl.load(sums + num_classes)


@jit
def norm_kernel(sums, num_classes, norm_ptr):
    """norm: () fp64, what a veto is asked about; NaN where it is not finite on any rank."""
    total, broken = _total(sums, num_classes)
    fine = (tl.abs(total) < float("inf")) & (broken == 0.0)
    tl.store(norm_ptr, tl.where(fine, tl.sqrt(total), float("nan")))


# A veto's answer may be an element of a larger tensor: wherever it lies, the same kernel.
@jit(do_not_specialize=["veto"])
def finish_kernel(
    partials, bounds, sums, num_classes, table, num_tensors, scalars, keys, control, norm_ptr, skipped, veto, max_norm,
    REDUCED: tl.constexpr, VETO: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr, SUM_BLOCK: tl.constexpr,
    RECORD: tl.constexpr, HYPER: tl.constexpr,
):  # fmt: skip
    """The norm, control = (clip factor, 1 to step or 0 to skip), and for every tensor step += 1 and what the update
    needs: scalars (num_tensors, 8) fp32: lr / (1 - β1^t), 1 / √(1 - β2^t), lr λ, 1 - β1, 1 - β2, ε; keys
    (num_tensors, 2) uint32.

    REDUCED: class sums exist (and have gone through all_reduce); otherwise this program adds up the partial sums
    itself. VETO: `veto` is one uint8, not 0 where the step must not be taken; otherwise any pointer."""
    if REDUCED:
        total, broken = _total(sums, num_classes)
    else:
        total = _sum(partials, 0, tl.load(bounds + num_classes), SUM_BLOCK)
        broken = tl.full((), 0.0, tl.float64)
    finite = tl.abs(total) < float("inf")
    fine = finite & (broken == 0.0)
    # A rank whose own sum is finite but whose peers' is not still reports a norm that is not finite.
    norm = tl.where(fine | (finite == 0), tl.sqrt(total).to(tl.float32), float("nan"))
    tl.store(norm_ptr, norm)
    go = fine
    if VETO:
        go = fine & (tl.load(veto) == 0)
    tl.store(control, tl.minimum(tl.div_rn(tl.cast(max_norm, tl.float32), norm + 1e-6), 1.0))
    tl.store(control + 1, go.to(tl.float32))
    tl.store(skipped, tl.load(skipped) + 1 - go.to(tl.int64))
    for first in range(0, num_tensors, BLOCK):
        index = first + tl.arange(0, BLOCK)
        mask = index < num_tensors
        record = table + index.to(tl.int64) * RECORD
        counter = _pointer(tl.load(record + 5, mask=mask, other=0), tl.float32)
        step = tl.load(counter, mask=mask, other=0.0) + go.to(tl.float32)
        tl.store(counter, step, mask=mask)
        # The groups' rows follow the tensors' in the same table; doubles lie in it as bits.
        hyper = table + num_tensors * RECORD + tl.load(record + 8, mask=mask, other=0) * HYPER
        lr = tl.load(hyper, mask=mask, other=0).to(tl.float64, bitcast=True)
        lr_address = tl.load(hyper + 1, mask=mask, other=0)
        lr_bytes = tl.load(hyper + 2, mask=mask, other=0)
        narrow = tl.load(_pointer(lr_address, tl.float32), mask=mask & (lr_bytes == 4), other=0.0).to(tl.float64)
        wide = tl.load(_pointer(lr_address, tl.float64), mask=mask & (lr_bytes == 8), other=0.0)
        lr = tl.where(lr_bytes == 4, narrow, tl.where(lr_bytes == 8, wide, lr))
        # fp64: 1 - β^t cancels for β near 1.
        log_beta1 = tl.load(hyper + 3, mask=mask, other=0).to(tl.float64, bitcast=True)
        log_beta2 = tl.load(hyper + 4, mask=mask, other=0).to(tl.float64, bitcast=True)
        correction1 = 1.0 - tl.exp(log_beta1 * step.to(tl.float64))
        correction2 = tl.sqrt(1.0 - tl.exp(log_beta2 * step.to(tl.float64)))
        weight1 = tl.load(hyper + 5, mask=mask, other=0).to(tl.float64, bitcast=True)
        weight2 = tl.load(hyper + 6, mask=mask, other=0).to(tl.float64, bitcast=True)
        eps = tl.load(hyper + 7, mask=mask, other=0).to(tl.float64, bitcast=True)
        weight_decay = tl.load(hyper + 8, mask=mask, other=0).to(tl.float64, bitcast=True)
        row = scalars + index * 8
        started = mask & (step > 0.0)  # a skipped first step has no corrections, and needs none
        tl.store(row, (lr / tl.where(started, correction1, 1.0)).to(tl.float32), mask=mask)
        tl.store(row + 1, (1.0 / tl.where(started, correction2, 1.0)).to(tl.float32), mask=mask)
        tl.store(row + 2, (lr * weight_decay).to(tl.float32), mask=mask)
        tl.store(row + 3, weight1.to(tl.float32), mask=mask)
        tl.store(row + 4, weight2.to(tl.float32), mask=mask)
        tl.store(row + 5, eps.to(tl.float32), mask=mask)
        if ROUND:
            seed = tl.load(hyper + 9, mask=mask, other=0)
            parameter = tl.load(record + 9, mask=mask, other=0)
            word0 = key_word(0x9E3779B9, seed, step, parameter)
            word1 = key_word(0x7F4A7C15, seed, step, parameter)
            tl.store(keys + index * 2, word0.to(tl.int32, bitcast=True), mask=mask)
            tl.store(keys + index * 2 + 1, word1.to(tl.int32, bitcast=True), mask=mask)


@jit
def _adamw_block(
    param, grad, exp_avg, exp_avg_sq, master, offsets, count, scale, step_size, inverse_root, decay, weight1, weight2,
    eps, index, before, key0, key1, run, gap, eviction,
    HAS_MASTER: tl.constexpr, WHOLE: tl.constexpr, GRAD_ALIGNED: tl.constexpr, HINT2: tl.constexpr,
    HINT4: tl.constexpr, ROUND: tl.constexpr, GAPS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The update of one block of offsets; see the formulas in adamw.py. The chunk's first element is number `index` of
    the whole parameter, and number `before` of its run."""
    param, grad, exp_avg, exp_avg_sq = param + offsets, grad + offsets, exp_avg + offsets, exp_avg_sq + offsets
    weight = master + offsets if HAS_MASTER else param
    if WHOLE:
        # A hint stays with the operation that made its argument: it must be given here, not in a function called.
        PARAM_HINT: tl.constexpr = HINT2 if param.dtype.element_ty.primitive_bitwidth == 16 else HINT4
        GRAD_HINT: tl.constexpr = HINT2 if grad.dtype.element_ty.primitive_bitwidth == 16 else HINT4
        STATE_HINT: tl.constexpr = HINT2 if exp_avg.dtype.element_ty.primitive_bitwidth == 16 else HINT4
        param = tl.multiple_of(param, [PARAM_HINT])
        exp_avg, exp_avg_sq = tl.multiple_of(exp_avg, [STATE_HINT]), tl.multiple_of(exp_avg_sq, [STATE_HINT])
        if HAS_MASTER:
            weight = tl.multiple_of(weight, [HINT4])
        else:
            weight = param
        if GRAD_ALIGNED:
            grad = tl.multiple_of(grad, [GRAD_HINT])
        w = tl.load(weight, eviction_policy=eviction).to(tl.float32)
        g = tl.load(grad, eviction_policy=eviction).to(tl.float32)
        m = tl.load(exp_avg, eviction_policy=eviction).to(tl.float32)
        v = tl.load(exp_avg_sq, eviction_policy=eviction).to(tl.float32)
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
    # Fast square root and division (2 ulp): exact ones take more instructions than the memory's pace leaves in bf16.
    w -= step_size * (m / (tl.sqrt(v) * inverse_root + eps))
    p = w
    if ROUND:
        index += offsets
        if GAPS:  # a shard of an inner dimension: after every `run` elements the whole parameter goes on `gap` further
            few = tl.minimum(run, CHUNK).to(tl.int32)
            crossed = (tl.minimum(before, CHUNK).to(tl.int32) + offsets) // few
            crossed = tl.where(run < CHUNK, crossed, (before + offsets >= run).to(tl.int32))
            index += crossed.to(tl.int64) * gap
        bits = first_word(index, key0, key1)
        if param.dtype.element_ty == tl.bfloat16 and not HAS_MASTER:
            p = round_bits(w, bits)
        if exp_avg.dtype.element_ty == tl.bfloat16:
            m = round_bits(m, bits >> 16)
            v = round_bits(v, second_word(bits))
    if WHOLE:
        if HAS_MASTER:
            tl.store(weight, w, eviction_policy=eviction)
        tl.store(param, p.to(param.dtype.element_ty), eviction_policy=eviction)
        tl.store(exp_avg, m.to(exp_avg.dtype.element_ty), eviction_policy=eviction)
        tl.store(exp_avg_sq, v.to(exp_avg_sq.dtype.element_ty), eviction_policy=eviction)
    else:
        mask = offsets < count
        if HAS_MASTER:
            tl.store(weight, w, mask=mask)
        tl.store(param, p.to(param.dtype.element_ty), mask=mask)
        tl.store(exp_avg, m.to(exp_avg.dtype.element_ty), mask=mask)
        tl.store(exp_avg_sq, v.to(exp_avg_sq.dtype.element_ty), mask=mask)


@jit
def adamw_kernel(
    table, chunks, scalars, keys, control,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, HAS_MASTER: tl.constexpr, ROUND: tl.constexpr,
    GAPS: tl.constexpr, BLOCK: tl.constexpr, ITERATIONS: tl.constexpr, HINT2: tl.constexpr, HINT4: tl.constexpr,
    EVICT: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    """One chunk of one parameter. chunks: int32, rows (tensor, chunk), one column a program."""
    tensor = tl.load(chunks + tl.program_id(0))
    chunk = tl.load(chunks + tl.num_programs(0) + tl.program_id(0))
    scale = tl.load(control)
    go = tl.load(control + 1)
    table += tensor.to(tl.int64) * RECORD
    param = _pointer(tl.load(table), PARAM)
    grad = _pointer(tl.load(table + 1), GRAD)
    exp_avg = _pointer(tl.load(table + 2), STATE)
    exp_avg_sq = _pointer(tl.load(table + 3), STATE)
    master = _pointer(tl.load(table + 4), tl.float32)
    numel = tl.load(table + 6)
    aligned = tl.load(table + 7)
    scalars += tensor * 8
    step_size = tl.load(scalars)
    inverse_root = tl.load(scalars + 1)
    decay = tl.load(scalars + 2)
    weight1 = tl.load(scalars + 3)
    weight2 = tl.load(scalars + 4)
    eps = tl.load(scalars + 5)
    CHUNK: tl.constexpr = BLOCK * ITERATIONS
    start = chunk.to(tl.int64) * CHUNK
    index, before, run, gap = start, start, start, start
    key0, key1 = 0, 0
    if ROUND:
        key0 = tl.load(keys + tensor * 2).to(tl.uint32, bitcast=True)
        key1 = tl.load(keys + tensor * 2 + 1).to(tl.uint32, bitcast=True)
        run, gap = tl.load(table + 11), tl.load(table + 12)
        index = tl.load(table + 10) + start
        if GAPS:
            index += start // run * gap
            before = start % run
    if go == 0.0:
        return
    param, grad, exp_avg, exp_avg_sq = param + start, grad + start, exp_avg + start, exp_avg_sq + start
    if HAS_MASTER:
        master += start
    # From here on offsets are small: int32, which saves registers.
    count = tl.minimum(numel - start, CHUNK).to(tl.int32)
    if (aligned == 3) & (count == CHUNK):
        for i in range(ITERATIONS):
            _adamw_block(
                param, grad, exp_avg, exp_avg_sq, master, i * BLOCK + tl.arange(0, BLOCK), count, scale, step_size,
                inverse_root, decay, weight1, weight2, eps, index, before, key0, key1, run, gap, EVICT,
                HAS_MASTER, True, True, HINT2, HINT4, ROUND, GAPS, CHUNK,
            )  # fmt: skip
    elif (aligned == 1) & (count == CHUNK):
        for i in range(ITERATIONS):
            _adamw_block(
                param, grad, exp_avg, exp_avg_sq, master, i * BLOCK + tl.arange(0, BLOCK), count, scale, step_size,
                inverse_root, decay, weight1, weight2, eps, index, before, key0, key1, run, gap, EVICT,
                HAS_MASTER, True, False, HINT2, HINT4, ROUND, GAPS, CHUNK,
            )  # fmt: skip
    else:
        for begin in range(0, count, BLOCK):
            _adamw_block(
                param, grad, exp_avg, exp_avg_sq, master, begin + tl.arange(0, BLOCK), count, scale, step_size,
                inverse_root, decay, weight1, weight2, eps, index, before, key0, key1, run, gap, EVICT,
                HAS_MASTER, False, False, HINT2, HINT4, ROUND, GAPS, CHUNK,
            )  # fmt: skip
