"""What a checkpoint in the background costs a run: how long training waits, how long the save takes, what memory does.

    python benchmarks/bench_checkpoint.py --preset llama3_1b --output benchmarks/results/checkpoint_llama3_1b.json

Trains on random tokens and saves again and again, keeping one checkpoint, with train/checkpoint_writer.py as a run
does; steps go on while a save is under way. A row a save: the time that the loop of steps waits (for the check that
weights are finite and for the copy to pinned memory), the save's own time from its begin to the manifest and the
deletion of the checkpoint before, and the memory afterwards. The first save allocates the pinned memory and stands
apart. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from timing import card_state, environment
from training_steps import Steps, configuration

from fuselm.train import checkpointing
from fuselm.train.checkpoint_writer import CheckpointWriter, Retention
from fuselm.train.checkpointing import human_bytes
from fuselm.train.errors import UserError, report

STALL_GOAL = 0.05  # of the save's own time
_SETTLED = 8  # steps until everything is compiled, captured and allocated
_QUIET = 6  # steps timed while nothing is saved
_FLAT = 0.01  # of a checkpoint, and
_FLAT_BYTES = 64 << 20  # so many bytes on top, may come and go
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Arguments:
    """Measure saves in the background."""

    preset: str = "llama3_1b"
    """Preset of train/pretrain.py."""

    saves: int = 10
    """Checkpoints written; the first one, which pins memory, included."""

    seconds: float = 120.0
    """No save begins that would end later than this after the start, as far as the one before tells."""

    folder: Path | None = None
    """Where the checkpoints go, into a folder of their own that is deleted in the end; None for /dev/shm if it has room
    for two, else runs/."""

    compile: bool | None = False
    """torch.compile the blocks: dearer to start, and nothing that a save would notice."""

    kernels: Literal["auto", "triton", "eager"] = "auto"
    """model.kernels."""

    output: Path | None = None
    """File for the result."""


@dataclass(frozen=True)
class Row:
    """One save.

    Attributes:
        stalled: seconds that the loop of steps waited.
        seconds: of the save itself.
        size: bytes written.
        steps: done meanwhile.
        step_ms: their median, milliseconds; None if there were fewer than two.
        host: resident memory of the process after the save, bytes.
        pinned: bytes of it, or beside it, in PyTorch's pinned allocator.
        device: allocated on the GPU after the save, bytes.
        free: bytes free in the folder after the save.
    """

    stalled: float
    seconds: float
    size: int
    steps: int
    step_ms: float | None
    host: int
    pinned: int
    device: int
    free: int

    @property
    def share(self) -> float:
        """Of the save's own time, what training waited."""
        return self.stalled / self.seconds

    def line(self, number: int) -> str:
        step = "-" if self.step_ms is None else f"{self.step_ms:.1f}"
        return (
            f"{number:>4}  {self.stalled:7.3f}  {self.seconds:6.2f}  {self.share:7.2%}  {self.size / 1e9:6.2f}  "
            f"{self.size / 1e9 / self.seconds:5.2f}  {self.steps:5d}  {step:>7}  {self.host / 2**30:8.3f}  "
            f"{self.pinned / 2**30:6.2f}  {self.device / 2**30:7.3f}  {self.free / 2**30:6.1f}"
        )


_HEADING = (
    "save  stall s  save s    share      GB   GB/s  steps  step ms  host GiB  pinned  GPU GiB  free GiB\n"
    "(stall: the step loop waits; save: of its own; step ms: median while saving; host: resident)"
)


def choose_folder(given: Path | None, size: int) -> Path:
    """Where two checkpoints of `size` bytes have room: the old one goes only after the new one is whole.

    Raises:
        UserError: nowhere, with the numbers.
    """
    places = [given] if given is not None else [_SHARED_MEMORY, Path("runs")]
    found = []
    for place in places:
        there = next(parent for parent in (place, *place.absolute().parents) if parent.exists())
        free = shutil.disk_usage(there).free
        found.append(f"{human_bytes(free)} free in {place}")
        if free >= 2 * size and (given is not None or there.is_dir()):
            place.mkdir(parents=True, exist_ok=True)
            print(f"checkpoints go to {place}: two side by side need {human_bytes(2 * size)}, {found[-1]}")
            return place
    raise UserError(
        f"two checkpoints side by side need {human_bytes(2 * size)}, but there are {', '.join(found)}: give a --folder "
        "with more room, or a smaller --preset"
    )


