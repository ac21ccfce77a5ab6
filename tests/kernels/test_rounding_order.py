"""No sum or difference of two products is left to the compiler in kernels whose results must not depend on layouts.

a * b + c * d contracts to fma(a, b, c * d) or to fma(c, d, a * b), which round differently. Triton 3.6 took the one for
contiguous and the other for strided gradients of rope, which then differed in the last bit on a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

OPS = ["rms_norm", "add_rms_norm", "rope", "rope_qkv", "qk_norm_rope", "swiglu"]

_WORKER = """
import sys, torch
from fuselm.kernels._triton import triton
from fuselm.kernels.aot import compile_only
from fuselm.kernels.specs.registry import SPECS
kinds = {}
launch = triton.runtime.jit.JITFunction.run
def note(self, *args, **kwargs):
    kernel = launch(self, *args, **kwargs)
    if "ttir" in getattr(kernel, "asm", {}):
        kinds[kernel.metadata.name] = kernel.asm["ttir"]
    return kernel
triton.runtime.jit.JITFunction.run = note
for spec in SPECS:
    if spec.name in sys.argv[1:]:
        with compile_only(90):
            inputs = spec.make_inputs(spec.aot_cases[0], torch.bfloat16, torch.device("cpu"), torch.Generator())
            outputs = spec.function(**inputs, backend="triton")
            outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
            torch.stack([o.float().sum() for o in outputs if o.requires_grad]).sum().backward()
for name, text in kinds.items():
    print("kernel", name)
    print(text)
"""


def _ambiguous(text: str) -> list[str]:
    """Lines that add or subtract two products."""
    products = set(re.findall(r"(%\S+) = arith\.mulf ", text))
    sums = re.findall(r"^.* = arith\.(?:addf|subf) (%[^, ]+), (%[^, ]+) .*$", text, re.M)
    return [f"{a} and {b}" for a, b in sums if a in products and b in products]


def test_what_is_looked_for_is_found():
    lines = "%3 = arith.mulf %1, %2 : f32\n%4 = arith.mulf %1, %1 : f32\n%5 = arith.subf %3, %4 : f32\n"
    assert _ambiguous(lines) == ["%3 and %4"] and not _ambiguous(lines.replace("%3, %4", "%3, %1"))


def test_no_kernel_leaves_the_order_of_rounding_open():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _WORKER, *OPS], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = dict(re.findall(r"^kernel (\w+)\n(.*?)(?=^kernel |\Z)", done.stdout, re.M | re.S))
    assert {"rope_kernel", "qk_norm_rope_backward_kernel", "rms_norm_backward_kernel"} <= set(kernels)
    assert sum("arith.mulf" in text for text in kernels.values()) >= 7
    for name, text in kernels.items():
        assert not _ambiguous(text), name
