"""Cross-entropy of whole rows on Hopper as in cross_entropy_ring_kernels.py, by two groups of warps: readers sum the
next row while writers write the gradient of this one.

The first KEPT chunks of a row stay in their ring until the writers have them; of the others the readers have a ring of
STREAM slots, the writers one more, and each ring has a producer of its own, so that none waits for another's slots. A
row's numbers go from readers to writers in shared memory (`notes`), AHEAD rows of them.

PARTS programs may share each row, part by part: their readers tell one another what they summed in words of global
memory (`sums`, zeros at first), and wait for them; all of the programs have to run at once for that.

The writers store from registers, or (SEND) put the gradient in the logits' place in shared memory, from where TMA takes
it: a slot is then free when TMA has read it.
"""

from __future__ import annotations

from fuselm.kernels._triton import tl
from fuselm.kernels.attention.hopper_common import (
    barrier_ring,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    ring,
    thread_barrier,
    tma,
    tma_store,
)
from fuselm.kernels.cross_entropy_ring_kernels import (
    bring,
    chunks_of,
    columns_of,
    empty_sum,
    gradient_of,
    lines_of_last,
    load_chunk,
    row_inputs,
    row_outputs,
    store_chunk,
    sum_chunks,
    sum_last,
    sum_of,
    write_chunks,
    write_last,
)


@gluon_jit
def _share_of(part, vocab, TILE: tl.constexpr, KEPT: tl.constexpr, PARTS: tl.constexpr):
    """The chunks begin .. end - 1 of part `part` of PARTS of a row, and how many of them do not stay."""
    chunks, _ = chunks_of(vocab, TILE, KEPT)
    each = (chunks + PARTS - 1) // PARTS
    begin = part * each
    end = min(begin + each, chunks)
    return begin, end, max(end - begin - KEPT, 0)


