"""The sped-up interpreter computes what Triton's own does. As a script: prints what this process computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
import triton.language.core as core
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="the interpreter is not switched on"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


@triton.jit
def _shifted(x, y):
    return core.where(x > y, x - y, x // y) + core.full((), 1, core.int32)


@triton.jit
def _twice_shifted(x, y):
    return _shifted(_shifted(x, y), y) + tl.abs(x)


@triton.jit
def _kernel(ints_ptr, floats_ptr, halves_ptr, out_ints_ptr, out_floats_ptr, out_halves_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    i = tl.load(ints_ptr + at, mask=mask, other=-3)
    f = tl.load(floats_ptr + at, mask=mask, other=float("-inf"))
    h = tl.load(halves_ptr + at, mask=mask, other=0.0)
    divisor = tl.where(at % 2 == 0, -7, 5)
    out = out_ints_ptr + at
    tl.store(out, i + 2147483647, mask=mask)
    tl.store(out + n, i * i * i, mask=mask)
    tl.store(out + 2 * n, i // divisor, mask=mask)
    tl.store(out + 3 * n, i % divisor, mask=mask)
    tl.store(out + 4 * n, _twice_shifted(i, divisor), mask=mask)
    tl.store(out + 5 * n, (i.to(tl.int64) * 2147483647 >> 16).to(tl.int32), mask=mask)
    tl.store(out + 6 * n, (i.to(tl.uint32) >> 3).to(tl.int32), mask=mask)
    tl.store(out + 7 * n, (i.to(tl.int8) * 3).to(tl.int32), mask=mask)
    tl.store(out_floats_ptr + at, tl.exp2(f) / (f - 1.0), mask=mask)
    tl.store(out_floats_ptr + n + at, tl.maximum(f, 0.5), mask=mask)
    tl.store(out_floats_ptr + 2 * n + at, tl.sum(tl.where(f == f, f, 0.0), 0) + tl.max(f, 0), mask=mask)
    tl.store(out_halves_ptr + at, (h.to(tl.float32) * 1.01).to(h.dtype), mask=mask)
    tl.atomic_add(out_ints_ptr + 8 * n + at % 3, i, mask=mask)
    tl.atomic_max(out_ints_ptr + 8 * n + 3 + at * 0, i, mask=mask)


@triton.jit
def _operands(ints_ptr, floats_ptr, halves_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Numbers of Python on either side, equal ones of other types among them, again and again; blocks of other types,
    sizes and dimensions; pointers from and to which is counted."""
    at = tl.arange(0, BLOCK)
    mask = at < n
    i, f = tl.load(ints_ptr + at, mask=mask, other=3), tl.load(floats_ptr + at, mask=mask, other=0.0)
    h = tl.load(halves_ptr + at, mask=mask, other=1.0)
    out = out_ptr + at
    for step in range(2):
        tl.store(out, f * 2 + f * 2.0 + f * True, mask=mask)
        tl.store(out + n, (2 - f) / 3 + (2.5 - f) / 0.3, mask=mask)
        tl.store(out + 2 * n, f * 0.0 + f * -0.0 + (0 - f) + step, mask=mask)
        tl.store(out + 3 * n, (i + 1.5) * (1.5 - i) + i * 2 + (7 - i) + i / 3, mask=mask)
        tl.store(out + 4 * n, h * 3 + 1.1 * h + h / 3 + 3.0 / (h + 5) + (h + h) / (h + 3), mask=mask)
        tl.store(
            out + 5 * n, (i == 1) + (i >= 1.0) + (f != 1) + (f > 1) + (h == 1) + (i % 7) * (i // 3 * 1.0), mask=mask
        )
        tl.store(
            out + 6 * n, f + h + i + n + i.to(tl.int64) * 5 + i.to(tl.uint8) * 3 - i.to(tl.int8) + 1 / n, mask=mask
        )
        tl.store(out + 7 * n, tl.sum(f[:, None] * 0.5 + i[None, :] - at[:, None] * 2, 1) + tl.max(h, 0) * 2, mask=mask)
        tl.store(
            out + 8 * n, tl.minimum(f, 2) + tl.where(f > 0, f, 1) + tl.where(mask, 1.0, h) - (n + 1) * 2, mask=mask
        )
        tl.store(n + 8 * n + at + out_ptr, tl.load(1 + floats_ptr + at - 1, mask=mask), mask=mask)


@triton.jit
def _refused(ptr, WHICH: tl.constexpr):
    number = tl.load(ptr)
    if WHICH == 0:
        tl.store(ptr + 1.0, number)
    elif WHICH == 1:
        tl.store(ptr, number + 2**40)
    elif WHICH == 2:
        tl.store(ptr, number.to(tl.uint32) + -1)
    elif WHICH == 3:
        tl.store(ptr + tl.arange(0, 4), number + tl.arange(0, 2) + tl.arange(0, 4))
    elif WHICH == 4:
        tl.store(ptr + tl.arange(0, 4), tl.arange(0, 4) // tl.arange(0, 4).to(tl.uint32))
    elif WHICH == 5:
        tl.store(ptr + tl.arange(0, 4), tl.zeros((3,), tl.int32))
    else:
        tl.store(ptr - ptr, number)


@triton.jit
def _failing(ptr):
    tl.store(ptr, _twice_shifted(tl.load(ptr), 2))
    tl.static_assert(False)


def numbers() -> list[torch.Tensor]:
    n = 21
    ints = torch.tensor([0, 1, -1, 2, -2, 7, -8, 2**31 - 1, -(2**31), 65537, -65537, *range(-5, 5)], dtype=torch.int32)
    nan, inf = float("nan"), float("inf")
    floats = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0, 1e-42, 3e38, -200.0, 129.0, 0.3, *range(-5, 5)])
    outs = [torch.full((8 * n + 4,), -1, dtype=torch.int32), torch.full((3 * n,), 7.0)]
    for dtype in (torch.float16, torch.bfloat16):
        outs.append(torch.full((n,), 7.0, dtype=dtype))
        launch: Any = _kernel[(2,)]
        launch(ints, floats, floats.to(dtype), *outs[:2], outs[-1], n, BLOCK=16)
        outs.append(torch.full((10 * n,), 7.0))
        _operands[(1,)](ints, floats, floats.half(), outs[-1], n, BLOCK=32)
    return [out.view(torch.int32 if out.element_size() == 4 else torch.int16) for out in outs]


def test_the_same_bits(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, str(tmp_path / "out")], env=environment, check=True, timeout=120)
    original = torch.load(tmp_path / "out")
    assert len(original) == 6 and all(map(torch.equal, numbers(), original))


@pytest.mark.parametrize("which", range(7))
def test_what_has_no_meaning_is_refused(which):
    """Also where the same operands have been taken for another operator, and a second time."""
    numbers()
    for _ in range(2):
        with pytest.raises(interpreter.InterpreterError):
            _refused[(1,)](torch.ones(8, dtype=torch.int32), WHICH=which)


def test_after_a_kernel_that_fails_all_is_as_before():
    before = numbers()
    functions = {name: getattr(tl, name) for name in ("load", "store", "arange", "where", "sum")}
    plus = tl.tensor.__add__
    with pytest.raises(interpreter.InterpreterError):
        _failing[(1,)](torch.ones(1, dtype=torch.int32))
    assert all(getattr(tl, name) is function for name, function in functions.items()) and tl.tensor.__add__ is plus
    assert all(map(torch.equal, numbers(), before))


if __name__ == "__main__":
    assert INTERPRETED and not hasattr(interpreter, "_sped_up")
    torch.save(numbers(), Path(sys.argv[1]))
