"""KernelSpecs of rms_norm and add_rms_norm."""

from __future__ import annotations

from typing import Any

import torch

from fuselm.kernels.rms_norm import add_rms_norm, rms_norm
from fuselm.kernels.specs.base import Case, Direction, KernelSpec, randn


def _plain(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0) -> torch.Tensor:
    scale = None if weight is None else (weight + offset).to(x.dtype)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), scale, eps)


def _plain_add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    h = x + residual
    return _plain(h, weight, eps, offset), h


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    n = case["n"]
    inputs: dict[str, Any] = {"x": randn((*case["rows"], n), dtype, device, generator)}
    weight_dtype = case.get("weight_dtype", dtype)
    inputs["weight"] = randn((n,), weight_dtype, device, generator) if case.get("weight", True) else None
    return inputs | {"eps": 1e-5, "offset": case.get("offset", 0.0)}


def _add_inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    inputs = _inputs(case, dtype, device, generator)
    return inputs | {"residual": randn((*case["rows"], case["n"]), dtype, device, generator)}


def _elements(case: Case) -> int:
    return torch.Size(case["rows"]).numel() * case["n"]


def _bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    return _elements(case) * dtype.itemsize * (2 if direction == "forward" else 3)


def _add_bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    return _elements(case) * dtype.itemsize * 4


_TEST: tuple[Case, ...] = (
    {"rows": (3, 5), "n": 40},
    # An fp32 weight, whose gradient is not rounded: the interpreter truncates to bf16, which three elements do not
    # average out. _GPU has the same case with a bf16 weight.
    {"rows": (1,), "n": 3, "weight_dtype": torch.float32},
    {"rows": (17,), "n": 255},
    {"rows": (2, 2, 3), "n": 257, "weight": False},
    {"rows": (0,), "n": 64},
    {"rows": (2, 3), "n": 384, "offset": 1.0},
    {"rows": (5,), "n": 4097},
)
_BENCHMARK: tuple[Case, ...] = (
    {"rows": (16384,), "n": 4096},
    {"rows": (32768,), "n": 2048},
    {"rows": (8192,), "n": 8192},
    {"rows": (65536,), "n": 768},
)
_GPU: tuple[Case, ...] = (
    {"rows": (1,), "n": 3},
    {"rows": (8193,), "n": 4097},
    {"rows": (1000,), "n": 128},
    {"rows": (4, 1024), "n": 5120, "weight_dtype": torch.float32},
    {"rows": (64,), "n": 65536},
    {"rows": (777,), "n": 768, "weight": False},
    {"rows": (500,), "n": 16384, "offset": 1.0},
    {"rows": (3, 50000), "n": 64},
)
_AOT: tuple[Case, ...] = (
    {"rows": (4096,), "n": 128},
    {"rows": (4096,), "n": 768},
    {"rows": (4096,), "n": 4096},
    {"rows": (999,), "n": 8192},
    {"rows": (999,), "n": 4097},
    {"rows": (1024,), "n": 5120},
    {"rows": (256,), "n": 16384},
    {"rows": (64,), "n": 65536},
)

RMS_NORM = KernelSpec("rms_norm", rms_norm, _plain, _inputs, _TEST, _GPU, _AOT, _BENCHMARK, _bytes)
ADD_RMS_NORM = KernelSpec(
    "add_rms_norm", add_rms_norm, _plain_add, _add_inputs, _TEST, _GPU, _AOT, _BENCHMARK[:1], _add_bytes
)
