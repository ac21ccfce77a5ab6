"""Every kernel under NVIDIA's compute-sanitizer: memcheck (accesses out of bounds) and racecheck (shared memory).

    python benchmarks/sanitize.py
    python benchmarks/sanitize.py --cases attention --tools racecheck --limit-s 300

Prints a line a tool and case as soon as it is known: clean; errors, with the first of them; or why nothing can be said,
in the tool's words: it is not installed, or refuses this machine (some virtual ones let nobody debug the GPU). Each
tool runs the cases of sanitize_cases.py in one process, and in a further one from the case after one that broke it or
took too long. The kernels are compiled beforehand, without a tool and without running. Last, memcheck must find a read
out of bounds that is there on purpose. At SIGTERM or Ctrl-C the cases without a result are listed.

Exit status: 0 all clean; 1 errors, or cases that raised or took too long; 2 not checked, in whole or in part; 128 and
the signal's number where one ended it.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TextIO

import torch
import tyro
from sanitize_cases import CASES, COMPILE, CONTROL, DONE, LEFT_OUT, RAISED, START
from watched import StoppedError, Watched, stopped_by_signals

Tool = Literal["memcheck", "racecheck"]
PREFIX = "========="  # of the tool's lines
FINDING = re.compile(
    r"^(?:(?:Error|Warning): )?(?:Invalid|Misaligned|Race|Potential|Hazard|Barrier|Out-of-range|Uninit)"
)
REFUSAL = re.compile(
    r"not supported|unsupported|internal.*error|unable to|failed to|could not|insufficient|denied", re.I
)
WORKERS = 3  # processes that compile
COMPILE_SHARE = 0.4  # of the time
STOPPED = "stopped"
LAUNCH_S = 60  # that the tool waits for the program's first call of CUDA; it imports torch before
PLACES = (
    "/usr/local/cuda*/bin/compute-sanitizer",
    "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    "/opt/nvidia/*/compute-sanitizer",
    f"{sys.prefix}/lib/python*/site-packages/nvidia/*/bin/compute-sanitizer",
    f"{sys.prefix}/lib/python*/site-packages/nvidia/*/compute-sanitizer/compute-sanitizer",
)


@dataclass(frozen=True)
class Arguments:
    """Run the kernels under compute-sanitizer."""

    tools: tuple[Tool, ...] = ("memcheck", "racecheck")
    """Its tools to run, side by side."""

    cases: str = ""
    """Cases whose name contains this."""

    limit_s: float = 120.0
    """Seconds for everything; what is not reached is listed as such."""

    silent_s: float = 45.0
    """Seconds without a line from a case after which it is ended."""

    log: Path | None = None
    """Folder for all that the tools print."""

    sanitizer: str = ""
    """The program; looked for on PATH and where CUDA lies by default."""


@dataclass
class Reading:
    """What one process printed, sorted to its cases.

    Attributes:
        found: case -> the tool's lines between its begin and that of the next.
        outcome: case -> how it ended: `DONE`, or `RAISED` or `LEFT_OUT` with a reason.
        before: the tool's lines before the first case.
        refusal: the tool's words where it stops checking, "" where it does not.
        refused_in: the case in which it said so, "" before the first one.
        banner: whether the tool has said its name.
    """

    found: dict[str, list[str]] = field(default_factory=dict)
    outcome: dict[str, tuple[str, str]] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    refusal: str = ""
    refused_in: str = ""
    banner: bool = False
    _current: str | None = None

    def take(self, line: str) -> str | None:
        """Sorts one line; gives the case before where the line begins the next one."""
        line, current = line.rstrip(), self._current
        if line.startswith(f"{START} "):
            self._current = line.removeprefix(f"{START} ")
            self.found[self._current] = []
            return current
        if current is not None and line == f"{DONE} {current}":
            self.outcome[current] = (DONE, "")
        elif current is not None and (match := re.match(rf"({RAISED}|{LEFT_OUT}) {re.escape(current)}: (.*)", line)):
            self.outcome[current] = (match[1], match[2])
        elif line.startswith(PREFIX):
            words = line.removeprefix(PREFIX).strip()
            self.banner |= "COMPUTE-SANITIZER" in words
            found = any(FINDING.search(w) for w in self.found.get(current or "", []))
            if REFUSAL.search(words) and not found and not self.refusal:
                self.refusal, self.refused_in = words, current or ""
            (self.before if current is None else self.found[current]).append(words)
        return None

    def end(self) -> None:
        """There are no more lines: a tool that said nothing at all has not checked."""
        if self.found and not self.banner and not self.refusal:
            self.refusal = "it printed nothing of its own"


def verdict(case: str, reading: Reading, ended: str) -> str:
    """One case's entry of the table. `ended` says how its process ended, if not by itself."""
    lines = reading.found[case]
    findings = [i for i, words in enumerate(lines) if FINDING.search(words)]
    if findings:
        where = next((w for w in lines[findings[0] :] if w.startswith(("at ", "in "))), "")
        count = f"{len(findings)} errors: " if len(findings) > 1 else "error: "
        return f"{count}{lines[findings[0]]} {where}".strip()
    kind, reason = reading.outcome.get(case, ("", ""))
    if kind == LEFT_OUT:
        return f"not on this card: {reason}"
    if case == reading.refused_in:
        return f"refused: {reading.refusal}"
    if kind == RAISED:
        return f"raised: {reason}"
    if not kind:
        return f"failed: {ended or 'its process ended in it'}"
    return "clean"


