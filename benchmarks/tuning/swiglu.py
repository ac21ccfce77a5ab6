"""Launch choices of swiglu to be timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tuning.base import Target, in_turn, some_rows

from fuselm.kernels.launch.swiglu import SwigluLaunch

ELEMENT = 2  # bytes of bf16
# The last of the large ones are about as much as L2 holds, or less.
SHAPES = ((16384, 14336), (32768, 8192), (8193, 4097), (16384, 5120), (1024, 14336), (512, 14336), (1, 14336))

# The default forward has two vectors of each operand a thread, the one backward one; 16 warps lost on an H200.
_CANDIDATES = tuple(
    SwigluLaunch(1, columns, warps, load)
    for load in ("evict_last", "")
    for columns, warps in ((512, 1), (1024, 4), (2048, 8))
)


def _tensors(rows: int, ffn: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    gate_up = torch.randn(rows, 2 * ffn, device=device, generator=generator).bfloat16()
    return [gate_up, torch.randn(rows, ffn, device=device, generator=generator).bfloat16()]


def _forward(rows: int, ffn: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    inputs = in_turn(functools.partial(_tensors, rows, ffn, device))
    gate_up, _ = inputs()
    some = some_rows(rows)

    def reference() -> torch.Tensor:
        gate, up = gate_up[some].float().chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return lambda: torch.ops.fuselm.swiglu_forward(inputs()[0])[some], reference


def _backward(rows: int, ffn: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    inputs = in_turn(functools.partial(_tensors, rows, ffn, device))
    gate_up, dy = inputs()
    some = some_rows(rows)

    def reference() -> torch.Tensor:
        gate, up = gate_up[some].float().chunk(2, -1)
        sigma, grad = torch.sigmoid(gate), dy[some].float()
        return torch.cat((grad * up * sigma * (1 + gate * (1 - sigma)), grad * gate * sigma), -1)

    def run() -> torch.Tensor:
        gate_up, dy = inputs()
        return torch.ops.fuselm.swiglu_backward(dy, gate_up)[some]

    return run, reference


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
