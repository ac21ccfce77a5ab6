"""A run on rows of whole documents."""

from __future__ import annotations

import dataclasses

import pytest

from fuselm.train.checkpointing import step_folder
from fuselm.train.config import resolve
from fuselm.train.errors import UserError
from fuselm.train.metrics import read_metrics
from fuselm.train.packing import PackedStream
from fuselm.train.trainer import StopSignal, Trainer


@pytest.fixture
def train(make_config, world, tmp_path):
    def run(name: str, **overrides) -> dict[int, float]:
        options = {"data__document_mask": True, "data__packing": "best_fit"} | overrides
        config = resolve(dataclasses.replace(make_config(tmp_path, **options), name=name), 1)
        trainer = Trainer(config, world, StopSignal())
        assert isinstance(trainer.training.stream, PackedStream) == (config.data.packing == "best_fit")
        trainer.train()
        metrics = read_metrics(tmp_path / name / "metrics.jsonl")
        return {e["step"]: e["loss"] for e in metrics if e.get("loss") is not None}

    return run


def test_a_run_packs_learns_and_resumes(train, tmp_path):
    packed = train("packed")
    assert packed[6] < packed[1]
    assert packed != train("concatenated", data__packing="concatenate")
    resumed = train("resumed", checkpoint__resume=str(step_folder(tmp_path / "packed", 3)))
    assert resumed == pytest.approx({step: packed[step] for step in (4, 5, 6)}, rel=1e-6)
    with pytest.raises(UserError, match=r"data\.packing best_fit, but it is concatenate now"):
        train("other", data__packing="concatenate", checkpoint__resume=str(step_folder(tmp_path / "packed", 3)))


def test_packing_needs_the_mask(make_config, tmp_path):
    with pytest.raises(UserError, match=r"best_fit, which needs data\.document_mask"):
        resolve(make_config(tmp_path, data__packing="best_fit"), 1)
