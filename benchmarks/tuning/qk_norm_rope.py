"""Launch choices of qk_norm_rope to be timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tuning.base import Target

from fuselm.kernels.launch.qk_norm_rope import QkNormRopeLaunch
from fuselm.kernels.qk_norm_rope import qk_norm_rope_reference

ELEMENT = 2  # bytes of bf16
SMS = 132
# batch, seq, query heads, key heads, head_dim
SHAPES = ((4, 4096, 32, 8, 128), (8, 2048, 32, 8, 64))

Shape = tuple[int, int, int, int, int]


def _make(shape: Shape, backward: bool, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    batch, seq_len, heads, kv_heads, head_dim = shape
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn((batch, seq_len, heads + 2 * kv_heads, head_dim), device=device, generator=generator).bfloat16()
    wq, wk = (torch.linspace(a, 1.5, head_dim, device=device).bfloat16() for a in (0.5, 0.7))
    frequency = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.arange(seq_len, dtype=torch.float64, device=device)[:, None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()
    inputs = [qkv, wq, wk]

    def exact(inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, q_weight, k_weight = inputs
        return qk_norm_rope_reference(x, q_weight, k_weight, cos, sin, num_heads=heads, num_kv_heads=kv_heads)

    if not backward:
        return (
            lambda: torch.ops.fuselm.qk_norm_rope_forward(*inputs, cos, sin, None, 0, 1e-6, 0.0, heads),
            lambda: exact([x.float() for x in inputs]),
        )
    parts = [x.contiguous() for x in qkv.flip(1).split((heads, kv_heads, kv_heads), dim=2)]

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [x.float().requires_grad_() for x in inputs]
        return torch.autograd.grad(exact(leaves), leaves, [x.float() for x in parts])

    return (
        lambda: torch.ops.fuselm.qk_norm_rope_backward(*parts, *inputs, cos, sin, None, 0, 1e-6, 0.0, True),
        gradients,
    )


def _candidates(shape: Shape, backward: bool) -> tuple[QkNormRopeLaunch, ...]:
    half = shape[-1] // 2
    found = []
    for heads in (8, 4, 2):
        for vectors in (1, 2):  # of 8 elements of each half that a thread holds
            for warps in (4, 2, 8):
                tokens = warps * 32 * vectors * 8 // (heads * half)
                resident = (16, 12, 24) if vectors == 1 else (8,)  # warps a multiprocessor
                programs = [SMS * max(1, count // warps) for count in resident] if backward else [0]
                if tokens:
                    found += [QkNormRopeLaunch(tokens, heads, half, warps, count) for count in programs]
    return tuple(found[:24])


TARGETS = [
    Target(
        f"qk_norm_rope {'backward' if backward else 'forward'} {shape[0]}x{shape[1]}, {shape[2]}+{shape[3]} heads of "
        f"{shape[4]} bf16",
        f"fuselm.kernels.qk_norm_rope.{'backward' if backward else 'forward'}_launch",
        _candidates(shape, backward),
        functools.partial(_make, shape, backward),
        # the op copies v, where an eager call makes it a view
        shape[0] * shape[1] * shape[4] * ELEMENT * ((3 if backward else 2) * (shape[2] + shape[3]) + 2 * shape[3]),
    )
    for shape in SHAPES
    for backward in (False, True)
]
