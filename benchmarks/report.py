"""Result files -> tables and pictures of the README and docs/performance.md.

    python benchmarks/report.py benchmarks/results/step_124m.json [...] --output benchmarks/results
    python benchmarks/report.py benchmarks/results/kernels.json [...] --output benchmarks/results
    python benchmarks/report.py --compare old.json new.json

Of bench_step.py's files with peers it makes OUTPUT/steps.md (tok/s, MFU, memory, loss difference) and OUTPUT/steps.png
(loss curves and speed), of those without steps_own.md and steps_own.png; of compare_kernels.py's OUTPUT/kernels.md (the
summary), OUTPUT/kernels_full.md and the pictures kernels, kernels_time and kernels_roofline as PNG and SVG. It prints
the tables and puts them into the pages, each between its two markers. --compare takes two files of compare_kernels.py
and exits with 1 if a row of the new one is slower, takes more memory or fails: the regression gate.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro
from report_kernels import KernelResults, changes, full_tables, merged, plain, summary_table
from report_plots import relative_times, roofline_shares, times_by_size
from step_compare import FORMULAS, SAME_LOSS, SETTLED_STEP, loss_of, ours_of, percent

from fuselm.model.flops import MFU_FORMULA

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

COLOURS = {"triton": "#0b3c6f", "eager": "#e08a1e"}  # told apart in greyscale too
SEVERAL_GPUS = "#7aa6d8"
PEER_COLOURS = {"torchtitan": "#c44536", "hf+liger": "#6a994e", "hf+compile": "#9d8ec7", "hf": "#bdbdbd"}
STYLES = {"torchtitan": "--", "hf+liger": "-.", "hf+compile": ":", "hf": (0, (1, 4))}
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
    """Page for the table of steps beside peers and the kernels' summary; None for no page."""

    performance: Path | None = Path("docs/performance.md")
    """Page for the table of our own steps and all kernel tables; None for no page."""

    compare: tuple[Path, Path] | None = None
    """An old and a new file of compare_kernels.py."""

    tolerance: float = 0.05
    """What --compare lets pass: the fraction by which a median may differ beyond the spread."""


def markdown(results: list[dict[str, Any]]) -> str:
    """The tables: our runs among themselves, and beside the peers, each where there are such results."""
    own = [result for result in results if not result.get("comparison")]
    with_peers = [result for result in results if result.get("comparison")]
    tables = [table(group) for table, group in ((own_table, own), (peer_table, with_peers)) if group]
    return "\n".join(tables)


