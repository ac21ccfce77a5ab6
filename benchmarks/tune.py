"""Times launch choices on this machine's card: every candidate is checked first, then timed beside the current choice.

    python benchmarks/tune.py rms_norm swiglu --output results/tune.json --budget-s 60

An op's targets are in benchmarks/tuning/OP.py. For each target the candidates of its launch function are tried: one
whose output differs from the reference, or that does not compile or launch, is a failed row. One that is right is at
once timed, briefly and interleaved with the current choice, L2 flushed, launch cost hidden. When all were tried, or the
budget ends, the best of each target are timed together for longer. The table is best first, with GB/s and what Triton
tells of registers, spills and shared memory. Nothing is changed: a better choice is written into kernels/launch/ by
hand, with the measured reason.

Candidates are tried in turns: the current choice of every target, then the first candidate of every target (the
likeliest), then the second. What the budget does not reach is the least likely of each, and is listed at the end.

On a GPU, --jobs processes compile, without launching anything, into Triton's cache on disk, in the same order; a
candidate is tried once it is there. The brief timings run beside them, which hidden launch cost and the current choice
in the same rounds make good enough to find the best ones; for the long timings the compilers have ended.

Choices run in a process of their own (tune_measure.py). A kernel that hangs, breaks the CUDA context or ends the
process is a failed row, and a new process goes on with the rest; a target that lost one is tried after the others.
Every result is printed and written to --output as it comes, so that a run that is killed leaves what it had timed; at
SIGTERM or Ctrl-C the tables are printed too.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if importlib.util.find_spec("fuselm") is None:  # run as a script in a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import tyro
from rich.console import Console
from rich.table import Table
from timing import Timing, environment
from tune_compile import CompileJobs, compile_part, turns_of
from tune_measure import CURRENT, SET_UP, LostError, NoTimeError, Row, StartError, Worker, serve
from tuning.base import Target
from watched import StoppedError, stopped_by_signals

SCRIPT = __file__  # what the processes that compile and measure run
FINALISTS = 6
TIMED_S = 1.0  # of the budget that is kept for timing a target's best choices, ...
TIMED_SHARE = 0.3  # ... but not more than this part of it for all of them
NO_TIME = "left out: the time budget is used up"


@dataclass(frozen=True)
class Arguments:
    """Try launch choices on this card."""

    ops: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of files in benchmarks/tuning/, for example rms_norm; all of them by default."""

    output: Path | None = None
    """JSON file for the results, written anew after every choice."""

    budget_s: float = 600.0
    """Seconds for everything, compiling included; what was left out is printed and in the JSON."""

    silent_s: float = 20.0
    """Seconds after which a kernel that was launched counts as hung: its process is killed, and a new one goes on.
    Compiling does not count."""

    rounds: int = 30
    """Timed rounds of the best candidates; each gets a third of it first."""

    only: str = ""
    """Targets whose name contains this, or one of several texts with commas between them."""

    jobs: int = 0
    """Processes that compile; 0 for all processors but two (at most 14) on a GPU and none on a CPU."""

    part: tuple[int, int] | None = None
    """Compile choices i, i + n, ... and measure nothing: what the processes of --jobs do."""

    done: Path | None = None
    """With --part: folder where a file for each compiled choice says that it is there."""

    measure: bool = False
    """Measure what is asked for on stdin: what the measuring process does."""


@dataclass
class Result:
    """A target's rows, in the end best first, then the failed and those left out.

    Attributes:
        note: why its best choices were not timed for longer, or "".
        lost: measuring processes that its choices cost.
    """

    name: str
    attribute: str
    bytes_moved: int
    rows: list[Row] = field(default_factory=list)
    note: str = ""
    lost: int = 0

    def right(self) -> dict[str, Row]:
        """choice -> row of those that gave the right output and were timed, best first."""
        rows = [row for row in self.rows if row.status == "ok" and row.timing]
        ratios = all(row.of_current for row in rows)  # which the card's drift between the rounds leaves alone
        return {row.choice: row for row in sorted(rows, key=lambda row: _speed(row, ratios))}

    def close(self, names: Sequence[str], why: str) -> None:
        """Sorts the rows and adds those of `names` that were not tried."""
        right = self.right()
        self.rows = [*right.values(), *(row for row in self.rows if row.choice not in right)]
        tried = {row.choice for row in self.rows}
        self.rows += [Row(name, why) for name in names if name not in tried]


def _speed(row: Row, ratios: bool) -> float:
    return (row.of_current if ratios else row.timing and row.timing.median_ms) or math.inf


def known_ops() -> list[str]:
    """Ops that have targets: the files of benchmarks/tuning/."""
    return sorted(path.stem for path in (Path(__file__).parent / "tuning").glob("*.py") if path.stem != "base")


