"""benchmarks/tune.py on a CPU: right candidates are timed, wrong and failing ones are rows that say why."""

from __future__ import annotations

import functools
import importlib
import json
import math
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import tyro

# Scripts of benchmarks/, which pytest's configuration puts on sys.path and a type checker does not know.
tune: Any = importlib.import_module("tune")
tune_compile: Any = importlib.import_module("tune_compile")
tune_measure: Any = importlib.import_module("tune_measure")
interleaved = importlib.import_module("timing").interleaved
Target = importlib.import_module("tuning.base").Target

CPU = torch.device("cpu")


@pytest.fixture
def toy(monkeypatch) -> Any:
    """A kernel module whose launch value is a factor and a pause; 2 is the right factor."""
    module: Any = ModuleType("toy_kernel")
    module.launch = lambda n: (2.0, 0.0)
    monkeypatch.setitem(sys.modules, "toy_kernel", module)
    return module


def _target(toy: Any, *candidates: object, name: str = "toy 64 fp32") -> Any:
    x = torch.arange(64.0)

    def run() -> torch.Tensor:
        factor, pause = toy.launch(64)
        time.sleep(pause)
        return x * factor

    return Target(name, "toy_kernel.launch", candidates, lambda device: (run, lambda: x.double() * 2), 2 * x.nbytes)


def _tuning(targets: list[Any], deadline: float = math.inf, **callbacks: Any) -> Any:
    """Measures in this process."""
    measurer = tune_measure.Measurer(targets, CPU, lambda step: None)
    callbacks = {"tried": lambda result, row: None, "report": lambda result: None} | callbacks
    return tune.Tuning(targets, lambda request, deadline: measurer.answer(request), 3, deadline, **callbacks)


def _tune(target: Any, deadline: float = math.inf) -> Any:
    results = []
    _tuning([target], deadline, report=results.append).run()
    (result,) = results
    return result


def test_candidates_are_checked_timed_and_sorted(toy):
    result = _tune(_target(toy, (2.0, 0.02), (3.0, 0.0), "no pair", (2.0, 0.0)))
    rows = {row.choice: row for row in result.rows}
    assert result.rows[-1].timing is None and result.rows[-2].timing is None
    assert "relative error 5.00e-01" in rows["(3.0, 0.0)"].status
    assert rows["no pair"].status.startswith("failed: ValueError: too many values")
    slow, fast = rows["(2.0, 0.02)"].timing, rows["(2.0, 0.0)"].timing
    assert fast.median_ms < 20 <= slow.median_ms
    assert [row.choice for row in result.rows][2] == "(2.0, 0.02)"
    assert toy.launch(64) == (2.0, 0.0)  # put back
    fact = next(row for row in tune.as_json(result)["rows"] if row["choice"] == "(2.0, 0.02)")
    assert fact["gb_s"] == pytest.approx(512 / slow.median_ms / 1e6)


def test_what_the_budget_left_out_is_said(toy):
    result = _tune(_target(toy, (2.0, 0.0)), deadline=time.monotonic() - 1)
    statuses = {row.choice: row.status for row in result.rows}
    assert statuses == dict.fromkeys(["current", "(2.0, 0.0)"], "left out: the time budget is used up")


def test_the_likeliest_candidates_of_all_targets_come_first(toy, monkeypatch):
    """The budget ends after four tries: both targets' current choice and first candidate."""
    results, tried = [], []
    targets = [_target(toy, (2.0, 0.0), (2.0, 0.001), name=name) for name in ("a", "b")]
    monkeypatch.setattr(tune.time, "monotonic", lambda: float(len(tried)))  # a second a try
    tuning = _tuning(
        targets,
        4.0 + 2 * tune.TIMED_S,
        tried=lambda result, row: tried.append((result.name, row.choice)),
        report=results.append,
    )
    tuning.run()
    first = [("a", "current"), ("b", "current"), ("a", "(2.0, 0.0)"), ("b", "(2.0, 0.0)")]
    assert tried[:4] == first and len(tried) < 6
    for result in results:
        statuses = {row.choice: row.status for row in result.rows}
        assert statuses["current"] == statuses["(2.0, 0.0)"] == "ok"
        assert all(row.timing and row.rounds == 3 for row in result.rows if row.status == "ok")
    assert [row.status for row in results[1].rows].count(tune.NO_TIME) == 1


