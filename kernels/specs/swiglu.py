"""KernelSpec of swiglu."""

from __future__ import annotations

import math
from typing import Any

import torch

from fuselm.kernels.specs.base import Case, Direction, KernelSpec, randn
from fuselm.kernels.swiglu import swiglu


def _plain(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    return {"gate_up": randn((*case["rows"], 2 * case["ffn"]), dtype, device, generator)}


def _bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    return math.prod(case["rows"]) * case["ffn"] * dtype.itemsize * (3 if direction == "forward" else 5)


_TEST: tuple[Case, ...] = (
    {"rows": (3, 5), "ffn": 37},
    {"rows": (), "ffn": 1},
    {"rows": (2, 3, 2, 2), "ffn": 64},
    {"rows": (0, 3), "ffn": 16},
    {"rows": (3,), "ffn": 4097},
    {"rows": (255,), "ffn": 8},
)
_BENCHMARK: tuple[Case, ...] = (
    {"rows": (16384,), "ffn": 14336},
    {"rows": (32768,), "ffn": 8192},
    {"rows": (16384,), "ffn": 8192},
    {"rows": (8192,), "ffn": 14336},
    {"rows": (32768,), "ffn": 2048},
)
_GPU: tuple[Case, ...] = (
    {"rows": (8193,), "ffn": 4097},
    {"rows": (3, 1025), "ffn": 14336},
    {"rows": (100000,), "ffn": 16},
    {"rows": (1,), "ffn": 1},
    {"rows": (4, 256), "ffn": 2730},
)
_AOT: tuple[Case, ...] = (
    {"rows": (2, 512), "ffn": 8192},
    {"rows": (512,), "ffn": 14336},
    {"rows": (999,), "ffn": 2730},
    {"rows": (512,), "ffn": 48},
)

SWIGLU = KernelSpec("swiglu", swiglu, _plain, _inputs, _TEST, _GPU, _AOT, _BENCHMARK, _bytes)
