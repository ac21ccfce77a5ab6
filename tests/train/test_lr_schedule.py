"""Schedules: known values, borders that divide by zero elsewhere, and independence of where a run resumes."""

from __future__ import annotations

import math

import pytest

from fuselm.train.config import resolve
from fuselm.train.lr_schedule import ScheduleConfig, lr_factor
from fuselm.train.metrics import read_metrics
from fuselm.train.trainer import StopSignal, Trainer


def test_warmup_is_linear_and_never_zero():
    schedule = ScheduleConfig(kind="constant", warmup_steps=4)
    assert [lr_factor(k, 10, schedule) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_by_hand():
    schedule = ScheduleConfig(kind="cosine", warmup_steps=10, min_lr_ratio=0.2)
    assert lr_factor(10, 110, schedule) == 1.0
    assert lr_factor(60, 110, schedule) == pytest.approx(0.6)
    assert lr_factor(35, 110, schedule) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert lr_factor(110, 110, schedule) == pytest.approx(0.2)
    assert lr_factor(1000, 110, schedule) == pytest.approx(0.2)


def test_wsd_by_hand():
    schedule = ScheduleConfig(kind="wsd", warmup_steps=10, decay_steps=20, min_lr_ratio=0.0)
    assert lr_factor(10, 100, schedule) == lr_factor(80, 100, schedule) == 1.0
    assert lr_factor(90, 100, schedule) == pytest.approx(0.5)
    assert lr_factor(99, 100, schedule) == pytest.approx(0.05)
    assert lr_factor(100, 100, schedule) == 0.0


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 5, 50])
@pytest.mark.parametrize("decay", [0, 1, 50])
@pytest.mark.parametrize("total", [0, 1, 10])
def test_borders_stay_in_range(kind, warmup, decay, total):
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=0.1)
    factors = [lr_factor(k, total, schedule) for k in range(total + 60)]
    assert all(0.0 < f <= 1.0 for f in factors)
    # Never a jump down to the floor at the end of the warmup, whichever lengths collide.
    assert max(factors) == pytest.approx(1.0) or warmup > total + 60


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 3, 20])
def test_a_resumed_run_has_the_rate_of_the_unbroken_one_at_every_step(make_config, world, tmp_path, kind, warmup):
    """The first life was to be shorter: from where it resumes on, the rates are those of the longer run."""
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup, decay_steps=4, min_lr_ratio=0.1)
    for steps in (4, 7, 9):
        config = make_config(tmp_path, training__steps=steps, schedule=schedule, evaluation__batches=0)
        run = Trainer(resolve(config, 1), world, StopSignal())
        run.train()
    rates = [e["lr"] for e in read_metrics(run.run / "metrics.jsonl")]
    totals = [4] * 4 + [7] * 3 + [9] * 2
    assert rates == [config.optimizer.lr * lr_factor(k, total, schedule) for k, total in enumerate(totals)]
    if kind == "constant":
        assert rates == [config.optimizer.lr * lr_factor(k, 9, schedule) for k in range(9)]
