"""train/checkpoints.py: what it lists, what it finds damaged, and what it deletes or leaves."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from fuselm.train import checkpoint_store, checkpoints
from fuselm.train.checkpoint_writer import Retention, save_checkpoint
from fuselm.train.checkpointing import step_folder
from fuselm.train.checkpoints import main
from fuselm.train.distributed import World
from fuselm.train.shards import hold

from ..forked import Program

ROOT = Path(__file__).resolve().parents[2]
STEPS = [100, 200, 300, 400, 500]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with five sound checkpoints and what an interrupted save left."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    world = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in STEPS:
        save_checkpoint(
            run, model, optimizer, world=world, retention=Retention(9), config={}, position={}, progress={"step": step}
        )
    leftover = run / "checkpoints" / "step_00000550.tmp"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half" * 100)
    return run


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return shutil.copytree(original, tmp_path / "tiny")


def _steps(run: Path) -> list[int]:
    return sorted(int(f.name[5:]) for f in (run / "checkpoints").iterdir() if f.name[5:].isdigit())


def _everything(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def _flip(run: Path, step: int) -> None:
    """One bit of the largest file."""
    path = step_folder(run, step) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def _truncate(run: Path, step: int) -> None:
    path = step_folder(run, step) / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])


def _call(*words: object) -> int:
    return main([str(word) for word in words])


def test_list_shows_sizes_ranks_times_and_states(run, capsys):
    _truncate(run, 200)
    (step_folder(run, 300) / "manifest.json").unlink()
    (step_folder(run, 400) / ".metadata").unlink()
    (step_folder(run, 500) / "manifest.json").write_text("{}")
    _flip(run, 100)  # sizes do not tell
    assert _call("list", run) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "size", "ranks", "written", "state"]
    assert [row.split()[0] for row in rows] == ["100", "200", "300", "400", "500", "550"]
    assert "complete" in rows[0] and "  1  20" in rows[0] and "MiB" in rows[0]
    assert "damaged size: __0_0.distcp has" in rows[1]
    assert "incomplete: no readable manifest.json" in rows[2]
    assert "incomplete: .metadata is missing" in rows[3]
    assert "damaged: manifest.json is damaged" in rows[4]
    assert "unfinished: step_00000550.tmp" in rows[5]


def test_list_of_a_run_without_checkpoints(tmp_path, capsys):
    assert _call("list", tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path} has no checkpoints\n"


def test_verify_of_sound_ones_prints_a_line_each(run, capsys):
    before = _everything(run)
    assert _call("verify", run) == 0
    out, err = capsys.readouterr()
    assert [line.split(",")[0] for line in out.splitlines()] == [f"step {step}: good" for step in STEPS]
    assert err == "", "no bar where there is no terminal"
    assert _everything(run) == before


def test_verify_names_each_file_and_what_is_wrong(run, capsys):
    _flip(run, 200)
    _truncate(run, 300)
    (step_folder(run, 300) / ".metadata").unlink()
    (step_folder(run, 400) / "manifest.json").unlink()
    assert _call("verify", run) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[0].startswith("step 100: good") and lines[4].startswith("step 500: good")
    assert lines[1] == "step 200: damaged: __0_0.distcp does not have the checksum it was written with"
    assert lines[2].startswith("step 300: damaged: .metadata is missing, expected ")
    assert "; __0_0.distcp has " in lines[2]
    assert lines[3] == "step 400: damaged: no readable manifest.json"
    assert _call("verify", run, "--step", 100) == 0
    assert _call("verify", run, "--step", 200) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_verify_draws_a_bar_on_a_terminal(run, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert _call("verify", run, "--step", 100) == 0
    out, err = capsys.readouterr()
    assert "step_00000100" in err and "step 100: good" in out


def test_what_a_run_deletes_meanwhile_is_no_damage(run, capsys, monkeypatch):
    def deleted(folder, advance):
        shutil.rmtree(folder)
        return ["no readable manifest.json"]

    monkeypatch.setattr(checkpoint_store, "problems", deleted)
    assert _call("verify", run, "--step", 100) == 0
    assert "step 100: deleted by the run meanwhile" in capsys.readouterr().out


def test_prune_keeps_the_newest_and_the_multiples(run, capsys):
    before = _everything(run)
    assert _call("prune", run, "--keep", 2, "--every", 200, "--dry-run") == 0
    planned = capsys.readouterr().out
    assert _everything(run) == before
    sizes = sum(p.stat().st_size for s in (100, 300) for p in step_folder(run, s).iterdir()) + 400
    assert _call("prune", run, "--keep", 2, "--every", 200) == 0
    out, err = capsys.readouterr()
    assert _steps(run) == [200, 400, 500] and err == ""
    assert {p.name for p in (run / "checkpoints").iterdir()} == {f"step_{s:08d}" for s in (200, 400, 500)}
    assert [line.split()[1].rpartition("/")[2] for line in out.splitlines()[:-1]] == [
        "step_00000550.tmp",
        "step_00000100",
        "step_00000300",
    ]
    assert out.splitlines()[-1].startswith(f"freed {sizes:,} bytes")
    assert planned == out.replace("deleted ", "would delete ").replace("freed ", "would free ")
    assert _call("prune", run, "--keep", 2, "--every", 200) == 0
    assert capsys.readouterr().out == "freed 0 bytes (0.0 MiB)\n"


def test_a_damaged_one_is_not_counted_and_stays(run, capsys):
    _flip(run, 500)
    _truncate(run, 400)
    _truncate(run, 100)  # older than those that stay
    assert _call("prune", run, "--keep", 1) == 0
    assert _steps(run) == [100, 300, 400, 500]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 3 and all(line.startswith("warning: ") for line in warnings)
    assert "step_00000500 stays" in warnings[0] and "does not have the checksum" in warnings[0]
    assert _call("verify", run, "--step", 300) == 0


def test_without_a_sound_one_nothing_is_deleted(run, capsys):
    for step in STEPS:
        _flip(run, step)
    before = _everything(run)
    assert _call("prune", run, "--keep", 1) == 1
    assert "the checksums of none of its checkpoints hold" in capsys.readouterr().err
    assert _everything(run) == before


def test_prune_refuses_while_the_run_is_locked(run, capsys):
    before = _everything(run)
    handle = hold(run)
    assert handle is not None
    try:
        assert _call("prune", run, "--keep", 1) == 2
        assert f"a process is training in {run}" in capsys.readouterr().err
        assert _call("list", run) == _call("verify", run) == 0, "looking is free"
    finally:
        os.close(handle)
    assert _everything(run) == before
    assert _call("prune", run, "--keep", 1) == 0
    again = hold(run)
    assert again is not None, "prune gave the lock back"
    os.close(again)


def test_an_interrupted_deletion_leaves_no_half_checkpoint(run, monkeypatch, capsys):
    def fails(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    (run / "checkpoints" / "step_00000550.tmp" / "__0_0.distcp").unlink()
    (run / "checkpoints" / "step_00000550.tmp").rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", fails)
        assert _call("prune", run, "--keep", 4) == 2
    assert "cannot be deleted: Operation not permitted" in capsys.readouterr().err
    assert _steps(run) == [200, 300, 400, 500]
    assert _call("prune", run, "--keep", 4) == 0
    assert len(list((run / "checkpoints").iterdir())) == 4


def test_what_a_link_leads_to_is_not_deleted(run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    step_folder(run, 100).rename(elsewhere)
    step_folder(run, 100).symlink_to(elsewhere)
    assert _call("prune", run, "--keep", 4) == 0
    assert _steps(run) == [200, 300, 400, 500] and (elsewhere / "manifest.json").is_file()


@pytest.mark.parametrize(
    "words, said",
    [
        ([], r"a command is missing: checkpoints\.py list\|verify\|prune RUN"),
        (["lst", "RUN"], r"unknown command lst \(did you mean list\?\)"),
        (["list"], r"RUN is missing: checkpoints\.py list RUN"),
        (["list", "missing"], r"run folder missing does not exist"),
        (["verify", "missing"], r"run folder missing does not exist"),
        (["prune", "missing", "--keep", "1"], r"run folder missing does not exist"),
        (["verify", "RUN", "--step", "7"], r"has no checkpoint of step 7; it has 100, 200, 300, 400, 500"),
        (["verify", "RUN", "--step", "x"], r"--step wants .*, got 'x'"),
        (["prune", "RUN"], r"--keep N is missing"),
        (["prune", "RUN", "--keep", "0"], r"--keep must be at least 1, got 0"),
        (["prune", "RUN", "--keep", "-1"], r"--keep must be at least 1, got -1"),
        (["prune", "RUN", "--keep", "1", "--every", "0"], r"--every must be at least 1, got 0"),
        (["prune", "RUN", "--kep", "1"], r"unknown option --kep \(did you mean --keep\?\)"),
        (["verify", "EMPTY"], r"has no checkpoints"),
        (["prune", "EMPTY", "--keep", "1"], r"it has no complete checkpoint"),
    ],
)
def test_mistakes_are_one_line(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    before = _everything(original)
    places: dict[str, str] = {"RUN": str(original), "EMPTY": str(tmp_path)}
    assert main([places.get(word, word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert re.search(said, err), err
    assert _everything(original) == before


def test_ctrl_c_ends_without_a_traceback(run, monkeypatch):
    def interrupted(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "_check", interrupted)
    assert _call("verify", run) == 130


def test_as_a_script(original, server):
    program = Program(server, ["train/checkpoints.py", "list", str(original)], cwd=ROOT)
    code, (out, err) = program.wait(120), program.communicate()
    assert code == 0 and out.count("complete") == 5, err


@pytest.mark.parametrize("command", [[], ["list"], ["verify"], ["prune"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) if command else contextlib.nullcontext():
        assert main([*command, "--help"]) == 0
    assert "usage: checkpoints.py" in capsys.readouterr().out
