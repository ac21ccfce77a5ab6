"""Result files -> tables and pictures; those of the README and docs/performance.md with --publish.

    python benchmarks/report.py step_124m.json [...]
    python benchmarks/report.py kernels.json [...]
    python benchmarks/report.py benchmarks/results/kernels.json [...] --publish
    python benchmarks/report.py --compare old.json new.json

Of bench_step.py's files with peers it makes steps.md (tok/s, MFU, memory, loss difference) and steps.png (loss curves
and speed), of those without steps_own.md and steps_own.png; of compare_kernels.py's kernels.md (the summary),
kernels_full.md and the pictures kernels, kernels_time and kernels_roofline as PNG and SVG. They lie beside the last
result file, and the table of steps or the summary is printed. --publish, for results of a GPU, puts them into
benchmarks/results and the tables into README.md and docs/performance.md, each between its two markers. --compare takes
two files of compare_kernels.py and exits with 1 if a row of the new one is slower, takes more memory or fails: the
regression gate.
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
ROOT = Path(__file__).resolve().parents[1]
README, PERFORMANCE, PUBLISHED = ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"
EXPECTED = "expected a result file of compare_kernels.py or bench_step.py"
# What the report reads of a file: its parts, those of its environment, and those of each entry of its lists.
KERNEL_KEYS = ("environment", "peers", "missing", "shows_gpu", "ceilings", "left_out", "rows")
KERNEL_ENTRIES = {"rows": ("op", "label", "direction", "bytes", "flops", "odd", "near", "goal_ms", "providers")}
STEP_KEYS = ("environment", "preset", "steps", "note", "largest_loss_difference_after_step_10", "runs")
STEP_ENTRIES = {
    "runs": ("kernels", "gpus", "losses", "tokens_per_second", "mfu", "memory_gib", "recompilations_after_step_2"),
    "comparison": ("provider", "ours", "again", "gpus", "status"),
}


@dataclass(frozen=True)
class Arguments:
    """Make the tables and pictures, or compare two results."""

    results: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """step_*.json files of bench_step.py, files of compare_kernels.py; of a row in several of them the last counts."""

    output: Path | None = None
    """Folder for the tables and pictures; that of the last result file by default."""

    publish: bool = False
    """Write them into benchmarks/results and the tables into README.md and docs/performance.md."""

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


def _absent(part: Any, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if not isinstance(part, dict) or key not in part]


def problem_of(facts: Any) -> str:
    """What keeps `facts` from being a result of one of the two programs; "" for nothing."""
    steps = isinstance(facts, dict) and "runs" in facts
    if absent := _absent(facts, STEP_KEYS if steps else KERNEL_KEYS):
        return f"it lacks {', '.join(absent)}"
    if absent := _absent(facts["environment"], ("card", "commit", *(("torch", "triton") if steps else ()))):
        return f"its environment lacks {', '.join(absent)}"
    entries = STEP_ENTRIES if steps else KERNEL_ENTRIES
    for name, keys in entries.items():
        for number, entry in enumerate(facts.get(name) or []):
            if absent := _absent(entry, keys):
                return f"{name}[{number}] lacks {', '.join(absent)}"
    if not any(facts.get(name) for name in entries):
        return f"it has no {' or '.join(entries)}"
    return ""


def read(path: Path) -> dict[str, Any]:
    """The result in a file; ends the program where it is none."""
    try:
        facts = json.loads(path.read_text())
    except OSError as error:
        raise SystemExit(f"error: {path}: {error.strerror}; {EXPECTED}") from error
    except ValueError as error:
        raise SystemExit(f"error: {path}: not JSON ({error}); {EXPECTED}") from error
    if problem := problem_of(facts):
        raise SystemExit(f"error: {path}: {problem}; {EXPECTED}")
    return facts


def read_kernels(path: Path) -> KernelResults:
    """The rows in a file of compare_kernels.py; ends the program where it is none."""
    facts = read(path)
    if "runs" in facts:
        raise SystemExit(f"error: {path}: a result of bench_step.py; expected one of compare_kernels.py")
    return merged([facts])


def why_not_published(facts: dict[str, Any]) -> str:
    """Why a result shows nothing about GPUs; "" for one that does."""
    card = facts["environment"]["card"]
    if card.startswith("CPU"):
        return f"it was measured without a GPU, on a {card}"
    return "" if facts.get("shows_gpu", True) else "it was measured on small shapes (shows_gpu is false)"


def _page(page: Path, table: str, markers: tuple[str, str]) -> str:
    try:
        return replace_table(page.read_text(), table, markers)
    except ValueError as error:
        raise SystemExit(f"error: {page}: {error}; add the two lines") from error


def report_steps(results: list[dict[str, Any]], folder: Path, publish: bool) -> list[Path]:
    """Tables and pictures of whole steps: beside peers for the README, ours alone for the performance page; gives what
    was written."""
    written: list[Path] = []
    for name, page, group in (
        ("steps", README, [result for result in results if result.get("comparison")]),
        ("steps_own", PERFORMANCE, [result for result in results if not result.get("comparison")]),
    ):
        if not group:
            continue
        texts = {folder / f"{name}.md": markdown(group)}
        print(texts[folder / f"{name}.md"])
        if publish:
            texts[page] = _page(page, markdown(group), MARKERS)
        written += _write(texts)
        picture(group, folder / f"{name}.png")
        written.append(folder / f"{name}.png")
    return written


def report_kernels(results: KernelResults, folder: Path, publish: bool) -> list[Path]:
    """Tables and pictures of kernels; gives what was written."""
    summary, full = summary_table(results), full_tables(results)
    texts = {folder / "kernels.md": summary, folder / "kernels_full.md": full}
    print(summary)
    if publish:
        texts |= {page: _page(page, table, KERNEL_MARKERS) for page, table in ((README, summary), (PERFORMANCE, full))}
    written = _write(texts)
    for draw in (relative_times, roofline_shares, times_by_size):
        written += draw(results, folder)
    return written


def _write(texts: dict[Path, str]) -> list[Path]:
    for path, text in texts.items():
        path.write_text(text)
    return list(texts)


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
        old, new = (read_kernels(path) for path in arguments.compare)
        return gate(old, new, arguments.tolerance)
    if not arguments.results:
        raise SystemExit("error: no result files: name some, or two after --compare")
    if arguments.publish and arguments.output is not None:
        raise SystemExit("error: --publish writes into benchmarks/results: leave --output out")
    facts = [read(path) for path in arguments.results]
    if arguments.publish:
        for path, result in zip(arguments.results, facts, strict=True):
            if why := why_not_published(result):
                raise SystemExit(f"error: {path}: {why}; --publish takes figures of a GPU at full size only")
    folder = PUBLISHED if arguments.publish else arguments.output or arguments.results[-1].parent
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if steps := [f for f in facts if "runs" in f]:
        written += report_steps(steps, folder, arguments.publish)
    if kernels := [f for f in facts if "runs" not in f]:
        written += report_kernels(merged(kernels), folder, arguments.publish)
    for path in written:
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
