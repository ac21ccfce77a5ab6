"""The run folder: room on the disk before and during a run, temporary files, nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fuselm.train.checkpointing import checkpoints_of, step_of, verify
from fuselm.train.config import resolve
from fuselm.train.errors import UserError
from fuselm.train.event_log import read_events
from fuselm.train.run_folder import RunFolder, temporary_folder
from fuselm.train.trainer import StopSignal, Trainer


def test_temporary_files_lie_under_the_run_and_go(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    with temporary_folder(tmp_path) as folder:
        assert Path(tempfile.mkstemp()[1]).parent == folder and tmp_path in folder.parents
        child = subprocess.run(
            [sys.executable, "-c", "import tempfile; print(tempfile.gettempdir())"], capture_output=True, text=True
        )
        assert child.stdout.strip() == str(folder)
        cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert folder not in cache.parents, "what was compiled is worth keeping"
    assert not (tmp_path / "tmp").exists()
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before and "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_start_cleans_what_a_killed_run_left(tmp_path):
    run = tmp_path / "run"
    for name in ("tmp/host.1/a", "checkpoints/step_00000002.tmp/__0_0.distcp", "config.json.tmp", "checkpoints/x"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("left")
    folder = RunFolder(run)
    folder.claim(goes_on=True, needed=1, what="it", compiles=False, files={"config.json": b"{}"})
    assert sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file()) == [
        "checkpoints/x",
        "config.json",
    ]
    folder.release()


def test_what_a_killed_run_left_does_not_move_aside_with_it(tmp_path):
    run = tmp_path / "run"
    for name in ("metrics.jsonl", "tmp/host.1/a", "checkpoints/step_00000002.tmp/a", "checkpoints/step_00000001/a"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("left")
    folder = RunFolder(run)
    moved = folder.claim(goes_on=False, needed=1, what="it", compiles=False, files={"config.json": b"{}"})
    folder.release()
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == [
        "run.1/checkpoints/step_00000001/a",
        "run.1/metrics.jsonl",
        "run/config.json",
    ]
    assert moved == tmp_path / "run.1"


@pytest.mark.parametrize("what", ["run folder", "compile cache"])
def test_too_little_room_is_told_before_the_run(tmp_path, monkeypatch, what):
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "not there yet"))
    full = cache if what == "compile cache" else tmp_path
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: type("usage", (), {"free": 1 << (20 if Path(path) == full else 40)})
    )
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=r"needs .*iB in .*, but only 1\.0 MiB are free there") as error:
        folder.claim(goes_on=False, needed=5 << 30, what="3 checkpoint(s)", compiles=True, files={})
    assert ("5.00 GiB" in str(error.value)) == (what == "run folder")
    assert ("256.0 MiB" in str(error.value) or "0.25 GiB" in str(error.value)) == (what == "compile cache")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_in_mid_run(make_config, world, tmp_path, capsys):
    """Training goes on with the last good checkpoint, and saves again when there is room."""
    config = make_config(tmp_path, training__steps=12, checkpoint__every=2, checkpoint__keep=9, evaluation__every=0)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, asynchronous=False))
    run = Trainer(resolve(config, 1), world, StopSignal())
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    micro_batches = run.training.micro_batches

    def fill(step: int):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14 if 5 <= step < 9 else limit[0], limit[1]))
        return micro_batches(step)

    object.__setattr__(run.training, "micro_batches", fill)
    try:
        run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    good = checkpoints_of(run.run)
    assert sorted(map(step_of, good)) == [2, 4, 10, 12]
    for folder in good:
        verify(folder)
    failed = [e for e in read_events(run.run) if e["kind"] == "save_failed"]
    assert [e["step"] for e in failed] == [6, 8]
    out = capsys.readouterr().out
    assert out.count("could not be written") == 2 and "Training goes on; earlier checkpoints are untouched" in out
    assert "MiB were needed" in out and not list(run.run.rglob("*.tmp"))
