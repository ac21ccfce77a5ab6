"""Launch choices of rms_norm and add_rms_norm to be timed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from tuning.base import Target

from fuselm.kernels.launch.rms_norm import RmsNormLaunch, SumLaunch, split_width

SMS = 132
EPS = 1e-6
ELEMENT = 2  # bytes of bf16


def _tensors(rows: int, n: int, device: torch.device, count: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(rows, n, device=device, generator=generator).bfloat16() for _ in range(count)]


def _weight(n: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, n, device=device).bfloat16()


def _forward_reference(h: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(h.float().square().mean(-1, keepdim=True) + EPS)
    return h.float() * rstd * weight.float(), rstd.squeeze(-1)


def _forward(rows: int, n: int, residual: bool, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    x, r = _tensors(rows, n, device, 2)
    weight = _weight(n, device)
    ops = torch.ops.fuselm
    if residual:
        h = (x.float() + r.float()).bfloat16()

        def reference() -> tuple[torch.Tensor, torch.Tensor, None]:
            return _forward_reference(h, weight)[0], h, None  # rstd depends on how each rounds h

        return lambda: ops.add_rms_norm_forward(x, r, weight, EPS), reference
    return lambda: ops.rms_norm_forward(x, weight, EPS), lambda: _forward_reference(x, weight)


def _backward(rows: int, n: int, residual: bool, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    x, dy, upstream = _tensors(rows, n, device, 3)
    dh = upstream if residual else None
    weight = _weight(n, device)
    rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        x_hat = x.float() * rstd[:, None]
        g = dy.float() * weight.float()
        dx = rstd[:, None] * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
        if dh is not None:
            dx += dh.float()
        return dx, (dy.float() * x_hat).sum(0)

    return lambda: torch.ops.fuselm.rms_norm_backward(dy, dh, x, weight, rstd, EPS, 0.0, True), reference


def _shapes(n: int) -> list[tuple[int, int]]:
    """Ways to cover a row with blocks."""
    whole = max(1 << (n - 1).bit_length(), 16)
    return list(dict.fromkeys([split_width(n), (whole, 0)]))


# (rows a program, elements a thread) of rows shorter than a warp's vectors
_SHORT = ((16, 16), (32, 16), (8, 8), (16, 8), (32, 32), (4, 16), (8, 16), (64, 32))


def _unaligned(n: int, resident: tuple[int, ...]) -> list[RmsNormLaunch]:
    """Launches of the form for dense rows that start anywhere; resident: warps a multiprocessor."""
    if n % 8 == 0:
        return []
    main = 1 << (n // 8 * 8 - 1).bit_length()
    tail = 0 if main >= n else 16
    return [
        RmsNormLaunch(1, main, tail, warps, SMS * max(1, count // warps) // 8 * 8, stages, unaligned=True)
        for warps in (main // 256, main // 512, main // 1024)
        for count in resident
        for stages in (3, 1, 2)
    ]


def _forward_candidates(n: int) -> tuple[RmsNormLaunch, ...]:
    found = _unaligned(n, (32, 48))
    for main, tail in _shapes(n):
        for rows, per_thread in _SHORT if n <= 256 else ((1, 16), (1, 32), (1, 8), (2, 16), (4, 16), (2, 32)):
            warps = rows * main // (32 * per_thread)
            if 1 <= warps <= 32 and (rows == 1 or main <= 4096):
                found.append(RmsNormLaunch(rows, main, tail, warps))
                if rows == 1 and per_thread >= 16:
                    programs = SMS * max(1, 32 // warps)
                    found += [RmsNormLaunch(1, main, tail, warps, programs, stages) for stages in (1, 3)]
    return tuple(found)


def _backward_candidates(n: int) -> tuple[RmsNormLaunch, ...]:
    found = _unaligned(n, (32, 16))
    aligned = n % 8 == 0
    for main, tail in _shapes(n):
        for rows, per_thread in _SHORT if n <= 256 else ((1, 16), (1, 8), (1, 32), (2, 16), (4, 16)):
            warps = rows * main // (32 * per_thread)
            if not 1 <= warps <= 32 or (rows > 1 and main > 2048) or (n <= 256 and warps > 8):
                continue
            for stages in (3, 1, 2, 4) if aligned else (1,):
                # About 16 warps a multiprocessor is what the registers of 16 elements a thread allow.
                for resident in (16, 24) if per_thread < 32 else (8, 12):
                    programs = SMS * max(1, resident // warps)
                    found.append(RmsNormLaunch(rows, main, tail, warps, programs, stages))
    found.append(dataclasses.replace(found[0], recompute_rstd=True))
    return tuple(dict.fromkeys(found))[:40]


_WIDE_FORWARD = tuple(RmsNormLaunch(1, block, 0, warps) for block, warps in ((16384, 32), (8192, 32), (8192, 16)))
_WIDE_BACKWARD = tuple(
    RmsNormLaunch(rows, block, 0, warps, SMS * per_sm)
    for rows, block, warps, per_sm in (
        (1, 8192, 16, 1),
        (1, 8192, 32, 1),
        (1, 4096, 16, 2),
        (1, 4096, 8, 2),
        (2, 4096, 16, 1),
        (2, 8192, 16, 1),
        (2, 4096, 8, 2),
        (4, 2048, 8, 2),
    )
)
_SUMS = tuple(
    SumLaunch(partials, block, warps)
    for partials, block, warps in ((256, 16, 4), (256, 16, 8), (128, 16, 4), (512, 8, 8), (128, 32, 4), (256, 32, 8))
)
SHAPES = ((16384, 4096), (32768, 2048), (8192, 8192), (65536, 768), (8193, 4097), (8192, 5120))
HEADS = (655360, 128)  # the q and k heads of 16,384 tokens, each normalised by itself
WIDE = ((4096, 16384), (1024, 65536))


def _targets() -> list[Target]:
    found = []
    for rows, n in (*SHAPES, HEADS, (1, 4096), *WIDE):
        forward = _WIDE_FORWARD if n > 16384 else _forward_candidates(n)
        backward = _WIDE_BACKWARD if n > 8192 else _backward_candidates(n)
        for residual in (False, True) if (rows, n) == SHAPES[0] else (False,):
            name, extra = ("add_rms_norm", 2) if residual else ("rms_norm", 0)
            found.append(
                Target(
                    f"{name} forward {rows}x{n} bf16",
                    "fuselm.kernels.rms_norm_launchers.forward_launch",
                    forward,
                    functools.partial(_forward, rows, n, residual),
                    (2 + extra) * rows * n * ELEMENT,
                )
            )
            found.append(
                Target(
                    f"{name} backward {rows}x{n} bf16",
                    "fuselm.kernels.rms_norm_launchers.backward_launch",
                    backward,
                    functools.partial(_backward, rows, n, residual),
                    (3 + residual) * rows * n * ELEMENT,
                )
            )
    for rows, n in (SHAPES[0], SHAPES[3]):
        found.append(
            Target(
                f"rms_norm sum of dw partials {rows}x{n} bf16",
                "fuselm.kernels.rms_norm_launchers.sum_launch",
                _SUMS,
                functools.partial(_backward, rows, n, False),
                3 * rows * n * ELEMENT,
            )
        )
    return found


TARGETS = _targets()
