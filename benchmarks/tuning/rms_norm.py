"""Launch choices of rms_norm and add_rms_norm to be timed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from tuning.base import Target, some_rows

from fuselm.kernels.launch.rms_norm import RingLaunch, RmsNormLaunch, SumLaunch
from fuselm.kernels.rms_norm_launchers import launch_backward, launch_forward

SMS = 132
EPS = 1e-6
ELEMENT = 2  # bytes of bf16


def _tensors(rows: int, n: int, device: torch.device, count: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(rows, n, device=device, generator=generator).bfloat16() for _ in range(count)]


def _weight(n: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, n, device=device).bfloat16()


def _forward(rows: int, n: int, residual: bool, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    x, r = _tensors(rows, n, device, 2)
    weight = _weight(n, device)
    some = some_rows(rows)

    def run() -> tuple[torch.Tensor, ...]:
        y, h, rstd = launch_forward(x, r if residual else None, weight, EPS, 0.0)
        return y[some], h[some] if residual else rstd[some]

    def reference() -> tuple[torch.Tensor, ...]:
        h = (x[some].float() + r[some].float()).bfloat16() if residual else x[some]
        rstd = torch.rsqrt(h.float().square().mean(-1, keepdim=True) + EPS)
        y = h.float() * rstd * weight.float()
        return (y, h) if residual else (y, rstd.squeeze(-1))

    return run, reference


def _backward(rows: int, n: int, residual: bool, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    x, dy, upstream = _tensors(rows, n, device, 3)
    dh = upstream if residual else None
    weight = _weight(n, device)
    rstd = torch.rsqrt(torch.cat([part.float().square().mean(-1) for part in x.split(4096)]) + EPS)
    some = some_rows(rows)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        dx, dw = launch_backward(dy, dh, x, weight, rstd, 0.0, True)
        return dx[some], dw

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        x_hat = x[some].float() * rstd[some, None]
        g = dy[some].float() * weight.float()
        dx = rstd[some, None] * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
        if dh is not None:
            dx += dh[some].float()
        parts = zip(dy.split(4096), x.split(4096), rstd.split(4096), strict=True)  # dw needs every row
        return dx, torch.stack([(a.float() * b.float() * c[:, None]).sum(0) for a, b, c in parts]).sum(0)

    return run, reference


# What is still open, the likeliest first; what lost on an H200 stands in the comments of kernels/launch/rms_norm.py.
def _window(main: int, tail: int, warps: int, programs: int, registers: int = 0, stages: int = 3) -> RmsNormLaunch:
    return RmsNormLaunch(1, main, tail, warps, programs, stages, window=True, max_registers=registers)


def _hints(launch: RmsNormLaunch) -> tuple[RmsNormLaunch, ...]:
    """A launch with what caches may be told, and other orders of rows. Loads with evict_first alone were slower."""
    change = functools.partial(dataclasses.replace, launch)
    policies = (("", ".cs"), ("", "evict_first"), ("", ".wt"), (".cg", ""), ("evict_first", ".cs"), ("evict_last", ""))
    hints = (change(load=load, store=store) for load, store in policies)
    return (change(late_weight=True, touch=True), *hints, change(order="halves"), change(order="backward"))


def _ways(*launches: RingLaunch) -> tuple[RingLaunch, ...]:
    """Each with outputs from the registers and through shared memory, the first two also the first to leave L2."""
    ways = tuple(dataclasses.replace(launch, by_tma=by_tma) for launch in launches for by_tma in (False, True))
    return (*ways, *(dataclasses.replace(launch, evict_first=True) for launch in launches[:2]))


def _ring(block_rows: int, slots: int, warps: int, programs: int, registers: int, runs: bool = False) -> RingLaunch:
    return RingLaunch(block_rows, slots, warps, programs, runs=runs, max_registers=registers)


# Rows by TMA, 64 to 200 KB of them at once in shared memory. Registers: what an SM has for so many programs, each with
# a warp that loads and three that wait beside it.
_RINGS = {
    8192: (
        *_ways(_ring(1, 6, 8, 2, 80), RingLaunch(1, 2, 8), _ring(1, 12, 8, 1, 168), RingLaunch(1, 4, 16)),
        _ring(1, 4, 8, 2, 80),
        _ring(1, 6, 8, 2, 80, runs=True),
        _ring(1, 6, 8, 8, 80),  # more programs than there is room for: who is done first gets the next
        _ring(1, 8, 16, 1, 96),
        _ring(2, 6, 16, 1, 96),
        RingLaunch(1, 1, 8),
        RingLaunch(1, 2, 16),
        RingLaunch(1, 4, 8),
    ),
    4096: (
        *_ways(_ring(1, 8, 8, 2, 80), RingLaunch(1, 4, 8), _ring(1, 8, 4, 3, 80), _ring(2, 6, 8, 2, 80)),
        _ring(2, 8, 8, 1, 168),
        RingLaunch(1, 4, 4),
        _ring(1, 8, 8, 2, 80, runs=True),
        _ring(1, 8, 8, 8, 80),
        _ring(4, 6, 16, 1, 96),
        RingLaunch(1, 2, 8),
        RingLaunch(1, 2, 4),
        RingLaunch(2, 2, 8),
        RingLaunch(1, 8, 8),
    ),
    768: (
        *_ways(_ring(8, 6, 8, 2, 80), RingLaunch(4, 2, 4), _ring(4, 6, 4, 3, 80), RingLaunch(8, 2, 8)),
        _ring(8, 6, 8, 2, 80, runs=True),
        _ring(8, 6, 8, 8, 80),
        _ring(8, 12, 8, 1, 168),
        _ring(16, 4, 16, 1, 96),
        RingLaunch(4, 1, 4),
        RingLaunch(4, 4, 4),
        RingLaunch(2, 4, 2),
        RingLaunch(8, 4, 8),
    ),
}
_ADD_RINGS = {  # a slot has two rows
    4096: (
        *_ways(_ring(1, 6, 8, 2, 80), RingLaunch(1, 2, 8), _ring(1, 4, 4, 3, 80), RingLaunch(1, 4, 8)),
        _ring(1, 4, 8, 2, 80),
        _ring(2, 6, 16, 1, 96),
        _ring(1, 6, 8, 2, 80, runs=True),
        _ring(1, 6, 8, 8, 80),
        _ring(1, 12, 8, 1, 168),
        RingLaunch(1, 1, 8),
        RingLaunch(1, 2, 16),
        RingLaunch(2, 2, 16),
    ),
    8192: (
        *_ways(_ring(1, 3, 16, 1, 96), RingLaunch(1, 2, 16), _ring(1, 6, 16, 1, 96), RingLaunch(1, 1, 16)),
        _ring(1, 6, 16, 1, 96, runs=True),
    ),
    768: (
        *_ways(_ring(8, 3, 8, 2, 80), RingLaunch(4, 2, 4), _ring(4, 4, 4, 3, 80), RingLaunch(8, 2, 8)),
        _ring(8, 3, 8, 2, 80, runs=True),
        RingLaunch(2, 2, 2),
    ),
}

_FORWARD = {
    (8192, 8192): (
        *_hints(RmsNormLaunch(1, 8192, 0, 8, late_weight=True)),
        *_RINGS[8192],
        RmsNormLaunch(2, 8192, 0, 16, late_weight=True, touch=True),
    ),
    (65536, 768): (*_RINGS[768], *_hints(RmsNormLaunch(2, 1024, 0, 2))),
    (16384, 4096): (*_RINGS[4096], *_hints(RmsNormLaunch(1, 4096, 0, 4))),
    (16384, 4097): (
        _window(4096, 16, 8, SMS * 4, 64),
        # Every thread has a whole vector of the tail, so that the tail comes through shared memory too.
        _window(4096, 2048, 8, SMS * 3 // 8 * 8, 80),
        _window(4096, 16, 8, SMS * 3 // 8 * 8, 80, 4),
    ),
    (16384, 4095): (_window(4096, 16, 8, SMS * 4, 64), _window(4096, 16, 8, SMS * 3 // 8 * 8, 80)),
    (16384, 5121): (
        _window(4096, 2048, 16, SMS * 2, 64),
        _window(8192, 0, 16, SMS * 2, 64),
        _window(4096, 2048, 8, SMS * 3 // 8 * 8, 80),
    ),
    (65536, 769): (
        RmsNormLaunch(1, 1024, 0, 1, late_weight=True),
        RmsNormLaunch(2, 1024, 0, 2, late_weight=True),
        _window(1024, 0, 2, SMS * 16, 64),
    ),
    (16384, 5120): (
        RmsNormLaunch(1, 4096, 1024, 4),
        RmsNormLaunch(1, 4096, 1024, 4, late_weight=True),
        RmsNormLaunch(1, 4096, 1024, 8, late_weight=True),
    ),
}
_ADD_FORWARD = {
    (16384, 4096): (*_ADD_RINGS[4096], *_hints(RmsNormLaunch(1, 4096, 0, 16))),
    (16384, 4097): (_window(4096, 16, 8, SMS * 2), _window(4096, 16, 8, SMS * 3 // 8 * 8, 80)),
    (65536, 768): (*_ADD_RINGS[768], RmsNormLaunch(2, 1024, 0, 4), RmsNormLaunch(2, 1024, 0, 2, late_weight=True)),
    (8192, 8192): (
        *_ADD_RINGS[8192],
        RmsNormLaunch(1, 8192, 0, 16, late_weight=True, touch=True),
        RmsNormLaunch(1, 8192, 0, 16, late_weight=True, store=".cs"),
        RmsNormLaunch(1, 8192, 0, 8, late_weight=True),
    ),
}
_BACKWARD = {
    (16384, 4097): (
        _window(4096, 16, 8, SMS * 2, 128),
        _window(4096, 16, 8, SMS * 2, 128, 4),
        _window(4096, 2048, 16, SMS // 8 * 8, 128),
    ),
    (16384, 4096): (
        RmsNormLaunch(1, 4096, 0, 16, SMS, 4),
        RmsNormLaunch(1, 4096, 0, 4, SMS * 2, 3),
        RmsNormLaunch(1, 4096, 0, 8, SMS * 2, 3),
    ),
    (65536, 768): (
        RmsNormLaunch(1, 1024, 0, 2, SMS * 8, 3),
        RmsNormLaunch(1, 512, 256, 2, SMS * 10, 3),
        RmsNormLaunch(2, 512, 256, 4, SMS * 4, 3),
    ),
    (4096, 16384): (RmsNormLaunch(2, 8192, 0, 16, SMS), RmsNormLaunch(2, 4096, 0, 16, SMS)),
    (4096, 8200): (RmsNormLaunch(4, 4096, 0, 16, SMS), RmsNormLaunch(2, 8192, 0, 16, SMS)),
}
_ADD_BACKWARD = {
    (16384, 4096): (RmsNormLaunch(1, 4096, 0, 16, SMS, 4), RmsNormLaunch(1, 4096, 0, 4, SMS * 2, 3)),
    (16384, 4097): (_window(4096, 16, 8, SMS * 2, 128), _window(4096, 2048, 16, SMS // 8 * 8, 128)),
}
_SUMS = tuple(
    SumLaunch(partials, block, warps)
    for partials, block, warps in ((256, 16, 4), (256, 16, 8), (128, 16, 4), (512, 8, 8), (128, 32, 4), (256, 32, 8))
)


def _targets() -> list[Target]:
    kinds = (
        ("rms_norm forward", "forward_launch", False, 2, _forward, _FORWARD),
        ("add_rms_norm forward", "forward_launch", True, 4, _forward, _ADD_FORWARD),
        ("rms_norm backward", "backward_launch", False, 3, _backward, _BACKWARD),
        ("add_rms_norm backward", "backward_launch", True, 4, _backward, _ADD_BACKWARD),
        (
            "rms_norm sum of dw partials",
            "sum_launch",
            False,
            3,
            _backward,
            dict.fromkeys(((16384, 4096), (65536, 768)), _SUMS),
        ),
    )
    return [
        Target(
            f"{name} {rows}x{n} bf16",
            f"fuselm.kernels.rms_norm_launchers.{attribute}",
            candidates,
            functools.partial(make, rows, n, residual),
            passes * rows * n * ELEMENT,
        )
        for name, attribute, residual, passes, make, shapes in kinds
        for (rows, n), candidates in shapes.items()
    ]


TARGETS = _targets()
