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

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if importlib.util.find_spec("fuselm") is None:  # run as a script in a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import tyro
from expected import run_call
from measure import Ceilings, RowRun, configure_compile, release
from peers.base import DETERMINISTIC, OURS, Maker, is_ours
from peers.registry import Peers, load_peers
from report_kernels import best_peer, deterministic_cost, milliseconds, ours, speed_ratio
from rows import BACKWARD, ODD_ROWS, ROWS, TINY_ROWS, Row, make_inputs, make_upstream
from timing import card_state, copy_bandwidth, describe, environment, matmul_rate

LOOK_S = 30.0  # between looks at the card's state, which nvidia-smi takes its time for
NOT_COMPILED = ("eager", "torch foreach", "torch fused")  # what processes of --jobs need not run


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

    budget_s: float = 240.0
    """Seconds after which no further row is begun; what was left out is printed and in the file."""

    jobs: int = 0
    """Processes that compile beforehand; 0 for half the processors (at most 8) on a GPU and none on a CPU."""

    tiny: bool = False
    """Small shapes, to see that the comparison works."""

    part: tuple[int, int] | None = None
    """Run rows i, i + n, ... once and write nothing: what the processes of --jobs do."""


def chosen_rows(arguments: Arguments) -> list[Row]:
    """The rows that the command line asks for.

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
    return rows


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


def compile_part(rows: list[Row], arguments: Arguments, device: torch.device, dtype: torch.dtype) -> None:
    """Runs every n-th row's providers once, from the i-th, so that the caches on disk have what they compile; what
    fails here fails again where it counts."""
    assert arguments.part is not None
    index, of = arguments.part
    started, peers = time.monotonic(), load_peers()
    for row in [r for r in rows if r.op != "adamw"][index::of]:
        with contextlib.suppress(Exception):
            inputs = make_inputs(row, dtype, device)
            upstream = make_upstream(row, inputs)
            for name, maker in chosen_makers(peers, row, arguments.providers).items():
                if name not in NOT_COMPILED and time.monotonic() - started < arguments.budget_s:
                    with contextlib.suppress(Exception):
                        call = maker(inputs)
                        run_call(call, upstream)
                        with torch.no_grad():  # torch.compile compiles this apart
                            call.function()
            del inputs, upstream
        release(device)


def compile_ahead(arguments: Arguments, jobs: int) -> None:
    """Starts the processes that compile, and waits for them for at most a third of the budget."""
    limit = arguments.budget_s / 3
    command = [sys.executable, __file__, "--only", arguments.only, "--budget-s", str(limit)]
    command += ["--sizes", arguments.sizes] + ["--tiny"] * arguments.tiny
    for option, values in (("--ops", arguments.ops), ("--providers", arguments.providers)):
        command += [option, *values] if values else []
    null = subprocess.DEVNULL
    running = [subprocess.Popen([*command, "--part", str(i), str(jobs)], stdout=null, stderr=null) for i in range(jobs)]
    deadline = time.monotonic() + limit
    for process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def summary(row: dict[str, Any]) -> str:
    """One line: ours, the best peer, its time over ours; then a line for each that failed."""
    mine, best = ours(row), best_peer(row)
    head = f"{row['op']} {row['label']} {row['direction']}:"
    bad = [f"{n} {m['status']}" for n, m in row["providers"].items() if m["status"].startswith(("failed", "wrong"))]
    if mine is not None:
        speed = f"{mine['tflops']:,.0f} TFLOP/s" if mine["tflops"] else f"{mine['gb_s']:,.0f} GB/s"
        share = f", {mine['share']:.0%} of the ceiling" if mine["share"] else ""
        graph = f", {milliseconds(mine['graph_ms'])} in a graph" if mine["graph_ms"] else ""
        goal = row["goal_ms"]
        goal = f", goal {goal:g} {'met' if mine['ms'] <= goal else 'MISSED'}" if goal else ""
        head += f" {milliseconds(mine['ms'])} ms ({speed}{share}{graph}{goal})"
    if (cost := deterministic_cost(row)) is not None and row["direction"] == BACKWARD:
        head += f" | deterministic {milliseconds(row['providers'][DETERMINISTIC]['ms'])} ms, {cost:.2f}x the time"
    if best:
        head += f" | best peer {best} {milliseconds(row['providers'][best]['ms'])} ms"
        head += f", {speed_ratio(row):.2f}x" if mine else ""
    return "\n    ".join([head, *bad])


def _lost(device: torch.device) -> str:
    """Why nothing can be measured in this process any more: a kernel broke the CUDA context. "" if all is well."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        return describe(error)
    return ""


def compare(
    arguments: Arguments, rows: list[Row], device: torch.device, dtype: torch.dtype, started: float
) -> dict[str, Any]:
    """Measures the rows and writes the file after each. Gives what was written."""
    peers = load_peers()
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
    }
    print(f"{facts['environment']['card']}, commit {facts['environment']['commit']}; ceilings {facts['ceilings']}")
    for name, reason in peers.missing.items():
        print(f"not compared: {name} ({reason})")
    if not facts["shows_gpu"]:
        print("Small shapes, or no GPU: these times show nothing about GPUs.")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    looked = started
    for i, row in enumerate(rows):
        lost = ""
        if time.monotonic() - started > arguments.budget_s:
            facts["left_out"].append(row.name)
        else:
            run = RowRun(row, dtype, device, ceilings, arguments.rounds)
            for result in run.run(chosen_makers(peers, row, arguments.providers)):
                facts["rows"].append(dataclasses.asdict(result))
                print(summary(facts["rows"][-1]), flush=True)
            del run
            lost = _lost(device)
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
        compile_part(rows, arguments, device, dtype)
        return
    jobs = arguments.jobs or (min(8, (os.cpu_count() or 2) // 2) if device.type == "cuda" else 0)
    if jobs > 1:
        compile_ahead(arguments, min(jobs, len(rows)))
        print(f"compiled beforehand in {time.monotonic() - started:.0f} s")
    compare(arguments, rows, device, dtype, started)


if __name__ == "__main__":
    main()
