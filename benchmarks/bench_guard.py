"""What the guard costs: steps with its verdict and without, in turn in one process.

    python benchmarks/bench_guard.py --preset llama3_1b --seconds 30 --output benchmarks/results/guard_llama3_1b.json

Steps come in the order with, without, without, with, so that a drift of the card's clock meets both alike. The cost is
the median over pairs of neighbours of their difference, with the interval that holds the true median in 95 of 100
measurements (order statistics, no assumption about how times are distributed). The verdict's own kernels are also timed
alone, back to back: they cannot cost more than that. Exit code 1 if the goal is missed.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from timing import Timing, card_state, environment
from training_steps import Steps, configuration

from fuselm.train.errors import UserError, report

GOAL = 0.005  # of a step
_SETTLED = 8  # steps until everything is compiled, captured and allocated
_FEWEST = 6  # pairs that give an interval
_ORDER = (True, False, False, True)
_ALONE = 200  # verdicts timed back to back


@dataclass(frozen=True)
class Arguments:
    """Measure what the guard costs."""

    preset: str = "llama3_1b"
    """Preset of train/pretrain.py."""

    seconds: float = 30.0
    """Time for the measured steps; starting and compiling come on top, about as much."""

    compile: bool | None = None
    """torch.compile the blocks; None as in training: on a GPU."""

    micro_batch_size: int = 0
    """Sequences a step; 0 for the preset's."""

    kernels: Literal["auto", "triton", "eager"] = "auto"
    """model.kernels."""

    output: Path | None = None
    """File for the result."""


@dataclass(frozen=True)
class Cost:
    """What a step costs more with the guard, in shares of a step.

    Attributes:
        share: the median.
        low, high: the interval around it.
        pairs: measured.
    """

    share: float
    low: float
    high: float
    pairs: int


def cost_of(with_guard: list[float], without: list[float]) -> Cost:
    """The cost from pairs of neighbouring steps.

    Args:
        with_guard, without: milliseconds; those at one place were neighbours.

    Raises:
        ValueError: too few pairs for an interval.
    """
    pairs = list(zip(with_guard, without, strict=True))
    if len(pairs) < _FEWEST:
        raise ValueError(f"{len(pairs)} pairs of steps: at least {_FEWEST} are needed, so give more --seconds")
    usual = statistics.median(without)
    shares = sorted((a - b) / usual for a, b in pairs)
    # The k-th smallest and k-th largest of n hold the median between them with probability 1 - 2 P(Bin(n, 1/2) < k).
    n, k, tail = len(shares), 0, 0.0
    while tail + math.comb(n, k) / 2**n <= 0.025:
        tail += math.comb(n, k) / 2**n
        k += 1
    return Cost(statistics.median(shares), shares[max(k - 1, 0)], shares[n - max(k, 1)], n)


def measure(steps: Steps, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds of steps with and without the guard, neighbours at the same place."""
    for _ in range(_SETTLED):
        steps.step()
    steps.step(guarded=False)
    steps.pause()
    steps.step()  # the first after a pause counts for neither
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds or done < _FEWEST * 2:
        for guarded in _ORDER:
            steps.step(guarded=guarded)
            done += 1
    steps.pause()
    times = steps.milliseconds[-done:]
    rounds = range(0, len(times), len(_ORDER))
    with_guard = [times[i + k] for i in rounds for k, guarded in enumerate(_ORDER) if guarded]
    without = [times[i + k] for i in rounds for k, guarded in enumerate(_ORDER) if not guarded]
    return with_guard, without


def verdict_alone(steps: Steps) -> float:
    """Milliseconds of one verdict, many of them back to back: what it costs where nothing hides its launches."""
    device = steps.world.device
    loss = torch.full((), 3.0, dtype=torch.float64, device=device)
    norm = torch.ones((), dtype=torch.float64, device=device)

    def judge(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            steps.guard.expect(loss)
            steps.guard.judge(norm)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) * 1e3 / count

    judge(10)
    return judge(_ALONE)


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes; returns the exit code."""
    given = tyro.cli(Arguments, args=arguments)
    try:
        if not given.seconds > 0:
            raise UserError(f"--seconds is {given.seconds}: it must be above 0")
        config = configuration(
            given.preset, compile=given.compile, kernels=given.kernels, micro_batch_size=given.micro_batch_size
        )
        with Steps(config) as steps:
            device, before = steps.world.device, card_state()
            with_guard, without = measure(steps, given.seconds)
            alone, uses_graph = verdict_alone(steps), steps.uses_graph
    except UserError as error:
        return report(error)
    cost, timings = cost_of(with_guard, without), {"guard": Timing.of(with_guard), "no guard": Timing.of(without)}
    usual = timings["no guard"].median_ms
    met = cost.share < GOAL
    for name, timing in timings.items():
        spread = f"{timing.low_ms:.3f} to {timing.high_ms:.3f}"
        print(f"{name:<9} {timing.median_ms:9.3f} ms a step (20th to 80th percentile {spread})")
    print(f"alone     {alone:9.3f} ms a verdict, launches included: {alone / usual:.3%} of a step")
    print(
        f"{given.preset}: the guard costs {cost.share:.3%} of a step (95 % interval {cost.low:.3%} to {cost.high:.3%}, "
        f"{cost.pairs} pairs); goal under {GOAL:.1%}: {'met' if met else 'MISSED'}"
        + ("" if not met or cost.high < GOAL else ", but the interval reaches beyond it: give more --seconds")
    )
    if given.output is not None:
        result = {
            "environment": environment(device),
            "card_before": before,
            "card_after": card_state(),
            "preset": given.preset,
            "cuda_graph": uses_graph,
            "goal": GOAL,
            "met": met,
            "cost": asdict(cost),
            "verdict_alone_ms": alone,
            "steps": {name: asdict(timing) for name, timing in timings.items()},
            "with_guard_ms": with_guard,
            "without_ms": without,
        }
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {given.output}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
