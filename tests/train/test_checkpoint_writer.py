"""Saving in the background: what is saved, how long training waits, what stays, what a failure leaves."""

from __future__ import annotations

import gc
import json
import logging
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from fuselm.train import checkpoint_writer, checkpointing
from fuselm.train.checkpoint_writer import CheckpointWriter, Retention, delete_old
from fuselm.train.checkpointing import checkpoints_of, load_checkpoint, read_manifest, step_folder, step_of, verify
from fuselm.train.config import resolve, to_json
from fuselm.train.distributed import AgreedError
from fuselm.train.event_log import read_events
from fuselm.train.trainer import StopSignal, Trainer, build

HERE = Path(__file__).parent


@pytest.fixture
def writer(make_config, world, tmp_path):
    """A writer, its model and optimizer."""
    model, optimizer = build(make_config(tmp_path), world)
    writer = CheckpointWriter(
        tmp_path, model, optimizer, world=world, retention=Retention(2), config={}, position={}, asynchronous=True
    )
    yield writer
    writer.close()


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().clone() for name, p in model.named_parameters()}


@pytest.fixture
def gate(monkeypatch):
    """The background stops before it writes anything until the gate is set."""
    gate, write = threading.Event(), FileSystemWriter.write_data
    monkeypatch.setattr(
        FileSystemWriter, "write_data", lambda self, plan, planner: (gate.wait(60), write(self, plan, planner))[1]
    )
    yield gate
    gate.set()


def test_what_is_saved_is_what_was_there_when_the_save_began(writer, gate, make_config, world, tmp_path):
    before = weights_of(writer.model)
    writer.save({"step": 3})
    with torch.no_grad():
        for parameter in writer.model.parameters():
            parameter.to_local().fill_(7.0)
    assert not writer.is_done() and checkpoints_of(tmp_path) == []
    gate.set()
    outcome = writer.outcome()
    assert outcome.error is None and outcome.folder == step_folder(tmp_path, 3) and writer.outcome() is None
    assert outcome.size == sum(p.stat().st_size for p in outcome.folder.iterdir() if p.name != "manifest.json")
    assert outcome.paused < outcome.seconds
    shards = [p.stat().st_size for p in outcome.folder.glob("*.distcp")]
    assert len(shards) == 2 and min(shards) > max(shards) / 2, "two threads share the work"
    fresh, optimizer = build(make_config(tmp_path, training__seed=9), world)
    load_checkpoint(outcome.folder, fresh, optimizer, world=world)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(fresh).items())


