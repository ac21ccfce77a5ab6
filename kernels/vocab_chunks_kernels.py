"""The kernels between the multiplications of vocab_chunks.py, and their launches.

The rows' numbers are six planes of fp32, (6, rows), to which one launch a block of logits adds: the maximum of
z · log2(e); the sum of 2^(z · log2(e) - maximum) in two parts, so that many small chunks beside a confident one are not
lost; the target's logit, capped and as it was; the sum of the capped logits, which label smoothing asks for.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import HAVE_TRITON, jit, tl
from fuselm.kernels.cross_entropy_kernels import LOWEST, row_sums
from fuselm.kernels.cross_entropy_launchers import Options
from fuselm.kernels.cross_entropy_math import expm1_of_negative, fma, lse_of, tanh
from fuselm.kernels.direct import RepeatedLaunch
from fuselm.kernels.launch.linear_cross_entropy import block_launch

PLANES = 6
PADDING = 16  # logits to which rows of a block are padded

if HAVE_TRITON:
    _LOG2E = tl.constexpr(1.4426950216293335)  # log2(e) rounded to fp32


@jit(do_not_specialize=["first", "plane", "vectors", "start", "columns"])
def block_sums_kernel(
    logits_ptr,
    targets_ptr,
    numbers_ptr,
    first,
    plane,
    vectors,
    start,
    columns,
    softcap,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One row of a block, columns [start, start + columns) of the vocabulary; the first block writes the numbers.

    The row is read before its target is looked at, ignored or not: its loads would wait for the target's.
    """
    softcap = tl.cast(softcap, tl.float32)
    logits = logits_ptr + tl.cast(tl.program_id(0), tl.int64) * vectors * VECTOR
    row = first + tl.program_id(0)
    target = tl.load(targets_ptr + row).to(tl.int64)
    at = numbers_ptr + row
    later = start > 0
    old_top = tl.load(at, mask=later, other=LOWEST)
    old_sum = tl.load(at + plane, mask=later, other=0.0)
    old_low = tl.load(at + 2 * plane, mask=later, other=0.0)
    wanted = -1
    if HAS_SOFTCAP:
        wanted = tl.where((target >= start) & (target < start + columns), target - start, -1).to(tl.int32)
    top, row_sum, total, picked = row_sums(
        logits,
        0,
        wanted,
        columns,
        columns,
        softcap,
        RAGGED,
        HAS_SMOOTHING,
        HAS_SOFTCAP,
        BLOCK,
        VECTOR,
    )
    local = target - start
    inside = (local >= 0) & (local < columns)
    raw = tl.load(logits + tl.where(inside, local, 0).to(tl.int32)).to(tl.float32)
    new = tl.maximum(old_top, top)
    rescale = tl.exp2(old_top - new)
    a = fma(old_sum, rescale, 0.0)  # products of their own: merged into the sums below, these would not add up
    b = fma(row_sum, tl.exp2(top - new), 0.0)
    both = a + b  # pyright: ignore[reportOperatorIssue]
    back = both - a  # pyright: ignore[reportOperatorIssue]
    tl.store(at, new)
    tl.store(at + plane, both)
    tl.store(at + 2 * plane, fma(old_low, rescale, (a - (both - back)) + (b - back)))
    known = tl.load(at + 3 * plane, mask=later, other=0.0)
    tl.store(at + 3 * plane, tl.where(inside, picked if HAS_SOFTCAP else raw, known))
    if HAS_SOFTCAP:
        known = tl.load(at + 4 * plane, mask=later, other=0.0)
        tl.store(at + 4 * plane, tl.where(inside, raw, known))
    if HAS_SMOOTHING:
        tl.store(at + 5 * plane, tl.load(at + 5 * plane, mask=later, other=0.0) + total)


