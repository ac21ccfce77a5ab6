"""Learning-rate schedules: linear warmup, then cosine, warmup-stable-decay (WSD), or constant.

A schedule is a pure function of the step and the configuration, so a resumed run has the learning rate of the unbroken
one by construction; there is no state to save. WSD follows Hu et al., "MiniCPM" (arXiv:2404.06395); cosine follows
Loshchilov and Hutter, "SGDR" (arXiv:1608.03983), with one period.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves over the run."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """After the warmup: one half cosine, warmup-stable-decay, or no change."""

    warmup_steps: int = 0
    """Steps of linear warmup from 0 to optimizer.lr; 0 for none."""

    decay_steps: int = 0
    """Steps of the linear decay at the end of a wsd run; 0 for none."""

    min_lr_ratio: float = 0.1
    """Where cosine and wsd end, as a share of optimizer.lr."""


def lr_factor(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """The share of the peak learning rate that a step uses.

    Args:
        step: the step, counted from 0.
        total_steps: the length of the run in steps. Steps past it keep the last value.
        schedule: the shape; `warmup_steps` may exceed `total_steps`, and every length may be 0.

    Returns:
        A factor in [0, 1]. The first warmup step has 1 / warmup_steps, not 0, so that no step is wasted.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    floor = schedule.min_lr_ratio
    if schedule.kind == "cosine":
        progress = _clamp((step - schedule.warmup_steps) / max(total_steps - schedule.warmup_steps, 1))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule.kind == "wsd" and schedule.decay_steps > 0:
        # A decay longer than what follows the warmup starts where the warmup ends.
        start = max(total_steps - schedule.decay_steps, schedule.warmup_steps)
        return 1 - (1 - floor) * _clamp((step - start) / max(total_steps - start, 1))
    return 1.0


def _clamp(progress: float) -> float:
    return min(max(progress, 0.0), 1.0)
