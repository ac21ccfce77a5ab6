"""Every kernel beside what a user would pick instead, on this machine's card.

    python benchmarks/compare_kernels.py --output results.json
    python benchmarks/compare_kernels.py --output results.json --ops rms_norm attention --rounds 20 --budget-s 120
    python benchmarks/compare_kernels.py --output results.json --tiny

For each row of rows.py: the kernel's values and gradients are checked against fp64 within the error budget, the peers'
with more room; then all are timed interleaved in this process, L2 flushed. A provider that raises is a failed entry
with its message, one that is wrong is marked, one that is not installed is listed with the reason. The file is written
after every row, so that a run cut off leaves what it has. `report.py` makes tables and pictures from it.

On a GPU, --jobs processes compile everything beforehand into the caches on disk. --tiny runs small shapes, also on a
CPU; it shows that the comparison works and nothing about GPUs.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if importlib.util.find_spec("fuselm") is None:  # run as a script in a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import compile_ahead
import torch
import tyro
from measure import Ceilings, Result, RowRun, configure_compile, release
from peers.base import DETERMINISTIC, OURS, Maker, is_ours
from peers.registry import Peers, load_peers
from report_kernels import best_peer, deterministic_cost, goal_of, milliseconds, ours, plain, speed_ratio
from rows import BACKWARD, ODD_ROWS, ROWS, TINY_ROWS, Row
from timing import card_state, copy_bandwidth, describe, environment, matmul_rate

from fuselm.model.config import nearest

LOOK_S = 60.0  # between looks at the card's state, which nvidia-smi takes its time for
COMPILE_SHARE = 0.4  # of the budget: a second of all processes saves several of this one
FIRST_OPS = ("attention", "linear_cross_entropy", "cross_entropy")  # measured first: what is left out is the others
ROW_LIMIT_S = 240.0  # no row takes as long, but one with a kernel that never ends, which nothing else would stop
SHOWN = 5  # slowest tasks and rows that are printed


@dataclass(frozen=True)
class Arguments:
    """Compare kernels on this card."""

    output: Path = Path("results.json")
    """JSON file for the results."""

    ops: tuple[str, ...] = ()
    """Ops to compare; all by default."""

    only: str = ""
    """Rows whose name contains this, for example 16384x4096."""

    providers: tuple[str, ...] = ()
    """Providers to compare with ours; all that are installed by default."""

    sizes: Literal["all", "round", "odd"] = "all"
    """Round sizes, those off every block border, or first the ones and then the others."""

    rounds: int = 50
    """Timed rounds at most; rows of long calls get fewer."""

    budget_s: float = 300.0
    """Seconds after which no further row is begun; what was left out is printed and in the file."""

    jobs: int = 0
    """Processes that compile beforehand; 0 for 3 of 4 processors (at most 12) on a GPU and none on a CPU."""

    tiny: bool = False
    """Small shapes, to see that the comparison works."""

    part: Path | None = None
    """A folder: compile what no other process has taken there, and write no results. What --jobs runs."""


def chosen_rows(arguments: Arguments) -> list[Row]:
    """The rows that the command line asks for, in the order in which to measure them.

    Raises:
        SystemExit: there are none.
    """
    known = TINY_ROWS if arguments.tiny else {"all": ROWS + ODD_ROWS, "round": ROWS, "odd": ODD_ROWS}[arguments.sizes]
    ops = sorted({row.op for row in known})
    if unknown := sorted(set(arguments.ops) - set(ops)):
        raise SystemExit(f"error: --ops {' '.join(unknown)}: expected one of {', '.join(ops)}")
    rows = [r for r in known if r.op in (arguments.ops or ops) and arguments.only in r.name]
    if not rows:
        raise SystemExit(f"error: --only {arguments.only!r}: no row has that in its name")
    return sorted(rows, key=lambda row: (row in ODD_ROWS, row.op not in FIRST_OPS))


def chosen_peers(providers: tuple[str, ...]) -> Peers:
    """All peers, after a look whether those that the command line names are there.

    Raises:
        SystemExit: one is not known, or is not installed.
    """
    peers = load_peers()
    names = {name for makers in peers.makers.values() for name in makers}
    names |= {name.split(",")[0] for name in names}
    for provider in providers:
        if provider in names:
            continue
        absent = ", ".join(peers.missing) or "none"
        families = sorted({name.split(",")[0] for name in names} - {OURS}, key=str.casefold)
        there = f"there are {', '.join(families)}; not installed: {absent}"
        reason = peers.missing.get(provider, peers.missing.get(provider.split(",")[0]))
        if reason is not None:
            raise SystemExit(f"error: --providers {provider}: not installed here ({reason}); {there}")
        hint = nearest(provider, [*peers.missing, *names])
        raise SystemExit(f"error: --providers {provider}: not known{hint}; {there}")
    return peers


def chosen_makers(peers: Peers, row: Row, providers: tuple[str, ...]) -> dict[str, Maker]:
    """The row's providers, ours first. Ours inside torch.compile is timed on the rows that say so."""
    makers = peers.makers[row.op]
    compiled = f"{OURS}, compiled"
    return {
        name: maker
        for name, maker in makers.items()
        if (name != compiled or row.compiled)
        and (is_ours(name) or not providers or name in providers or name.split(",")[0] in providers)
    }


