"""Settings of the guard (guard.py); without torch, so that the command line answers at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GuardConfig:
    """What counts as a spike, and what follows. Steps that are not finite are always skipped."""

    spikes: bool = True
    """Skip a step whose loss or gradient norm is a spike: it changes nothing."""

    window: int = 128
    """Steps that a new one is compared with, by their median and median absolute deviation (MAD)."""

    min_history: int = 32
    """Finite steps in the window before anything counts as a spike."""

    loss_threshold: float = 10.0
    """A loss this many robust standard deviations (1.4826 MAD, at least 1 % of the median) above the median is a
    spike."""

    norm_threshold: float = 20.0
    """The same for the gradient norm before clipping (a standard deviation counts as at least 5 % of the median)."""

    rollback_after: int = 3
    """Go back to a checkpoint when this many steps of the last rollback_within were skipped; 0 for never."""

    rollback_within: int = 50
    """See rollback_after."""

    pass_over_before: int = 4
    """Passed over after a rollback: the batches from the first skipped one to the last, and this many before, for one
    of them may have led there."""

    max_rollbacks: int = 3
    """Stop at one more than this many within forget_after steps."""

    forget_after: int = 1000
    """Steps after which a rollback no longer counts."""