def test_what_is_compiled_is_tried_while_the_rest_is_waited_for(toy):
    tried, stopped = [], []
    target = _target(toy, (2.0, 0.0), (2.0, 0.001))
    ready = {(0, 0): 9, (1, 0): 1, (2, 0): 2}  # looks until another process has compiled it

    def compiled(turn: int, index: int) -> bool:
        ready[turn, index] -= 1
        return ready[turn, index] < 0

    tuning = _tuning([target], tried=lambda result, row: tried.append(row.choice))
    tuning.run(compiled, lambda: stopped.append(list(tried)))
    assert tried == ["(2.0, 0.0)", "(2.0, 0.001)", "current"] and stopped == [tried]


def test_a_choice_has_a_time_as_soon_as_it_was_tried(toy):
    """Beside the current one, in the same rounds; the long timings come last, and where they fail the first ones stay.

    The current choice takes 20 ms and the candidate 1 ms, so that their ratio tells one from the other."""
    toy.launch = lambda n: (2.0, 0.02)
    target, seen = _target(toy, (2.0, 0.001)), []
    tuning = _tuning(
        [target], tried=lambda result, row: seen.append((row.choice, row.timing.median_ms, row.of_current))
    )
    tuning.run()
    assert [choice for choice, _, _ in seen] == ["current", "(2.0, 0.001)"]
    assert seen[0][1] >= 20 and seen[0][2] == 1.0 and seen[1][1] >= 1 and seen[1][2] < 0.9

    def no_finals(request: dict[str, Any], deadline: float) -> dict[str, Any]:
        if request["do"] == "finals":
            raise tune_measure.LostError("hung while it was timed, ended after 20 s", "time")
        return measurer.answer(request)

    measurer = tune_measure.Measurer([target], CPU, lambda step: None)
    tuning = tune.Tuning([target], no_finals, 30, math.inf, lambda result, row: None, lambda result: None)
    tuning.run()
    (result,) = tuning.results
    assert result.note == "no longer timings: hung while it was timed, ended after 20 s"
    assert [(row.choice, row.rounds) for row in result.rows] == [("(2.0, 0.001)", 10), ("current", 10)]


def test_a_target_that_lost_a_process_is_tried_after_the_others(toy):
    tried = []
    targets = [_target(toy, (2.0, 0.0), (2.0, 0.001), name=name) for name in ("a", "b")]
    measurer = tune_measure.Measurer(targets, CPU, lambda step: None)

    def ask(request: dict[str, Any], deadline: float) -> dict[str, Any]:
        lost = request["do"] == "attempt" and (request["index"], request["turn"]) == (0, 1)
        return measurer.answer(request) | ({"lost": True} if lost else {})

    tuning = tune.Tuning(
        targets, ask, 3, math.inf, lambda result, row: tried.append((result.name, row.choice)), lambda result: None
    )
    tuning.run()
    assert [name for name, _ in tried] == ["a", "b", "a", "b", "b", "a"] and len(set(tried)) == 6


def test_a_choice_that_the_deadline_ended_is_told_from_those_not_reached(toy):
    """It may be one that hangs."""
    clock = [0.0]

    def ask(request: dict[str, Any], deadline: float) -> dict[str, Any]:
        clock[0] = deadline + 1
        raise tune_measure.NoTimeError("run was not done by the deadline")

    tuning = tune.Tuning([_target(toy, (2.0, 0.0))], ask, 3, 50.0, lambda result, row: None, lambda result: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune.time, "monotonic", lambda: clock[0])
        tuning.run()
    assert {row.choice: row.status for row in tuning.results[0].rows} == {
        "current": "left out: run was not done by the deadline",
        "(2.0, 0.0)": tune.NO_TIME,
    }


def test_a_target_that_cannot_be_set_up_is_a_failed_row(toy):
    target = _target(toy, (2.0, 0.0))
    missing = Target(target.name, "toy_kernel.renamed", target.candidates, target.make, 0)
    assert "has no attribute 'renamed'" in _tune(missing).rows[-1].status

    def broken(device: torch.device) -> None:
        raise RuntimeError("out of memory")

    (row,) = _tune(Target(target.name, target.attribute, (), broken, 0)).rows
    assert row.status == "failed: RuntimeError: out of memory"


