"""How far a run is, as the host knows it: what a checkpoint's manifest keeps beside model, optimizer and RNG state."""

from __future__ import annotations

import bisect
import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class BadStep:
    """A step that changed nothing.

    Attributes:
        step: steps done, this one included.
        batch: number of its batch in the data stream.
        kind: "nonfinite" or "spike".
    """

    step: int
    batch: int
    kind: str


@dataclass
class Progress:
    """The state of a run that lives on the host, complete once every queued step was read.

    Attributes:
        step: optimizer steps done, skipped ones included.
        tokens: valid tokens of these steps.
        passed_over: numbers of the batches that no step takes, sorted.
        history: (loss, gradient norm) of the last steps that the guard compares with; None for one that is not finite.
        bad_steps: steps that changed nothing and still count towards a rollback.
        nonfinite: steps in a row that were not finite.
        alarms: steps at which enough of them were bad to go back, as far as they count.
        best_loss: the lowest validation loss so far, None before the first.
        best_step: when that was.
        validation_loss: of the last validation.
        validation_step: when that was.
    """

    step: int = 0
    tokens: int = 0
    passed_over: list[int] = field(default_factory=list)
    history: list[tuple[float, float] | None] = field(default_factory=list)
    bad_steps: list[BadStep] = field(default_factory=list)
    nonfinite: int = 0
    alarms: list[int] = field(default_factory=list)
    best_loss: float | None = None
    best_step: int | None = None
    validation_loss: float | None = None
    validation_step: int | None = None

    def batch_of(self, step: int) -> int:
        """The number of the batch that step number `step`, counted from 0, takes: the step-th that is not passed
        over."""
        batch = step
        for passed in self.passed_over:
            batch += passed <= batch
        return batch

    def pass_over(self, first: int, last: int) -> list[int]:
        """Pass over batches first to last, both included; returns those that were not passed over before."""
        new = [batch for batch in range(first, last + 1) if batch not in self.passed_over]
        for batch in new:
            bisect.insort(self.passed_over, batch)
        return new

    def validated(self, loss: float) -> bool:
        """Remember a validation after `step` steps; returns whether none before was as good."""
        self.validation_step = self.step
        self.validation_loss = loss if math.isfinite(loss) else None
        best = self.validation_loss is not None and (self.best_loss is None or loss < self.best_loss)
        if best:
            self.best_loss, self.best_step = loss, self.step
        return best

    def remember(self, loss: float, grad_norm: float, *, window: int) -> None:
        """Add a step to the history, which keeps the last `window`."""
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.history.append((loss, grad_norm) if finite else None)
        del self.history[:-window]

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it; floats come back to the last bit."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        """What `to_dict` gave, after JSON."""
        progress = cls(**values)
        progress.history = [None if pair is None else (pair[0], pair[1]) for pair in values["history"]]
        progress.bad_steps = [BadStep(**bad) for bad in values["bad_steps"]]
        return progress
