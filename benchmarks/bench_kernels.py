"""`pytest benchmarks/bench_kernels.py`: each kernel beside plain PyTorch, eager and compiled, on this machine.

Each test checks the kernel against fp64 first and times it only if it passes. Without a GPU the suite runs the smallest
case of each kernel and shows nothing about GPUs; the report says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config

from fuselm.kernels.numerics import check_budget
from fuselm.kernels.specs.base import Case, KernelSpec
from fuselm.kernels.specs.registry import SPECS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
CHECK_LIMIT = 2**28  # elements of the largest input whose fp64 check fits beside it


def _cases(spec: KernelSpec) -> tuple[Case, ...]:
    return spec.benchmark_cases if DEVICE.type == "cuda" else spec.test_cases[:1]


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _differentiable(outputs: Any) -> list[torch.Tensor]:
    return [o for o in _tensors(outputs) if o.requires_grad]


def _providers(spec: KernelSpec) -> dict[str, Callable[..., Any]]:
    return {"fuselm": spec.function, "eager": spec.plain, "compile": torch.compile(spec.plain)}


def _check(spec: KernelSpec, inputs: dict[str, Any]) -> None:
    """Forward values against fp64 where that fits; a kernel that fails is not timed."""
    floats = [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if max(t.numel() for t in floats) > CHECK_LIMIT:
        pytest.fail(f"{spec.name}: an input of more than {CHECK_LIMIT} elements cannot be checked; take a smaller case")
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in inputs.items()}
    with torch.no_grad():
        ours, exact, plain = (
            _tensors(f(**i)) for f, i in ((spec.function, inputs), (spec.plain, wide), (spec.plain, inputs))
        )
    for i, (a, e, p) in enumerate(zip(ours, exact, plain, strict=False)):
        check_budget(a, e, p, name=f"{spec.name} output {i}", dtype=DTYPE)


def _parameters() -> list[Any]:
    return [
        pytest.param(spec, case, direction, provider, id=f"{spec.name}-{index}-{direction}-{provider}")
        for spec in SPECS
        for index, case in enumerate(_cases(spec))
        for direction in ("forward", "forward+backward")
        for provider in ("fuselm", "eager", "compile")
    ]


@pytest.mark.parametrize(("spec", "case", "direction", "provider"), _parameters())
def test_kernel(benchmark, spec: KernelSpec, case: Case, direction: str, provider: str) -> None:
    functorch_config.donated_buffer = False  # a compiled backward that is timed twice needs its buffers
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    inputs = spec.make_inputs(case, DTYPE, DEVICE, generator)
    if provider == "fuselm":
        _check(spec, inputs)
    function = _providers(spec)[provider]
    leaves = [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]

    def run() -> None:
        if direction == "forward":
            with torch.no_grad():
                function(**inputs)
        else:
            outputs = _differentiable(function(**inputs))
            torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{spec.name} {dict(case)} {direction}"
    moved = spec.bytes_moved(case, DTYPE, "forward")
    moved += spec.bytes_moved(case, DTYPE, "backward") if direction != "forward" else 0
    benchmark.pedantic(run, rounds=20, warmup_rounds=3)
    benchmark.extra_info |= {"bytes": moved, "GB/s": moved / benchmark.stats.stats.median / 1e9, "dtype": str(DTYPE)}
