"""AdamW's kernels compiled ahead of time, by running this file in a process without the interpreter."""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from typing import Any

import pytest
import torch

ARCHITECTURES = ("80", "90", "100")
SETTINGS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "tensor lr": (torch.float32, {"lr": torch.tensor(1e-3)}),
    "bf16": (torch.bfloat16, {"state_dtype": torch.bfloat16}),
    "master": (torch.bfloat16, {"master_weights": True}),
    "fp16": (torch.float16, {"master_weights": True, "lr": 0.0}),
    "rounded": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": torch.bfloat16}),
    "rounded, shards of columns": (torch.bfloat16, {"stochastic_rounding": True}),
}


def _report(arch: int) -> list[dict]:
    from triton.runtime.jit import JITFunction

    from fuselm.kernels import adamw_slots
    from fuselm.kernels.adamw import AdamW
    from fuselm.kernels.adamw_sharding import Place
    from fuselm.kernels.aot import compile_only

    place_of = adamw_slots.place_of

    jit_function: Any = JITFunction
    run = jit_function.run
    ptx: list[str] = []

    def recording_run(self, *args, **kwargs):
        kernel = run(self, *args, **kwargs)
        if id(kernel) not in known:
            known[id(kernel)] = kernel
            ptx.append(kernel.asm["ptx"])
        return kernel

    known: dict[int, Any] = {}
    jit_function.run = recording_run  # compile_only wraps this one; the process ends with it in place
    settings: list[str] = []
    optimizer: Any = None
    with compile_only(arch) as compiled:
        for name, (dtype, options) in SETTINGS.items():
            params = [torch.zeros(shape, dtype=dtype).requires_grad_() for shape in [(64, 256), (5,), (7, 3)]]
            optimizer = AdamW(params, max_grad_norm=1.0, **options)
            adamw_slots.place_of = (lambda _: Place(3, 40, 8)) if "columns" in name else place_of
            for p in params:
                p.grad = torch.zeros_like(p)
            for _ in range(2):
                optimizer.step()
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * 0.5
            settings += [name] * (len(compiled) - len(settings))
        reduction = optimizer._reduction
        reduction.groups, reduction.all_reduce = {(0, 1): None}, lambda sums: None
        optimizer.step()
        settings += ["sharded"] * (len(compiled) - len(settings))
        for first in (0, 1):  # the answer at any address
            optimizer.veto = lambda _, first=first: torch.zeros(17, dtype=torch.bool)[first]
            optimizer.step()
        settings += ["veto"] * (len(compiled) - len(settings))

    def count(access: str, width: str, text: str) -> int:
        return len(re.findall(rf"{access}\.global[.\w:]*\.{width}\.b32", text))

    return [
        {
            "setting": setting,
            "name": kernel.name,
            "registers": kernel.registers,
            "spill_bytes": kernel.spill_bytes,
            "warnings": kernel.warnings,
            "accesses": {f"{a} {w}": count(a, w, text) for a in ("ld", "st") for w in ("v4", "v2")},
        }
        for setting, kernel, text in zip(settings, compiled, ptx, strict=True)
    ]


if __name__ == "__main__":
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # nobody reads it here
    gc.disable()
    print(json.dumps({arch: _report(int(arch)) for arch in sys.argv[1:]}))


@pytest.fixture(scope="module")
def report(server: Any) -> dict[str, list[dict]]:
    from ..forked import Program  # here, for as a script this file has no package

    program = Program(server, [__file__, *ARCHITECTURES])
    code, (out, err) = program.wait(300), program.communicate()
    assert code == 0, out + err
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills_or_warnings(report, arch):
    names = {kernel["name"] for kernel in report[arch]}
    assert names == {"squares_kernel", "class_sums_kernel", "norm_kernel", "finish_kernel", "adamw_kernel"}
    assert sorted(k["name"] for k in report[arch] if k["setting"] == "veto") == ["finish_kernel", "norm_kernel"]
    for kernel in report[arch]:
        assert kernel["spill_bytes"] == 0 and not kernel["warnings"] and 0 < kernel["registers"] <= 128, kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_whole_chunks_take_wide_accesses(report, arch):
    """Two paths take whole chunks: the gradient's loads are wide in the first only. In every path each tensor takes as
    many accesses as the launch's vectors leave it: none is split further."""
    from fuselm.kernels._triton import KNOWN_PROFILES
    from fuselm.kernels.launch.adamw import step_launch

    found = {k["setting"]: k["accesses"] for k in report[arch] if k["name"] == "adamw_kernel"}
    kinds = {"fp32": (4, 4, 4, None), "bf16": (2, 2, 2, None), "master": (2, 2, 4, 4), "rounded": (2, 2, 2, None)}
    for setting, (param, grad, state, master) in kinds.items():
        dtypes = tuple(torch.float32 if width == 4 else torch.bfloat16 for width in (param, grad, state))
        launch = step_launch(dtypes, master is not None, KNOWN_PROFILES[int(arch)])
        expected = {"ld v4": 0, "ld v2": 0, "st v4": 0, "st v2": 0}
        walked = [master or param, state, state]
        for access, widths in (("ld", [*walked * 2, grad]), ("st", [*walked, *([param] if master else [])] * 2)):
            for width in widths:
                wide = min(16, width * launch.vector)
                accesses = launch.block // (32 * launch.num_warps) * width // wide
                expected[f"{access} v{wide // 4}"] += accesses
        assert found[setting] == expected, setting
    for kernel in report[arch]:
        if kernel["name"] == "squares_kernel":
            assert kernel["accesses"]["ld v4"] > 0 and kernel["accesses"]["ld v2"] == 0, kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_new_learning_rate_compiles_nothing(report, arch):
    found = [sum(kernel["name"] == name for kernel in report[arch]) for name in ("adamw_kernel", "squares_kernel")]
    # One a combination of dtypes, though each was stepped with two rates and one with a tensor as rate; one a gradient.
    assert found == [len(SETTINGS) - 1, 3]
