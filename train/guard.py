"""The guard: one verdict a step over all ranks, reached on the device before the optimizer changes anything.

A step is skipped when its loss or gradient norm is not finite, or a spike. With x the loss or the norm, and median and
MAD (median absolute deviation) over the last finite steps, it is a spike when

    x - median > threshold · max(1.4826 · MAD, floor · |median|)

1.4826 · MAD is the standard deviation of a normal distribution, and unlike it hardly moves when some of the steps are
spikes themselves (Leys et al. 2013, doi:10.1016/j.jesp.2013.03.013). The floor keeps a very smooth curve from making
every wiggle a spike.

The norm is known inside the optimizer's step only, between its reduction and its update, where `Guard.judge` is
the optimizer's veto: where it says so, the optimizer leaves everything as it is. The host reads the numbers one step
later and never waits for a step that it has just queued.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fuselm.kernels.adamw import AdamW
from fuselm.train.distributed import World
from fuselm.train.guard_config import GuardConfig
from fuselm.train.progress import BadStep, Progress

_SIGMA = 1.4826
_FLOORS = (0.01, 0.05)  # of the medians of loss and norm


@dataclass(frozen=True)
class Verdict:
    """A step as the host reads it.

    Attributes:
        loss: mean over all ranks' valid tokens.
        grad_norm: before clipping; NaN where a rank's gradient is not finite.
        nonfinite: loss or norm is not finite.
        loss_spike, norm_spike: what is a spike.
    """

    loss: float
    grad_norm: float
    nonfinite: bool
    loss_spike: bool
    norm_spike: bool

    @property
    def kind(self) -> str | None:
        """Why the step was skipped: "nonfinite", "spike", or None where it was not."""
        if self.nonfinite:
            return "nonfinite"
        return "spike" if self.loss_spike or self.norm_spike else None


class Guard:
    """Judges the steps of one optimizer.

    Args:
        config: thresholds.
        world: all of its ranks step together.
        optimizer: on the world's device; its steps are judged from now on, by its veto.

    Attributes:
        record: (5,) fp64 on the device, new in each step: loss, norm, and how many ranks found the step not finite, a
            spike of the loss, a spike of the norm. `read` takes its numbers.
    """

    record: torch.Tensor

    def __init__(self, config: GuardConfig, world: World, optimizer: AdamW) -> None:
        self.config, self.world = config, world
        self._loss: torch.Tensor | None = None
        device = world.device
        # One row for the loss, one for the norm; infinite where there is no step yet or it was not finite.
        self._history = torch.full((2, config.window), math.inf, dtype=torch.float64, device=device)
        self._next = 0
        self._thresholds = _upload([config.loss_threshold, config.norm_threshold], device)
        self._floors = _upload(_FLOORS, device)
        self._inf = _upload([math.inf], device)[0]
        self._no_veto = torch.zeros((), dtype=torch.bool, device=device)
        optimizer.veto = self.judge

    def expect(self, loss: torch.Tensor) -> None:
        """Give the loss, () on the device and the same on every rank, of the step that the optimizer does next."""
        self._loss = loss

    def restore(self, history: list[tuple[float, float] | None]) -> None:
        """Compare with these steps from now on: (loss, norm), None for one that is not finite; the oldest first."""
        pairs = [pair or (math.inf, math.inf) for pair in history[-self.config.window :]]
        self._history.fill_(math.inf)
        if pairs:
            values = torch.tensor(pairs, dtype=torch.float64).T.contiguous()
            self._history[:, : len(pairs)] = _upload(values, self._history.device)
        self._next = len(pairs) % self.config.window

    def judge(self, norm: torch.Tensor) -> torch.Tensor:
        """The verdict on one step, on the device. Nothing waits for it.

        Args:
            norm: () fp64, of the gradients of all ranks before clipping; NaN where one is not finite.

        Returns:
            () bool: whether the step must not be taken.
        """
        if self._loss is None:
            # No step of the run's: torch.distributed.checkpoint does one to create the optimizer's state.
            return self._no_veto
        loss, self._loss = self._loss, None
        # Each line is a launch or two, and they add up: hence `< inf`, one launch where isfinite takes four.
        now = torch.stack([loss.double(), norm.float().double()])  # the norm as the optimizer reports it
        finite = (now.abs() < math.inf).all()
        flags = torch.cat([~finite.view(1), self._spikes(now) & finite]).double()
        # Every rank computed this from the norm over all of them; that all come to the same is not left to chance.
        self.world.sum(flags)
        self._history[:, self._next] = torch.where(finite, now, self._inf)
        self._next = (self._next + 1) % self.config.window
        self.record = torch.cat([now, flags])
        return flags.any()

    def _spikes(self, now: torch.Tensor) -> torch.Tensor:
        """(2,) bool: whether loss and norm are far above those of the window."""
        if not self.config.spikes:
            return torch.zeros(2, dtype=torch.bool, device=now.device)
        count = (self._history[0] < math.inf).sum()
        middle = ((count - 1) // 2).clamp(min=0).expand(2, 1)
        median = _sorted_at(self._history, middle)
        deviation = _sorted_at((self._history - median).abs(), middle)[:, 0]
        median = median[:, 0]
        scale = torch.maximum(_SIGMA * deviation, self._floors * median.abs())
        return (now - median > self._thresholds * scale) & (count >= self.config.min_history)

    @staticmethod
    def read(record: list[float]) -> Verdict:
        """The verdict of a step from the numbers in `record`."""
        loss, norm, nonfinite, loss_spike, norm_spike = record
        return Verdict(loss, norm, nonfinite > 0, loss_spike > 0, norm_spike > 0)


def _upload(values: torch.Tensor | list[float] | tuple[float, ...], device: torch.device) -> torch.Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _sorted_at(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """(rows, 1): the value at this place of each sorted row. torch.nanmedian would wait for the device."""
    return rows.sort(dim=1).values.gather(1, index)


# --- What follows, on the host --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alarm:
    """Enough bad steps: go back, or stop.

    Attributes:
        reason: what happened, for people.
        stop: no going back any more.
        bad_steps: those that count, the oldest first.
    """

    reason: str
    stop: bool
    bad_steps: list[BadStep]


def take_notice(
    progress: Progress, batch: int, verdict: Verdict, config: GuardConfig, *, max_nonfinite_steps: int
) -> Alarm | None:
    """Count a step that was read; the same on every rank, for the verdict is.

    Args:
        progress: of the run; its step is that of the verdict.
        batch: that the step took.
        verdict: on it.
        config: when to go back.
        max_nonfinite_steps: stop after so many in a row.

    Returns:
        What must be done now, or None.
    """
    progress.remember(verdict.loss, verdict.grad_norm, window=config.window)
    progress.bad_steps = [bad for bad in progress.bad_steps if bad.step > progress.step - config.rollback_within]
    progress.alarms = [step for step in progress.alarms if step > progress.step - config.forget_after]
    progress.nonfinite = progress.nonfinite + 1 if verdict.nonfinite else 0
    if verdict.kind is None:
        return None
    progress.bad_steps.append(BadStep(progress.step, batch, verdict.kind))
    bad = list(progress.bad_steps)
    if progress.nonfinite >= max_nonfinite_steps:
        reason = (
            f"loss or gradient norm was not finite in {progress.nonfinite} steps in a row (up to step {progress.step})"
        )
        return Alarm(reason, True, bad)
    if not config.rollback_after or len(bad) < config.rollback_after:
        return None
    reason = f"{len(bad)} of the last {config.rollback_within} steps were skipped (up to step {progress.step})"
    progress.alarms.append(progress.step)
    progress.bad_steps = []
    stop = len(progress.alarms) > config.max_rollbacks
    if stop:
        reason += f", for the {len(progress.alarms)}th time within {config.forget_after} steps"
    return Alarm(reason, stop, bad)
