"""Times launch choices on this machine's card: every candidate is checked first, then all are timed in turn.

    python benchmarks/tune.py rms_norm swiglu --output results/tune.json --budget-s 60

An op's targets are in benchmarks/tuning/OP.py. For each target the candidates of its launch function are tried: one
whose output differs from the reference, or that does not compile or launch, is a failed row. The rest are timed
interleaved with the current choice, L2 flushed, launch cost hidden: all of them briefly, then the best ones longer.
The table is best first, with GB/s and what Triton tells of registers, spills and shared memory. Nothing is changed: a
better choice is written into kernels/launch/ by hand, with the measured reason.

Candidates are tried in turns: the current choice of every target, then the first candidate of every target (the
likeliest), then the second. What the budget does not reach is the least likely of each, and is listed at the end.

On a GPU, --jobs processes compile, without launching anything, into Triton's cache on disk, in the same order; the
measuring process tries each candidate once it is there, and times only when they have ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

if importlib.util.find_spec("fuselm") is None:  # run as a script in a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import tyro
from rich.console import Console
from rich.table import Table
from timing import Timing, describe, environment, interleaved, tensors_of
from tune_compile import CompileJobs, called, compile_part, turns_of
from tuning.base import Target

from fuselm.kernels._triton import HAVE_TRITON, INTERPRET, triton
from fuselm.kernels.numerics import UNIT_ROUNDOFF

CURRENT = "current"
ROUNDINGS = 4.0  # relative error that a candidate may have, in roundings of its output's dtype
FP32_ERROR = 1e-5  # and at least this: fp32 sums in another order differ by more than a rounding
FINALISTS = 6
TIMED_S = 1.0  # of the budget that is kept for timing a target, ...
TIMED_SHARE = 0.3  # ... but not more than this part of it for all of them
NO_TIME = "left out: the time budget is used up"
CHUNK = 2**26  # elements compared at a time in fp64


@dataclass(frozen=True)
class Arguments:
    """Try launch choices on this card."""

    ops: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of files in benchmarks/tuning/, for example rms_norm; all of them by default."""

    output: Path | None = None
    """JSON file for the results, written after every target."""

    budget_s: float = 600.0
    """Seconds for everything, compiling included; what was left out is printed and in the JSON."""

    rounds: int = 30
    """Timed rounds of the best candidates; all of them get a third of it first."""

    only: str = ""
    """Targets whose name contains this, or one of several texts with commas between them."""

    jobs: int = 0
    """Processes that compile; 0 for all processors but two (at most 14) on a GPU and none on a CPU."""

    part: tuple[int, int] | None = None
    """Compile choices i, i + n, ... and measure nothing: what the processes of --jobs do."""

    done: Path | None = None
    """With --part: folder where a file for each compiled choice says that it is there."""


@dataclass
class Row:
    """One candidate's result.

    Attributes:
        choice: the launch value as text; "current" for what the library takes now.
        status: "ok", "failed: why" or "left out: why".
        timing: milliseconds, None where it was not timed.
        registers, spills, shared: largest over the kernels that a run launched: registers a thread, spilled 32-bit
            registers a thread, bytes of shared memory a program; None where Triton does not tell.
    """

    choice: str
    status: str = "ok"
    timing: Timing | None = None
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None


@dataclass
class Result:
    """A target's rows, best first, then the failed and those left out."""

    name: str
    attribute: str
    bytes_moved: int
    rows: list[Row] = field(default_factory=list)


class CardLostError(RuntimeError):
    """A kernel broke the CUDA context: nothing can be measured in this process any more."""


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


@contextlib.contextmanager
def launched_kernels() -> Iterator[list[Any]]:
    """Collects the compiled Triton kernels that are launched within this context."""
    kernels: list[Any] = []
    if not HAVE_TRITON or INTERPRET:
        yield kernels
        return
    jit_function: Any = triton.runtime.jit.JITFunction
    run = jit_function.run

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        kernels.append(kernel)
        return kernel

    jit_function.run = recording
    try:
        yield kernels
    finally:
        jit_function.run = run


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """‖actual - exact‖ / ‖exact‖ in fp64, a piece at a time; infinite where one is not finite and the other differs."""
    if actual.shape != exact.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)}, reference {tuple(exact.shape)}")
    difference = magnitude = 0.0
    for a, e in zip(actual.reshape(-1).split(CHUNK), exact.reshape(-1).split(CHUNK), strict=True):
        a, e = a.double(), e.double()
        apart = torch.where(a == e, 0.0, a - e)
        if not bool(apart.isfinite().all()):
            return math.inf
        difference += apart.square().sum().item()
        magnitude += torch.where(e.isfinite(), e, 0.0).square().sum().item()
    return math.sqrt(difference) / (math.sqrt(magnitude) or 1.0)


