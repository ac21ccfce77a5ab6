"""benchmarks/tune.py with choices that hang or end their process, and when it is ended itself: what is known stays."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# Scripts of benchmarks/, which pytest's configuration puts on sys.path and a type checker does not know.
tune: Any = importlib.import_module("tune")
tune_measure: Any = importlib.import_module("tune_measure")
watched: Any = importlib.import_module("watched")
Target = importlib.import_module("tuning.base").Target

# tune.py with the targets of a kernel whose launch value says what it does.
SCRIPT = """
import os, signal, sys, time
from types import ModuleType

import torch
import tune
from tuning.base import Target

kernel = sys.modules["toy_kernel"] = ModuleType("toy_kernel")
kernel.launch = lambda: "current"
x = torch.arange(64.0)


def run():
    print("noise of a target")
    choice = kernel.launch()
    if choice.startswith("hang"):
        with open(sys.argv[1], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(1000)
    if choice == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return x * (3.0 if choice == "wrong" else 2.0)


def target(name, *candidates):
    return Target(name, "toy_kernel.launch", candidates, lambda device: (run, lambda: x * 2), 512)


tune.SCRIPT = __file__
tune.load_targets = lambda op: [target("a", "right", "hang", "die", "last"), target("b", "wrong", "right")]
if __name__ == "__main__":
    tune.main()
"""


@pytest.fixture
def script(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(tune.__file__).parent))
    path = tmp_path / "tune_toy.py"
    path.write_text(SCRIPT)
    return path


def _targets() -> list[Any]:
    """The script's, for the side that asks: it calls nothing."""
    names = {"a": ("right", "hang", "die", "last"), "b": ("wrong", "right")}
    return [Target(name, "toy_kernel.launch", choices, None, 512) for name, choices in names.items()]


def _gone(pid: int) -> bool:
    """Whether a process ends, within some seconds. One that nobody has waited for yet has ended too."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_choices_that_hang_or_end_their_process_are_rows_and_the_rest_goes_on(script, tmp_path):
    worker = tune_measure.Worker([sys.executable, str(script), str(tmp_path / "pid"), "--measure"], 0.5)
    tuning = tune.Tuning(_targets(), worker.ask, 3, math.inf, lambda result, row: None, lambda result: None)
    try:
        tuning.run()
    finally:
        worker.end()
    a, b = ({row.choice: row for row in result.rows} for result in tuning.results)
    assert {choice: row.status for choice, row in a.items()} == {
        "current": "ok",
        "right": "ok",
        "last": "ok",
        "hang": "failed: hung, ended after 0.5 s",
        "die": "failed: its process ended with SIGKILL (step: run)",
    }
    assert b["right"].status == "ok" and "output 0 is wrong" in b["wrong"].status
    timed = [row for row in (*a.values(), *b.values()) if row.timing]
    assert len(timed) == 5 and all(row.timing.median_ms > 0 and row.of_current > 0 for row in timed)
    assert tuning.results[0].lost == 2 and tuning.results[1].lost == 0
    assert _gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_what_it_had_timed(script, tmp_path, signum):
    """In the middle of a choice that hangs. No process is left behind, even where tune.py could not end it."""
    output, pid = tmp_path / "tune.json", tmp_path / "pid"
    command = [sys.executable, str(script), str(pid), "--output", str(output), "--only", "a", "--silent-s", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while not (pid.exists() and pid.read_text()) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signum)
        printed, _ = process.communicate(timeout=30)
    assert process.returncode == (143 if signum == signal.SIGTERM else -signal.SIGKILL)
    facts = json.loads(output.read_text())
    (target,) = facts["targets"]
    times = {row["choice"]: row["timing"] and row["timing"]["median_ms"] for row in target["rows"]}
    assert times["current"] > 0 and times["right"] > 0
    assert "a  right: " in printed and "noise" not in printed  # a line each, as soon as it was timed
    if signum == signal.SIGTERM:
        assert facts["state"] == "stopped by SIGTERM" and "toy_kernel.launch" in printed
        statuses = {row["choice"]: row["status"] for row in target["rows"]}
        assert {statuses[choice] for choice in ("hang", "die", "last")} == {"left out: stopped by SIGTERM"}
    else:
        assert facts["state"] == "running" and set(times) == {"current", "right"}
    assert _gone(int(pid.read_text()))


class _Process:
    """Stands in for Watched: gives the lines it was made with, then silence, or its end."""

    lines: list[str | None]

    def __init__(self, command: list[str], asked: bool) -> None:
        self.left, self.ended, self.waited = list(self.lines), False, []

    def send(self, line: str) -> None:
        assert not self.ended

    def line(self, seconds: float) -> str | None:
        self.waited.append(seconds)
        if not self.left:
            raise TimeoutError
        return self.left.pop(0)

    def exit_code(self) -> int:
        return 3

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize(
    ("steps", "message", "limit"),
    [
        (["ready", "run"], "hung, ended after 7 s", 7.0),
        (["ready", "set up", "compile", "run", "time"], "hung while it was timed, ended after 7 s", 7.0),
        (["ready", "compile"], "compile did not end, ended after 90 s", 90.0),
        (["ready"], "set up did not end, ended after 90 s", 90.0),
        (["ready", "run", None], r"its process ended with exit code 3 \(step: run\)", 7.0),
    ],
)
def test_the_limit_of_silence_is_one_of_launched_kernels(monkeypatch, steps, message, limit):
    lines = [step and json.dumps({"at": step}) for step in steps]
    monkeypatch.setattr(_Process, "lines", lines, raising=False)
    made: list[Any] = []
    monkeypatch.setattr(tune_measure, "Watched", lambda *a, **k: made.append(_Process(*a, **k)) or made[-1])
    worker = tune_measure.Worker(["tune.py"], 7.0)
    with pytest.raises(tune_measure.LostError, match=message):
        worker.ask({}, math.inf)
    assert made[0].ended and made[0].waited[-1] == limit
    monkeypatch.setattr(_Process, "lines", [*lines[:1], json.dumps({"row": 1, "lost": True})])
    assert (
        worker.ask({}, math.inf)["row"] == 1 and len(made) == 2 and made[1].ended
    )  # a new one; the card was lost in it


def test_what_ends_before_it_is_ready_ends_the_tuning(monkeypatch):
    monkeypatch.setattr(_Process, "lines", [None], raising=False)
    monkeypatch.setattr(tune_measure, "Watched", _Process)
    with pytest.raises(tune_measure.StartError, match="exit code 3 before it was ready"):
        tune_measure.Worker(["tune.py"], 7.0).ask({}, math.inf)


def test_a_step_does_not_go_on_long_past_the_deadline(monkeypatch):
    monkeypatch.setattr(_Process, "lines", ['{"at": "ready"}', '{"at": "compile"}'], raising=False)
    monkeypatch.setattr(tune_measure, "Watched", _Process)
    monkeypatch.setattr(tune_measure, "OVERTIME_S", 0.0)
    with pytest.raises(tune_measure.NoTimeError, match="compile was not done by the deadline"):
        tune_measure.Worker(["tune.py"], 7.0).ask({}, time.monotonic() - 1)


def test_only_the_first_signal_counts():
    before = signal.getsignal(signal.SIGTERM)
    with watched.stopped_by_signals():
        with pytest.raises(watched.StoppedError, match="stopped by SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before
