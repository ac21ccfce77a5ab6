"""Arithmetic that the cross-entropy kernels share: multiply-adds that round once, tanh and exp(x) - 1 to fp32, sums of
vectors, the logarithm of a sum in two parts."""

from __future__ import annotations

from fuselm.kernels._triton import HAVE_TRITON, INTERPRET, jit, tl

if HAVE_TRITON:
    # log2(e) rounded to fp32, and the inverse of just that number in two parts
    _LOG2E = tl.constexpr(1.4426950216293335)
    _LN2 = tl.constexpr(0.6931471824645996)
    _LN2_LOW = tl.constexpr(7.348693209507928e-09)
    _INTERPRET = tl.constexpr(INTERPRET)


@jit
def fma(x, y, z):
    if _INTERPRET:  # the interpreter's own rounds twice
        return (x.to(tl.float64) * y + z).to(tl.float32)
    return tl.fma(x, y, z)


@jit
def plus(a, b):
    return tl.fma(a, 1.0, b)


@jit
def sum_of_vectors(x):
    # Triton 3.6 has a pass that looks for sums which are added up in a loop, and fails on some of those here. It does
    # not look for sums by a multiply-add.
    if _INTERPRET:
        return tl.sum(x, 1)
    return tl.reduce(x, 1, plus)


@jit
def tanh(x):
    # A polynomial near 0, where the quotient of exponentials cancels; both are right to about 2^-22.
    a = tl.abs(x)
    q = a * a
    series = 0.1333256445 + q * (-0.05385029639 + q * (0.02106413707 + q * -0.006264367955))
    near = a + a * q * (-0.333333168 + q * series)
    e = tl.exp2(a * -2.8853900817779268)
    t = tl.where(a < 0.5, near, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -t, t)


@jit
def expm1_of_negative(x):
    # exp(-x) - 1 for x >= 0, by its series where the difference would cancel
    series = 1.0 - x * (1 / 6) * (1.0 - x * (1 / 7))
    series = 1.0 - x * (1 / 4) * (1.0 - x * (1 / 5) * series)
    series = 1.0 - x * (1 / 2) * (1.0 - x * (1 / 3) * series)
    return tl.where(x < 0.3, -x * series, tl.exp2(-x * _LOG2E) - 1.0)


@jit
def lse_of(top, row_sum):
    # lse = top / log2(e) + ln(row_sum) in two parts. The first term is two numbers, the rounded product and what it
    # lacks.
    log_sum = tl.log(row_sum)
    # (A multiply-add of nothing: ptxas would merge a plain product into the sums below, which then do not add up.)
    maximum = fma(top, _LN2, 0.0)
    maximum_low = fma(top, _LN2, -maximum) + top * _LN2_LOW  # pyright: ignore[reportOperatorIssue]
    lse = maximum + log_sum
    back = lse - maximum  # pyright: ignore[reportOperatorIssue]
    lse_low = ((maximum - (lse - back)) + (log_sum - back)) + maximum_low
    # an lse of -inf or NaN has no low part
    return lse, tl.where(tl.abs(lse) < float("inf"), lse_low, 0.0)