class Processes:
    """Starts processes and reads them; `end_all` ends those that run, and lets no further one start."""

    def __init__(self) -> None:
        self._running: set[Watched] = set()
        self._lock, self._ended = threading.Lock(), False

    def lines_of(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        silent_s: float,
        limit_s: float,
        take: Callable[[str], object],
    ) -> str:
        """Runs a command until it ends, says nothing for `silent_s` or runs longer than `limit_s`.

        Args:
            command: words.
            env: its environment.
            silent_s, limit_s: seconds.
            take: gets each line, of stdout and stderr, as it comes.

        Returns:
            how it was ended: "" by itself.
        """
        with self._lock:
            if self._ended:
                return STOPPED
            process = Watched(command, env, stderr=subprocess.STDOUT, asked=False)
            self._running.add(process)
        deadline = time.monotonic() + limit_s
        try:
            while (line := process.line(min(silent_s, deadline - time.monotonic()))) is not None:
                take(line)
            process.exit_code()
            return STOPPED if self._ended else ""
        except TimeoutError:
            return "no time left" if time.monotonic() >= deadline else f"ended after {silent_s:.0f} s without a line"
        finally:
            with self._lock:
                self._running.discard(process)
            process.end()

    def end_all(self) -> None:
        """Ends all of them; whoever reads one gets `STOPPED`."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.kill()


def check(
    run: Callable[[Sequence[str], float, Callable[[str], object]], str],
    cases: Sequence[str],
    deadline: float,
    report: Callable[[str, str], None],
) -> None:
    """Runs all cases under one tool: those behind one that ended the process, or the checking, in a further process.

    Args:
        run: (cases, seconds, what takes each line) -> how it was ended, see `Processes.lines_of`.
        cases: their names, in the order of sanitize_cases.py.
        deadline: of time.monotonic.
        report: gets each case and its entry of the table, once, as soon as it is known.
    """
    left, refused = list(cases), 0

    def known(case: str, result: str) -> None:
        left.remove(case)
        report(case, result)

    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            for case in list(left):
                known(case, "not run: no time left")
            return
        reading, others = Reading(), []

        def take(line: str, reading: Reading = reading, others: list[str] = others) -> None:
            if not line.startswith(PREFIX) and line.strip():
                others.append(line.strip())
            before = reading.take(line)
            # Without the tool's name, or after a refusal, it takes the end of the process to judge its cases.
            if before is not None and reading.banner and not reading.refusal:
                known(before, verdict(before, reading, ""))

        ended = run(list(left), seconds, take)
        reading.end()
        if ended == STOPPED:
            for case in [case for case in list(reading.found)[-1:] if case in left]:
                result = verdict(case, reading, STOPPED)
                known(case, result if "error" in result else f"not run to its end: {STOPPED}")
            return
        if reading.refused_in == next(iter(reading.found), ""):
            refused += 1
        if not reading.found or (reading.refusal and (not reading.refused_in or refused > 1)):
            errors = [words for words in reading.before if words.startswith("Error")]
            words = reading.refusal or " ".join(errors) or ended or " ".join(others[-1:]) or "it printed nothing"
            for case in list(left):
                known(case, f"refused: {words}")
            return
        checked = list(reading.found)
        if reading.refused_in:
            checked = checked[: checked.index(reading.refused_in) + 1]
        for case in checked:
            if case in left:
                known(case, verdict(case, reading, ended))


def control(result: str) -> str:
    """The control's entry: errors are what it is there for."""
    return f"found, as it must be ({result})" if result.startswith("error") or " errors: " in result else result


def status(results: Mapping[tuple[str, str], str]) -> int:
    """The exit status, see the top of this file."""
    wrong = unchecked = False
    for (_, case), result in results.items():
        if case == CONTROL:
            unchecked |= not result.startswith("found")
        else:
            wrong |= not result.startswith(("clean", "refused", "not "))
            unchecked |= result.startswith(("refused", "not run"))
    return 1 if wrong else 2 if unchecked else 0


def find_sanitizer(asked: str) -> str | None:
    """The program's path."""
    if asked:
        return shutil.which(asked)
    return shutil.which("compute-sanitizer") or next((p for place in PLACES for p in sorted(glob.glob(place))), None)


def _command(names: Sequence[str]) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name("sanitize_cases.py")), *names]


