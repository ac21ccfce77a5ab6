"""KernelSpec of linear_cross_entropy."""

from __future__ import annotations

import math
from typing import Any

import torch

from fuselm.kernels.linear_cross_entropy import linear_cross_entropy
from fuselm.kernels.specs.base import Case, Direction, KernelSpec, randn
from fuselm.kernels.specs.cross_entropy import OPTIONS, draw_targets, plain_cross_entropy


def _plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk_size: int = 0,
    memory_budget: int = 0,
    **options: Any,
) -> Any:
    return plain_cross_entropy(torch.nn.functional.linear(x, weight), targets, **options)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    vocab, dim = case["vocab"], case["dim"]
    weight = randn((vocab, dim), dtype, device, generator, grad=False) * dim**-0.5
    return {
        "x": randn((*case["rows"], dim), dtype, device, generator),
        "weight": weight.requires_grad_(),
        "targets": draw_targets(case, device, generator),
    } | {name: case[name] for name in (*OPTIONS, "chunk_size", "memory_budget") if name in case}


def _bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    # x and the weight in, their gradients out; the logits could stay on the chip
    return (math.prod(case["rows"]) + case["vocab"]) * case["dim"] * dtype.itemsize


def _flops(case: Case, direction: Direction) -> int:
    return math.prod(case["rows"]) * case["vocab"] * case["dim"] * (2 if direction == "forward" else 4)


_TEST: tuple[Case, ...] = (
    {
        "rows": (3, 5),
        "vocab": 37,
        "dim": 16,
        "chunk_size": 4,
        "reduction": "none",
        "return_lse": True,
        "z_loss": 1e-2,
        "label_smoothing": 0.1,
    },
    {"rows": (17,), "vocab": 259, "dim": 24, "chunk_size": 5},
    {"rows": (2, 5), "vocab": 64, "dim": 8, "reduction": "sum", "softcap": 5.0},
    {"rows": (9,), "vocab": 37, "dim": 16, "chunk_size": 4, "ignore_index": 3, "return_lse": True},
    {"rows": (6,), "vocab": 37, "dim": 16, "ignored": 1.0, "chunk_size": 4},
    {"rows": (0, 3), "vocab": 37, "dim": 16},
    {"rows": (), "vocab": 1, "dim": 1, "ignored": 0.0},
)
_GPU: tuple[Case, ...] = (
    {"rows": (3, 257), "vocab": 50257, "dim": 128, "chunk_size": 200, "reduction": "none", "return_lse": True},
    {"rows": (1025,), "vocab": 50257, "dim": 768, "chunk_size": 500},
    {"rows": (513,), "vocab": 128256, "dim": 256, "z_loss": 1e-4, "chunk_size": 256},
    {"rows": (1000,), "vocab": 1024, "dim": 256, "ignored": 1.0, "chunk_size": 128},
    {"rows": (777,), "vocab": 32000, "dim": 512, "softcap": 30.0, "reduction": "sum"},
    {"rows": (4000,), "vocab": 50257, "dim": 256, "memory_budget": 2**23, "return_lse": True, "label_smoothing": 0.1},
    {"rows": (2000,), "vocab": 50257, "dim": 1024, "memory_budget": 2**23},
)
_EVERYTHING = {"return_lse": True, "z_loss": 1e-4, "label_smoothing": 0.1, "softcap": 30.0}
_AOT: tuple[Case, ...] = (
    {"rows": (4,), "vocab": 128256, "dim": 8},
    {"rows": (4,), "vocab": 50257, "dim": 8, "memory_budget": 2**17},
    {"rows": (4,), "vocab": 50257, "dim": 8, "memory_budget": 2**17} | _EVERYTHING,
    {"rows": (4,), "vocab": 50257, "dim": 8, "reduction": "none"},
    {"rows": (4,), "vocab": 32000, "dim": 8} | _EVERYTHING,
)
_BENCHMARK: tuple[Case, ...] = (
    {"rows": (8192,), "dim": 4096, "vocab": 128256, "ignored": 0.0},
    {"rows": (16384,), "dim": 2048, "vocab": 128256, "ignored": 0.0},
    {"rows": (32768,), "dim": 768, "vocab": 50304, "ignored": 0.0},
)

LINEAR_CROSS_ENTROPY = KernelSpec(
    "linear_cross_entropy",
    linear_cross_entropy,
    _plain,
    _inputs,
    _TEST,
    _GPU,
    _AOT,
    _BENCHMARK,
    _bytes,
    _flops,
)
