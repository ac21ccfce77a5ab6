"""Checkpoints: whole or absent, checked before use, never deleted before a newer one is whole."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from fuselm.model.llama import Llama
from fuselm.train import checkpoint_writer, checkpointing
from fuselm.train.checkpoint_writer import Retention, save_checkpoint
from fuselm.train.checkpointing import (
    all_finite,
    checkpoint_bytes,
    checkpoints_of,
    clean,
    latest_checkpoint,
    load_checkpoint,
    load_model,
    read_manifest,
    resumable,
    step_folder,
    verify,
    write_atomically,
)
from fuselm.train.distributed import AgreedError
from fuselm.train.errors import UserError
from fuselm.train.evaluation import forward_backward
from fuselm.train.trainer import build


@pytest.fixture
def trained(make_config, world, tmp_path):
    """A model and an optimizer that have done a step, and save(step) for them."""
    config = make_config(tmp_path)
    model, optimizer = build(config, world)
    _step(model, optimizer, world)

    def save(step: int, keep: int = 2) -> Path:
        return save_checkpoint(
            tmp_path,
            model,
            optimizer,
            world=world,
            retention=Retention(keep),
            config={"a": 1},
            position={"seed": 0},
            progress={"step": step},
        )

    return config, model, optimizer, save


def _step(model, optimizer, world, seed=0):
    from fuselm.train.data_stream import Batch

    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 261, (2, 33), generator=generator)
    loss, _, _ = forward_backward(model, [Batch(tokens[:, :-1], tokens[:, 1:])], world)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _damage(checkpoint: Path) -> Path:
    """Flip one bit in the middle of the largest file."""
    path = max((p for p in checkpoint.iterdir() if p.suffix == ".distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    return path


def test_load_restores_everything(trained, make_config, world, tmp_path):
    _, model, optimizer, save = trained
    random_state = torch.get_rng_state()
    folder = save(1)
    expected = [_step(model, optimizer, world, seed) for seed in (1, 2, 3)]
    fresh, fresh_optimizer = build(make_config(tmp_path, training__seed=5), world)
    torch.manual_seed(99)
    manifest = load_checkpoint(folder, fresh, fresh_optimizer, world=world)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert (manifest["step"], manifest["position"], manifest["config"]) == (1, {"seed": 0}, {"a": 1})
    assert [_step(fresh, fresh_optimizer, world, seed) for seed in (1, 2, 3)] == expected


def test_a_plain_model_loads_the_weights(trained):
    config, model, _, save = trained
    plain = Llama(config.model)
    load_model(save(1), plain)
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert set(whole) == {name for name, _ in plain.named_parameters()}, "tied embeddings are stored once"
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, whole[name]), name


def test_activation_checkpointing_and_compile_leave_no_trace_in_names(make_config, world, tmp_path):
    config = make_config(tmp_path, parallel__activation_checkpointing="full")
    model, optimizer = build(config, world)
    _step(model, optimizer, world)
    folder = save_checkpoint(
        tmp_path, model, optimizer, world=world, retention=Retention(1), config={}, position={}, progress={"step": 1}
    )
    load_model(folder, Llama(config.model))


def test_the_newest_complete_one_is_found_with_a_warning(trained, tmp_path, capsys):
    *_, save = trained
    first, second = save(1), save(2)
    assert latest_checkpoint(tmp_path) == second
    (second / ".metadata").unlink()
    assert latest_checkpoint(tmp_path) == first
    said = capsys.readouterr().err
    assert said.startswith("warning: ") and said.count("\n") == 1
    assert re.search(r"step_00000002.*\.metadata is missing", said)
    (first / "manifest.json").unlink()
    assert latest_checkpoint(tmp_path) is None
    assert capsys.readouterr().err.count("warning: ") == 2


@pytest.mark.parametrize("damage", ["truncated", "garbled manifest", "no manifest", "no sizes"])
def test_incomplete_ones_are_named_errors(trained, world, damage):
    config, model, optimizer, save = trained
    folder = save(1)
    if damage == "truncated":
        path = _damage(folder)
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "garbled manifest":
        (folder / "manifest.json").write_text('{"step": 1, "files"')
    elif damage == "no sizes":
        (folder / "manifest.json").write_text('{"step": 1, "files": {"__0_0.distcp": 3}}')
    else:
        (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="not a complete checkpoint"):
        load_checkpoint(folder, model, optimizer, world=world)
    with pytest.raises(UserError, match="not a complete checkpoint"):
        load_model(folder, Llama(config.model))


def test_a_flipped_bit_is_an_error_or_skipped(trained, world, tmp_path, capsys):
    config, model, optimizer, save = trained
    first, second = save(1), save(2)
    path = _damage(second)
    read_manifest(second)  # sizes alone do not tell
    for load in (
        lambda: verify(second),
        lambda: load_checkpoint(second, model, optimizer, world=world),
        lambda: load_model(second, Llama(config.model)),
    ):
        with pytest.raises(UserError, match=f"damaged: {path.name}"):
            load()
    assert resumable(tmp_path, world) == first
    assert "step_00000002 is damaged" in capsys.readouterr().err


def test_a_flipped_bit_in_the_manifest_is_seen(trained, world):
    """It would be another step or place in the data, without a word."""
    *_, save = trained
    manifest = save(1) / "manifest.json"
    whole = manifest.read_bytes()
    assert read_manifest(manifest.parent)["step"] == 1
    for place in range(len(whole)):
        manifest.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            verify(manifest.parent, world)


def test_a_file_that_cannot_be_read_is_an_error_on_every_rank(trained, world, monkeypatch):
    *_, save = trained
    folder = save(1)

    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpointing, "file_crc32", fails)
    with pytest.raises(AgreedError, match=r"\.metadata cannot be read: Input/output error"):
        verify(folder, world)


def test_only_the_newest_stay(trained, tmp_path):
    *_, save = trained
    for step in (1, 2, 3, 10):
        save(step, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_00000003", "step_00000010"]


def test_a_damaged_one_of_an_earlier_process_is_not_counted(trained, tmp_path, monkeypatch):
    *_, save = trained
    first, second = save(1), save(2)
    _damage(second)
    for module in (checkpointing, checkpoint_writer):
        monkeypatch.setattr(module, "trusted", set())
    third = save(3, keep=2)
    assert first.is_dir() and second.is_dir() and verify(first)["step"] == 1
    read = []
    monkeypatch.setattr(checkpointing, "verify", lambda folder: read.append(folder) or {})
    save(4, keep=2)
    assert not read, "one that this process wrote is not read again"
    assert not first.exists() and third.is_dir()


def test_a_save_that_fails_deletes_nothing(trained, tmp_path, monkeypatch):
    *_, save = trained
    first = save(1, keep=1)

    def fails(*args, **kwargs):
        (kwargs["checkpoint_id"] / "__0_0.distcp").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_writer, "save", fails)
    with pytest.raises(UserError, match=r"checkpoint of step 2 could not be written.*No space left on device"):
        save(2, keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [first.name]
    verify(first)


def test_what_dcp_itself_refuses_is_a_user_error(trained, world, tmp_path):
    """torch.distributed.checkpoint raises CheckpointException, which `except Exception` does not catch."""
    config, _, _, save = trained
    folder = save(1)
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, ffn_dim=64))
    with pytest.raises(UserError, match=r"does not fit this model: .*[Ss]ize mismatch"):
        load_model(folder, Llama(wider.model))
    with pytest.raises(UserError, match=r"does not fit this model: .*[Ss]ize mismatch"):
        load_checkpoint(folder, *build(wider, world), world=world)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:  # as a full disk: the write fails in the middle of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, limit[1]))
        with pytest.raises(
            UserError, match=r"checkpoint of step 2 could not be written.*writing failed.* needed, .* free"
        ):
            save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [folder.name]
    verify(folder)


def test_too_little_space_is_refused_with_the_numbers(trained, tmp_path, monkeypatch):
    _, model, _, save = trained
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 2**20))
    with pytest.raises(UserError, match=r"step 1 needs 4\.\d MiB in .*checkpoints, but only 1\.0 MiB are free"):
        save(1)
    assert latest_checkpoint(tmp_path) is None
    parameters = sum(p.numel() for p in model.parameters())
    assert checkpoint_bytes(model) == parameters * 12 + 2**22


def test_the_estimate_covers_what_is_written(trained):
    _, model, _, save = trained
    assert sum(p.stat().st_size for p in save(1).iterdir()) <= checkpoint_bytes(model)


def test_leftovers_are_cleaned_and_a_step_can_be_saved_again(trained, tmp_path):
    *_, save = trained
    folder = save(1)
    leftover = tmp_path / "checkpoints" / "step_00000002.tmp"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == folder
    clean(tmp_path)
    assert not leftover.exists()
    (folder / "manifest.json").unlink()
    save(1)
    assert latest_checkpoint(tmp_path) == folder == step_folder(tmp_path, 1)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_manifest_lists_every_file(trained):
    *_, save = trained
    folder = save(1)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {p.name for p in folder.iterdir()} - {"manifest.json"}
    assert manifest["world_size"] == 1 and manifest["step"] == 1
    assert manifest["versions"]["torch"] in torch.__version__
    assert {"fuselm", "python", "triton"} <= set(manifest["versions"]) and "T" in manifest["written"]


def test_nan_weights_are_seen(trained, world):
    _, model, _, _ = trained
    assert all_finite(model, world)
    with torch.no_grad():
        next(iter(model.blocks.parameters())).to_local()[-1] = float("inf")
    assert not all_finite(model, world)


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_a_file_that_cannot_be_written_whole_stays_as_it_was(fails, tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_bytes(b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync" if fails == "write" else "replace", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_atomically(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"config.json": b"old"}


def test_only_numbers_are_steps(tmp_path):
    for name in ("step_00000002", "step_x", "step_\N{SUPERSCRIPT TWO}", "step_", "step_00000003.tmp"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [folder.name for folder in checkpoints_of(tmp_path)] == ["step_00000002"]
