"""KernelSpec: what tests and benchmarks need to know of one op.

Cases are plain dictionaries of sizes and options; `make_inputs` turns one into the keyword arguments of the public
function. Floating-point tensors among them that require a gradient are differentiated and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Case = Mapping[str, Any]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class KernelSpec:
    """What tests and benchmarks need to know of one op.

    Attributes:
        name: the public function's name.
        function: called as `function(**inputs, backend=...)`; gives a tensor or a tuple of tensors.
        plain: what a user would write in plain PyTorch, called as `plain(**inputs)`; the error budget is measured
            against it. With fp64 inputs it is the exact formula, independent of our reference.
        make_inputs: (case, dtype, device, generator) -> keyword arguments.
        test_cases: small awkward sizes for the interpreter (each well under a second).
        gpu_cases: sizes for a GPU test, off the block borders too.
        aot_cases: realistic sizes, compiled ahead of time; tensors are never touched, so they may be large, but
            whatever the op computes outside Triton (a GEMM) runs, so those must be small.
        benchmark_cases: the shapes of the performance tables.
        bytes_moved: (case, dtype, direction) -> the fewest bytes that device memory must move.
        flops: (case, direction) -> floating-point operations, for ops that are bound by arithmetic.
        architectures: compute capabilities times ten that the kernels compile for.
        dtypes: input dtypes to test.
    """

    name: str
    function: Callable[..., Any]
    plain: Callable[..., Any]
    make_inputs: Callable[[Case, torch.dtype, torch.device, torch.Generator], dict[str, Any]]
    test_cases: tuple[Case, ...]
    gpu_cases: tuple[Case, ...]
    aot_cases: tuple[Case, ...]
    benchmark_cases: tuple[Case, ...]
    bytes_moved: Callable[[Case, torch.dtype, Direction], int]
    flops: Callable[[Case, Direction], int] | None = None
    architectures: tuple[int, ...] = (80, 90, 100)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def randn(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator, *, grad: bool = True
) -> torch.Tensor:
    """Standard normal values drawn in fp32, cast, a leaf."""
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
    return x.requires_grad_(grad)