@pytest.mark.parametrize("factor", [1.0, 1.0 + 2.0**-7])
def test_the_check_allows_roundings_and_nothing_else(factor):
    x = torch.linspace(1, 2, 1000, dtype=torch.float64)
    tune_measure.check((x.to(torch.bfloat16) * factor, None), [x, None])
    with pytest.raises(ValueError, match="output 0 is wrong"):
        tune_measure.check(x.to(torch.bfloat16) * 1.03, [x])
    with pytest.raises(ValueError, match="relative error inf"):
        tune_measure.check(torch.where(x == 1, torch.nan, x), [x])
    with pytest.raises(ValueError, match="1 outputs, the reference has 2"):
        tune_measure.check(x, [x, x])
    with pytest.raises(ValueError, match="shapes differ"):
        tune_measure.check(x[:5], [x])


class _InProcess:
    """Stands in for the Worker."""

    def __init__(self, command: list[str], silent_s: float) -> None:
        arguments = tyro.cli(tune.Arguments, args=command[2:])
        assert arguments.measure and silent_s == 20.0
        targets = [t for t in tune.load_targets("toy") if t.name.startswith(arguments.only.split(",")[0])]
        self._measurer = tune_measure.Measurer(targets, CPU, lambda step: None)

    def ask(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        return self._measurer.answer(request)

    def end(self) -> None:
        pass


def test_the_command_line_writes_json(toy, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tune, "Worker", _InProcess)
    monkeypatch.setattr(tune, "load_targets", lambda op: [_target(toy, (2.0, 0.0)), _target(toy, name="other")])
    output = tmp_path / "results" / "tune.json"
    monkeypatch.setattr(
        sys, "argv", ["tune.py", "toy", "--output", str(output), "--only", "toy 64,none", "--rounds", "3"]
    )
    tune.main()
    facts = json.loads(output.read_text())
    assert [t["name"] for t in facts["targets"]] == ["toy 64 fp32"] and facts["environment"]["torch"]
    assert facts["state"] == "complete" and [path.name for path in output.parent.iterdir()] == ["tune.json"]
    printed = capsys.readouterr().out
    assert "show nothing about GPUs" in printed and "toy_kernel.launch" in printed and "left out" not in printed
    monkeypatch.setattr(sys, "argv", ["tune.py", "toy", "--budget-s", "0"])
    tune.main()
    assert "left out: toy 64 fp32: current, (2.0, 0.0)" in capsys.readouterr().out


def test_an_op_without_targets_is_refused():
    with pytest.raises(SystemExit, match="op 'nonsense' has no targets"):
        tune.load_targets("nonsense")


def test_the_pause_outlasts_a_slow_host():
    pause_cycles = importlib.import_module("timing").pause_cycles
    assert pause_cycles(1e-4) == 1_200_000  # a fast host: 0.6 ms
    assert pause_cycles(5e-4) == 2_000_000  # 1 ms at 2 GHz
    assert pause_cycles(0.1) == 8_000_000  # a call that waits for the GPU: no pause as long as that


class _Gpu:
    """A GPU and its host in model seconds: what is queued begins when both the GPU and the host are there."""

    def __init__(self) -> None:
        self.host = self.done = 0.0
        self.cuda = SimpleNamespace(Event=self.event, _sleep=self.sleep, synchronize=self.wait)
        self.int8 = None

    def work(self, seconds: float, launching: float = 5e-6) -> float:
        self.host += launching
        self.done = max(self.done, self.host) + seconds
        return self.done

    def sleep(self, cycles: int) -> None:
        self.work(cycles / 2e9)

    def wait(self, _device: Any = None) -> None:
        self.host = max(self.host, self.done)

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.work(0.0))
        event.elapsed_time = lambda other: (other.at - event.at) * 1e3
        return event

    def empty(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(zero_=lambda: self.work(1e-4))


def test_a_slow_host_is_in_no_time(monkeypatch):
    """Not of a call that takes it a millisecond, and not of one that follows a call that waits for the GPU."""
    timing: Any = importlib.import_module("timing")
    gpu = _Gpu()
    monkeypatch.setattr(timing, "torch", gpu)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: gpu.host)
    functions = {"slow": lambda: gpu.work(1e-5, 1e-3), "waits": lambda: gpu.wait() or gpu.work(2e-5), "long": None}
    functions["long"] = lambda: gpu.work(0.04)
    device = SimpleNamespace(type="cuda")
    hidden = timing.interleaved(functions, device, 9, hide_launch=True)
    # The time of a call that waits has the 5 microseconds in which its kernel is queued.
    assert {n: round(t.high_ms, 4) for n, t in hidden.items()} == {"slow": 0.01, "waits": 0.025, "long": 40.0}
    assert timing.interleaved(functions, device, 9)["slow"].high_ms > 0.8


