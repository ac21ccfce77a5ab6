"""The benchmarks of checkpoints and of the guard on a CPU: they run, and their verdicts follow from their numbers."""

from __future__ import annotations

import importlib
import json
import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselm.train.errors import UserError

bench_checkpoint: Any = importlib.import_module("bench_checkpoint")
bench_guard: Any = importlib.import_module("bench_guard")
training_steps: Any = importlib.import_module("training_steps")

Usage = namedtuple("Usage", "total used free")
GIB = 1 << 30


def test_checkpoints_are_written_while_steps_go_on(tmp_path, capsys):
    output, folder = tmp_path / "results" / "c.json", tmp_path / "checkpoints"
    code = bench_checkpoint.main(
        ["--preset", "debug", "--kernels", "eager", "--saves", "4", "--folder", str(folder), "--output", str(output)]
    )
    out, result = capsys.readouterr().out, json.loads(output.read_text())
    assert len(result["saves"]) == 4 and list(folder.iterdir()) == [], "its files are deleted"
    for row in result["saves"]:
        assert row["stalled"] > 0 and row["seconds"] > 0 and row["share"] == row["stalled"] / row["seconds"]
        assert 2e6 < row["size"] < 4e6 and row["host"] > 50e6 and row["free"] > 0
    assert sum(row["steps"] for row in result["saves"]) >= 1, "training went on meanwhile"
    assert code == (0 if all(result["goals"].values()) else 1)
    assert out.count("debug: stall under 5% of the save's time: ") == 1 and "GiB free" in out and "deleted" not in out
    assert result["goals"]["memory flat"] == ("memory flat: met" in out)


def rows(stalls: list[float], host: list[int]) -> list[Any]:
    return [
        bench_checkpoint.Row(stall, 10.0, 15 * GIB, 30, 280.0, memory, 15 * GIB, 20 * GIB, GIB)
        for stall, memory in zip(stalls, host, strict=True)
    ]


@pytest.mark.parametrize(
    ("stalls", "host", "stall_met", "flat"),
    [
        ([8.0, 0.4, 0.3, 0.4], [9 * GIB, 20 * GIB, 20 * GIB, 20 * GIB], True, True),  # the first stands apart
        ([0.1, 0.4, 0.51, 0.4], [20 * GIB] * 4, False, True),
        ([0.1, 0.4, 0.4, 0.4], [20 * GIB, 20 * GIB, 20 * GIB, 21 * GIB], True, False),
    ],
)
def test_verdicts_on_saves(stalls, host, stall_met, flat):
    assert list(bench_checkpoint.verdicts(rows(stalls, host)).values()) == [stall_met, flat]


def test_too_few_saves_are_no_verdict():
    with pytest.raises(UserError, match="2 saves are too few"):
        bench_checkpoint.verdicts(rows([0.1, 0.1], [GIB, GIB]))


def test_saves_go_where_two_have_room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(bench_checkpoint, "_SHARED_MEMORY", memory)
    free = {memory: 40 * GIB, tmp_path: 20 * GIB}
    monkeypatch.setattr(
        bench_checkpoint.shutil, "disk_usage", lambda path: Usage(0, 0, free[Path(path).absolute().resolve()])
    )
    assert bench_checkpoint.choose_folder(None, 15 * GIB) == memory
    assert bench_checkpoint.choose_folder(None, 20 * GIB) == memory
    with pytest.raises(UserError, match=r"need 42\.00 GiB, .*40\.00 GiB free in .*memory, 20\.00 GiB free in runs"):
        bench_checkpoint.choose_folder(None, 21 * GIB)
    free[memory] = 10 * GIB
    assert bench_checkpoint.choose_folder(None, 10 * GIB) == Path("runs") and (tmp_path / "runs").is_dir()
    with pytest.raises(UserError, match=r"20\.00 GiB free in mine"):
        bench_checkpoint.choose_folder(Path("mine"), 15 * GIB)


def test_saves_end_in_time(tmp_path, monkeypatch, capsys):
    """Each takes ten seconds by this clock: the fourth would end after the thirty-five."""
    clock = iter(range(100))
    monkeypatch.setattr(bench_checkpoint, "_save", lambda *a: (next(clock), rows([0.1], [GIB])[0])[1])
    monkeypatch.setattr(bench_checkpoint.time, "perf_counter", lambda: 10.0 * next(clock))
    steps: Any = type("Steps", (), {"milliseconds": [1.0] * 9, "step": lambda s: None, "pause": lambda s: None})()
    monkeypatch.setattr(bench_checkpoint, "CheckpointWriter", lambda *a, **k: type("W", (), {"close": lambda s: 0})())
    steps.model = steps.optimizer = steps.world = None
    arguments = bench_checkpoint.Arguments(seconds=35.0)
    _, done = bench_checkpoint.measure(steps, arguments, tmp_path, 0.0)
    assert 1 <= len(done) < 4 and "35 s are over" in capsys.readouterr().out


def test_the_guard_is_measured_beside_none(tmp_path, capsys):
    output = tmp_path / "g.json"
    code = bench_guard.main(["--preset", "debug", "--kernels", "eager", "--seconds", "0.1", "--output", str(output)])
    out, result = capsys.readouterr().out, json.loads(output.read_text())
    assert len(result["with_guard_ms"]) == len(result["without_ms"]) >= 6
    assert code == (0 if result["met"] else 1) and ("met" if result["met"] else "MISSED") in out
    cost = result["cost"]
    assert cost["low"] <= cost["share"] <= cost["high"] and cost["pairs"] == len(result["without_ms"])
    assert result["verdict_alone_ms"] > 0 and result["steps"]["no guard"]["median_ms"] > 0


def test_the_guard_s_cost_is_found_in_noise():
    """2 % on top of steps that drift by half; the interval holds the truth as often as it says."""
    chance, inside = random.Random(3), 0
    for _ in range(200):
        usual = [100 * (1 + k / 80) * chance.uniform(0.99, 1.01) for k in range(40)]
        guarded = [usual[k] + 2.0 + chance.gauss(0, 1.5) for k in range(40)]
        cost = bench_guard.cost_of(guarded, usual)
        truth = 2.0 / sorted(usual)[20]
        assert abs(cost.share - truth) < 0.012
        inside += cost.low <= truth <= cost.high
    assert 180 <= inside <= 200


def test_too_few_pairs_are_no_cost():
    with pytest.raises(ValueError, match="5 pairs of steps: at least 6"):
        bench_guard.cost_of([1.0] * 5, [1.0] * 5)


def test_steps_without_the_guard_meet_no_verdict():
    with training_steps.Steps(training_steps.configuration("debug", kernels="eager", micro_batch_size=1)) as steps:
        judged = []
        judge = steps.guard.judge
        steps.guard.judge = lambda norm: (judged.append(float(norm)), judge(norm))[1]
        before = [p.detach().clone() for p in steps.model.parameters()]
        for guarded in (True, False, False, True):
            steps.step(guarded=guarded)
        assert len(judged) == 2 and len(steps.milliseconds) == 4
        moved = [not torch.equal(a, b) for a, b in zip(before, steps.model.parameters(), strict=True)]
        assert all(moved) and int(steps.optimizer.skipped_steps) == 0


@pytest.mark.parametrize("main", [bench_guard.main, bench_checkpoint.main], ids=["guard", "checkpoint"])
def test_an_unknown_preset_is_one_line(main, capsys):
    assert main(["--preset", "llama9"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --preset is 'llama9'") and "llama3_1b" in err and err.count("\n") == 1
