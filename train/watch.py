"""Look at a run from beside it: `python train/watch.py RUN`, or `fuselm-watch`.

    watch RUN                  loss, norm, tok/s, MFU, memory, events and time left, live; Ctrl-C ends it
    watch RUN --once           the same, printed once
    watch RUN --html FILE      a report with plots in one HTML file

It reads the run folder and touches nothing in it; it can run on any machine that sees the folder.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, in_words, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fuselm.train.checkpointing import write_atomically
from fuselm.train.command_line import parse_arguments
from fuselm.train.watch_data import RunView
from fuselm.train.watch_report import facts
from fuselm.train.watch_report import report as html_report

_BLOCKS = "▁▂▃▄▅▆▇█"
_EVENTS = 8


@dataclass
class Arguments:
    """Show the state of a run, live."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/debug."""
    once: bool = False
    """Print the state once and end."""
    html: Path | None = None
    """Write a report to this file, and end."""
    interval: float = 2.0
    """Seconds between two looks."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Numbers as a line of blocks, each the mean of its share of them; empty without numbers."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def render(view: RunView, width: int) -> RenderableType:
    """The state of a run for a terminal of so many columns."""
    steps = view.steps
    table = Table.grid(padding=(0, 2))
    for label, value in facts(view):
        table.add_row(Text(label, style="bold"), Text(value))
    for label, name in (("loss", "loss"), ("gradient norm", "grad_norm")):
        values = [e[name] for e in steps if e.get(name) is not None]
        if values:
            line = sparkline(values, max(width - 30, 10))
            table.add_row(Text(label, style="bold"), Text(f"{line}  {min(values):.3g} to {max(values):.3g}"))
    done = steps[-1]["step"] if steps else 0
    parts: list[RenderableType] = [ProgressBar(total=max(view.total, 1), completed=done), table]
    events = Table.grid(padding=(0, 2))
    for event in view.events.entries[-_EVENTS:]:
        events.add_row(Text(event["time"]), Text(event["kind"], style=_style(event["kind"])), Text(event["message"]))
    if view.events.entries:
        parts += [Text("events", style="bold"), events]
    return Panel(Group(*parts), title=escape(str(view.run)))


def _style(kind: str) -> str:
    return (
        "red"
        if kind in ("nonfinite", "stop", "stall", "save_failed")
        else "yellow"
        if kind in ("spike", "rollback")
        else ""
    )


@command
def main(args: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, or 2 after an error of the user's."""
    raise_on_interrupt()
    try:
        arguments = parse_arguments(Arguments, args, "watch.py")
        if not arguments.run.is_dir():
            raise UserError(f"run folder {arguments.run} does not exist")
        if not arguments.interval > 0:
            raise UserError(f"--interval is {arguments.interval}: it must be above 0")
        view = RunView.open(arguments.run)
        if arguments.html is not None:
            try:
                write_atomically(arguments.html, html_report(view).encode())
            except OSError as error:
                raise UserError(f"{arguments.html} cannot be written: {in_words(error)}") from error
            print(f"wrote {arguments.html}")
            return 0
        console = Console(highlight=False)
        if arguments.once:
            console.print(render(view, console.width))
            return 0
        with Live(render(view, console.width), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(arguments.interval)
                view.refresh()
                live.update(render(view, console.width), refresh=True)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
