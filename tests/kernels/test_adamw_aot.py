"""AdamW's kernels compiled ahead of time, by running this file in a process without the interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

ARCHITECTURES = ("80", "90", "100")
SETTINGS = 5


def _report(arch: int) -> list[dict]:
    from triton.runtime.jit import JITFunction

    from fuselm.kernels.adamw import AdamW
    from fuselm.kernels.aot import compile_only

    jit_function: Any = JITFunction
    run = jit_function.run
    ptx: dict[str, set[str]] = {}

    def recording_run(self, *args, **kwargs):
        kernel = run(self, *args, **kwargs)
        ptx.setdefault(kernel.metadata.name, set()).add(kernel.asm["ptx"])
        return kernel

    jit_function.run = recording_run  # compile_only wraps this one; the process ends with it in place
    settings = [  # parameter dtype, moments' dtype, master weights, lr
        (torch.float32, torch.float32, False, 1e-3),
        (torch.float32, torch.float32, False, torch.tensor(1e-3)),
        (torch.bfloat16, torch.bfloat16, False, 1e-3),
        (torch.bfloat16, torch.float32, True, 1e-3),
        (torch.float16, torch.float32, True, 0.0),
    ]
    assert len(settings) == SETTINGS
    with compile_only(arch) as compiled:
        for dtype, state_dtype, master, lr in settings:
            params = [torch.zeros(shape, dtype=dtype).requires_grad_() for shape in [(64, 256), (5,), (7, 3)]]
            optimizer = AdamW(params, lr=lr, master_weights=master, state_dtype=state_dtype, max_grad_norm=1.0)
            for p in params:
                p.grad = torch.zeros_like(p)
            for _ in range(2):
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.5

    def has_wide(access: str, name: str) -> bool:
        return all(re.search(rf"{access}\.global[.\w:]*\.v4\.b32", text) for text in ptx[name])

    return [
        {
            "name": kernel.name,
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "warnings": kernel.warnings,
            "wide_loads": has_wide("ld", kernel.name),
            "wide_stores": has_wide("st", kernel.name),
        }
        for kernel in compiled
    ]


if __name__ == "__main__":
    print(json.dumps({arch: _report(int(arch)) for arch in sys.argv[1:]}))


@pytest.fixture(scope="module")
def report() -> dict[str, list[dict]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, *ARCHITECTURES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills_or_warnings(report, arch):
    names = {kernel["name"] for kernel in report[arch]}
    assert names == {"squares_kernel", "class_sums_kernel", "scalars_kernel", "adamw_kernel"}
    for kernel in report[arch]:
        assert kernel["spill_bytes"] == 0 and not kernel["warnings"] and 0 < kernel["registers"] <= 128, kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_whole_chunks_take_16_byte_accesses(report, arch):
    for kernel in report[arch]:
        if kernel["name"] in ("squares_kernel", "adamw_kernel"):
            assert kernel["wide_loads"], kernel
        if kernel["name"] == "adamw_kernel":
            assert kernel["wide_stores"], kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_new_learning_rate_compiles_nothing(report, arch):
    counts = [sum(kernel["name"] == name for kernel in report[arch]) for name in ("adamw_kernel", "squares_kernel")]
    assert counts == [SETTINGS, 3]  # one a setting, though each was stepped with two rates; one a gradient dtype
