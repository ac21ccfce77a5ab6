"""Curves and a table of several runs: `python train/compare.py RUN RUN... [--output compare.png]`.

A RUN is a run folder (metrics.jsonl), a folder or file of llm.c (main.log), or a metrics.jsonl by itself.
"""

from __future__ import annotations

import importlib.util
import io
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, in_words, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

import tyro

from fuselm.train.command_line import parse_arguments
from fuselm.train.metrics import centered_mean, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS_FILE, LLM_C_FILE = "metrics.jsonl", "main.log"
# What llm.c calls them in main.log: "s:250 trl:6.4321 lr:0.000214 norm:1.23", "s:250 tel:6.3987".
_LLM_C = {"trl": "loss", "tel": "validation_loss", "norm": "grad_norm", "lr": "lr"}
PANELS = {
    "loss": "training loss (nats per token)",
    "validation_loss": "validation loss (nats per token)",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens a second",
}


@dataclass
class Curves:
    """What a run wrote: for each quantity the steps, and the values there. Steps whose value is not finite are left
    out."""

    name: str
    steps: dict[str, list[int]] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, quantity: str, step: int, value: float) -> None:
        """Appends a value."""
        if math.isfinite(value):
            self.steps.setdefault(quantity, []).append(step)
            self.values.setdefault(quantity, []).append(value)

    def at_tokens(self, quantity: str) -> list[float]:
        """Where the steps of a quantity lie in tokens; raises UserError where the run did not write them."""
        known = dict(zip(self.steps.get("tokens", []), self.values.get("tokens", []), strict=True))
        if not known:
            raise UserError(f"run {self.name} does not say how many tokens its steps have: compare by step")
        each = max(known.values()) / max(known)
        return [known.get(step, step * each) for step in self.steps[quantity]]


def load_curves(path: Path) -> Curves:
    """Reads a run.

    Raises:
        UserError: there is nothing to read, or it holds no steps.
    """
    file = path
    if path.is_dir():
        found = [path / name for name in (METRICS_FILE, LLM_C_FILE) if (path / name).is_file()]
        if not found:
            raise UserError(f"run folder {path} has neither {METRICS_FILE} nor {LLM_C_FILE}")
        file = found[0]
    elif not path.exists():
        raise UserError(f"run {path} does not exist")
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    try:
        curves = _from_llm_c(file, name) if file.suffix == ".log" else _from_metrics(file, name)
    except OSError as error:
        raise UserError(f"cannot read {file}: {in_words(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not curves.steps:
        raise UserError(f"{file} holds no steps")
    return curves


def _from_metrics(file: Path, name: str) -> Curves:
    curves = Curves(name)
    for entry in read_metrics(file):
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            continue
        for quantity in (*PANELS, "lr", "tokens"):
            value = entry.get(quantity)
            if isinstance(value, int | float) and not isinstance(value, bool):
                curves.add(quantity, entry["step"], float(value))
    return curves


def _from_llm_c(file: Path, name: str) -> Curves:
    curves = Curves(name)
    for line in file.read_text(encoding="utf-8").splitlines():
        pairs = dict(part.split(":", 1) for part in line.split() if ":" in part)
        if not pairs.get("s", "").isdecimal():
            continue
        for key, quantity in _LLM_C.items():
            try:
                curves.add(quantity, int(pairs["s"]), float(pairs[key]))
            except (KeyError, ValueError):  # this line has another quantity, or was cut off
                continue
    return curves


def with_names_apart(runs: list[Curves]) -> list[Curves]:
    """The runs, where names occur twice with numbers added."""
    names = [run.name for run in runs]
    for i, run in enumerate(runs):
        if names.count(names[i]) > 1:
            run.name = f"{names[i]} ({names[: i + 1].count(names[i])})"
    return runs


def draw(runs: Sequence[Curves], *, by_tokens: bool = False) -> Figure:
    """Draws loss, validation loss, gradient norm and speed of runs.

    Args:
        runs: the runs.
        by_tokens: over tokens rather than steps.

    Returns:
        A matplotlib figure, in no window.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    panels = figure.subplots(2, 2).flatten().tolist()
    for axes, (quantity, label) in zip(panels, PANELS.items(), strict=True):
        for number, run in enumerate(runs):
            if quantity not in run.values:
                continue
            where: list[Any] = run.at_tokens(quantity) if by_tokens else run.steps[quantity]
            values = run.values[quantity]
            color = f"C{number}"
            if quantity == "validation_loss":
                axes.plot(where, values, color=color, marker="o", markersize=3, label=run.name)
                continue
            smooth = len(values) >= 50  # single steps are noisy
            axes.plot(where, values, color=color, alpha=0.25 if smooth else 1, linewidth=0.8 if smooth else 1.3)
            mean = centered_mean(values, 10) if smooth else values
            axes.plot(where, mean, color=color, linewidth=1.4, label=run.name)
        axes.set_xlabel("tokens" if by_tokens else "optimizer step")
        axes.set_title(label, fontsize=10)
        axes.grid(alpha=0.3)
        if quantity == "grad_norm" and axes.has_data():
            axes.set_yscale("log")
        if quantity == "tokens_per_second" and axes.has_data():
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter("{x:,.0f}")
        if axes.has_data():
            axes.legend(fontsize=8)
    return figure


class Picture:
    """A figure as notebooks show it, whatever backend they have."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png")
        return buffer.getvalue()


