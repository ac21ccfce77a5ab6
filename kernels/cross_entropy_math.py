"""Arithmetic that the cross-entropy kernels share: multiply-adds that round once, tanh and exp(x) - 1 to fp32, sums of
vectors."""

from __future__ import annotations

from fuselm.kernels._triton import HAVE_TRITON, INTERPRET, jit, tl

if HAVE_TRITON:
    _LOG2E = tl.constexpr(1.4426950216293335)  # log2(e) rounded to fp32
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