def load_targets(op: str) -> list[Target]:
    """TARGETS of benchmarks/tuning/<op>.py.

    Raises:
        SystemExit: there is no such file; the message lists those there are.
    """
    if op not in known_ops():
        raise SystemExit(f"error: op {op!r} has no targets: expected one of {', '.join(known_ops())}")
    targets = list(importlib.import_module(f"tuning.{op}").TARGETS)
    for target in targets:  # makes the ops that a target calls
        importlib.import_module(target.attribute.rpartition(".")[0])
    return targets


class Tuning:
    """Tries the targets' choices in turns, then times each target's best.

    Args:
        targets: what to tune.
        ask: (request, deadline) -> answer, as Worker.ask.
        rounds: timed rounds of the finalists.
        deadline: time.monotonic() at which all should be done.
        tried: gets each result and the row that has come to it.
        report: gets each target's result when nothing more will come to it.

    Attributes:
        results: one a target, in their order.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        ask: Callable[[dict[str, Any], float], dict[str, Any]],
        rounds: int,
        deadline: float,
        tried: Callable[[Result, Row], None],
        report: Callable[[Result], None],
    ) -> None:
        self.results = [Result(target.name, target.attribute, target.bytes_moved) for target in targets]
        self._names = [[CURRENT, *map(str, target.candidates)] for target in targets]
        self._ask, self._rounds, self._deadline, self._tried, self._report = ask, rounds, deadline, tried, report
        self._waiting = turns_of(targets)
        self._open = list(range(len(targets)))
        self._broken: set[int] = set()

    def run(
        self,
        compiled: Callable[[int, int], bool] = lambda turn, index: True,
        stop_compiling: Callable[[], None] = lambda: None,
    ) -> None:
        """Does all of it.

        Args:
            compiled: whether another process has compiled a target's choice of a turn.
            stop_compiling: called before the long timings.

        Raises:
            StartError: nothing can be measured any more. `close` reports what there is.
        """
        left = self._deadline - time.monotonic()
        no_more = self._deadline - min(TIMED_SHARE * max(left, 0.0), TIMED_S * len(self.results))
        while self._waiting and time.monotonic() < no_more:
            ready = [place for place in self._waiting if compiled(*place)]
            if not ready:
                time.sleep(0.01)
                continue
            turn, index = min(ready, key=lambda place: self.results[place[1]].lost)
            self._waiting.remove((turn, index))
            self._attempt(turn, index)
        stop_compiling()
        while self._open:
            self._finals(self._open[0])
            self._close(self._open[0], NO_TIME)

    def close(self, why: str) -> None:
        """Reports the targets that were not reported yet.

        Args:
            why: status of the choices that were not tried.
        """
        for index in list(self._open):
            self._close(index, why)

    def _close(self, index: int, why: str) -> None:
        self._open.remove(index)
        self.results[index].close([] if index in self._broken else self._names[index], why)
        self._report(self.results[index])

    def _attempt(self, turn: int, index: int) -> None:
        result, choice = self.results[index], self._names[index][turn]
        beside = turn > 0 and CURRENT in result.right()
        request = {"do": "attempt", "index": index, "turn": turn, "beside": beside, "rounds": max(self._rounds // 3, 3)}
        try:
            answer = self._ask(request, self._deadline)
        except NoTimeError as error:  # perhaps it hangs: not the same as one that was never reached
            answer = {"row": {"choice": choice, "status": f"left out: {error}"}, "broken": False}
        except LostError as error:
            answer = {"row": {"choice": choice, "status": f"failed: {error}"}, "broken": error.step == SET_UP}
            result.lost += 1
        else:
            result.lost += answer["lost"]
        row = Row(**answer["row"])
        row.timing = Timing(**answer["row"]["timing"]) if row.timing else None
        result.rows.append(row)
        if answer["broken"]:
            self._broken.add(index)
            self._waiting = [place for place in self._waiting if place[1] != index]
        self._tried(result, row)

    def _finals(self, index: int) -> None:
        """Times the best together, the current choice among them; where that fails, the brief timings stand."""
        result = self.results[index]
        right = result.right()
        names = [name for i, name in enumerate(right) if i < FINALISTS or name == CURRENT]
        if not names:
            return
        if time.monotonic() > self._deadline:
            result.note = "no time for longer timings"
            return
        choices = {name: self._names[index].index(name) for name in names}
        try:
            answer = self._ask(
                {"do": "finals", "index": index, "choices": choices, "rounds": self._rounds}, self._deadline
            )
        except (LostError, NoTimeError) as error:
            result.note = f"no longer timings: {error}"
            return
        result.note = f"no longer timings: {answer['error']}" if answer["error"] else ""
        timings = {name: Timing(**timing) for name, timing in answer["timings"].items()}
        for name in timings:
            right[name].timed(timings, self._rounds)


def as_json(result: Result) -> dict[str, Any]:
    """The result as JSON, with GB/s."""
    facts = dataclasses.asdict(result)
    for row in facts["rows"]:
        ms = row["timing"] and row["timing"]["median_ms"]
        row["gb_s"] = result.bytes_moved / ms / 1e6 if ms and result.bytes_moved else None
    return facts


def show(result: Result, console: Console) -> None:
    """Prints the table of one target."""
    table = Table(title=f"{result.name}  ({result.attribute})", title_justify="left", caption=result.note or None)
    for column in ("choice", "ms", "20-80 %", "of current", "GB/s", "registers", "spills", "shared", "status"):
        table.add_column(column, overflow="fold")
    for row, facts in zip(result.rows, as_json(result)["rows"], strict=True):
        timing = row.timing
        numbers = (
            ("", "") if timing is None else (f"{timing.median_ms:.4f}", f"{timing.low_ms:.4f}-{timing.high_ms:.4f}")
        )
        ratio = "" if row.of_current is None else f"{row.of_current:.3f}"
        speed = "" if facts["gb_s"] is None else f"{facts['gb_s']:,.0f}"
        compiled = ("" if v is None else str(v) for v in (row.registers, row.spills, row.shared))
        table.add_row(row.choice, *numbers, ratio, speed, *compiled, row.status)
    console.print(table)


class Record:
    """The JSON file: whole after every write, whenever this process ends."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self._path, self._facts = path, facts

    def write(self, state: str, results: Sequence[Result]) -> None:
        """Writes all results; `state` says whether more will come."""
        if self._path is None:
            return
        facts = self._facts | {"state": state, "targets": [as_json(result) for result in results]}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_name(f"{self._path.name}.tmp")
        beside.write_text(json.dumps(facts, indent=1) + "\n")
        beside.replace(self._path)