def _tasks(rows: list[Row], peers: Peers, arguments: Arguments) -> list[compile_ahead.Task]:
    return compile_ahead.tasks_of([(row, chosen_makers(peers, row, arguments.providers)) for row in rows])


def compile_all(rows: list[Row], arguments: Arguments, jobs: int) -> tuple[Peers, dict[str, float]]:
    """Compiles with several processes, for a part of the budget, while this one imports the peers.

    Returns:
        the peers, and what was compiled -> seconds.
    """
    limit = arguments.budget_s * COMPILE_SHARE
    deadline = time.monotonic() + limit
    options = ["--only", arguments.only, "--budget-s", str(limit), "--sizes", arguments.sizes]
    options += ["--tiny"] * arguments.tiny
    for option, values in (("--ops", arguments.ops), ("--providers", arguments.providers)):
        options += [option, *values] if values else []
    with tempfile.TemporaryDirectory() as folder:
        running = compile_ahead.start(options, Path(folder), jobs)
        try:
            peers = chosen_peers(arguments.providers)
        except SystemExit:
            compile_ahead.finish(running, time.monotonic())
            raise
        importlib.import_module("torch._inductor.compile_fx")  # seconds that the first compilation would take
        compile_ahead.finish(running, deadline)
        tasks = _tasks(rows, peers, arguments)
        seconds = compile_ahead.compiled(tasks, Path(folder))
    slowest = "; ".join(f"{name} {s:.0f} s" for name, s in list(seconds.items())[:SHOWN])
    print(
        f"compiled beforehand: {len(seconds)} of {len(tasks)} in {time.monotonic() + limit - deadline:.0f} s: {slowest}"
    )
    return peers, seconds


def summary(row: dict[str, Any]) -> str:
    """One line: ours, the best peer, its time over ours; then a line for each that failed."""
    mine, best = ours(row), best_peer(row)
    head = f"{row['op']} {row['label']} {row['direction']}:"
    bad = [f"{n} {m['status']}" for n, m in row["providers"].items() if m["status"].startswith(("failed", "wrong"))]
    if mine is not None:
        speed = f"{mine['tflops']:,.0f} TFLOP/s" if mine["tflops"] else f"{mine['gb_s']:,.0f} GB/s"
        share = f", {mine['share']:.0%} of the ceiling" if mine["share"] else ""
        graph = f", {milliseconds(mine['graph_ms'])} in a graph" if mine["graph_ms"] else ""
        goal = f", goal {goal}" if (goal := goal_of(row)) else ""
        head += f" {milliseconds(mine['ms'])} ms ({speed}{share}{graph}{goal})"
    if (cost := deterministic_cost(row)) is not None and row["direction"] == BACKWARD:
        head += f" | deterministic {milliseconds(row['providers'][DETERMINISTIC]['ms'])} ms, {cost:.2f}x the time"
    if best:
        head += f" | best peer {best} {milliseconds(row['providers'][best]['ms'])} ms"
        head += f", {speed_ratio(row):.2f}x" if mine else ""
    return "\n    ".join([head, *bad])


def _record(result: Result) -> dict[str, Any]:
    """The result as the file has it, errors in plain text."""
    row = dataclasses.asdict(result)
    for measured in row["providers"].values():
        measured |= {key: plain(measured[key]) for key in ("status", "graph_note")}
    return row


