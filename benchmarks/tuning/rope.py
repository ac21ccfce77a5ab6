"""Launch choices of rope to be timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tuning.base import Target, in_turn, some_rows

from fuselm.kernels.launch.rope import RopeLaunch

ELEMENT = 2  # bytes of bf16
# batch, seq, query heads, key heads, head_dim
SHAPES = (
    (4, 4096, 32, 8, 128),
    (8, 2048, 32, 8, 64),
    (32, 1024, 12, 12, 64),
    (8, 1024, 12, 12, 64),
    (3, 1025, 24, 8, 128),
    (3, 1024, 24, 8, 128),
    (1, 4096, 32, 8, 128),
    (1, 8192, 28, 4, 128),
)

Shape = tuple[int, int, int, int, int]


def _inputs(shape: Shape, device: torch.device) -> list[torch.Tensor]:
    """q and k as views of a packed qkv, and the tables."""
    batch, seq_len, heads, kv_heads, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn((batch, seq_len, heads + 2 * kv_heads, head_dim), device=device, generator=generator).bfloat16()
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.arange(seq_len, dtype=torch.float64, device=device)[:, None] * frequency
    return [qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads], angle.cos().float(), angle.sin().float()]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1)


def _make(shape: Shape, direction: str, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def make() -> list[torch.Tensor]:
        q, k, cos, sin = _inputs(shape, device)
        return [q, k, cos, sin] if direction == "forward" else [q.contiguous(), k.contiguous(), cos, sin]

    inputs = in_turn(make)
    q, k, cos, sin = inputs()
    some = some_rows(shape[1])  # of each sequence
    angles = cos[some], sin[some] if direction == "forward" else -sin[some]

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        op = torch.ops.fuselm.rope_forward if direction == "forward" else torch.ops.fuselm.rope_backward
        rotated_q, rotated_k = op(*inputs(), None, 0)
        return rotated_q[:, some], rotated_k[:, some]

    return run, lambda: (_turned(q[:, some], *angles), _turned(k[:, some], *angles))


def _candidates(shape: Shape) -> tuple[RopeLaunch, ...]:
    """One vector of each half a thread, over four warps, eight or two; heads that stay in L2, or nothing said."""
    _, _, _, kv_heads, head_dim = shape
    heads = 8 if kv_heads % 8 == 0 else 4
    half = head_dim // 2
    tokens = 512 // (heads * half)  # of two warps
    return tuple(
        RopeLaunch(tokens * parts, heads, half, 2 * parts, load)
        for parts, load in ((2, "evict_last"), (4, "evict_last"), (1, "evict_last"), (2, ""))
    )


TARGETS = [
    Target(
        f"rope {direction} {batch}x{seq_len}, {heads}+{kv_heads} heads of {head_dim} bf16",
        "fuselm.kernels.rope.rope_launch",
        _candidates((batch, seq_len, heads, kv_heads, head_dim)),
        functools.partial(_make, (batch, seq_len, heads, kv_heads, head_dim), direction),
        2 * batch * seq_len * (heads + kv_heads) * head_dim * ELEMENT + seq_len * head_dim * 4,
    )
    for batch, seq_len, heads, kv_heads, head_dim in SHAPES
    for direction in ("forward", "backward")
]
