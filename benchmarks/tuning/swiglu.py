"""Launch choices of swiglu to be timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tuning.base import Target

from fuselm.kernels.launch.swiglu import SwigluLaunch

ELEMENT = 2  # bytes of bf16
SHAPES = ((16384, 14336), (32768, 8192), (8193, 4097), (16384, 5120), (1, 14336))
PIECE = 2048  # rows that the reference computes in fp32 at a time

_CANDIDATES = tuple(
    SwigluLaunch(rows, columns, warps)
    for rows, columns, warps in (
        (1, 2048, 4),
        (1, 1024, 4),
        (1, 2048, 8),
        (1, 4096, 8),
        (1, 512, 2),
        (1, 1024, 2),
        (1, 4096, 16),
        (1, 256, 1),
        (1, 512, 1),
        (2, 1024, 4),
        (4, 1024, 8),
        (8, 256, 4),
    )
)


def _tensors(rows: int, ffn: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    gate_up = torch.randn(rows, 2 * ffn, device=device, generator=generator).bfloat16()
    return gate_up, torch.randn(rows, ffn, device=device, generator=generator).bfloat16()


def _forward(rows: int, ffn: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    gate_up, _ = _tensors(rows, ffn, device)

    def piece(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).bfloat16()

    return (
        lambda: torch.ops.fuselm.swiglu_forward(gate_up),
        lambda: torch.cat([piece(x) for x in gate_up.split(PIECE)]),
    )


def _backward(rows: int, ffn: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    gate_up, dy = _tensors(rows, ffn, device)

    def piece(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        gate, up = x.float().chunk(2, -1)
        sigma = torch.sigmoid(gate)
        grad = dy.float()
        return torch.cat((grad * up * sigma * (1 + gate * (1 - sigma)), grad * gate * sigma), -1).bfloat16()

    return (
        lambda: torch.ops.fuselm.swiglu_backward(dy, gate_up),
        lambda: torch.cat([piece(x, g) for x, g in zip(gate_up.split(PIECE), dy.split(PIECE), strict=True)]),
    )


TARGETS = [
    Target(
        f"swiglu {direction} {rows}x{ffn} bf16",
        "fuselm.kernels.swiglu.swiglu_launch",
        _CANDIDATES,
        functools.partial(make, rows, ffn),
        passes * rows * ffn * ELEMENT,
    )
    for rows, ffn in SHAPES
    for direction, make, passes in (("forward", _forward, 3), ("backward", _backward, 5))
]
