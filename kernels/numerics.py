"""The error budget that tests and benchmarks share.

A kernel is right when its error against the formula in fp64 is no larger than the error of what a user would have
written in plain PyTorch at the same dtype, plus a slack derived from the dtype's unit roundoff. Both the norm of the
error and its largest element count, so that one wrong element in a million shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fuselm.kernels._triton import INTERPRET

UNIT_ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Errors:
    """Error of a tensor against an exact one.

    Attributes:
        norm: ‖actual - exact‖ / ‖exact‖ (the plain norm where exact is all zero).
        largest: max |actual - exact| / max |exact|.
    """

    norm: float
    largest: float


def measure(actual: torch.Tensor, exact: torch.Tensor) -> Errors:
    """Errors of `actual` against `exact` (same shape, any dtypes), computed in fp64. Infinities that agree count as
    equal; NaN anywhere in `actual` where `exact` has none gives infinite errors."""
    if actual.shape != exact.shape:
        raise ValueError(f"shapes differ: actual {tuple(actual.shape)}, exact {tuple(exact.shape)}")
    if actual.numel() == 0:
        return Errors(0.0, 0.0)
    a, e = actual.detach().double(), exact.detach().double()
    same = (a == e) | (a.isnan() & e.isnan())
    difference = torch.where(same, 0.0, (a - e).abs())
    if not bool(difference.isfinite().all()):
        return Errors(math.inf, math.inf)
    magnitude = torch.where(e.isfinite(), e, 0.0)
    norm, largest = magnitude.norm().item(), magnitude.abs().max().item()
    return Errors(difference.norm().item() / (norm or 1.0), difference.max().item() / (largest or 1.0))


def slack(dtype: torch.dtype) -> float:
    """What a kernel may add to the plain op's error: half a rounding of the output in 16-bit dtypes, 8 roundings in
    fp32 (a different summation order), 64 in fp64."""
    roundings = {torch.float32: 8.0, torch.float64: 64.0}.get(dtype, 0.5)
    if INTERPRET and dtype == torch.bfloat16:
        roundings = 1.0  # Triton's interpreter truncates fp32 to bf16 where a GPU rounds
    return roundings * UNIT_ROUNDOFF[dtype]


def check_budget(
    actual: torch.Tensor,
    exact: torch.Tensor,
    plain: torch.Tensor,
    *,
    name: str = "output",
    dtype: torch.dtype | None = None,
) -> Errors:
    """Asserts that `actual` is as close to `exact` as `plain` is.

    Args:
        actual: what the kernel gave.
        exact: the formula in fp64.
        plain: what plain PyTorch gives at the kernel's dtype.
        name: for the message.
        dtype: the dtype whose slack applies; by default that of `actual`. Give the inputs' dtype where an fp32 output
            was computed from 16-bit operands.

    Returns:
        The kernel's errors.

    Raises:
        AssertionError: the budget is exceeded; the message has both errors.
    """
    ours, theirs = measure(actual, exact), measure(plain, exact)
    extra = slack(dtype or actual.dtype)
    if not (ours.norm <= theirs.norm + extra and ours.largest <= theirs.largest + 2 * extra):
        raise AssertionError(
            f"{name}: error norm {ours.norm:.3e} (plain {theirs.norm:.3e}), largest {ours.largest:.3e} "
            f"(plain {theirs.largest:.3e}), slack {extra:.1e}"
        )
    return ours