def _compile(names: Sequence[str], arguments: Arguments, deadline: float, processes: Processes) -> None:
    """Compiles with a few processes, so that no compiler runs under a tool; says how far it is."""
    began = time.monotonic()
    seconds = min(arguments.limit_s * COMPILE_SHARE, deadline - began)
    names = [name for name in names if name != CONTROL]
    parts = [part for i in range(WORKERS) if (part := names[i::WORKERS])]
    done: list[str] = []
    print(f"compiling {len(names)} cases in {len(parts)} processes, for {seconds:.0f} s at most", flush=True)

    def take(line: str) -> None:
        kind = next((kind for kind in (DONE, RAISED, LEFT_OUT) if line.startswith(f"{kind} ")), None)
        if kind is not None:
            done.append(line)
            what = line.strip() if kind != DONE else line.removeprefix(f"{DONE} ").strip()
            print(f"compiled {len(done)} of {len(names)}, {time.monotonic() - began:.0f} s: {what}", flush=True)

    with ThreadPoolExecutor(WORKERS) as pool:
        _ended_with(
            processes,
            lambda: list(
                pool.map(
                    lambda part: processes.lines_of(_command([COMPILE, *part]), os.environ, seconds, seconds, take),
                    parts,
                )
            ),
        )
    if len(done) < len(names):
        print(f"{len(names) - len(done)} cases were not compiled in time, and will be under the tool", flush=True)


def _ended_with(processes: Processes, wait: Callable[[], object]) -> None:
    """Waits for threads; where a signal ends the waiting, what they wait for ends too."""
    try:
        wait()
    except BaseException:
        processes.end_all()
        raise


def sanitize(arguments: Arguments, program: str, names: Sequence[str], report: Callable[[str, str, str], None]) -> None:
    """All tools side by side; `report` gets tool, case and result as soon as it is known, from several threads.

    Raises:
        StoppedError: a signal came; what was known by then has been reported.
    """
    deadline = time.monotonic() + arguments.limit_s
    processes = Processes()
    _compile(names, arguments, deadline, processes)
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each tensor has borders of its own

    def run_tool(tool: str) -> None:
        prefix = [program, "--tool", tool, "--target-processes", "application-only", "--report-api-errors", "no"]
        prefix += ["--launch-timeout", str(LAUNCH_S)]

        def run(left: Sequence[str], seconds: float, take: Callable[[str], object]) -> str:
            with _log(arguments.log, tool) as log:

                def both(line: str) -> None:
                    log.write(line)
                    take(line)

                ended = processes.lines_of([*prefix, *_command(left)], env, arguments.silent_s, seconds, both)
                log.write(f"{ended}\n")
            return ended

        check(
            run,
            cases_of(tool, names),
            deadline,
            lambda case, result: report(tool, case, control(result) if case == CONTROL else result),
        )

    with ThreadPoolExecutor() as pool:
        _ended_with(processes, lambda: list(pool.map(run_tool, arguments.tools)))


def cases_of(tool: str, names: Sequence[str]) -> list[str]:
    """The names that a tool runs: the control is one for memcheck, racecheck looks at shared memory."""
    return [name for name in names if tool == "memcheck" or name != CONTROL]


def _log(folder: Path | None, tool: str) -> TextIO:
    """A tool's log, with each line in it as soon as it is written."""
    if folder is None:
        return open(os.devnull, "w")
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{tool}.txt").open("a", buffering=1)


def main() -> int:
    """Runs what the command line asks for; gives the exit status."""
    arguments = tyro.cli(Arguments)
    names = [case.name for case in CASES if arguments.cases in case.name or case.name == CONTROL]
    if names == [CONTROL] and arguments.cases not in CONTROL:
        raise SystemExit(f"error: --cases {arguments.cases!r}: no case has that in its name")
    program = find_sanitizer(arguments.sanitizer)
    if not torch.cuda.is_available():
        print("not checked: there is no CUDA device")
        return 2
    if program is None:
        looked = arguments.sanitizer or "compute-sanitizer"
        print(f"not checked: {looked} is not there; it comes with the CUDA toolkit, --sanitizer takes its path")
        return 2
    started = time.monotonic()
    results: dict[tuple[str, str], str] = {}
    width = max(len(name) for name in names)

    def report(tool: str, case: str, result: str) -> None:
        results[tool, case] = result
        print(f"{tool:<9}  {case:<{width}}  {result}\n", end="", flush=True)

    code = None
    with stopped_by_signals():
        try:
            sanitize(arguments, program, names, report)
        except StoppedError as stop:
            for tool in arguments.tools:
                for case in cases_of(tool, names):
                    if (tool, case) not in results:
                        report(tool, case, f"not run: {stop}")
            code = 128 + stop.signum
        print(f"{torch.cuda.get_device_name()}, {program}, {time.monotonic() - started:.0f} s", flush=True)
    return status(results) if code is None else code


if __name__ == "__main__":
    sys.exit(main())
