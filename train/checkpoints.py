"""Look after a run's checkpoints: `python train/checkpoints.py list|verify|prune RUN`, or `fuselm-checkpoints`.

    list RUN                              step, size, ranks, time and state of each
    verify RUN [--step N]                 compare every byte with the checksums in the manifest
    prune RUN --keep N [--every M]        delete old ones beyond the newest N, and left-overs

`COMMAND --help` lists a command's options. Exit codes: 0; 1 when a checkpoint is damaged; 2 for what cannot be done.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, raise_on_interrupt, report, warn

if __name__ == "__main__":
    end_on_interrupt()

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fuselm.train import checkpoint_store as store
from fuselm.train.checkpointing import human_bytes, step_of
from fuselm.train.command_line import parse_arguments
from fuselm.train.config import nearest

_Run = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]


@dataclass
class ListArguments:
    """Print a table of a run's checkpoints; sizes are compared with the manifest, contents are not read."""

    run: _Run
    """Run folder, such as runs/debug."""


@dataclass
class VerifyArguments:
    """Compare size and checksum of every file with the manifest; exit code 1 if a checkpoint is damaged."""

    run: _Run
    """Run folder, such as runs/debug."""
    step: int | None = None
    """Step of the checkpoint; by default all of them."""


@dataclass
class PruneArguments:
    """Delete old complete checkpoints and what interrupted saves left; damaged ones stay and are not counted."""

    run: _Run
    """Run folder, such as runs/debug; nothing may be training in it."""
    keep: int | None = None
    """Stay: this many of the newest whose checksums hold, at least 1. Must be given."""
    every: int | None = None
    """Stay as well: the steps divisible by this."""
    dry_run: bool = False
    """Print what would be deleted, and delete nothing."""


def _list(arguments: ListArguments) -> int:
    entries = store.entries(arguments.run)
    if not entries:
        print(f"{arguments.run} has no checkpoints")
        return 0
    rows = [("step", "size", "ranks", "written", "state")]
    rows += [(e.step, human_bytes(e.size), str(e.world_size or "-"), e.written or "-", e.state) for e in entries]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for step, size, ranks, written, state in rows:
        left = f"{step:>{widths[0]}}  {size:>{widths[1]}}  {ranks:>{widths[2]}}"
        print(f"{left}  {written:<{widths[3]}}  {state}")
    return 0


def _verify(arguments: VerifyArguments) -> int:
    damaged = False
    for folder in store.select(arguments.run, arguments.step):
        wrong = _check(folder)
        if wrong and not folder.exists():
            print(f"step {step_of(folder)}: deleted by the run meanwhile", flush=True)
            continue
        damaged |= bool(wrong)
        found = f"damaged: {'; '.join(wrong)}" if wrong else f"good, {human_bytes(store.folder_bytes(folder))}"
        print(f"step {step_of(folder)}: {found}", flush=True)
    return int(damaged)


def _prune(arguments: PruneArguments) -> int:
    for option, value in (("--keep", arguments.keep), ("--every", arguments.every)):
        if value is not None and value < 1:
            raise UserError(f"{option} must be at least 1, got {value}")
    if arguments.keep is None:
        raise UserError("--keep N is missing: how many of the newest checkpoints stay")
    with store.held(arguments.run):
        plan = store.plan_prune(arguments.run, keep=arguments.keep, every=arguments.every, check=_check)
        for folder, wrong in plan.damaged.items():
            warn(f"{folder} stays to be looked at, and is not counted: {'; '.join(wrong)}")
        if plan.newest_good is None:
            found = "the checksums of none of its checkpoints hold" if plan.damaged else "it has no complete checkpoint"
            report(f"nothing in {arguments.run} was deleted: {found}")
            return 1 if plan.damaged else 2
        freed = 0
        for folder in plan.delete:
            size = store.folder_bytes(folder) if arguments.dry_run else store.delete(folder)
            print(f"{'would delete' if arguments.dry_run else 'deleted'} {folder} ({human_bytes(size)})", flush=True)
            freed += size
    print(f"{'would free' if arguments.dry_run else 'freed'} {freed:,} bytes ({human_bytes(freed)})")
    return 0


def _check(folder: Path) -> list[str]:
    """`store.problems` with a progress bar where stderr is a terminal; it is gone before the result is printed."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"reading {folder.name}", total=store.folder_bytes(folder))
        return store.problems(folder, lambda count: bar.advance(task, count))


_COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "list": (ListArguments, _list),
    "verify": (VerifyArguments, _verify),
    "prune": (PruneArguments, _prune),
}


@command
def main(args: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 1 for damage, 2 after an error of the user's, 130 when interrupted."""
    raise_on_interrupt()
    given = list(sys.argv[1:] if args is None else args)
    try:
        if given[:1] in (["--help"], ["-h"]):
            print(f"usage: checkpoints.py {'|'.join(_COMMANDS)} RUN [OPTIONS]\n\n{__doc__}")
            return 0
        if not given or given[0] not in _COMMANDS:
            wrong = (
                f"unknown command {given[0]}{nearest(given[0], list(_COMMANDS))}" if given else "a command is missing"
            )
            raise UserError(f"{wrong}: checkpoints.py {'|'.join(_COMMANDS)} RUN [OPTIONS]")
        arguments, command = _COMMANDS[given[0]]
        return command(parse_arguments(arguments, given[1:], f"checkpoints.py {given[0]}"))
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