def _line(result: Result, row: Row, seconds: float) -> str:
    """A choice's result in one line."""
    ratio = "" if row.of_current is None else f", {row.of_current:.3f} of current"
    outcome = row.status if row.timing is None else f"{row.timing.median_ms:.4f} ms{ratio}"
    return f"{seconds:6.1f} s  {result.name}  {row.choice}: {outcome}"


def main() -> None:
    """Tunes the ops that the command line names."""
    arguments = tyro.cli(Arguments)
    started = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ops = arguments.ops or known_ops()
    wanted = arguments.only.split(",")
    targets = [t for op in ops for t in load_targets(op) if any(text in t.name for text in wanted)]
    if not targets:
        raise SystemExit(f"error: --only {arguments.only!r}: no target of {', '.join(ops)} has that in its name")
    if arguments.silent_s <= 0:
        raise SystemExit(f"error: --silent-s {arguments.silent_s:g}: it must be above 0")
    if arguments.measure:
        serve(targets, device)
    elif arguments.part is not None:
        compile_part(targets, device, arguments.part, started + arguments.budget_s, arguments.done)
    else:
        with stopped_by_signals():
            _tune(arguments, targets, device, started)


def _tune(arguments: Arguments, targets: Sequence[Target], device: torch.device, started: float) -> None:
    """Starts the processes, and prints and writes what comes of them."""
    jobs = arguments.jobs or (min(14, max((os.cpu_count() or 2) - 2, 1)) if device.type == "cuda" else 0)
    command = [sys.executable, SCRIPT, *arguments.ops, "--only", arguments.only]
    compiling = CompileJobs([*command, "--budget-s", str(arguments.budget_s)], jobs) if jobs > 1 else None
    console = Console(width=None if sys.stdout.isatty() else 200)
    facts = {"environment": environment(device)}
    console.print(f"{facts['environment']['card']}; {len(targets)} targets, {jobs} processes compile")
    if device.type != "cuda":
        console.print("There is no GPU here: these times show nothing about GPUs.")
    record = Record(arguments.output, facts)
    worker = Worker([*command, "--measure"], arguments.silent_s)

    def tried(result: Result, row: Row) -> None:
        print(_line(result, row, time.monotonic() - started), flush=True)
        record.write("running", tuning.results)

    def report(result: Result) -> None:
        show(result, console)
        sys.stdout.flush()
        record.write("running", tuning.results)

    deadline = started + arguments.budget_s
    tuning = Tuning(targets, worker.ask, arguments.rounds, deadline, tried, report)
    state, code = "complete", 0
    try:
        if compiling is None:
            tuning.run()
        else:
            tuning.run(compiling.compiled, compiling.stop)
    except StoppedError as stop:
        state, code = str(stop), 128 + stop.signum
    except StartError as error:
        state, code = str(error), 1
    finally:
        worker.end()
        if compiling is not None:
            compiling.stop()
    tuning.close(f"left out: {state}")
    record.write(state, tuning.results)
    for result in tuning.results:
        missing = [row.choice for row in result.rows if row.status.startswith("left out")]
        if missing:
            print(f"left out: {result.name}: {', '.join(missing)}")
    if arguments.output is not None:
        print(f"wrote {arguments.output}")
    if code:
        print(f"error: {state}", flush=True)
        raise SystemExit(code)


if __name__ == "__main__":
    main()