@gluon_jit
def _bring_kept(
    slots, full, empty, desc, rows, vocab, TILE: tl.constexpr, KEPT: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    begin, end, others = _share_of(gl.program_id(0) % PARTS, vocab, TILE, KEPT, PARTS)
    bring(slots, full, empty, desc, rows, begin, end - others, 0, TILE, KEPT, PARTS)


@gluon_jit
def _bring_others(
    slots, full, empty, desc, rows, vocab,
    TILE: tl.constexpr, KEPT: tl.constexpr, STREAM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    _, end, others = _share_of(gl.program_id(0) % PARTS, vocab, TILE, KEPT, PARTS)
    bring(slots, full, empty, desc, rows, end - others, end, 0, TILE, STREAM, PARTS)


@gluon_jit
def _bits(x):
    return x.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF


@gluon_jit
def _all_parts(sums_ptr, row, top, total, PARTS: tl.constexpr):
    """The maximum and the sum of a row of which every program of PARTS has a part. A part's two numbers are one word,
    which is 0 until they are there: the greatest term of a sum is 1, or the maximum is not 0."""
    words = sums_ptr + gl.cast(row, gl.int64) * PARTS
    gl.store(words + gl.program_id(0) % PARTS, _bits(top) << 32 | _bits(total))
    for part in gl.static_range(PARTS):
        word = gl.load(words + part, volatile=True)
        while word == 0:
            word = gl.load(words + part, volatile=True)
        its_top = (word >> 32).to(gl.int32).to(gl.float32, bitcast=True)
        its_total = word.to(gl.int32).to(gl.float32, bitcast=True)
        if part == 0:
            top, total = its_top, its_total
        else:
            both = gl.maximum(top, its_top)
            total = total * gl.exp2(top - both) + its_total * gl.exp2(its_top - both)
            top = both
    return top, total


@gluon_jit
def _note(notes, place, value, WARPS: tl.constexpr):
    notes.index(place).store(gl.full([1], value, gl.float32, gl.BlockedLayout([1], [32], [WARPS], [0])))


@gluon_jit
def _noted(notes, place, WARPS: tl.constexpr):
    return gl.sum(notes.index(place).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon_jit
def _read(
    slots, full, others, others_full, others_empty, notes, ready, taken, logits_ptr, targets_ptr, loss_ptr, lse_ptr,
    lse_low_ptr, scale_ptr, grad_lse_ptr, sums_ptr, scale_stride, rows, stride, vocab, ignore_index, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    TILE: tl.constexpr, KEPT: tl.constexpr, STREAM: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    begin, after, streamed = _share_of(gl.program_id(0) % PARTS, vocab, TILE, KEPT, PARTS)
    exists = lines_of_last(vocab, after, TILE, WARPS)
    base = gl.program_id(0) * 0  # loads used so far of the kept chunks, over all rows
    other = base  # of the others
    turn = base
    for row in range(gl.program_id(0) // PARTS, rows, gl.num_programs(0) // PARTS):
        target, mine, ignored, in_range, x_target, scale, grad_lse = row_inputs(
            row, logits_ptr, targets_ptr, scale_ptr, grad_lse_ptr, scale_stride, stride, vocab, ignore_index,
            begin * (TILE * 64), after * (TILE * 64), HAS_SCALE, HAS_GRAD_LSE,
        )  # fmt: skip
        reference, s = empty_sum(TILE, WARPS)
        end = base + (after - begin) - streamed
        if STREAM == 0:
            reference, s = sum_chunks(slots, full, full, base, end - 1, reference, s, False, TILE, KEPT, WARPS)
            reference, s = sum_last(slots, full, full, end - 1, reference, s, exists, False, TILE, KEPT, WARPS)
        else:
            last = other + streamed - 1
            reference, s = sum_chunks(slots, full, full, base, end, reference, s, False, TILE, KEPT, WARPS)
            reference, s = sum_chunks(
                others, others_full, others_empty, other, last, reference, s, True, TILE, STREAM, WARPS
            )
            reference, s = sum_last(
                others, others_full, others_empty, last, reference, s, exists, True, TILE, STREAM, WARPS
            )
        base = end
        other += streamed
        top, total = sum_of(reference, s)
        if PARTS > 1:
            top, total = _all_parts(sums_ptr, row, top, total, PARTS)
        rounded, factor, zero, d_target = row_outputs(
            row, top, total, ignored, in_range, x_target, scale, grad_lse, loss_ptr, lse_ptr, lse_low_ptr, z_loss,
            mine, SKIP_IGNORED, HAS_GRAD_LSE,
        )  # fmt: skip
        # where the target's element is; -1 for nowhere in this part, -2 for a row of zeros
        place = gl.where(zero, -2, gl.where(in_range & mine, target.to(gl.int32), -1))
        stage = turn % AHEAD
        mbarrier.wait(taken.index(stage), turn // AHEAD & 1 ^ 1)
        _note(notes, stage * 4, rounded, WARPS)
        _note(notes, stage * 4 + 1, factor, WARPS)
        _note(notes, stage * 4 + 2, d_target, WARPS)
        _note(notes, stage * 4 + 3, place.to(gl.float32, bitcast=True), WARPS)
        mbarrier.arrive(ready.index(stage), count=1)
        turn += 1


@gluon_jit
def _send_chunks(
    slots, full, empty, begin, end, desc, row, first, columns, reference, factor, zero, place, d_target,
    TILE: tl.constexpr, SLOTS: tl.constexpr, SEND: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The second pass over loads begin .. end - 1 of a ring, the first of which is chunk `first` of the row: the
    gradient takes the logits' place and leaves by TMA, which knows where the row ends."""
    CHUNK: tl.constexpr = TILE * 64
    LAG: tl.constexpr = SEND if SEND < SLOTS else SLOTS - 1  # the producer needs one to go on
    for number in range(begin, end):
        slot = number % SLOTS  # pyright: ignore[reportOperatorIssue]
        mbarrier.wait(full.index(slot), number // SLOTS & 1)
        z = load_chunk(slots, slot, TILE, WARPS)
        d = gradient_of(z.to(gl.float32), reference, factor, zero)
        chunk = first + (number - begin)
        target = place - chunk * CHUNK
        if (target >= 0) & (target < CHUNK):
            d = gl.where(columns == target, d_target, d)
        store_chunk(slots, slot, d, TILE, WARPS)
        fence_async_shared()
        tma_store(desc, [row, chunk * TILE, 0], slots.index(slot))
        tma.store_wait(LAG)
        before = gl.maximum(number - LAG, begin)
        mbarrier.arrive(empty.index(before % SLOTS), count=1, pred=number >= begin + LAG)
    tma.store_wait(0)
    for number in range(gl.maximum(end - LAG, begin), end):
        mbarrier.arrive(empty.index(number % SLOTS), count=1)  # pyright: ignore[reportOperatorIssue]


@gluon_jit
def _write(
    slots, full, empty, others, others_full, others_empty, notes, ready, taken, gradient_desc, gradient_ptr, rows,
    gradient_stride, vocab, TILE: tl.constexpr, KEPT: tl.constexpr, STREAM: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, SEND: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    begin, after, streamed = _share_of(gl.program_id(0) % PARTS, vocab, TILE, KEPT, PARTS)
    columns = columns_of(TILE, WARPS)
    exists = lines_of_last(vocab, after, TILE, WARPS)
    base = gl.program_id(0) * 0
    other = base
    turn = base
    for row in range(gl.program_id(0) // PARTS, rows, gl.num_programs(0) // PARTS):
        stage = turn % AHEAD
        mbarrier.wait(ready.index(stage), turn // AHEAD & 1)
        rounded = _noted(notes, stage * 4, WARPS)
        factor = _noted(notes, stage * 4 + 1, WARPS)
        d_target = _noted(notes, stage * 4 + 2, WARPS)
        place = _noted(notes, stage * 4 + 3, WARPS).to(gl.int32, bitcast=True)
        mbarrier.arrive(taken.index(stage), count=1)
        zero = place == -2
        sink = gradient_ptr + gl.cast(row, gl.int64) * gradient_stride
        end = base + (after - begin) - streamed
        last = other + streamed - 1
        head = sink + begin * (TILE * 64)
        tail = sink + (after - 1) * (TILE * 64)
        if SEND:
            _send_chunks(
                slots, full, empty, base, end, gradient_desc, row, begin, columns, rounded, factor, zero, place,
                d_target, TILE, KEPT, SEND, WARPS,
            )  # fmt: skip
            if STREAM != 0:
                _send_chunks(
                    others, others_full, others_empty, other, last + 1, gradient_desc, row, begin + (end - base),
                    columns, rounded, factor, zero, place, d_target, TILE, STREAM, SEND, WARPS,
                )  # fmt: skip
        elif STREAM == 0:
            write_chunks(
                slots, full, empty, base, end - 1, head, columns, rounded, factor, zero, True, TILE, KEPT, WARPS
            )
            write_last(
                slots, full, empty, end - 1, tail, columns, rounded, factor, zero, exists, True, TILE, KEPT, WARPS
            )
        else:
            write_chunks(slots, full, empty, base, end, head, columns, rounded, factor, zero, True, TILE, KEPT, WARPS)
            write_chunks(
                others, others_full, others_empty, other, last, head + (end - base) * (TILE * 64), columns, rounded,
                factor, zero, True, TILE, STREAM, WARPS,
            )  # fmt: skip
            write_last(
                others, others_full, others_empty, last, tail, columns, rounded, factor, zero, exists, True, TILE,
                STREAM, WARPS,
            )  # fmt: skip
        base = end
        other += streamed
        if SEND == 0:
            thread_barrier()  # after the vector that holds the target's element
            gl.store(sink + place, d_target.to(gradient_ptr.dtype.element_ty), mask=place >= 0)
        turn += 1


@gluon_jit(do_not_specialize=["rows", "vocab", "scale_stride", "ignore_index"])
def cross_entropy_groups_kernel(
    logits_desc, gradient_desc, logits_ptr, targets_ptr, loss_ptr, lse_ptr, lse_low_ptr, gradient_ptr, scale_ptr,
    grad_lse_ptr, sums_ptr, scale_stride, rows, stride, gradient_stride, vocab, ignore_index, z_loss,
    SKIP_IGNORED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    TILE: tl.constexpr, KEPT: tl.constexpr, STREAM: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, SEND: tl.constexpr, READERS: tl.constexpr, WRITERS: tl.constexpr, REGISTERS: tl.constexpr,
):  # fmt: skip
    slots = ring(logits_desc, KEPT)
    full = barrier_ring(KEPT, 1)
    empty = barrier_ring(KEPT, 1)
    notes = gl.allocate_shared_memory(gl.float32, [AHEAD * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = barrier_ring(AHEAD, 1)
    taken = barrier_ring(AHEAD, 1)
    # fmt: off
    if STREAM == 0:
        gl.warp_specialize(
            [
                (_read, (slots, full, slots, full, full, notes, ready, taken, logits_ptr, targets_ptr, loss_ptr,
                         lse_ptr, lse_low_ptr, scale_ptr, grad_lse_ptr, sums_ptr, scale_stride, rows, stride, vocab,
                         ignore_index, z_loss, SKIP_IGNORED, HAS_SCALE, HAS_GRAD_LSE, TILE, KEPT, 0, PARTS, AHEAD,
                         READERS)),
                (_write, (slots, full, empty, slots, full, empty, notes, ready, taken, gradient_desc, gradient_ptr,
                          rows, gradient_stride, vocab, TILE, KEPT, 0, PARTS, AHEAD, SEND, WRITERS)),
                (_bring_kept, (slots, full, empty, logits_desc, rows, vocab, TILE, KEPT, PARTS)),
            ],
            [WRITERS, 1],
            [REGISTERS, 24],
        )
    else:
        once = ring(logits_desc, STREAM)
        once_full = barrier_ring(STREAM, 1)
        once_empty = barrier_ring(STREAM, 1)
        twice = ring(logits_desc, STREAM)
        twice_full = barrier_ring(STREAM, 1)
        twice_empty = barrier_ring(STREAM, 1)
        gl.warp_specialize(
            [
                (_read, (slots, full, once, once_full, once_empty, notes, ready, taken, logits_ptr, targets_ptr,
                         loss_ptr, lse_ptr, lse_low_ptr, scale_ptr, grad_lse_ptr, sums_ptr, scale_stride, rows, stride,
                         vocab, ignore_index, z_loss, SKIP_IGNORED, HAS_SCALE, HAS_GRAD_LSE, TILE, KEPT, STREAM, PARTS,
                         AHEAD, READERS)),
                (_write, (slots, full, empty, twice, twice_full, twice_empty, notes, ready, taken, gradient_desc,
                          gradient_ptr, rows, gradient_stride, vocab, TILE, KEPT, STREAM, PARTS, AHEAD, SEND, WRITERS)),
                (_bring_kept, (slots, full, empty, logits_desc, rows, vocab, TILE, KEPT, PARTS)),
                (_bring_others, (once, once_full, once_empty, logits_desc, rows, vocab, TILE, KEPT, STREAM, PARTS)),
                (_bring_others, (twice, twice_full, twice_empty, logits_desc, rows, vocab, TILE, KEPT, STREAM, PARTS)),
            ],
            [WRITERS, 1, 1, 1],
            [REGISTERS, 24, 24, 24],
        )
    # fmt: on
