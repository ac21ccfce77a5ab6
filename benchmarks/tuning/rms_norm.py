"""Launch choices of rms_norm and add_rms_norm to be timed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tuning.base import Target, in_turn, some_rows

from fuselm.kernels.launch.rms_norm import RmsNormLaunch, SumLaunch
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
    inputs = in_turn(functools.partial(_tensors, rows, n, device, 2))
    x, r = inputs()
    weight = _weight(n, device)
    some = some_rows(rows)

    def run() -> tuple[torch.Tensor, ...]:
        x, r = inputs()
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
def _ahead(main: int, tail: int, warps: int, programs: int, registers: int = 0) -> RmsNormLaunch:
    return RmsNormLaunch(1, main, tail, warps, programs, 3, unaligned=True, max_registers=registers)


def _late(main: int, tail: int, warps: int) -> RmsNormLaunch:
    return RmsNormLaunch(1, main, tail, warps, unaligned=True, late_weight=True)


def _kept(main: int, warps: int, tail: int = 0, late_weight: bool = False) -> RmsNormLaunch:
    return RmsNormLaunch(1, main, tail, warps, late_weight=late_weight, load="evict_last")


def _thirds(third: int, rows: int = 4) -> RmsNormLaunch:
    """Each row in one warp: no lane is idle, and no warp waits for another."""
    return RmsNormLaunch(rows, third, 0, rows, late_weight=True, load="evict_last", blocks=3)


_FORWARD = {
    (65536, 768): (_thirds(256), _thirds(256, 8), RmsNormLaunch(2, 1024, 0, 2, late_weight=True, load="evict_last")),
    (65536, 1536): (_thirds(512), _kept(1024, 2, 512), _kept(1024, 2, 512, late_weight=True)),
    (131072, 384): (_thirds(128), RmsNormLaunch(4, 512, 0, 2, late_weight=True, load="evict_last")),
    (32768, 2048): (_kept(2048, 4, late_weight=True), _kept(2048, 2, late_weight=True), _kept(2048, 4)),
    # All programs at once: nothing is gained by few registers.
    **dict.fromkeys(
        ((1, 4096), (64, 4096)),
        (_kept(4096, 8), _kept(4096, 16), RmsNormLaunch(1, 4096, 0, 8), RmsNormLaunch(1, 4096, 0, 16), _kept(4096, 4)),
    ),
    # The last ones are about as much as L2 holds, or less.
    **dict.fromkeys(
        ((16384, 4096), (8192, 4096), (4096, 4096), (2048, 4096)),
        (_kept(4096, 8, late_weight=True), _kept(4096, 4, late_weight=True), _kept(4096, 4)),
    ),
    (8192, 8192): (
        _kept(8192, 8, late_weight=True),
        _kept(8192, 4, late_weight=True),
        _kept(8192, 16, late_weight=True),
    ),
    (16384, 5120): (_kept(4096, 4, 1024), _kept(4096, 8, 1024), _kept(4096, 4, 1024, late_weight=True)),
    (16384, 4097): (_late(4096, 0, 4), _late(4096, 0, 2), _late(4096, 0, 8), _ahead(4096, 0, 4, SMS * 4)),
    (16384, 5121): (_ahead(4096, 1024, 4, SMS * 3 // 8 * 8), _late(4096, 1024, 4)),
    (16384, 2049): (_late(2048, 0, 2), _late(2048, 0, 1), _ahead(2048, 0, 2, SMS * 6)),
    (65536, 769): (_late(512, 256, 1), _ahead(512, 256, 1, SMS * 16)),
    (65536, 513): (_late(512, 0, 1), _ahead(512, 0, 1, SMS * 16)),
    (8192, 8193): (_late(8192, 0, 8), _late(8192, 0, 4), _ahead(8192, 0, 8, SMS * 2)),
    (4096, 16383): (_ahead(16384, 0, 16, SMS // 8 * 8), _late(16384, 0, 16), _late(16384, 0, 8)),
}
_ADD_FORWARD = {
    (65536, 768): (RmsNormLaunch(2, 1024, 0, 4, load="evict_last"), _thirds(256)),
    (32768, 2048): (_kept(2048, 8), _kept(2048, 4)),
    (8192, 8192): (_kept(8192, 16), _kept(8192, 16, late_weight=True)),
    **dict.fromkeys(((16384, 4096), (2048, 4096)), (_kept(4096, 8), _kept(4096, 16), RmsNormLaunch(1, 4096, 0, 8))),
    (16384, 4097): (_late(4096, 0, 8), _late(4096, 0, 4), _ahead(4096, 0, 16, SMS * 2)),
    (16384, 5121): (_ahead(4096, 1024, 8, SMS * 2), _late(4096, 1024, 8), _late(4096, 1024, 4)),
    (65536, 769): (_late(512, 256, 1), _ahead(512, 256, 2, SMS * 12)),
    (65536, 513): (_late(512, 0, 1), _ahead(512, 0, 1, SMS * 16)),
    (8192, 8193): (_late(8192, 0, 16), _late(8192, 0, 8), _ahead(8192, 0, 16, SMS * 2)),
}
_BACKWARD = {
    (16384, 4097): (_ahead(4096, 0, 8, SMS * 2, 128), _ahead(4096, 0, 4, SMS * 2)),
    (16384, 5121): (_ahead(4096, 1024, 8, SMS * 2, 128), _ahead(4096, 1024, 8, SMS // 8 * 8)),
    (65536, 769): (_ahead(512, 256, 2, SMS * 8, 128), _ahead(512, 256, 2, SMS * 10, 96)),
    (65536, 513): (_ahead(512, 0, 1, SMS * 16, 128), _ahead(512, 0, 2, SMS * 12)),
    (8192, 8193): (_ahead(8192, 0, 16, SMS // 8 * 8),),
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
    (16384, 4097): (_ahead(4096, 0, 8, SMS * 2, 128), _ahead(4096, 0, 4, SMS * 2)),
    (16384, 5121): (_ahead(4096, 1024, 8, SMS * 2, 128), _ahead(4096, 1024, 8, SMS // 8 * 8)),
    (65536, 769): (_ahead(512, 256, 2, SMS * 8, 128), _ahead(512, 256, 2, SMS * 10, 96)),
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