def check(outputs: Any, exact: list[torch.Tensor | None]) -> None:
    """Raises ValueError where an output is further from the reference than its dtype's roundings allow."""
    actual = tensors_of(outputs)
    if len(actual) != len(exact):
        raise ValueError(f"{len(actual)} outputs, the reference has {len(exact)}")
    for i, (a, e) in enumerate(zip(actual, exact, strict=True)):
        if a is None or e is None:
            continue
        error, limit = relative_error(a, e), max(ROUNDINGS * UNIT_ROUNDOFF.get(a.dtype, 0.0), FP32_ERROR)
        if not error <= limit:
            raise ValueError(f"output {i} is wrong: relative error {error:.2e}, allowed {limit:.2e}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def try_once(run: Callable[[], Any], exact: list[torch.Tensor | None] | None, row: Row, device: torch.device) -> None:
    """Runs a candidate once and fills `row`: what Triton tells of its kernels, and whether the output is right.

    Raises:
        CardLostError: the run left the device unusable.
    """
    try:
        with launched_kernels() as kernels:
            outputs = run()
        _synchronize(device)
        for name, source in (("registers", "n_regs"), ("spills", "n_spills")):
            values = [getattr(k, source, None) for k in kernels]
            setattr(row, name, max((v for v in values if v is not None), default=None))
        row.shared = max((k.metadata.shared for k in kernels if k is not None), default=None)
        if exact is not None:
            check(outputs, exact)
    except Exception as error:  # whatever a candidate raises is its result
        row.status = f"failed: {describe(error)}"
        try:
            _synchronize(device)
        except RuntimeError as lost:
            raise CardLostError(f"{row.choice}: {lost}") from lost


class Trial:
    """A target and what has been tried of it.

    Attributes:
        result: its rows so far.
        turns: choices to try: the current one, then the candidates.
    """

    def __init__(self, target: Target, device: torch.device) -> None:
        self.result = Result(target.name, target.attribute, target.bytes_moved)
        self.turns = 1 + len(target.candidates)
        self._target, self._device = target, device
        self._made: tuple[Callable[[], Any], list[torch.Tensor | None]] | None = None
        self._broken = False

    def release(self) -> None:
        """Lets go of inputs and reference; they are made anew when they are needed."""
        self._made = None

    def _make(self) -> tuple[Callable[[], Any], list[torch.Tensor | None]]:
        if self._made is None:
            run, reference = self._target.make(self._device)
            self._made = run, [None if e is None else e.detach() for e in tensors_of(reference())]
        return self._made

    def _call(self, choice: str) -> Callable[[], Any]:
        run = self._make()[0]
        if choice == CURRENT:
            return run
        candidate = next(c for c in self._target.candidates if str(c) == choice)
        return called(run, self._target.attribute, candidate)

    def attempt(self, turn: int) -> None:
        """Runs and checks the current choice (turn 0) or a candidate.

        Raises:
            CardLostError: it left the device unusable.
        """
        if turn >= self.turns or self._broken:
            return
        row = Row(CURRENT if turn == 0 else str(self._target.candidates[turn - 1]))
        self.result.rows.append(row)
        try:
            call = self._call(row.choice)
            exact = self._make()[1]
        except Exception as error:  # a target that cannot be set up is a failed row, and the others get their turn
            row.status, self._broken = f"failed: {describe(error)}", True
            return
        try_once(call, exact, row, self._device)

    def measure(self, rounds: int, deadline: float) -> None:
        """Times what was right, the best ones longer; sorts the rows and adds those that were left out."""
        rows = {row.choice: row for row in self.result.rows if row.status == "ok"}
        for names, repeats in (_all, max(rounds // 3, 3)), (_finalists, rounds):
            if time.monotonic() > deadline:
                for row in rows.values():
                    row.status = row.status if row.timing else NO_TIME
                break
            calls = {name: self._call(name) for name in names(rows)}
            timings = interleaved(calls, self._device, repeats, hide_launch=True)
            for name, timing in timings.items():
                rows[name].timing = timing
        self.result.rows.sort(key=lambda row: (row.status != "ok", row.timing.median_ms if row.timing else math.inf))
        if not self._broken:
            tried = {row.choice for row in self.result.rows}
            names = [CURRENT, *map(str, self._target.candidates)]
            self.result.rows += [Row(name, NO_TIME) for name in names if name not in tried]


def _make_room(trials: list[Trial], device: torch.device) -> None:
    """Lets go of all inputs where less than half of the device's memory is left."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) < total / 2:
            for trial in trials:
                trial.release()
            torch.cuda.empty_cache()


def tune(
    targets: list[Target],
    device: torch.device,
    rounds: int,
    deadline: float,
    report: Callable[[Result], None],
    compiled: Callable[[int, int], bool] = lambda turn, index: True,
    stop_compiling: Callable[[], None] = lambda: None,
) -> None:
    """Tries the targets' candidates in turns, then times each target's.

    Args:
        targets: what to tune.
        device: where.
        rounds: timed rounds of the finalists.
        deadline: time.monotonic() at which all should be done.
        report: gets each target's result; also when the card is lost on the way.
        compiled: whether another process has compiled a target's choice of a turn.
        stop_compiling: called before anything is timed.

    Raises:
        CardLostError: a candidate left the device unusable.
    """
    trials = [Trial(target, device) for target in targets]
    left = deadline - time.monotonic()
    no_more = deadline - min(TIMED_SHARE * max(left, 0.0), TIMED_S * len(targets))
    waiting = turns_of(targets)
    try:
        while waiting and time.monotonic() < no_more:
            place = next((k for k, place in enumerate(waiting) if compiled(*place)), None)
            if place is None:
                time.sleep(0.01)
                continue
            turn, index = waiting.pop(place)
            trials[index].attempt(turn)
            _make_room(trials, device)
        stop_compiling()
    except CardLostError:
        for trial in trials:
            report(trial.result)
        raise
    for trial in trials:
        try:
            trial.measure(rounds, deadline)
        except Exception as error:  # for example no memory: the other targets are still measured
            trial.result.rows.append(Row(CURRENT, f"failed: {describe(error)}"))
        report(trial.result)
        trial.release()


def _all(rows: dict[str, Row]) -> list[str]:
    return list(rows)


def _finalists(rows: dict[str, Row]) -> list[str]:
    """The best of the first pass, and the current choice beside them."""
    ordered = sorted(rows, key=lambda name: t.median_ms if (t := rows[name].timing) else math.inf)
    return ordered[:FINALISTS] + [CURRENT] * (CURRENT in ordered[FINALISTS:])


def as_json(result: Result) -> dict[str, Any]:
    """The result as JSON, with GB/s."""
    facts = dataclasses.asdict(result)
    for row in facts["rows"]:
        ms = row["timing"] and row["timing"]["median_ms"]
        row["gb_s"] = result.bytes_moved / ms / 1e6 if ms and result.bytes_moved else None
    return facts


def show(result: Result, console: Console) -> None:
    """Prints the table of one target."""
    table = Table(title=f"{result.name}  ({result.attribute})", title_justify="left")
    for column in ("choice", "ms", "20-80 %", "GB/s", "registers", "spills", "shared", "status"):
        table.add_column(column, overflow="fold")
    for row, facts in zip(result.rows, as_json(result)["rows"], strict=True):
        timing = row.timing
        numbers = (
            ("", "") if timing is None else (f"{timing.median_ms:.4f}", f"{timing.low_ms:.4f}-{timing.high_ms:.4f}")
        )
        speed = "" if facts["gb_s"] is None else f"{facts['gb_s']:,.0f}"
        compiled = ("" if v is None else str(v) for v in (row.registers, row.spills, row.shared))
        table.add_row(row.choice, *numbers, speed, *compiled, row.status)
    console.print(table)


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
    deadline = started + arguments.budget_s
    if arguments.part is not None:
        compile_part(targets, device, arguments.part, deadline, arguments.done)
        return
    jobs = arguments.jobs or (min(14, max((os.cpu_count() or 2) - 2, 1)) if device.type == "cuda" else 0)
    command = [sys.executable, __file__, *arguments.ops, "--only", arguments.only]
    command += ["--budget-s", str(arguments.budget_s)]
    compiling = CompileJobs(command, jobs) if jobs > 1 else None
    console = Console(width=None if sys.stdout.isatty() else 200)
    facts = {"environment": environment(device), "targets": []}
    console.print(f"{facts['environment']['card']}; {len(targets)} targets, {jobs} processes compile")
    if device.type != "cuda":
        console.print("There is no GPU here: these times show nothing about GPUs.")

    def report(result: Result) -> None:
        facts["targets"].append(as_json(result))
        show(result, console)
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(facts, indent=1) + "\n")

    try:
        if compiling is None:
            tune(targets, device, arguments.rounds, deadline, report)
        else:
            tune(targets, device, arguments.rounds, deadline, report, compiling.compiled, compiling.stop)
    except CardLostError as error:
        raise SystemExit(f"error: the GPU stopped at {error}; nothing was timed") from error
    finally:
        if compiling is not None:
            compiling.stop()
    for fact in facts["targets"]:
        missing = [row["choice"] for row in fact["rows"] if row["status"] == NO_TIME]
        if missing:
            console.print(f"left out, no time: {fact['name']}: {', '.join(missing)}", markup=False)
    if arguments.output is not None:
        console.print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