def peer_table(results: list[dict[str, Any]]) -> str:
    """A row for each run beside the peers, in the order in which they ran; then what it comes to, model by model."""
    lines = [
        "| model | GPUs | trained by | ms a step (20th to 80th percentile) | tok/s | MFU | causal MFU "
        "| peak memory a GPU | loss | from ours | time / ours |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for row in result["comparison"]:
            name = f"{row['provider']}, again" if row["again"] else row["provider"]
            start = f"| {result['preset']} | {row['gpus']} | {name} |"
            if row["status"] != "ok":
                reason = plain(row["reason"]).replace("|", "\\|")
                lines.append(f"{start} {row['status']}: {reason} | | | | | | | |")
                continue
            timing = row["step_ms"]
            apart = f"{row['loss_difference']:+.2%}" if "loss_difference" in row else ""
            if not row.get("same_loss", True):
                apart += ", **not the same training**"
            ratio = f"{row['time_to_ours']:.2f}" if "time_to_ours" in row else ""
            lines.append(
                f"{start} {timing['median']:.1f} ({timing['low']:.1f} to {timing['high']:.1f}) | "
                f"{row['tokens_per_second']:,.0f} | {percent(row['mfu'])} | {percent(row['mfu_causal'])} | "
                f"{row['memory_gib']:.1f} GiB | {loss_of(row):.4f} at step {row['compared_step']} | {apart} | {ratio} |"
            )
    lines.append("")
    for result in results:
        for gpus in sorted({row["gpus"] for row in result["comparison"]}):
            note = f" {result['note']}" if result["note"] else ""
            where = f"{result['preset']} on {gpus} GPU{'s' if gpus > 1 else ''}"
            steps = f"{result['steps']} steps, commit {result['environment']['commit']}."
            again = recomputation(result.get("command", ""))
            lines.append(f"- {where}: {verdict(result['comparison'], gpus)} {steps}{again}{note}")
    facts = results[0]["environment"]
    packages = ("torch", "triton", "transformers", "liger-kernel", "torchtitan")
    versions = ", ".join(f"{name} {facts[name]}" for name in packages if name in facts)
    lines += [
        "",
        f"{facts['card']}; {versions}. Medians are over the steps after step {SETTLED_STEP}. All begin with the same "
        "weights and read the same tokens in the same order. The peers train under FSDP2, also on one GPU (fp32 "
        "parameters, bf16 compute, fp32 reductions), with PyTorch's clipping and fused AdamW; ours as "
        "train/pretrain.py does by default, but for what is said above. "
        '"Time / ours" is the median over the mean of ours, first and again: '
        f"above 1 ours is faster, below 1 slower. A loss further than {SAME_LOSS:.0%} from ours does not count. "
        f"{FORMULAS}.",
    ]
    return "\n".join(lines) + "\n"


def verdict(rows: list[dict[str, Any]], gpus: int) -> str:
    """Ours against the fastest peer that trained the same, and how far our two runs are apart: a sentence or two."""
    ours = ours_of(rows, gpus)
    if not ours:
        return "none of our runs ended well."
    medians = [row["step_ms"]["median"] for row in ours]
    drift = f" Our two runs differ by {abs(medians[1] / medians[0] - 1):.1%}." if len(medians) == 2 else ""
    peers = [row for row in rows if row["gpus"] == gpus and not row["ours"] and row.get("same_loss")]
    if not peers:
        return f"no peer to compare with.{drift}"
    best = min(peers, key=lambda row: row["step_ms"]["median"])
    leanest = min(peers, key=lambda row: row["memory_gib"])
    memory = max(row["memory_gib"] for row in ours)
    return (
        f"{best['provider']}, the fastest peer, takes {best['time_to_ours']:.2f} times our time; "
        f"{leanest['provider']}, the leanest, takes {leanest['memory_gib'] / memory:.2f} times our memory.{drift}"
    )


def recomputation(command: str) -> str:
    """A sentence on what the command has ours, and no peer, compute again in the backward pass; empty if nothing."""
    mode = re.search(r"--parallel\.activation[-_]checkpointing[= ](\w+)", command)
    if mode is None or mode[1] == "none":
        return ""
    return f" Ours ran with `--parallel.activation-checkpointing {mode[1]}`, the peers recompute nothing."


def own_table(results: list[dict[str, Any]]) -> str:
    """A row for each of our runs, then what differs and where it was measured."""
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


@dataclass(frozen=True)
class Curve:
    """A run as the picture shows it; of one that was run again, for its speed alone, no losses are drawn."""

    name: str
    again: bool
    colour: str
    style: Any
    losses: list[float]
    tokens_per_second: float


def curves_of(result: dict[str, Any]) -> list[Curve]:
    """The runs of a result that the picture shows: not controls, not those that failed."""
    rows = result.get("comparison") or [run | {"status": "ok", "again": False, "ours": True} for run in result["runs"]]
    mixed = len({row["gpus"] for row in rows}) > 1  # else the title says it
    curves = []
    for row in rows:
        kernels = row.get("kernels", row.get("provider", "").removeprefix("fuselm (").removesuffix(")"))
        known = kernels in (COLOURS if row["ours"] else PEER_COLOURS)
        if row["status"] != "ok" or not known:
            continue
        own = "fuselm" if result.get("comparison") and kernels == "triton" else NAMES.get(kernels, str(kernels))
        name = own if row["ours"] else kernels
        name += ", again" if row["again"] else ""
        name += f", {row['gpus']} GPUs" if mixed and row["gpus"] > 1 else ""
        style = STYLES.get(kernels, "-" if kernels == "triton" else "--")
        colour = COLOURS[kernels] if row["ours"] else PEER_COLOURS[kernels]
        if row["ours"] and mixed and row["gpus"] > 1:  # or it hides under the same kernels on one GPU
            style, colour = "--", SEVERAL_GPUS
        curves.append(Curve(name, row["again"], colour, style, row["losses"], row["tokens_per_second"]))
    return curves


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """Loss curves above, tokens a second below, one column a model."""
    drawn = [(result, curves_of(result)) for result in results]
    drawn = [(result, curves) for result, curves in drawn if len({curve.name for curve in curves}) > 1] or drawn
    size = (5.2 * len(drawn), 6)
    figure, axes = plt.subplots(2, len(drawn), figsize=size, dpi=130, layout="constrained", squeeze=False)
    for column, (result, curves) in enumerate(drawn):
        loss, speed = axes[0][column], axes[1][column]
        for curve in curves:
            if not curve.again:
                steps = range(1, len(curve.losses) + 1)
                loss.plot(steps, curve.losses, linestyle=curve.style, color=curve.colour, label=curve.name, lw=1.6)
        gpus = {row["gpus"] for row in result.get("comparison") or result["runs"]}
        where = result["preset"] + (f" on {max(gpus)} GPUs" if len(gpus) == 1 and max(gpus) > 1 else "")
        loss.set_title(f"{where}: training loss")
        loss.xaxis.set_major_locator(MaxNLocator(integer=True))
        loss.set_xlabel("optimizer step")
        loss.set_ylabel("loss (nats a token)")
        loss.legend()
        loss.grid(alpha=0.3)
        values = [curve.tokens_per_second / 1e3 for curve in curves]
        bars = speed.barh(
            range(len(curves)), values, color=[curve.colour for curve in curves], height=0.5,
            tick_label=[curve.name for curve in curves],
        )  # fmt: skip
        speed.bar_label(bars, labels=[f"{v:,.1f}k" for v in values], padding=3)
        speed.set_xlim(0, max(values, default=1.0) * 1.18)
        speed.set_xlabel("thousand tokens a second")
        speed.set_title(f"{where}: speed, {result['environment']['card']}")
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
    """Tables and pictures of whole steps: beside peers for the README, ours alone for the performance page; gives what
    was written."""
    written: list[Path] = []
    for name, page, group in (
        ("steps", arguments.readme, [result for result in results if result.get("comparison")]),
        ("steps_own", arguments.performance, [result for result in results if not result.get("comparison")]),
    ):
        if not group:
            continue
        table, paths = markdown(group), [arguments.output / f"{name}.md", arguments.output / f"{name}.png"]
        paths[0].write_text(table)
        picture(group, paths[1])
        print(table)
        written += paths + _put(page, table, MARKERS)
    return written


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
