"""Launch choices of decode attention to be timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tuning.base import Target

from fuselm.kernels.decode_attention import decode_attention, decode_attention_reference
from fuselm.kernels.launch.decode_attention import DecodeLaunch

ELEMENT = 2  # bytes of bf16
# batch, heads, kv_heads, head_dim, keys: Llama 3 8B and 1B, one sequence and many; a 124m model
SHAPES = (
    (1, 32, 8, 128, 8192),
    (16, 32, 8, 128, 4096),
    (1, 32, 8, 64, 2048),
    (64, 32, 8, 64, 1024),
    (16, 12, 12, 64, 1024),
)
_CANDIDATES = tuple(
    DecodeLaunch(splits, block_n, warps, stages)
    for splits in (1, 2, 4, 8, 16, 33, 64)
    for block_n, warps, stages in ((64, 4, 3), (64, 4, 2), (128, 4, 2), (32, 2, 4))
)


def _make(
    batch: int, heads: int, kv_heads: int, head_dim: int, keys: int, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randn(batch, heads, head_dim, device=device, generator=generator).bfloat16()
    k, v = torch.randn(2, batch, keys, kv_heads, head_dim, device=device, generator=generator).bfloat16()
    lengths = torch.full((batch,), keys, device=device)
    return lambda: decode_attention(q, k, v, lengths), lambda: decode_attention_reference(q, k, v, lengths)


TARGETS: list[Target] = [
    Target(
        f"decode_attention {batch}x{heads}/{kv_heads} heads x {head_dim}, {keys} keys bf16",
        "fuselm.kernels.decode_attention.decode_launch",
        _CANDIDATES,
        functools.partial(_make, batch, heads, kv_heads, head_dim, keys),
        2 * batch * keys * kv_heads * head_dim * ELEMENT,
    )
    for batch, heads, kv_heads, head_dim, keys in SHAPES
]
