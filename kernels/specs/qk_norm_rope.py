"""KernelSpec of qk_norm_rope."""

from __future__ import annotations

import math
from typing import Any

import torch

from fuselm.kernels.qk_norm_rope import qk_norm_rope
from fuselm.kernels.specs.base import Case, Direction, KernelSpec, randn
from fuselm.kernels.specs.rope import ROPE_QKV


def _plain(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, weight_offset: float, **rest: Any
) -> tuple[torch.Tensor, ...]:
    heads, kv_heads = rest["num_heads"], rest["num_kv_heads"]
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=-2)
    q, k = (
        torch.nn.functional.rms_norm(x, x.shape[-1:], (weight_offset + w).to(x.dtype), eps)
        for x, w in ((q, q_weight), (k, k_weight))
    )
    return ROPE_QKV.plain(torch.cat((q, k, v), dim=-2), **rest)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    inputs = ROPE_QKV.make_inputs(case, dtype, device, generator)
    weight_dtype = case.get("weight_dtype", dtype)
    weights = {n: randn((case["head_dim"],), weight_dtype, device, generator) for n in ("q_weight", "k_weight")}
    return inputs | weights | {"eps": 1e-5, "weight_offset": case.get("weight_offset", 0.0)}


def _bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    per_head = math.prod(case["lead"]) * case["head_dim"] * dtype.itemsize
    rotated, copied = case["heads"] + case["kv_heads"], case["kv_heads"]
    tables = case["lead"][-1] * case["head_dim"] * 4
    return per_head * (2 * rotated if direction == "forward" else 3 * rotated + 2 * copied) + tables


_TEST: tuple[Case, ...] = (
    {"lead": (2, 5), "heads": 4, "kv_heads": 2, "head_dim": 16},
    {"lead": (1, 17), "heads": 3, "kv_heads": 1, "head_dim": 40, "offset": 300, "weight_offset": 1.0},
    {"lead": (3, 4), "heads": 6, "kv_heads": 2, "head_dim": 80, "positions": "batch", "weight_dtype": torch.float32},
    {"lead": (7,), "heads": 4, "kv_heads": 1, "head_dim": 64, "positions": "batch"},
    {"lead": (0, 5), "heads": 4, "kv_heads": 2, "head_dim": 16},
)
_BENCHMARK: tuple[Case, ...] = (
    {"lead": (4, 4096), "heads": 32, "kv_heads": 8, "head_dim": 128},
    {"lead": (8, 2048), "heads": 32, "kv_heads": 8, "head_dim": 64},
)
_GPU: tuple[Case, ...] = (
    {"lead": (3, 1025), "heads": 24, "kv_heads": 8, "head_dim": 128},
    {"lead": (2, 127), "heads": 71, "kv_heads": 1, "head_dim": 40, "positions": "batch"},
    {"lead": (70000, 1), "heads": 4, "kv_heads": 2, "head_dim": 16, "positions": "batch", "index_dtype": torch.int32},
    {"lead": (4097,), "heads": 16, "kv_heads": 4, "head_dim": 256, "positions": "batch", "weight_offset": 1.0},
)
_AOT: tuple[Case, ...] = (
    {"lead": (2, 2048), "heads": 32, "kv_heads": 8, "head_dim": 64},
    {"lead": (1, 4096), "heads": 32, "kv_heads": 8, "head_dim": 128, "positions": "batch"},
    {"lead": (2, 1000), "heads": 12, "kv_heads": 12, "head_dim": 80},
    {"lead": (8, 1), "heads": 32, "kv_heads": 8, "head_dim": 256, "positions": "batch"},
)

QK_NORM_ROPE = KernelSpec("qk_norm_rope", qk_norm_rope, _plain, _inputs, _TEST, _GPU, _AOT, _BENCHMARK, _bytes)