def table(runs: Sequence[Curves]) -> str:
    """Lines for people: steps, losses at the end, the best validation loss and where, the median norm and speed."""
    width = max(3, *(len(run.name) for run in runs))
    lines = [
        f"{'run':<{width}} {'steps':>8} {'tokens':>15} {'loss':>8} {'val':>8} {'best val':>8} {'at step':>8} "
        f"{'norm':>7} {'tok/s':>11}"
    ]
    for run in runs:
        loss, validation = run.values.get("loss", []), run.values.get("validation_loss", [])
        best = min(range(len(validation)), key=validation.__getitem__) if validation else 0
        norm, speed = run.values.get("grad_norm", []), run.values.get("tokens_per_second", [])
        cells = [
            f"{max(step for steps in run.steps.values() for step in steps):>8,}",
            _cell(run.values.get("tokens", [])[-1:], 15, ",.0f"),
            _cell([statistics.fmean(loss[-20:])] if loss else [], 8, ".4f"),  # single steps are noisy
            _cell(validation[-1:], 8, ".4f"),
            _cell(validation[best : best + 1], 8, ".4f"),
            _cell([run.steps["validation_loss"][best]] if validation else [], 8, ",d"),
            _cell([statistics.median(norm)] if norm else [], 7, ".3f"),
            _cell([statistics.median(speed)] if speed else [], 11, ",.0f"),
        ]
        lines.append(f"{run.name:<{width}} {' '.join(cells)}")
    return "\n".join(lines)


def _cell(values: Sequence[float], width: int, form: str) -> str:
    return f"{format(values[0], form) if values else '-':>{width}}"


@dataclass
class Arguments:
    """Draw the curves of several runs into one picture, and print a table."""

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN [RUN ...]")]
    """Run folders such as runs/124m, folders of llm.c with a main.log, or such files."""
    output: Path = Path("compare.png")
    """The picture to write."""
    by_tokens: bool = False
    """Over tokens instead of steps."""


@command
def main(args: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 after an error of the user's, 130 when interrupted."""
    try:
        raise_on_interrupt()
        arguments = parse_arguments(Arguments, args, "compare.py")
        if not arguments.runs:
            raise UserError("RUN is missing: compare.py RUN [RUN ...]; --help lists the options")
        runs = with_names_apart([load_curves(path) for path in arguments.runs])
        figure = draw(runs, by_tokens=arguments.by_tokens)
        try:
            figure.savefig(arguments.output)
        except (OSError, ValueError) as error:  # a folder that is missing, or a kind of picture
            raise UserError(f"cannot write output {arguments.output}: {error}") from error
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        report("interrupted")
        return 130
    print(table(runs))
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
