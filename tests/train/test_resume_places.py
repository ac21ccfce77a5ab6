"""What a run goes on from: its own folder by any name, and only with the very text that it was trained on."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from fuselm.train.checkpointing import latest_checkpoint, open_manifest, write_manifest
from fuselm.train.config import TrainConfig, resolve
from fuselm.train.errors import UserError
from fuselm.train.shards import HEADER_BYTES
from fuselm.train.trainer import StopSignal, Trainer


def train(config: TrainConfig, world) -> None:
    Trainer(resolve(config, 1), world, StopSignal()).train()


def goes_on_to(config: TrainConfig, steps: int, resume: str = "auto") -> TrainConfig:
    training = dataclasses.replace(config.training, steps=steps)
    checkpoint = dataclasses.replace(config.checkpoint, resume=resume)
    return dataclasses.replace(config, training=training, checkpoint=checkpoint)


def test_its_own_folder_by_any_name(make_config, world, losses_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make_config(Path("runs"), training__steps=2)
    train(config, world)
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    names = ["runs/tiny", "runs/../runs/tiny", str(tmp_path / "runs" / "tiny"), "link/tiny"]
    for steps, name in enumerate(names, 3):
        train(goes_on_to(config, steps, name), world)
        assert sorted(losses_of(tmp_path / "runs" / "tiny")) == list(range(1, steps + 1)), name
    train(goes_on_to(config, 7, f"link/tiny/checkpoints/step_{6:08d}"), world)
    assert sorted(losses_of(tmp_path / "runs" / "tiny")) == list(range(1, 8))
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["tiny"], "nothing was moved aside"


def test_other_text_of_the_same_length_is_refused(make_config, world, losses_of, tiny_data, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    config = make_config(tmp_path, training__steps=2, data__path=data)
    train(config, world)
    shard = data / "train_00000.bin"
    content = shard.read_bytes()
    middle = (HEADER_BYTES + len(content)) // 4 * 2
    shard.write_bytes(content[:HEADER_BYTES] + content[middle:] + content[HEADER_BYTES:middle])
    with pytest.raises(UserError, match="digest of the training data"):
        train(goes_on_to(config, 3), world)
    shard.write_bytes(content)
    train(goes_on_to(config, 3), world)

    checkpoint = latest_checkpoint(tmp_path / "tiny")
    assert checkpoint is not None
    manifest = open_manifest(checkpoint)
    del manifest["position"]["digest of the training data"]  # of a version that did not write it
    write_manifest(checkpoint, manifest)
    train(goes_on_to(config, 4), world)
    assert sorted(losses_of(tmp_path / "tiny")) == [1, 2, 3, 4]

    checkpoint = latest_checkpoint(tmp_path / "tiny")
    assert checkpoint is not None
    manifest = open_manifest(checkpoint)
    del manifest["position"]["training.seed"]  # which every version wrote
    write_manifest(checkpoint, manifest)
    with pytest.raises(UserError, match=r"training\.seed None"):
        train(goes_on_to(config, 5), world)
