"""Result files -> the table and the picture of the README.

    python benchmarks/report.py benchmarks/results/step_124m.json [...] --output benchmarks/results

Writes OUTPUT/steps.md (tok/s, MFU, memory, loss difference) and OUTPUT/steps.png (loss curves and speed), prints
the table, and puts it into README between its two markers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro

from fuselm.model.flops import MFU_FORMULA

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"triton": "#0b3c6f", "eager": "#e08a1e"}  # told apart in greyscale too
MARKERS = ("<!-- steps -->", "<!-- /steps -->")
NAMES = {"triton": "kernels=triton", "eager": "kernels=eager"}


@dataclass(frozen=True)
class Arguments:
    """Make the table and the picture of whole training steps."""

    results: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """step_*.json files of bench_step.py."""

    output: Path = Path("benchmarks/results")
    """Folder for steps.md and steps.png."""

    readme: Path | None = Path("README.md")
    """Page whose table is replaced; None for no page."""


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
        lines.append(f"- {result['preset']}: {steps}.{note}")
    facts = results[0]["environment"]
    lines += [
        "",
        f"{facts['card']}, torch {facts['torch']}, triton {facts['triton']}, commit {facts['commit']}; medians and "
        f"differences are over the steps after the tenth. {MFU_FORMULA}.",
    ]
    return "\n".join(lines) + "\n"


def replace_table(page: str, table: str) -> str:
    """`page` with `table` between its markers.

    Raises:
        ValueError: the page lacks them.
    """
    before, opening, rest = page.partition(MARKERS[0])
    _, closing, after = rest.partition(MARKERS[1])
    if not (opening and closing):
        raise ValueError(f"the page has no {MARKERS[0]} ... {MARKERS[1]} to put the table between")
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


def main() -> None:
    """Reads the results, writes and prints the report."""
    arguments = tyro.cli(Arguments)
    results = [json.loads(path.read_text()) for path in arguments.results]
    arguments.output.mkdir(parents=True, exist_ok=True)
    table = markdown(results)
    (arguments.output / "steps.md").write_text(table)
    picture(results, arguments.output / "steps.png")
    written = [arguments.output / "steps.md", arguments.output / "steps.png"]
    if arguments.readme is not None:
        arguments.readme.write_text(replace_table(arguments.readme.read_text(), table))
        written.append(arguments.readme)
    print(table)
    for path in written:
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
