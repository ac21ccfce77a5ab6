"""Every kernel under NVIDIA's compute-sanitizer: memcheck (accesses out of bounds) and racecheck (shared memory).

    python benchmarks/sanitize.py
    python benchmarks/sanitize.py --cases attention --tools racecheck --limit-s 300

Prints a line a tool and case: clean; errors, with the first of them; or why nothing can be said, in the tool's words:
it is not installed, or refuses this machine (some virtual ones let nobody debug the GPU). Each tool runs the cases of
sanitize_cases.py in one process, and in a further one from the case after one that broke it or took too long. The
kernels are compiled beforehand, without a tool. Last, memcheck must find a read out of bounds that is there on purpose.

Exit status: 0 all clean; 1 errors, or cases that raised or took too long; 2 not checked, in whole or in part.
"""

from __future__ import annotations

import glob
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
import tyro
from sanitize_cases import CASES, CONTROL, DONE, LEFT_OUT, RAISED, START

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
    """What one process printed.

    Attributes:
        found: case -> the tool's lines between its begin and that of the next.
        outcome: case -> how it ended: `DONE`, or `RAISED` or `LEFT_OUT` with a reason.
        before: the tool's lines before the first case.
        refusal: the tool's words where it stops checking, "" where it does not.
        refused_in: the case in which it said so, "" before the first one.
    """

    found: dict[str, list[str]] = field(default_factory=dict)
    outcome: dict[str, tuple[str, str]] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    refusal: str = ""
    refused_in: str = ""


def read(lines: Iterable[str]) -> Reading:
    """Sorts the lines of a process to its cases."""
    reading, current, banner = Reading(), None, False
    for line in (line.rstrip() for line in lines):
        if line.startswith(f"{START} "):
            current = line.removeprefix(f"{START} ")
            reading.found[current] = []
        elif current is not None and line == f"{DONE} {current}":
            reading.outcome[current] = (DONE, "")
        elif current is not None and (match := re.match(rf"({RAISED}|{LEFT_OUT}) {re.escape(current)}: (.*)", line)):
            reading.outcome[current] = (match[1], match[2])
        elif line.startswith(PREFIX):
            words = line.removeprefix(PREFIX).strip()
            banner |= "COMPUTE-SANITIZER" in words
            found = any(FINDING.search(w) for w in reading.found.get(current or "", []))
            if REFUSAL.search(words) and not found and not reading.refusal:
                reading.refusal, reading.refused_in = words, current or ""
            (reading.before if current is None else reading.found[current]).append(words)
    if reading.found and not banner and not reading.refusal:
        reading.refusal = "it printed nothing of its own"
    return reading


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


def lines_of(command: Sequence[str], env: Mapping[str, str], silent_s: float, limit_s: float) -> tuple[list[str], str]:
    """Runs a command until it ends, says nothing for `silent_s` or runs longer than `limit_s`.

    Returns:
        its lines, of stdout and stderr, and how it was ended: "" by itself.
    """
    process = subprocess.Popen(
        [*command], env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    arrived: queue.Queue[str | None] = queue.Queue()

    def collect() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            arrived.put(line)
        arrived.put(None)

    threading.Thread(target=collect, daemon=True).start()
    lines: list[str] = []
    deadline, ended = time.monotonic() + limit_s, ""
    while not ended:
        wait = min(silent_s, deadline - time.monotonic())
        try:
            line = arrived.get(timeout=max(wait, 0.01))
        except queue.Empty:
            ended = "no time left" if time.monotonic() >= deadline else f"ended after {silent_s:.0f} s without a line"
            break
        if line is None:
            break
        lines.append(line)
    if ended:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return lines, ended


def check(
    run: Callable[[Sequence[str], float], tuple[list[str], str]], cases: Sequence[str], deadline: float
) -> dict[str, str]:
    """Runs all cases under one tool: those behind one that ended the process, or the checking, in a further process.

    Args:
        run: (cases, seconds) -> lines and how it was ended, see `lines_of`.
        cases: their names, in the order of sanitize_cases.py.
        deadline: of time.monotonic.

    Returns:
        case -> its entry of the table.
    """
    results: dict[str, str] = {}
    left, refused = list(cases), 0
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            return results | dict.fromkeys(left, "not run: no time left")
        lines, ended = run(left, seconds)
        reading = read(lines)
        if reading.refused_in == next(iter(reading.found), ""):
            refused += 1
        if not reading.found or (reading.refusal and (not reading.refused_in or refused > 1)):
            errors = [words for words in reading.before if words.startswith("Error")]
            others = [line.strip() for line in lines if not line.startswith(PREFIX) and line.strip()]
            words = reading.refusal or " ".join(errors) or ended or " ".join(others[-1:]) or "it printed nothing"
            return results | dict.fromkeys(left, f"refused: {words}")
        checked = list(reading.found)
        if reading.refused_in:
            checked = checked[: checked.index(reading.refused_in) + 1]
        results |= {case: verdict(case, reading, ended) for case in checked}
        left = [case for case in left if case not in results]
    return results


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


def _compile(names: Sequence[str], arguments: Arguments, deadline: float) -> None:
    """Compiles with a few processes, so that no compiler runs under a tool."""
    seconds = min(arguments.limit_s * COMPILE_SHARE, deadline - time.monotonic())
    names = [name for name in names if name != CONTROL]
    parts = [part for i in range(WORKERS) if (part := names[i::WORKERS])]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda part: lines_of(_command(part), os.environ, seconds, seconds), parts))


def sanitize(arguments: Arguments, program: str, names: Sequence[str]) -> dict[tuple[str, str], str]:
    """(tool, case) -> result, of all tools side by side."""
    deadline = time.monotonic() + arguments.limit_s
    _compile(names, arguments, deadline)
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that each tensor has borders of its own

    def run_tool(tool: str) -> dict[str, str]:
        prefix = [program, "--tool", tool, "--target-processes", "application-only", "--report-api-errors", "no"]
        prefix += ["--launch-timeout", str(LAUNCH_S)]
        # The control is one for memcheck: racecheck looks at shared memory.
        chosen = [name for name in names if tool == "memcheck" or name != CONTROL]

        def run(left: Sequence[str], seconds: float) -> tuple[list[str], str]:
            lines, ended = lines_of([*prefix, *_command(left)], env, arguments.silent_s, seconds)
            if arguments.log is not None:
                arguments.log.mkdir(parents=True, exist_ok=True)
                with (arguments.log / f"{tool}.txt").open("a") as file:
                    file.writelines([*lines, f"{ended}\n"])
            return lines, ended

        return check(run, chosen, deadline)

    with ThreadPoolExecutor() as pool:
        of_tools = dict(zip(arguments.tools, pool.map(run_tool, arguments.tools), strict=True))
    return {
        (tool, case): control(result) if case == CONTROL else result
        for tool, results in of_tools.items()
        for case, result in results.items()
    }


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
    results = sanitize(arguments, program, names)
    width = max(len(case) for _, case in results)
    for (tool, case), result in results.items():
        print(f"{tool:<9}  {case:<{width}}  {result}")
    print(f"{torch.cuda.get_device_name()}, {program}, {time.monotonic() - started:.0f} s")
    return status(results)


if __name__ == "__main__":
    sys.exit(main())
