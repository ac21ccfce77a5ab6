"""KernelSpec of decode_attention."""

from __future__ import annotations

from typing import Any

import torch

from fuselm.kernels.decode_attention import decode_attention
from fuselm.kernels.specs.base import Case, Direction, KernelSpec, randn


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    group = q.shape[1] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = (q[:, None] * k).sum(-1) * q.shape[-1] ** -0.5  # (batch, keys, heads)
    hidden = (torch.arange(k.shape[1], device=q.device) >= lengths[:, None])[:, :, None]
    p = scores.masked_fill(hidden, float("-inf")).softmax(1)
    return (torch.nan_to_num(p)[..., None] * v).sum(1)  # a sequence without keys has NaN here


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    batch, keys, kv_heads, head_dim = case["batch"], case["keys"], case["kv_heads"], case["head_dim"]
    lengths = torch.tensor(case.get("lengths", [keys] * batch), dtype=case.get("index_dtype", torch.int64))
    return {
        "q": randn((batch, case["heads"], head_dim), dtype, device, generator),
        "k": randn((batch, keys, kv_heads, head_dim), dtype, device, generator),
        "v": randn((batch, keys, kv_heads, head_dim), dtype, device, generator),
        "lengths": lengths.to(device),
    }


def _bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    held = sum(case.get("lengths", [case["keys"]] * case["batch"]))
    once = 2 * held * case["kv_heads"] * case["head_dim"] * dtype.itemsize
    return once if direction == "forward" else 2 * once


_TEST: tuple[Case, ...] = (
    {"batch": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "keys": 37, "lengths": [37, 1, 20]},
    {"batch": 2, "heads": 8, "kv_heads": 1, "head_dim": 64, "keys": 300, "lengths": [300, 20]},  # splits, some empty
    {"batch": 1, "heads": 3, "kv_heads": 3, "head_dim": 40, "keys": 129, "index_dtype": torch.int32},
    {"batch": 1, "heads": 17, "kv_heads": 1, "head_dim": 80, "keys": 5, "lengths": [3]},
    {"batch": 2, "heads": 2, "kv_heads": 1, "head_dim": 256, "keys": 200, "lengths": [200, 64]},
)
_GPU: tuple[Case, ...] = (
    {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "keys": 4097},
    {"batch": 5, "heads": 12, "kv_heads": 12, "head_dim": 64, "keys": 1025, "lengths": [1025, 1, 64, 65, 1000]},
    {"batch": 2, "heads": 71, "kv_heads": 1, "head_dim": 64, "keys": 2048, "lengths": [2048, 777]},
    {"batch": 3, "heads": 16, "kv_heads": 4, "head_dim": 256, "keys": 513, "lengths": [513, 512, 2]},
)
_AOT: tuple[Case, ...] = (
    {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 64, "keys": 2048},
    {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "keys": 2048},
    {"batch": 64, "heads": 12, "kv_heads": 12, "head_dim": 64, "keys": 65},
    {"batch": 2, "heads": 16, "kv_heads": 4, "head_dim": 256, "keys": 512},
)
_BENCHMARK: tuple[Case, ...] = (
    {"batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128, "keys": 8192},
    {"batch": 16, "heads": 32, "kv_heads": 8, "head_dim": 64, "keys": 4096},
    {"batch": 64, "heads": 12, "kv_heads": 12, "head_dim": 64, "keys": 1024},
)

DECODE_ATTENTION = KernelSpec(
    "decode_attention", decode_attention, _plain, _inputs, _TEST, _GPU, _AOT, _BENCHMARK, _bytes
)