def test_host_memory_that_is_kept_between_saves_holds_the_newest_state(
    writer, monkeypatch, make_config, world, tmp_path
):
    """As on a GPU, whose copies go to pinned memory that is allocated once; a CPU has none to pin."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    writer._stager = BlockingAsyncStager(cache_staged_state_dict=True)
    places = []
    for step in (1, 2, 3):
        before = weights_of(writer.model)
        writer.save({"step": step})
        with torch.no_grad():
            for parameter in writer.model.parameters():
                parameter.to_local().add_(1.0)
        outcome = writer.outcome()
        assert outcome.error is None
        cache = writer._stager.state_dict_cache
        assert cache is not None
        places.append([tensor.to_local().data_ptr() for tensor in cache["model"].values()])
        fresh, optimizer = build(make_config(tmp_path, training__seed=9), world)
        load_checkpoint(outcome.folder, fresh, optimizer, world=world)
        assert all(torch.equal(value, before[name]) for name, value in weights_of(fresh).items())
    assert places[0] == places[1] == places[2]


def test_one_save_at_a_time(writer, gate):
    writer.save({"step": 1})
    with pytest.raises(RuntimeError, match="outcome of the save before"):
        writer.save({"step": 2})


def test_thirty_saves_take_no_more_memory_than_one(writer):
    sizes = []
    logging.disable()  # pytest keeps every record
    tracemalloc.start()
    for step in range(30):
        writer.save({"step": step})
        assert writer.outcome().error is None
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    logging.disable(logging.NOTSET)
    assert sizes[-1] < sizes[4] + 200_000, "Python objects pile up"
    assert len(checkpoints_of(writer.run)) == 2 and threading.active_count() < 20


@pytest.mark.parametrize("phase", ["write", "read back", "manifest", "rename", "room"])
def test_a_save_that_fails_leaves_the_others_and_nothing_else(writer, monkeypatch, phase):
    writer.save({"step": 1})
    first = writer.outcome().folder

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if phase == "write":
            patch.setattr(FileSystemWriter, "write_data", refuse)
        elif phase == "read back":
            patch.setattr(checkpoint_writer, "file_crc32", refuse)
        elif phase == "manifest":
            patch.setattr(checkpointing, "write_atomically", refuse)
        elif phase == "rename":
            patch.setattr(checkpointing, "sync_folder", refuse)
        else:
            patch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 1 << 20}))
            with pytest.raises(AgreedError, match=r"step 2 needs .* but only 1\.0 MiB are free"):
                writer.save({"step": 2})
        if phase != "room":
            writer.save({"step": 2})
            error = writer.outcome().error
            assert "step 2" in error or "read back" in error
            assert "No space left on device" in error
    verify(first)
    left = sorted(p.name for p in first.parent.iterdir())
    assert left == [first.name] or (phase == "rename" and left == [first.name, "step_00000002"])
    writer.save({"step": 3})
    assert writer.outcome().error is None


def fake_checkpoints(run: Path, losses: dict[int, float | None]) -> None:
    """Complete checkpoints without weights, of which some were validated at their step."""
    for step, loss in losses.items():
        folder = step_folder(run, step)
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(b"weights")
        files = {"__0_0.distcp": {"bytes": 7, "crc32": checkpointing.file_crc32(folder / "__0_0.distcp")}}
        progress = {"step": step, "validation_loss": loss or 0.5, "validation_step": step if loss else step - 1}
        checkpointing.write_manifest(folder, {"step": step, "files": files, "progress": progress})


RETAINED = [
    # keep, keep_every, keep_best, what stays of 1 to 10 with the losses below
    (2, 0, False, [9, 10]),
    (1, 0, False, [10]),
    (2, 4, False, [4, 8, 9, 10]),
    (2, 0, True, [3, 9, 10]),
    (3, 5, True, [3, 5, 8, 9, 10]),
    (20, 0, True, list(range(1, 11))),
]
LOSSES = {1: 5.0, 2: None, 3: 2.0, 4: 2.5, 5: None, 6: 4.0, 7: 3.0, 8: None, 9: 3.5, 10: None}


@pytest.mark.parametrize(("keep", "keep_every", "keep_best", "expected"), RETAINED)
def test_what_stays(tmp_path, keep, keep_every, keep_best, expected):
    fake_checkpoints(tmp_path, LOSSES)
    delete_old(tmp_path, Retention(keep, keep_every, keep_best))
    assert sorted(map(step_of, checkpoints_of(tmp_path))) == expected


def test_a_damaged_best_one_is_not_the_best(tmp_path):
    fake_checkpoints(tmp_path, LOSSES)
    (step_folder(tmp_path, 3) / "__0_0.distcp").write_bytes(b"wEights")
    delete_old(tmp_path, Retention(1))
    # The damaged one has the right size, and nothing but reading it tells: it goes, or stays to be looked at.
    assert {4, 10} <= set(map(step_of, checkpoints_of(tmp_path))) <= {3, 4, 10}


@pytest.mark.parametrize("first", [0, 3, 10])
@pytest.mark.parametrize("every", [0, 1, 3, 7])
@pytest.mark.parametrize("retention", [Retention(1), Retention(2, 4), Retention(3, 0, False), Retention(2, 6)])
def test_room_is_asked_for_as_much_as_a_run_can_take(tmp_path, first, every, retention):
    last = 20
    steps = [s for s in range(first + 1, last + 1) if s == last or (every and s % every == 0)]
    there = [s for s in (1, 2, 3, 6, 10) if s <= first]
    fake_checkpoints(tmp_path, {s: 9.0 - s for s in there})
    delete_old(tmp_path, retention)
    there = most = len(checkpoints_of(tmp_path))
    for step in steps:
        fake_checkpoints(tmp_path, {step: 9.0 + step})  # the best stays the first
        most = max(most, len(checkpoints_of(tmp_path)))
        delete_old(tmp_path, retention)
    assert most - there <= retention.most(first, last, every, there) <= most - there + 2


def test_a_run_reports_its_saves_and_survives_those_that_fail(make_config, world, tmp_path, monkeypatch, capsys):
    config = make_config(tmp_path, training__steps=9, checkpoint__every=2, checkpoint__keep=9)
    run = Trainer(resolve(config, 1), world, StopSignal())
    write, calls = run.writer._finish, []

    def finish(temporary, folder, files, progress):
        calls.append(progress["step"])
        if progress["step"] == 4:
            raise checkpointing.UserError("the disk is full")
        write(temporary, folder, files, progress)

    monkeypatch.setattr(run.writer, "_finish", finish)
    run.train()
    out = capsys.readouterr().out
    assert calls == [2, 4, 6, 8, 9]
    assert sorted(map(step_of, checkpoints_of(run.run))) == [2, 6, 8, 9]
    assert "warning: the disk is full. Training goes on" in out and "MiB in " in out and "training waited" in out
    events = [(e["kind"], e["step"]) for e in read_events(run.run) if e["kind"].startswith("save")]
    assert [e for e in events if e[0] == "save"] == [("save", s) for s in (2, 6, 8, 9)]
    assert [e[0] for e in events].count("save_failed") == 1


def test_a_failed_last_save_is_an_error(make_config, world, tmp_path, monkeypatch):
    run = Trainer(resolve(make_config(tmp_path, training__steps=3), 1), world, StopSignal())

    def finish(*args):
        raise checkpointing.UserError("the disk is full")

    monkeypatch.setattr(run.writer, "_finish", finish)
    with pytest.raises(AgreedError, match="the last checkpoint, of step 3, could not be written: the disk is full"):
        run.train()
    assert checkpoints_of(run.run) == []


def test_the_best_validation_is_remembered(make_config, world, tmp_path):
    config = make_config(tmp_path, training__steps=8, evaluation__every=2, checkpoint__every=2, checkpoint__keep=1)
    run = Trainer(resolve(config, 1), world, StopSignal())
    run.train()
    entries = [json.loads(line) for line in (run.run / "metrics.jsonl").read_text().splitlines()]
    losses = {e["step"]: e["validation_loss"] for e in entries if "validation_loss" in e}
    best = min(losses, key=lambda step: losses[step])
    progress = read_manifest(step_folder(run.run, 8))["progress"]
    assert (progress["best_step"], progress["best_loss"]) == (best, losses[best])
    assert (progress["validation_step"], progress["validation_loss"]) == (8, losses[8])
    assert progress["tokens"] == 8 * 8 * 32


def test_each_rank_has_its_own_random_numbers_again(make_config, launch, tmp_path):
    config = make_config(tmp_path, training__steps=2, training__micro_batch_size=4)
    (tmp_path / "config.json").write_text(to_json(config))
    command = [str(HERE / "random_numbers.py"), str(tmp_path / "config.json"), str(step_folder(tmp_path / "tiny", 2))]
    drawn = []
    for code, output, errors in launch(command, 2).wait():
        assert code == 0, errors
        before, after = json.loads(output.splitlines()[-1])
        assert before == after
        drawn.append(before)
    assert drawn[0] != drawn[1]