def resident_bytes() -> int:
    """Memory of this process that is in RAM, on Linux; 0 elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    import resource

    return pages * resource.getpagesize()


def pinned_bytes() -> int:
    """Bytes that PyTorch's allocator of pinned memory holds; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def measure(steps: Steps, arguments: Arguments, folder: Path, began: float) -> tuple[float, list[Row]]:
    """(median milliseconds of a step while nothing is saved, the saves)."""
    writer = CheckpointWriter(
        folder,
        steps.model,
        steps.optimizer,
        world=steps.world,
        retention=Retention(1, keep_best=False),
        config={},
        position={},
    )
    for _ in range(_SETTLED):
        steps.step()
    steps.pause()
    for _ in range(_QUIET + 1):
        steps.step()
    steps.pause()
    quiet = statistics.median(steps.milliseconds[-_QUIET:])
    rows: list[Row] = []
    try:
        for number in range(1, arguments.saves + 1):
            took = rows[-1].seconds if rows else 0.0
            if rows and time.perf_counter() - began + took > arguments.seconds:
                print(f"no time for save {number}: {arguments.seconds:.0f} s are over (--seconds)")
                break
            rows.append(_save(steps, writer, number, folder))
            print(rows[-1].line(number), flush=True)
    finally:
        writer.close()
    return quiet, rows


def _save(steps: Steps, writer: CheckpointWriter, number: int, folder: Path) -> Row:
    steps.step()
    steps.pause()  # as a run does, which reads the last step's numbers before it saves
    device = steps.world.device
    began = time.perf_counter()
    if not checkpointing.all_finite(steps.model, steps.world):
        raise UserError("weights are not finite")
    writer.save({"step": number})
    stalled = time.perf_counter() - began
    before, done = len(steps.milliseconds), 0
    while not writer.is_done():
        steps.step()
        done += 1
    steps.pause()
    outcome = writer.outcome()
    assert outcome is not None
    if outcome.error is not None:
        raise UserError(outcome.error)
    times = [value for value in steps.milliseconds[before:] if not math.isnan(value)]
    return Row(
        stalled=stalled,
        seconds=outcome.seconds,
        size=outcome.size,
        steps=done,
        step_ms=statistics.median(times) if len(times) > 1 else None,
        host=resident_bytes(),
        pinned=pinned_bytes(),
        device=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
        free=shutil.disk_usage(folder).free,
    )


def growth(rows: list[Row]) -> dict[str, int]:
    """By how many bytes memory grew at most, from the second save to any later one."""
    return {
        name: max((getattr(row, name) - getattr(rows[1], name) for row in rows[2:]), default=0)
        for name in ("host", "pinned", "device")
    }


def verdicts(rows: list[Row]) -> dict[str, bool]:
    """Which goals are met, by their wording; the first save stands apart.

    Raises:
        UserError: there are too few saves to tell.
    """
    if len(rows) < 3:
        raise UserError(f"{len(rows)} saves are too few to tell: give more --saves or --seconds")
    grown, allowed = growth(rows), _FLAT * rows[0].size + _FLAT_BYTES
    return {
        f"stall under {STALL_GOAL:.0%} of the save's time": max(row.share for row in rows[1:]) < STALL_GOAL,
        "memory flat": all(value <= allowed for value in grown.values()),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes; returns the exit code."""
    given, began = tyro.cli(Arguments, args=arguments), time.perf_counter()
    try:
        if given.saves < 3:
            raise UserError(f"--saves is {given.saves}: it must be at least 3, the first one and two to compare")
        with Steps(configuration(given.preset, compile=given.compile, kernels=given.kernels)) as steps:
            device, parameters = steps.world.device, steps.model.num_parameters()
            place = choose_folder(given.folder, checkpointing.checkpoint_bytes(steps.model))
            print(f"{given.preset}: {parameters / 1e6:,.1f} M parameters with two moments each\n{_HEADING}")
            with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=place) as folder:
                quiet, rows = measure(steps, given, Path(folder), began)
            uses_graph = steps.uses_graph
        goals = verdicts(rows)
    except UserError as error:
        return report(error)
    later = rows[1:]
    stall, own = sum(row.stalled for row in later), sum(row.seconds for row in later)
    grown = ", ".join(f"{name} {value / 2**20:+.1f} MiB" for name, value in growth(rows).items())
    slower = [row.step_ms / quiet - 1 for row in later if row.step_ms is not None]
    print(
        f"saves 2 to {len(rows)}: training waited {stall / len(later):.3f} s of {own / len(later):.2f} s a save, "
        f"{stall / own:.2%} (at most {max(row.share for row in later):.2%})\n"
        f"after save 2 memory grew by at most {grown}"
    )
    if slower:
        print(f"a step takes {quiet:.1f} ms; while a save is under way {statistics.median(slower):+.1%}")
    for goal, met in goals.items():
        print(f"{given.preset}: {goal}: {'met' if met else 'MISSED'}")
    if given.output is not None:
        result = {
            "environment": environment(device),
            "card": card_state(),
            "preset": given.preset,
            "folder": str(place) if place == _SHARED_MEMORY else "disk",
            "cuda_graph": uses_graph,
            "quiet_step_ms": quiet,
            "goals": goals,
            "growth_bytes": growth(rows),
            "saves": [asdict(row) | {"share": row.share} for row in rows],
            "whole_seconds": time.perf_counter() - began,
        }
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {given.output}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
