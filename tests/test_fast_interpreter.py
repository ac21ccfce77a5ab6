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
    return [out.view(torch.int32 if out.element_size() == 4 else torch.int16) for out in outs]


def test_the_same_bits(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, str(tmp_path / "out")], env=environment, check=True, timeout=120)
    original = torch.load(tmp_path / "out")
    assert len(original) == 4 and all(map(torch.equal, numbers(), original))


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
