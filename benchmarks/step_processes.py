"""Training runs as processes: a log each, a limit of time for each and for all, and why one failed in one line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:[\w.]*(?:Error|Exception|Interrupt)|error): .*)", re.MULTILINE)
_SHORTEST_S = 10.0  # what a run needs to get anywhere; it is not begun with less


class RunError(RuntimeError):
    """A run that failed or was stopped.

    Attributes:
        reason: why, in one line.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class OutOfBudget(RunError):
    """There was no time left for a run."""


class Budget:
    """Seconds for a number of runs.

    Args:
        total: for all together, from now on; None for no limit.
        each: for one run; None for no limit.
    """

    def __init__(self, total: float | None, each: float | None) -> None:
        for name, value in (("budget_s", total), ("limit_s", each)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: it must be above 0, or left out for no limit")
        self.total, self.each, self.began = total, each, time.monotonic()

    def for_a_run(self) -> float | None:
        """Seconds that the next run may take; None for no limit.

        Raises:
            OutOfBudget: it would not get anywhere in what is left.
        """
        left = None if self.total is None else self.total - (time.monotonic() - self.began)
        if left is not None and left < min(_SHORTEST_S, self.total or _SHORTEST_S):
            reason = f"{max(left, 0):.0f} s of the budget of {self.total:g} s were left"
            raise OutOfBudget(reason, reason)
        limits = [limit for limit in (left, self.each) if limit is not None]
        return min(limits) if limits else None


class Process:
    """A command that has been started, with all its output in a log.

    Args:
        command: words.
        log: file for its output.
        variables: added to the environment.
    """

    def __init__(self, command: list[str], log: Path, variables: dict[str, str]) -> None:
        self.command, self.log = command, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | variables,
            )

    def finish(self, budget: Budget) -> str:
        """Wait for its end, and give what it printed.

        Raises:
            RunError: it failed, or was stopped for taking too long; with the end of its output.
            OutOfBudget: there is no time left for it.
        """
        try:
            limit = budget.for_a_run()
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired as error:
            self.stop()
            reason = f"stopped after {error.timeout:.0f} s"
            raise RunError(f"{' '.join(self.command)}: {reason}:\n{self.log.read_text()[-3000:]}", reason) from None
        finally:
            self.stop()
        text = self.log.read_text()
        if code:
            reason = first_error(text) or f"exit code {code}"
            message = f"{' '.join(self.command)} failed with exit code {code}:\n{text[-3000:]}"
            raise RunError(message, reason)
        print(f"wrote {self.log}", flush=True)
        return text

    def stop(self) -> None:
        """Kill it and all that it started (torchrun's ranks are sessions of their own); safe to call twice."""
        if self.process.poll() is not None:
            return
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def first_error(log: str) -> str:
    """The first error in a log in one line, else its last line."""
    found = _ERROR.search(log)
    lines = log.strip().splitlines() or [""]
    return " ".join((found[1] if found else lines[-1]).split())[:300]


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that these started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the name, which may hold spaces and brackets: state, parent
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(pid, []))
    for child in found:  # which grows meanwhile
        found += children.get(child, [])
    return found
