"""Numbers for W&B, held against a module of its name that writes down how it is called."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.machinery
import json
import math
import sys
import time
from pathlib import Path

import pytest

from fuselm.train import pretrain, wandb_log
from fuselm.train.config import LoggingConfig, resolve
from fuselm.train.errors import UserError
from fuselm.train.metrics import Reporter, StepMetrics
from fuselm.train.trainer import StopSignal, Trainer

from .faults import Faults

# What of W&B's interface is used. The file that it is run from says where to write and what is to go wrong.
STAND_IN = """
import json
from pathlib import Path

HERE = Path(__file__).parent

def write(what, **values):
    with (HERE / "calls.jsonl").open("a") as file:
        file.write(json.dumps({"call": what, **values}) + "\\n")

def wrong(what):
    if (HERE / f"wrong_{what}").exists():
        raise RuntimeError(f"no network\\nfor {what}")

class Settings(dict):
    pass

class Run:
    def define_metric(self, name, step_metric=None):
        write("define_metric", name=name, step_metric=step_metric)

    def log(self, values):
        wrong("log")
        write("log", values=values)

    def finish(self):
        wrong("finish")
        write("finish")

def init(**options):
    wrong("init")
    write("init", **options)
    return Run()
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder of the stand-in; calls() gives what it was asked."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("wandb", None)


def calls(folder: Path) -> list[dict]:
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(step: int, loss: float = 2.0) -> StepMetrics:
    return StepMetrics(step, loss, 1.0, 1e-3, step * 100, 1000.0, 0.5, None, 0.1, step - 1)


def test_a_run_sends_its_numbers_and_goes_on_as_the_same_run(package, make_config, world, tmp_path):
    config = make_config(tmp_path, training__steps=6, evaluation__every=3, logging__wandb="plays")
    run = Trainer(resolve(dataclasses.replace(config, name="first"), 1), world, StopSignal())
    with Faults(run, spikes=[1]):
        run.train()
    first = calls(package)
    assert [c["call"] for c in first[:3]] == ["init", "define_metric", "define_metric"]
    init = first[0]
    assert (init["project"], init["name"], init["resume"]) == ("plays", "first", "allow")
    assert init["dir"] == str(tmp_path / "first") and init["config"]["training"]["steps"] == 6
    assert first[2] == {"call": "define_metric", "name": "*", "step_metric": "step"}
    logged = [c["values"] for c in first if c["call"] == "log"]
    written = [json.loads(line) for line in (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()]
    steps = [e for e in written if "loss" in e]
    assert [v["step"] for v in logged if "train/loss" in v] == list(range(1, 7))
    for values, entry in zip([v for v in logged if "train/loss" in v], steps, strict=True):
        assert values == {"step": entry["step"]} | {
            f"train/{name}": entry[name]
            for name in ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tflops", "memory_gib")
        }
    validations = [(v["step"], v["validation/loss"]) for v in logged if "validation/loss" in v]
    assert validations == [(e["step"], e["validation_loss"]) for e in written if "validation_loss" in e]
    assert [c["call"] for c in first].count("finish") == 1 and first[-1]["call"] == "finish"

    longer = make_config(tmp_path, training__steps=8, evaluation__every=3, logging__wandb="plays")
    Trainer(resolve(dataclasses.replace(longer, name="first"), 1), world, StopSignal()).train()
    second = calls(package)[len(first) :]
    assert second[0]["id"] == init["id"] and second[0]["config"]["training"]["steps"] == 8
    assert [c["values"]["step"] for c in second if "train/loss" in c.get("values", {})] == [7, 8]


def test_steps_that_are_done_again_are_sent_again(package, tmp_path):
    reporter = Reporter(tmp_path, LoggingConfig(tensorboard=False, wandb="p"), total_steps=4, start_step=0)
    for step in (1, 2, 3):
        reporter.step(metrics(step))
    reporter.rewind(1)
    reporter.step(metrics(2, math.nan))
    reporter.close()
    reporter.close()
    sent = [c["values"] for c in calls(package) if c["call"] == "log"]
    assert [v["step"] for v in sent] == [1, 2, 3, 2] and math.isnan(sent[-1]["train/loss"])
    assert [c["call"] for c in calls(package)].count("init") == 1 and calls(package)[-1]["call"] == "finish"


def test_other_ranks_and_other_runs_do_not_ask_for_it(package, tmp_path):
    Reporter(None, LoggingConfig(wandb="p"), total_steps=2, start_step=0).step(metrics(1))
    reporter = Reporter(tmp_path, LoggingConfig(tensorboard=False), total_steps=2, start_step=0)
    reporter.step(metrics(1))
    reporter.close()
    assert calls(package) == [] and "wandb" not in sys.modules


def test_what_goes_wrong_at_wandb_does_not_end_a_run(package, tmp_path, capsys):
    (package / "wrong_init").touch()
    with pytest.raises(UserError, match=r"could not start \(no network for init\).*WANDB_MODE=offline"):
        Reporter(tmp_path, LoggingConfig(tensorboard=False, wandb="p"), total_steps=9, start_step=0)
    resumed = Reporter(tmp_path, LoggingConfig(tensorboard=False, wandb="p"), total_steps=9, start_step=3)
    resumed.step(metrics(4))
    resumed.close()
    assert capsys.readouterr().err.count("the run goes on without it") == 1

    (package / "wrong_init").unlink()
    reporter = Reporter(tmp_path, LoggingConfig(tensorboard=False, wandb="p"), total_steps=9, start_step=4)
    reporter.step(metrics(5))
    (package / "wrong_log").touch()
    reporter.step(metrics(6))
    reporter.step(metrics(7))
    reporter.close()
    err = capsys.readouterr().err
    assert err.count("warning: ") == 1 and "W&B takes no more numbers (no network for log)" in err

    (package / "wrong_log").unlink()
    (package / "wrong_finish").touch()
    log = wandb_log.WandbLog(tmp_path, "p", resumed=True)
    log.log({"x": 1.0}, 8)
    log.close()
    assert "did not get everything (no network for finish): wandb sync" in capsys.readouterr().err


def test_an_end_without_a_network_is_not_waited_for(package, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wandb_log, "_PATIENCE_SECONDS", 0.2)
    log = wandb_log.WandbLog(tmp_path, "p", resumed=False)
    monkeypatch.setattr(importlib.import_module("wandb").Run, "finish", lambda self: time.sleep(5))
    began = time.monotonic()
    log.close()
    assert time.monotonic() - began < 3 and "it has not ended after 0 s" in capsys.readouterr().err


@pytest.mark.parametrize("left_over", [False, True])
def test_without_the_package_the_command_says_what_to_install(left_over, tmp_path, monkeypatch, capsys):
    """Also where W&B has left its folder, which Python would take for a package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    found = importlib.machinery.ModuleSpec("wandb", None) if left_over else None
    monkeypatch.setattr(wandb_log.importlib.util, "find_spec", lambda name: found)
    assert pretrain.main(["--preset", "debug", "--logging.wandb", "plays"]) == 2
    err = capsys.readouterr().err
    assert err == "error: logging.wandb needs a package that is not installed: pip install wandb\n"
    assert list(tmp_path.iterdir()) == []


def test_an_empty_project_is_refused(make_config, tmp_path):
    with pytest.raises(UserError, match=r"logging\.wandb is empty"):
        resolve(make_config(tmp_path, logging__wandb=" "), 1)
