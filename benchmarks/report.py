"""Result files -> tables and pictures of the README and docs/performance.md.

    python benchmarks/report.py benchmarks/results/step_124m.json [...] --output benchmarks/results
    python benchmarks/report.py benchmarks/results/kernels.json [...] --output benchmarks/results
    python benchmarks/report.py --compare old.json new.json

Of bench_step.py's files it makes OUTPUT/steps.md (tok/s, MFU, memory, loss difference) and OUTPUT/steps.png (loss
curves and speed); of compare_kernels.py's OUTPUT/kernels.md (the summary), OUTPUT/kernels_full.md and the pictures
kernels, kernels_time and kernels_roofline as PNG and SVG. It prints the tables and puts them into the pages, each
between its two markers. --compare takes two files of compare_kernels.py and exits with 1 if a row of the new one is
slower, takes more memory or fails: the regression gate.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro
from report_kernels import KernelResults, changes, full_tables, merged, summary_table
from report_plots import relative_times, roofline_shares, times_by_size

from fuselm.model.flops import MFU_FORMULA

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"triton": "#0b3c6f", "eager": "#e08a1e"}  # told apart in greyscale too
MARKERS = ("<!-- steps -->", "<!-- /steps -->")
KERNEL_MARKERS = ("<!-- kernels -->", "<!-- /kernels -->")
NAMES = {"triton": "kernels=triton", "eager": "kernels=eager"}


@dataclass(frozen=True)
class Arguments:
    """Make the tables and pictures, or compare two results."""

    results: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """step_*.json files of bench_step.py, files of compare_kernels.py; of a row in several of them the last counts."""

    output: Path = Path("benchmarks/results")
    """Folder for the tables and pictures."""

    readme: Path | None = Path("README.md")
    """Page for the steps' table and the kernels' summary; None for no page."""

    performance: Path | None = Path("docs/performance.md")
    """Page for all kernel tables; None for no page."""

    compare: tuple[Path, Path] | None = None
    """An old and a new file of compare_kernels.py."""

    tolerance: float = 0.05
    """What --compare lets pass: the fraction by which a median may differ beyond the spread."""


def markdown(results: list[dict[str, Any]]) -> str:
    """The table, a row for each run, then what differs and where it was measured."""
    lines = [
        "| model | GPUs | kernels | tok/s | MFU | peak memory a GPU | last loss | largest difference of losses |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        first, difference = result["runs"][0], result["largest_loss_difference_after_step_10"]
        for run in result["runs"]:
            mfu = "n/a" if run["mfu"] is None else f"{run['mfu']:.1%}"
            control = result.get("control_loss_differences", {}).get(run["kernels"])
            apart = "" if run is first or difference is None else f"{difference:.2%}"
            apart = apart if control is None else f"{control:.2%} from {run['kernels'].partition('+')[0]} (control)"
            lines.append(
                f"| {result['preset']} | {run['gpus']} | {run['kernels']} | {run['tokens_per_second']:,.0f} | {mfu} | "
                f"{run['memory_gib']:.1f} GiB | {run['losses'][-1]:.3f} | {apart} |"
            )
    lines.append("")
    for result in results:
        recompiled = sum(run["recompilations_after_step_2"] for run in result["runs"])
        note = f" {result['note']}" if result["note"] else ""
        steps = f"{result['steps']} steps, {recompiled} recompilations after step 2"
        lines.append(f"- {result['preset']}: {steps}, commit {result['environment']['commit']}.{note}")
    facts = results[0]["environment"]
    lines += [
        "",
        f"{facts['card']}, torch {facts['torch']}, triton {facts['triton']}; medians and "
        f"differences are over the steps after the tenth. {MFU_FORMULA}.",
    ]
    return "\n".join(lines) + "\n"


def replace_table(page: str, table: str, markers: tuple[str, str] = MARKERS) -> str:
    """`page` with `table` between its markers.

    Raises:
        ValueError: the page lacks them.
    """
    before, opening, rest = page.partition(markers[0])
    _, closing, after = rest.partition(markers[1])
    if not (opening and closing):
        raise ValueError(f"the page has no {markers[0]} ... {markers[1]} to put the table between")
    return f"{before}{opening}\n{table}{closing}{after}"


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """Loss curves above, tokens a second below, one column a model."""
    shown = [result for result in results if len({run["kernels"] for run in result["runs"]}) > 1] or results
    size = (5.2 * len(shown), 6)
    figure, axes = plt.subplots(2, len(shown), figsize=size, dpi=130, layout="constrained", squeeze=False)
    for column, result in enumerate(shown):
        loss, speed = axes[0][column], axes[1][column]
        runs = [run for run in result["runs"] if run["kernels"] in COLOURS]  # controls are in the table only
        for run in runs:
            kernels = run["kernels"]
            style = "-" if kernels == "triton" else "--"
            steps = range(1, len(run["losses"]) + 1)
            loss.plot(steps, run["losses"], style, color=COLOURS[kernels], label=NAMES[kernels], lw=1.6)
        loss.set_title(f"{result['preset']}: training loss")
        loss.set_xlabel("optimizer step")
        loss.set_ylabel("loss (nats a token)")
        loss.legend()
        loss.grid(alpha=0.3)
        names = [NAMES[run["kernels"]] + (f", {run['gpus']} GPUs" if run["gpus"] > 1 else "") for run in runs]
        values = [run["tokens_per_second"] / 1e3 for run in runs]
        bars = speed.barh(names, values, color=[COLOURS[run["kernels"]] for run in runs], height=0.5)
        speed.bar_label(bars, labels=[f"{v:,.1f}k" for v in values], padding=3)
        speed.set_xlim(0, max(values) * 1.18)
        speed.set_xlabel("thousand tokens a second")
        speed.set_title(f"{result['preset']}: speed, {result['environment']['card']}")
        speed.invert_yaxis()
    figure.savefig(path)
    plt.close(figure)


def _put(page: Path | None, table: str, markers: tuple[str, str]) -> list[Path]:
    if page is None:
        return []
    try:
        page.write_text(replace_table(page.read_text(), table, markers))
    except ValueError as error:
        raise SystemExit(f"error: {page}: {error}; add the two lines, or pass None for the page") from error
    return [page]


def report_steps(results: list[dict[str, Any]], arguments: Arguments) -> list[Path]:
    """Table and picture of whole steps; gives what was written."""
    table, paths = markdown(results), [arguments.output / "steps.md", arguments.output / "steps.png"]
    paths[0].write_text(table)
    picture(results, paths[1])
    print(table)
    return paths + _put(arguments.readme, table, MARKERS)


def report_kernels(results: KernelResults, arguments: Arguments) -> list[Path]:
    """Tables and pictures of kernels; gives what was written."""
    summary, full = summary_table(results), full_tables(results)
    paths = [arguments.output / "kernels.md", arguments.output / "kernels_full.md"]
    for path, table in zip(paths, (summary, full), strict=True):
        path.write_text(table)
        print(table)
    for draw in (relative_times, roofline_shares, times_by_size):
        paths += draw(results, arguments.output)
    paths += _put(arguments.readme, summary, KERNEL_MARKERS)
    return paths + _put(arguments.performance, full, KERNEL_MARKERS)


def gate(old: KernelResults, new: KernelResults, tolerance: float) -> int:
    """Prints what changed; 1 if anything is worse, else 0."""
    found = changes(old, new, tolerance)
    for change in found:
        print(f"{change.row}: {change.text}")
    worse = sum(change.worse for change in found)
    print(
        f"{len(old.rows)} rows compared: {worse} worse, {len(found) - worse} faster, beyond spread and {tolerance:.0%}"
    )
    return int(worse > 0)


def main() -> int:
    """Reads the results, writes and prints the report, or compares."""
    arguments = tyro.cli(Arguments)
    if arguments.compare is not None:
        old, new = (merged([json.loads(path.read_text())]) for path in arguments.compare)
        return gate(old, new, arguments.tolerance)
    facts = [json.loads(path.read_text()) for path in arguments.results]
    if not facts:
        raise SystemExit("error: no result files: name some, or two after --compare")
    arguments.output.mkdir(parents=True, exist_ok=True)
    written = []
    if steps := [f for f in facts if "runs" in f]:
        written += report_steps(steps, arguments)
    if kernels := [f for f in facts if "runs" not in f]:
        written += report_kernels(merged(kernels), arguments)
    for path in written:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
