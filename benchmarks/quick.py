"""This machine's card in under five minutes: which kernel runs for each op, and every kernel beside what is installed.

    python benchmarks/quick.py
    python benchmarks/quick.py --output my_card.json

Sizes are those of a small model and fit into 8 GB. Without a GPU it runs tiny shapes, which shows that the comparison
works and nothing about speed. The file is one of compare_kernels.py's kind, so report.py makes pictures from it.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if importlib.util.find_spec("fuselm") is None:  # run as a script in a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import compare_kernels
import torch
import tyro
from measure import configure_compile
from peers.base import OURS
from report_kernels import KernelResults, best_peer, merged, milliseconds, speed_ratio
from rich.console import Console
from rich.table import Table
from rows import QUICK_ROWS, TINY_ROWS

from fuselm.env import devices, kernel_choices

BUDGET_S = 270.0  # no row is begun after this


@dataclass(frozen=True)
class Arguments:
    """Measure this machine's card."""

    output: Path = Path("quick.json")
    """JSON file for the results."""

    providers: tuple[str, ...] = ()
    """Providers to compare with ours; all that are installed by default."""

    rounds: int = 30
    """Timed rounds at most."""


def choices_table(device: torch.device) -> Table:
    """Which kernel runs for each op here."""
    table = Table(title="Which kernel runs", title_justify="left")
    for column in ("op", "kernel", "why"):
        table.add_column(column)
    for row in kernel_choices(device):
        table.add_row(*row)
    return table


def speed_table(results: KernelResults, title: str) -> Table:
    """A line a row: ours, the best peer, the ratio; what failed in words."""
    table = Table(title=title, title_justify="left")
    for column in ("op", "shape", "pass", "fuselm ms", "rate", "of ceiling", "best peer", "ms", "best peer / fuselm"):
        table.add_column(column)
    for row in results.rows.values():
        mine: dict[str, Any] = row["providers"].get(OURS, {"status": "not measured", "ms": None})
        best, ratio = best_peer(row), speed_ratio(row)
        if mine["ms"] is None:
            cells = [mine["status"], "", ""]
        else:
            rate = f"{mine['tflops']:,.1f} TFLOP/s" if mine["tflops"] else f"{mine['gb_s']:,.0f} GB/s"
            cells = [milliseconds(mine["ms"]), rate, f"{mine['share']:.0%}" if mine["share"] else ""]
        cells += [best or "", milliseconds(row["providers"][best]["ms"]) if best else ""]
        table.add_row(row["op"], row["label"], row["direction"], *cells, "" if ratio is None else f"{ratio:.2f}x")
    return table


def main() -> None:
    """Measures and prints."""
    started = time.monotonic()
    arguments = tyro.cli(Arguments)
    device, description = devices()[0]
    on_gpu = device.type == "cuda"
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(choices_table(device))
    configure_compile()
    options = compare_kernels.Arguments(
        output=arguments.output,
        providers=arguments.providers,
        rounds=arguments.rounds,
        budget_s=BUDGET_S,
        tiny=not on_gpu,
    )
    rows = list(QUICK_ROWS if on_gpu else TINY_ROWS)
    facts = compare_kernels.compare(options, rows, device, torch.bfloat16 if on_gpu else torch.float32, started)
    console.print(speed_table(merged([facts]), description))
    if not on_gpu:
        console.print("There is no GPU here: these times show nothing about GPUs.")
    console.print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