def _lost(device: torch.device) -> str:
    """Why nothing can be measured in this process any more: a kernel broke the CUDA context. "" if all is well."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        return describe(error)
    return ""


def _slowest(row_seconds: dict[str, dict[str, float]]) -> str:
    """The rows that took longest, and what of them did."""
    rows = sorted(row_seconds.items(), key=lambda pair: -sum(pair[1].values()))[:SHOWN]
    return "; ".join(
        f"{name} {sum(parts.values()):.0f} s ({', '.join(f'{p} {s:.1f}' for p, s in parts.items() if s >= 1)})"
        for name, parts in rows
    )


def compare(
    arguments: Arguments,
    rows: list[Row],
    device: torch.device,
    dtype: torch.dtype,
    started: float,
    peers: Peers | None = None,
    compiled: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Measures the rows and writes the file after each. Gives what was written.

    Args:
        arguments: of the command line.
        rows: in the order in which to measure them; the file has them in that of rows.py.
        device: where.
        dtype: of inputs and, but for an optimizer's fp32 ones, parameters.
        started: time.monotonic() at the begin of the budget.
        peers: if they are loaded already.
        compiled: what was compiled beforehand -> seconds, for the file.
    """
    peers = peers or chosen_peers(arguments.providers)
    on_gpu = device.type == "cuda"
    ceilings = Ceilings(copy_bandwidth(device), matmul_rate(device)) if on_gpu else Ceilings()
    facts: dict[str, Any] = {
        "environment": environment(device),
        "peers": peers.versions,
        "missing": peers.missing,
        "shows_gpu": on_gpu and not arguments.tiny,
        "ceilings": {"copy_gb_s": ceilings.copy / 1e9, "matmul_tflops": ceilings.matmul / 1e12},
        "card_at_start": card_state() if on_gpu else "",
        "rows": [],
        "left_out": [],
        "compile_seconds": compiled or {},
        "row_seconds": {},
    }
    print(f"{facts['environment']['card']}, commit {facts['environment']['commit']}; ceilings {facts['ceilings']}")
    for name, reason in peers.missing.items():
        print(f"not compared: {name} ({reason})")
    if not facts["shows_gpu"]:
        print("Small shapes, or no GPU: these times show nothing about GPUs.")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    looked = started
    place = {(row.op, row.label): i for i, row in enumerate(ROWS + ODD_ROWS)}
    for i, row in enumerate(rows):
        lost = ""
        if time.monotonic() - started > arguments.budget_s:
            facts["left_out"].append(row.name)
        else:
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(ROW_LIMIT_S, exit=True, file=sys.__stderr__ or sys.stderr)
            run = RowRun(row, dtype, device, ceilings, arguments.rounds)
            for result in run.run(chosen_makers(peers, row, arguments.providers)):
                facts["rows"].append(_record(result))
                print(summary(facts["rows"][-1]), flush=True)
            facts["rows"].sort(key=lambda r: place.get((r["op"], r["label"]), 0))
            facts["row_seconds"][row.name] = {part: round(s, 2) for part, s in run.seconds.items()}
            del run
            lost = _lost(device)
            faulthandler.cancel_dump_traceback_later()
            if not lost:
                release(device)
        if lost:
            facts["left_out"] += [r.name for r in rows[i + 1 :]]
            facts["card_lost"] = f"{row.name}: {lost}"
        elif on_gpu and (row is rows[-1] or time.monotonic() - looked > LOOK_S):
            facts["card_at_end"], looked = card_state(), time.monotonic()
        facts["seconds"] = round(time.monotonic() - started, 1)
        arguments.output.write_text(json.dumps(facts, indent=1) + "\n")
        if lost:
            raise SystemExit(
                f"error: the GPU stopped at {row.name} ({lost}): what {arguments.output} says of it is void"
            )
    if facts["left_out"]:
        print(f"left out, no time: {'; '.join(facts['left_out'])}")
    if facts["row_seconds"]:
        print(f"took longest: {_slowest(facts['row_seconds'])}")
    print(f"wrote {arguments.output} after {facts['seconds']} s")
    return facts


def main() -> None:
    """Compares the kernels that the command line asks for."""
    started = time.monotonic()
    arguments = tyro.cli(Arguments)
    rows = chosen_rows(arguments)
    configure_compile()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type != "cuda" and not arguments.tiny:
        raise SystemExit("error: there is no CUDA device: run with --tiny, which shows nothing about GPUs")
    if arguments.part is not None:
        tasks = _tasks(rows, chosen_peers(arguments.providers), arguments)
        compile_ahead.compile_tasks(tasks, arguments.part, arguments.budget_s, device, dtype)
        return
    jobs = arguments.jobs or (min(12, (os.cpu_count() or 2) * 3 // 4) if device.type == "cuda" else 0)
    peers, compiled = compile_all(rows, arguments, jobs) if jobs > 1 else (chosen_peers(arguments.providers), {})
    gc.collect()
    gc.freeze()  # the collection after each row need not look at what was imported
    compare(arguments, rows, device, dtype, started, peers, compiled)


if __name__ == "__main__":
    main()