def test_interleaved_calls_in_turn():
    """Each function once a round, in an order that changes."""
    calls = []
    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    resets, before = {"b": lambda: calls.append("-")}, functools.partial(calls.append, ".")
    timings = interleaved(functions, CPU, 12, warmup=1, resets=resets, before=before)
    rounds = "".join(calls)
    assert len(calls) == 3 + 5 * 12 and set(timings) == {"a", "b"}
    assert rounds[:3] == "a-b" and rounds.count(".a") == rounds.count("-.b") == 12
    rounds = rounds.replace("-", "").replace(".", "")
    assert {rounds[i : i + 2] for i in range(0, 26, 2)} == {"ab", "ba"}
    assert interleaved({}, CPU, 2) == {}


@pytest.mark.parametrize("op", tune.known_ops())
def test_targets_name_launch_functions_that_exist(op):
    targets = tune.load_targets(op)
    assert targets and len({t.name for t in targets}) == len(targets)
    for target in targets:
        module, _, name = target.attribute.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), target.attribute
        assert len({str(c) for c in target.candidates}) == len(target.candidates), target.name


def test_processes_that_compile_run_their_share_once(toy, monkeypatch, tmp_path):
    """Every choice, the current one and failing ones included, is in exactly one share, in the order of trying."""
    seen = []
    original = _target(toy, (2.0, 1.0), "no pair", (3.0, 0.0), (4.0, 0.0))

    def make(device: torch.device) -> Any:
        return lambda: seen.append(toy.launch(64)) or toy.launch(64)[0], lambda: 1 / 0

    targets = [Target(name, original.attribute, original.candidates[:n], make, 0) for name, n in (("a", 4), ("b", 1))]
    monkeypatch.setattr(tune, "load_targets", lambda op: targets)
    shares = []
    for i in range(2):
        monkeypatch.setattr(sys, "argv", ["tune.py", "toy", "--part", str(i), "2", "--done", str(tmp_path)])
        tune.main()
        shares.append(list(seen))
        seen.clear()
    current = (2.0, 0.0)
    assert shares == [[current, (2.0, 1.0), "no pair", (4.0, 0.0)], [current, (2.0, 1.0), (3.0, 0.0)]]
    assert {path.name for path in tmp_path.iterdir()} == {f"{turn}-{i}" for turn, i in tune_compile.turns_of(targets)}


class _Process:
    """Stands in for subprocess.Popen; ends when it is killed."""

    started: ClassVar[list[Any]] = []

    def __init__(self, command: list[str], **_: Any) -> None:
        self.command, self.killed = command, False
        self.started.append(self)

    def poll(self) -> int | None:
        return 1 if self.killed else None

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> None:
        assert self.killed


def test_processes_that_compile_get_the_same_targets_and_end(toy, monkeypatch):
    monkeypatch.setattr(_Process, "started", [])
    monkeypatch.setattr(tune_compile, "subprocess", SimpleNamespace(Popen=_Process, DEVNULL=None))
    monkeypatch.setattr(tune, "load_targets", lambda op: [_target(toy, name="a 16384"), _target(toy, name="b 8192")])
    arguments = ["rope", "swiglu", "--only", "16384,8192", "--budget-s", "0.5", "--jobs", "2"]
    monkeypatch.setattr(sys, "argv", ["tune.py", *arguments])
    tune.main()
    assert all(process.killed for process in _Process.started)
    parsed = [tyro.cli(tune.Arguments, args=process.command[2:]) for process in _Process.started]
    assert [(p.ops, p.only, p.part, p.budget_s) for p in parsed] == [
        (("rope", "swiglu"), "16384,8192", (i, 2), 0.5) for i in range(2)
    ]
    assert parsed[0].done == parsed[1].done is not None and not parsed[0].done.exists()


def test_a_choice_counts_as_compiled_when_nobody_is_left_to_do_it(monkeypatch):
    monkeypatch.setattr(_Process, "started", [])
    monkeypatch.setattr(tune_compile, "subprocess", SimpleNamespace(Popen=_Process, DEVNULL=None))
    jobs = tune_compile.CompileJobs(["python", "tune.py"], 2)
    done = tyro.cli(tune.Arguments, args=_Process.started[0].command[2:]).done
    assert not jobs.compiled(1, 3)
    (done / "1-3").touch()
    assert jobs.compiled(1, 3) and not jobs.compiled(0, 0)
    for process in _Process.started:
        process.kill()
    assert jobs.compiled(0, 0)
    jobs.stop()
