"""What tune.py needs to know of a launch choice. Each benchmarks/tuning/<op>.py lists its TARGETS."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """A launch choice to tune at one shape.

    Attributes:
        name: op, direction, shape and dtype, for the table: "rms_norm backward 16384x4096 bf16".
        attribute: the launch function as the module that calls it sees it:
            "fuselm.kernels.rms_norm_launchers.backward_launch".
        candidates: launch values to try, the likeliest first; tune.py puts a function that returns one of them in the
            attribute's place.
        make: device -> (run, reference). `run` is what is timed and gives the tensor or tensors that are checked;
            `reference` gives what they should be, in the same order, in any precision (an entry may be None: not
            checked). `run` is called again and again, each time with another launch value: it must keep nothing that
            depends on one (build tables of chunks anew), nor depend on what an earlier call wrote.
        bytes_moved: bytes that `run` must move at least, for GB/s; 0 for a run that is bound by arithmetic.
    """

    name: str
    attribute: str
    candidates: tuple[Any, ...]
    make: Callable[[torch.device], tuple[Callable[[], Any], Callable[[], Any]]]
    bytes_moved: int


CHECKED_ROWS = 256
COPIES = 3


def in_turn(make: Callable[[], list[torch.Tensor]]) -> Callable[[], list[torch.Tensor]]:
    """What COPIES calls of `make` give, equal tensors in other memory, in turn: a call for each call of a kernel.

    Part of what a kernel has told L2 to keep outlives the flush between two timings, so that the next kernel that reads
    the same memory is faster for it: rms_norm of 65536 x 768 without hints by 2 % on an H200.
    """
    copies = itertools.cycle([make() for _ in range(COPIES)])
    return lambda: next(copies)


def some_rows(rows: int) -> slice:
    """The rows whose outputs are compared, about CHECKED_ROWS: a reference of all of them would take longer than the
    tuning. A view, so that `run` launches nothing for it; the step is odd, so that the rows begin at every distance
    from a 16-byte border and lie in many programs; the last row, where masks matter most, is one of them.
    """
    step = max(rows // CHECKED_ROWS, 1) | 1
    return slice((rows - 1) % step, None, step)
