"""KernelSpec of cross_entropy, and what linear_cross_entropy's shares with it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from fuselm.kernels.cross_entropy import cross_entropy
from fuselm.kernels.specs.base import Case, Direction, KernelSpec, randn

OPTIONS = ("ignore_index", "label_smoothing", "z_loss", "softcap", "reduction", "return_lse")


def plain_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
) -> Any:
    """torch's own cross-entropy on fp32 (or fp64) logits, plus the analytic z-loss."""
    z = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    flat = z.reshape(-1, z.shape[-1])
    loss = F.cross_entropy(
        flat, targets.reshape(-1), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    ).view(targets.shape)
    valid = targets != ignore_index
    lse = torch.logsumexp(z, -1)
    loss = loss + z_loss * lse.square() * valid
    if reduction != "none":
        loss = loss.sum()
    if reduction == "mean":
        loss = loss / valid.sum().clamp(min=1)
    return (loss, lse) if return_lse else loss


def draw_targets(case: Case, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Targets of the case's rows, a fraction `ignored` of them (default a quarter) set to its ignore_index."""
    targets = torch.randint(0, case["vocab"], case["rows"], device=device, generator=generator)
    ignored = torch.rand(case["rows"], device=device, generator=generator) < case.get("ignored", 0.25)
    return targets.masked_fill(ignored, case.get("ignore_index", -100))


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    logits = randn((*case["rows"], case["vocab"]), dtype, device, generator, grad=False)
    logits = (logits * case.get("spread", 1.0)).requires_grad_()
    targets = draw_targets(case, device, generator)
    return {"logits": logits, "targets": targets} | {name: case[name] for name in OPTIONS if name in case}


def _bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    # one read for the forward, one write for the backward: both can be one launch
    return math.prod(case["rows"]) * case["vocab"] * dtype.itemsize


_TEST: tuple[Case, ...] = (
    {"rows": (5, 7), "vocab": 37, "reduction": "none", "return_lse": True, "z_loss": 1e-2, "label_smoothing": 0.1},
    {"rows": (7,), "vocab": 37},
    {"rows": (2, 2, 3), "vocab": 4099, "softcap": 5.0, "reduction": "sum", "spread": 4.0},
    {"rows": (5,), "vocab": 2048, "ignore_index": 3, "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 30.0},
    {"rows": (6,), "vocab": 37, "ignored": 1.0, "return_lse": True},
    {"rows": (0, 3), "vocab": 37},
    {"rows": (), "vocab": 1, "ignored": 0.0},
    {"rows": (6,), "vocab": 257, "spread": 30.0, "z_loss": 1e-4},
    {"rows": (2,), "vocab": 50257},
)
_GPU: tuple[Case, ...] = (
    {"rows": (3, 257), "vocab": 50257, "reduction": "none", "return_lse": True, "label_smoothing": 0.1},
    {"rows": (4097,), "vocab": 37},
    {"rows": (513,), "vocab": 128256, "z_loss": 1e-4},
    {"rows": (255,), "vocab": 129920, "softcap": 30.0, "reduction": "sum"},
    {"rows": (1024,), "vocab": 32000, "ignored": 1.0},
    {"rows": (300,), "vocab": 50304, "spread": 30.0},
)
_EVERYTHING = {"return_lse": True, "z_loss": 1e-4, "label_smoothing": 0.1, "softcap": 30.0}
_EACH_ROW: Case = {"reduction": "none"}
_AOT: tuple[Case, ...] = tuple(
    {"rows": (rows,), "vocab": vocab} | dict(options)
    for rows, vocab, all_options in (
        (40, 37, ({}, _EVERYTHING)),
        (40, 32000, ({}, _EACH_ROW)),
        (40, 50257, (_EVERYTHING, _EACH_ROW)),
        (40, 128256, ({}, _EVERYTHING)),
        (2, 50257, (_EVERYTHING, _EACH_ROW)),
    )  # the last: several programs a row
    for options in all_options
)
_BENCHMARK: tuple[Case, ...] = (
    {"rows": (8192,), "vocab": 128256, "ignored": 0.0},
    {"rows": (16384,), "vocab": 50304, "ignored": 0.0},
    {"rows": (16384,), "vocab": 32000, "ignored": 0.0},
)

CROSS_ENTROPY = KernelSpec(
    "cross_entropy", cross_entropy, plain_cross_entropy, _inputs, _TEST, _GPU, _AOT, _BENCHMARK, _bytes
)
