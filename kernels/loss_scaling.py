"""Small kernels around a loss: the weight of a row, the weighted sum over rows, gradients times a number on the device.

Each is one launch where a chain of PyTorch operations would be three to five, which shows beside a loss of half a
millisecond; none reads a number on the host.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import HAVE_TRITON, INTERPRET, device_profile, jit, tl

if HAVE_TRITON:
    _INTERPRET = tl.constexpr(INTERPRET)


@jit
def _row_weight_kernel(targets_ptr, weight_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)  # [BLOCK]
        mask = row < rows
        targets = tl.load(targets_ptr + row, mask=mask, other=0).to(tl.int64)
        count += (mask & (targets != ignore_index)).to(tl.int32)
    tl.store(weight_ptr, tl.div_rn(1.0, tl.maximum(tl.sum(count, 0), 1).to(tl.float32)))


@jit
def _weighted_sum_kernel(values_ptr, weight_ptr, sum_ptr, rows, BLOCK: tl.constexpr):
    # one program: always the same order of summation
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)  # [BLOCK]
        total += tl.load(values_ptr + row, mask=row < rows, other=0.0)
    tl.store(sum_ptr, tl.sum(total, 0) * tl.load(weight_ptr))


@jit
def _multiply_kernel(source_ptr, result_ptr, factor_ptr, n, KEEP_IF_ONE: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if KEEP_IF_ONE:
        if factor == 1.0:
            return
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        index = start + tl.arange(0, BLOCK)  # [BLOCK]
        value = tl.load(source_ptr + index, mask=index < n).to(tl.float32) * factor
        if _INTERPRET:  # which truncates to bf16: to nearest, ties to even, by hand
            if result_ptr.dtype.element_ty == tl.bfloat16:
                bits = value.to(tl.int32, bitcast=True)
                value = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
        tl.store(result_ptr + index, value.to(result_ptr.dtype.element_ty), mask=index < n)


def launch_row_weight(targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """1 / max(targets that are not `ignore_index`, 1), 0-dim fp32; `targets` (rows,) contiguous."""
    weight = torch.empty((), dtype=torch.float32, device=targets.device)
    with torch.cuda.device_of(targets):
        _row_weight_kernel[(1,)](targets, weight, targets.numel(), ignore_index, BLOCK=4096, num_warps=16)
    return weight


def launch_weighted_sum(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sum(values) · weight, 0-dim fp32, bitwise reproducible; `values` (rows,) contiguous fp32, `weight` 0-dim."""
    result = torch.empty((), dtype=torch.float32, device=values.device)
    with torch.cuda.device_of(values):
        _weighted_sum_kernel[(1,)](values, weight, result, values.numel(), BLOCK=4096, num_warps=16)
    return result


def launch_multiply(source: torch.Tensor, result: torch.Tensor, factor: torch.Tensor) -> None:
    """result = source · factor in fp32, rounded once to result's dtype, for contiguous tensors and a 0-dim fp32 factor
    on the device. If result is source and the factor is 1, memory is not touched."""
    n = source.numel()
    if n == 0:
        return
    block = 4096
    with torch.cuda.device_of(source):
        _multiply_kernel[(min(-(-n // block), 8 * device_profile(source.device).num_sms),)](
            source, result, factor, n, KEEP_IF_ONE=result is source, BLOCK=block, num_warps=8
        )
