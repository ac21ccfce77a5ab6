"""Launches to try for cross_entropy, forward and backward together (one launch and its check of the upstream gradient),
and for the backward kernel alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tuning.base import Target

from fuselm.kernels.cross_entropy import cross_entropy
from fuselm.kernels.launch.cross_entropy import CrossEntropyLaunch, PartsLaunch, RingLaunch
from fuselm.kernels.specs.cross_entropy import plain_cross_entropy

# Shapes of the portable kernel on Hopper (for others: RINGS); 50257 and 128255 have rows that start anywhere, the first
# too few to be divided, and not as many as make whole lines.
SHAPES = ((16384, 32000), (4095, 32768), (4095, 50257), (2047, 50257), (8192, 128255))
CHECKED_ROWS = 64
# logits a program handles at a time (512 a warp are two vectors of 8 bf16 a thread), warps, logits of the next row that
# it asks L2 for
LAUNCHES = {
    "wide": ((32768, 32), (32768, 32, 32768), (16384, 32)),
    "middle": ((16384, 16), (8192, 16), (4096, 16), (4096, 8), (8192, 32), (8192, 16, 8192), (8192, 16, 16384)),
}


def _inputs(rows: int, vocab: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn((rows, vocab), device=device, generator=generator, dtype=torch.bfloat16)
    return logits.requires_grad_(), torch.randint(0, vocab, (rows,), device=device, generator=generator)


def _make(rows: int, vocab: int, reduction: str, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    rows, vocab = (rows, vocab) if device.type == "cuda" else (6, 512)
    logits, targets = _inputs(rows, vocab, device)
    some = slice(None, None, max(rows // CHECKED_ROWS - 1, 1))  # rows that start at every distance from 16 bytes

    def run() -> tuple[torch.Tensor | None, torch.Tensor]:
        loss = cross_entropy(logits, targets, reduction=reduction)  # pyright: ignore[reportArgumentType]
        (gradient,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))
        return loss.detach()[some] if loss.dim() else None, gradient[some]

    def reference() -> tuple[torch.Tensor | None, torch.Tensor]:
        chosen = logits.detach()[some].double().requires_grad_()
        losses = plain_cross_entropy(chosen, targets[some], reduction="none")
        (gradient,) = torch.autograd.grad(losses.sum(), chosen)
        return None if reduction == "sum" else losses.detach(), gradient

    return run, reference


TARGETS: list[Target] = [
    Target(
        name=f"cross_entropy {what} {rows}x{vocab} bf16",
        attribute="fuselm.kernels.cross_entropy_launchers.cross_entropy_launch",
        candidates=tuple(CrossEntropyLaunch(*values) for values in LAUNCHES["wide" if vocab > 65536 else "middle"]),
        make=partial(_make, rows, vocab, reduction),
        bytes_moved=passes * rows * vocab * 2,
    )
    for what, reduction, passes, shapes in (
        ("forward+backward", "sum", 2, SHAPES),
        ("forward, then backward", "none", 3, ((8192, 128256),)),
    )
    for rows, vocab in shapes
]

# Few rows: programs a row, logits of each, logits and warps a program handles at a time; None is one program a row.
FEW_ROWS = (
    (1, 128256, (PartsLaunch(126, 1024, 1024, 4), PartsLaunch(63, 2048, 2048, 8), None)),
    (16, 128256, (PartsLaunch(16, 8192, 2048, 8), PartsLaunch(8, 16384, 2048, 8), None)),
    (32, 128256, (PartsLaunch(4, 32768, 2048, 8), PartsLaunch(8, 16384, 2048, 8), None)),
)

# Rows in shared memory (Hopper), or None: the portable kernel. A chunk of 64 lines is 8 KB: 28 of them fill an SM's 227
# KB. Two groups take rows that fit; rows of 50257 begin within lines, and of 4159 rows the portable kernel takes 63.
_GROUPS = (RingLaunch(64, 28, 8, writers=8), RingLaunch(128, 14, 8, writers=8))
_LONG = (RingLaunch(128, 14, 16, kept=5), RingLaunch(128, 14, 8, kept=6))
RINGS: tuple[tuple[int, int, tuple[RingLaunch | None, ...]], ...] = (
    *((16384, vocab, (*_GROUPS, None)) for vocab in (40960, 50257, 50304)),
    (4159, 50257, (_GROUPS[0], None)),
    (8192, 102400, (_GROUPS[0], _LONG[0], None)),
    *((8192, vocab, (*_LONG, None)) for vocab in (128256, 202048)),
)

# How many of the rows are for the ring where they make no whole lines: all but the last 63, or all, which it refuses.
DIVIDED = ((2111, 50257, (2048, 2111)), (1087, 50257, (1024, 1087)))

TARGETS += [
    Target(
        name=f"cross_entropy {what}, forward+backward {rows}x{vocab} bf16",
        attribute=f"fuselm.kernels.cross_entropy_launchers.{attribute}",
        candidates=candidates,
        make=partial(_make, rows, vocab, "sum"),
        bytes_moved=2 * rows * vocab * 2,
    )
    for what, attribute, shapes in (
        ("few rows", "parts_launch", FEW_ROWS),
        ("ring", "ring_launch", RINGS),
        ("divided", "ring_rows", DIVIDED),
    )
    for rows, vocab, candidates in shapes
]
