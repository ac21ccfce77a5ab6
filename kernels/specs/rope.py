"""KernelSpec of rope."""

from __future__ import annotations

import math
from typing import Any

import torch

from fuselm.kernels.rope import rope, rope_qkv
from fuselm.kernels.specs.base import Case, Direction, KernelSpec, randn


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    offset: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    seq_len = q.shape[-3]
    at = torch.arange(offset, offset + seq_len, device=q.device) if positions is None else positions
    # As model code does it: tables doubled to the whole head and cast to the dtype of q.
    c = torch.cat((cos, cos), -1)[at].unsqueeze(-2).to(q.dtype)
    s = torch.cat((sin, sin), -1)[at].unsqueeze(-2).to(q.dtype)

    def turned(x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat((-x2, x1), -1)

    return q * c + turned(q) * s, k * c + turned(k) * s


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    lead, heads, kv_heads, head_dim = case["lead"], case["heads"], case["kv_heads"], case["head_dim"]
    if case.get("packed_qkv", False):
        qkv = randn((*lead, heads + 2 * kv_heads, head_dim), dtype, device, generator, grad=False)
        q = qkv[..., :heads, :].detach().requires_grad_()
        k = qkv[..., heads : heads + kv_heads, :].detach().requires_grad_()
    else:
        q = randn((*lead, heads, head_dim), dtype, device, generator)
        k = randn((*lead, kv_heads, head_dim), dtype, device, generator)
    seq_len, offset = lead[-1], case.get("offset", 0)
    table_len = offset + seq_len + 3
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.arange(table_len, dtype=torch.float64, device=device)[:, None] * frequency
    shape = {"none": None, "seq": (seq_len,), "batch": tuple(lead)}[case.get("positions", "none")]
    positions = None
    if shape is not None:
        positions = torch.randint(table_len, shape, generator=generator, device=device)
        positions = positions.to(case.get("index_dtype", torch.int64))
    return {
        "q": q,
        "k": k,
        "cos": angle.cos().float(),
        "sin": angle.sin().float(),
        "positions": positions,
        "offset": offset,
    }


def _bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    del direction  # the backward pass is the same rotation of the gradients
    head_dim, tokens = case["head_dim"], math.prod(case["lead"])
    rows = tokens if case.get("positions", "none") == "batch" else case["lead"][-1]
    return 2 * tokens * (case["heads"] + case["kv_heads"]) * head_dim * dtype.itemsize + rows * head_dim * 4


_TEST: tuple[Case, ...] = (
    {"lead": (2, 5), "heads": 4, "kv_heads": 2, "head_dim": 16},
    {"lead": (1, 17), "heads": 3, "kv_heads": 1, "head_dim": 40, "offset": 300},
    {"lead": (2, 3), "heads": 9, "kv_heads": 9, "head_dim": 96, "positions": "seq", "packed_qkv": True},
    {"lead": (3, 4), "heads": 6, "kv_heads": 2, "head_dim": 80, "positions": "batch", "packed_qkv": True},
    {"lead": (2, 1), "heads": 12, "kv_heads": 4, "head_dim": 256, "positions": "batch", "index_dtype": torch.int32},
    {"lead": (7,), "heads": 4, "kv_heads": 1, "head_dim": 64, "positions": "batch"},
    {"lead": (0, 5), "heads": 4, "kv_heads": 2, "head_dim": 16},
)
_BENCHMARK: tuple[Case, ...] = (
    {"lead": (8, 2048), "heads": 32, "kv_heads": 8, "head_dim": 64, "packed_qkv": True},
    {"lead": (4, 4096), "heads": 32, "kv_heads": 8, "head_dim": 128, "packed_qkv": True},
    {"lead": (32, 1024), "heads": 12, "kv_heads": 12, "head_dim": 64, "packed_qkv": True},
)
_GPU: tuple[Case, ...] = (
    {"lead": (3, 1025), "heads": 24, "kv_heads": 8, "head_dim": 128, "packed_qkv": True},
    {"lead": (2, 127), "heads": 71, "kv_heads": 1, "head_dim": 40, "positions": "batch"},
    {"lead": (70000, 1), "heads": 4, "kv_heads": 2, "head_dim": 16, "positions": "batch", "index_dtype": torch.int32},
    {"lead": (1, 129), "heads": 16, "kv_heads": 4, "head_dim": 256, "offset": 131072, "packed_qkv": True},
    {"lead": (4097,), "heads": 12, "kv_heads": 4, "head_dim": 96, "positions": "batch"},
)
_AOT: tuple[Case, ...] = (
    {"lead": (2, 2048), "heads": 32, "kv_heads": 8, "head_dim": 64, "packed_qkv": True},
    {"lead": (1, 4096), "heads": 32, "kv_heads": 8, "head_dim": 128, "packed_qkv": True, "positions": "batch"},
    {"lead": (2, 1000), "heads": 12, "kv_heads": 12, "head_dim": 80, "packed_qkv": True},
    {"lead": (8, 1), "heads": 128, "kv_heads": 8, "head_dim": 256, "positions": "batch"},
    {"lead": (1, 17), "heads": 71, "kv_heads": 1, "head_dim": 40, "offset": 1},
)

ROPE = KernelSpec("rope", rope, _plain, _inputs, _TEST, _GPU, _AOT, _BENCHMARK, _bytes)


def _plain_qkv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    positions: torch.Tensor | None,
    offset: int,
) -> tuple[torch.Tensor, ...]:
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    return *_plain(q, k, cos, sin, positions, offset), v


def _qkv_inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    inputs = _inputs(case, dtype, device, generator)
    del inputs["q"], inputs["k"]
    heads, kv_heads = case["heads"], case["kv_heads"]
    qkv = randn((*case["lead"], heads + 2 * kv_heads, case["head_dim"]), dtype, device, generator)
    return {"qkv": qkv, "num_heads": heads, "num_kv_heads": kv_heads} | inputs


def _qkv_bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    copied = 2 * math.prod(case["lead"]) * case["kv_heads"] * case["head_dim"] * dtype.itemsize
    return _bytes(case, dtype, direction) + copied


ROPE_QKV = KernelSpec("rope_qkv", rope_qkv, _plain_qkv, _qkv_inputs, _TEST, _GPU, _AOT, _BENCHMARK, _qkv_bytes)