@jit
def row_losses_kernel(
    targets_ptr,
    numbers_ptr,
    loss_ptr,
    lse_ptr,
    lse_low_ptr,
    rows,
    vocab,
    ignore_index,
    label_smoothing,
    z_loss,
    SKIP_IGNORED: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """loss, lse and what it lacks of BLOCK rows, from their numbers."""
    label_smoothing = tl.cast(label_smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = row < rows
    at = numbers_ptr + row
    target = tl.load(targets_ptr + row, mask=mask, other=0).to(tl.int64)
    ignored = target == ignore_index
    top = tl.load(at, mask=mask, other=0.0)
    row_sum = tl.load(at + rows, mask=mask, other=1.0)
    sum_low = tl.load(at + 2 * rows, mask=mask, other=0.0)
    z_target = tl.load(at + 3 * rows, mask=mask, other=0.0)
    if SKIP_IGNORED:  # rows that were not read
        row_sum = tl.where(ignored, 1.0, row_sum)
    lse, lse_low = lse_of(top, row_sum)
    lse_low += tl.where(tl.abs(lse) < float("inf"), sum_low / row_sum, 0.0)
    if SKIP_IGNORED:
        lse = tl.where(ignored, 0.0, lse)
        lse_low = tl.where(ignored, 0.0, lse_low)
    loss = (lse - z_target) + lse_low
    loss = tl.where(loss < 0.0, 0.0, loss)  # p <= 1, a rounding aside
    if HAS_SMOOTHING:
        loss += label_smoothing * (z_target - tl.load(at + 5 * rows, mask=mask, other=0.0) / vocab)
    loss += z_loss * lse * lse
    loss = tl.where((target >= 0) & (target < vocab), loss, float("nan"))
    tl.store(loss_ptr + row, tl.where(ignored, 0.0, loss), mask=mask)
    tl.store(lse_ptr + row, lse, mask=mask)
    tl.store(lse_low_ptr + row, lse_low, mask=mask)


@jit(
    do_not_specialize=["scale_stride", "first", "plane", "vectors", "start", "columns", "vocab", "ignore_index"],
)
def block_gradient_kernel(
    logits_ptr,
    targets_ptr,
    numbers_ptr,
    lse_ptr,
    lse_low_ptr,
    scale_ptr,
    grad_lse_ptr,
    scale_stride,
    first,
    plane,
    vectors,
    start,
    columns,
    vocab,
    ignore_index,
    label_smoothing,
    z_loss,
    softcap,
    HAS_SCALE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One row of a block: the gradient over its logits, and zeros over their padding.

    The target's logit is that of the first round, not the one that lies here: a multiplication of another shape may
    have rounded it otherwise, and lse minus it is what a confident row's gradient is made of.
    """
    label_smoothing = tl.cast(label_smoothing, tl.float32)
    z_loss = tl.cast(z_loss, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    dtype = logits_ptr.dtype.element_ty
    stride = vectors * VECTOR
    logits = logits_ptr + tl.cast(tl.program_id(0), tl.int64) * stride
    row = first + tl.program_id(0)
    target = tl.load(targets_ptr + row).to(tl.int64)
    # before the branch, so that none of these loads waits for the target's
    lse = tl.load(lse_ptr + row)
    lse_low = tl.load(lse_low_ptr + row)
    z_target = tl.load(numbers_ptr + row + 3 * plane)
    raw_target = 0.0
    if HAS_SOFTCAP:
        raw_target = tl.load(numbers_ptr + row + 4 * plane)
    scale = 1.0
    if HAS_SCALE:
        scale = tl.load(scale_ptr + tl.cast(row, tl.int64) * scale_stride)
    ignored = target == ignore_index
    local = target - start
    zero = ignored
    grad_lse = 0.0
    if HAS_GRAD_LSE:
        grad_lse = tl.load(grad_lse_ptr + row)
        zero = False
    if zero:
        for at in range(0, stride, BLOCK):
            column = at + tl.arange(0, BLOCK)  # [BLOCK]
            tl.store(logits + column, tl.zeros([BLOCK], dtype), mask=column < stride)
    else:
        scale = tl.where((target >= 0) & (target < vocab), scale, float("nan"))
        scale = tl.where(ignored, 0.0, scale)
        # p = 2^(z · log2(e) - reference - low): the reference is a rounded number, what it lacks goes into the factor
        reference = lse * _LOG2E
        low = fma(lse, _LOG2E, -reference) + lse_low * _LOG2E
        low = tl.where(tl.abs(lse) < float("inf"), low, 0.0)
        p_factor = scale * (2.0 * z_loss * lse) + grad_lse
        factor = (scale + p_factor) * tl.exp2(-low)
        uniform = scale * (label_smoothing / vocab)
        # p - 1 is small beside p where the model is confident: from the loss, which keeps its digits there
        slope = 1.0
        if HAS_SOFTCAP:
            t_target = tanh(raw_target * (1.0 / softcap))
            slope = 1.0 - t_target * t_target
        nll = (lse - z_target) + lse_low
        p_minus_one = expm1_of_negative(tl.where(nll < 0.0, 0.0, nll))
        smoothing = label_smoothing - label_smoothing / vocab
        d_target = (scale * (p_minus_one + smoothing) + (1.0 + p_minus_one) * p_factor) * slope
        for at in tl.range(0, stride, BLOCK, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
            column = at + tl.arange(0, BLOCK)  # [BLOCK]
            z = tl.load(logits + column, mask=column < stride, other=0.0).to(tl.float32)
            slopes = 1.0
            if HAS_SOFTCAP:
                t = tanh(z * (1.0 / softcap))
                z = softcap * t
                slopes = 1.0 - t * t
            d = tl.exp2(fma(z, _LOG2E, -reference)) * factor
            if HAS_SMOOTHING:
                d -= uniform
            if HAS_SOFTCAP:
                d *= slopes
            # what the padding holds is nobody's
            d = tl.where(column < columns, tl.where(column == local, d_target, d), 0.0)
            tl.store(logits + column, d.to(dtype), mask=column < stride)


class BlockSums:
    """Launches that add blocks of logits to their rows' numbers; blocks of column 0 come first and write them.

    Args:
        targets: (rows,) contiguous.
        numbers: (PLANES, rows) fp32, contiguous.
        options: see Options.
    """

    def __init__(self, targets: torch.Tensor, numbers: torch.Tensor, options: Options) -> None:
        self._targets, self._numbers, self._options = targets, numbers, options
        self._launches: dict[int, RepeatedLaunch] = {}  # by columns

    def add(self, logits: torch.Tensor, first: int, start: int) -> None:
        """Adds the block of rows from `first` and columns from `start` on.

        Args:
            logits: (rows of the block, columns), unit stride in the last dimension; the buffer and its rows start on
                16-byte borders. One dtype for all calls.
        """
        rows, columns = logits.shape
        vector = 16 // logits.element_size()
        _, label_smoothing, _, softcap = self._options
        launch = self._launches.get(columns)
        if launch is None:
            choice = block_launch(columns, logits.element_size(), softcap != 0)
            launch = self._launches[columns] = RepeatedLaunch(
                block_sums_kernel,
                choice.num_warps,
                HAS_SMOOTHING=label_smoothing != 0,
                HAS_SOFTCAP=softcap != 0,
                RAGGED=columns % vector != 0,
                BLOCK=choice.block,
                VECTOR=vector,
            )
        launch(
            rows,
            logits,
            self._targets,
            self._numbers,
            first,
            self._numbers.stride(0),
            logits.stride(0) // vector,
            start,
            columns,
            softcap,
        )


def launch_row_losses(
    targets: torch.Tensor, numbers: torch.Tensor, vocab: int, options: Options, skip_ignored: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss (NaN for an impossible target, 0 for ignored rows), lse (0 for ignored rows with `skip_ignored`) and what
    lse lacks, (rows,) fp32 each, from numbers (PLANES, rows) to which all columns were added."""
    ignore_index, label_smoothing, z_loss, _ = options
    (rows,) = targets.shape
    loss, lse, lse_low = (torch.empty(rows, dtype=torch.float32, device=targets.device) for _ in range(3))
    block = 256
    row_losses_kernel[(-(-rows // block),)](
        targets,
        numbers,
        loss,
        lse,
        lse_low,
        rows,
        vocab,
        ignore_index,
        label_smoothing,
        z_loss,
        SKIP_IGNORED=skip_ignored,
        HAS_SMOOTHING=label_smoothing != 0,
        BLOCK=block,
        num_warps=4,
    )
    return loss, lse, lse_low


class BlockGradients:
    """Launches that write the gradient of blocks of logits over them and the padding between their rows.

    Args:
        targets, numbers, options: as in BlockSums.
        lse, lse_low: (rows,) of the whole vocabulary.
        scale: fp32, what each row's loss gradient is multiplied by: (rows,) or 0-dim; None for 1.
        grad_lse: (rows,) contiguous fp32, the upstream gradient of lse; None for 0.
        vocab: classes in all.
    """

    def __init__(
        self,
        targets: torch.Tensor,
        numbers: torch.Tensor,
        lse: torch.Tensor,
        lse_low: torch.Tensor,
        scale: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
        vocab: int,
        options: Options,
    ) -> None:
        self._tensors = (
            targets,
            numbers,
            lse,
            lse_low,
            lse if scale is None else scale,
            lse if grad_lse is None else grad_lse,
            0 if scale is None or scale.dim() == 0 else scale.stride(0),
        )
        self._given = {"HAS_SCALE": scale is not None, "HAS_GRAD_LSE": grad_lse is not None}
        self._plane, self._vocab, self._options = numbers.stride(0), vocab, options
        self._launches: dict[int, RepeatedLaunch] = {}  # by the stride between rows

    def write(self, logits: torch.Tensor, first: int, start: int) -> None:
        """The block of rows from `first` and columns from `start` on; logits as in BlockSums.add, overwritten."""
        rows, columns = logits.shape
        stride, vector = logits.stride(0), 16 // logits.element_size()
        _, label_smoothing, _, softcap = self._options
        launch = self._launches.get(stride)
        if launch is None:
            choice = block_launch(stride, logits.element_size(), softcap != 0)
            launch = self._launches[stride] = RepeatedLaunch(
                block_gradient_kernel,
                choice.num_warps,
                **self._given,
                HAS_SMOOTHING=label_smoothing != 0,
                HAS_SOFTCAP=softcap != 0,
                BLOCK=choice.block,
                VECTOR=vector,
            )
        launch(
            rows,
            logits,
            *self._tensors,
            first,
            self._plane,
            stride // vector,
            start,
            columns,
            self._vocab,
            *self._options,
        )
