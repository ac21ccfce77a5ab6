"""Every command and example in README.md and docs/ works: Python blocks run, shell commands run or, where they would
train for hours or need many GPUs, are parsed by the program they name."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuselm.train.config import parse_command_line
from fuselm.train.presets import PRESETS

from .forked import Program, Server

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
QUICK_PRESETS = {"debug"}


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def _commands(page: Path) -> list[str]:
    lines = [line for block in _blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    commands = [line.split("  #")[0].strip() for line in lines]
    return [command for command in commands if command and not command.startswith("#")]


@pytest.fixture(scope="module")
def bundled_data(tmp_path_factory, server) -> Path:
    """The bundled text, prepared once for all pages; the first run in a clone does it."""
    folder = tmp_path_factory.mktemp("bundled")
    _run("python train/pretrain.py --preset debug --training.steps 1", _clone(folder), server)
    return folder / "runs" / "data"


def _clone(folder: Path) -> Path:
    """Makes `folder` look like a clone, with some text to prepare, so that runs land in it."""
    for name in ("src", "kernels", "model", "train", "benchmarks", "tests", "Makefile", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    texts = folder / "my_texts"
    texts.mkdir()
    lines = "".join(f"Line {i}: the quick brown fox jumps over dog {i * i}.\n\tAnd once more.\n" for i in range(3000))
    (texts / "one.txt").write_text(lines)
    (texts / "two.txt").write_text(lines[::-1])
    return folder


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p, "python")], ids=lambda p: p.stem)
def test_python_examples_run(page, tmp_path, monkeypatch, server):
    monkeypatch.chdir(_clone(tmp_path))
    code = "\n".join(_blocks(page, "python"))
    if "my_data" in code:
        _run("python train/prepare_data.py my_texts my_data --vocab-size 1024", tmp_path, server)
    exec(compile(code, str(page), "exec"), {"__name__": "example"})


def _run(command: str, folder: Path, server: Server) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = shlex.split(command)
    if words[0] in ("python", "torchrun") and not {"|", ">"} & set(words):
        module = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
        program = Program(server, [*module, *words[1:]], env=environment, cwd=folder)
        code, (out, err) = program.wait(300), program.communicate()
    else:
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        shell: dict[str, Any] = {"shell": True, "cwd": folder, "env": environment, "stdin": subprocess.DEVNULL}
        done = subprocess.run(command, **shell, capture_output=True, text=True, timeout=300)
        code, out, err = done.returncode, done.stdout, done.stderr
    assert code == 0, f"{command}\n{out[-1500:]}\n{err[-2500:]}"


def _pretrain_arguments(words: list[str]) -> list[str] | None:
    scripts = [
        i for i, w in enumerate(words) if w.endswith("pretrain.py") or w in ("fuselm.train.pretrain", "fuselm-pretrain")
    ]
    return words[scripts[0] + 1 :] if scripts else None


@pytest.mark.parametrize("page", [p for p in PAGES if _commands(p)], ids=lambda p: p.stem)
def test_shell_commands(page, tmp_path, bundled_data, server):
    """In their order, as a reader of the page would type them."""
    folder = _clone(tmp_path)
    shutil.copytree(bundled_data, folder / "runs" / "data")
    commands = _commands(page)
    if any("runs/demo" in command for command in commands):  # what `make demo` leaves behind, in short
        _run("python train/pretrain.py --preset debug --name demo --training.steps 2", folder, server)
    for command in commands:
        _check(command, folder, server)


def _check(command: str, clone: Path, server: Server) -> None:
    words = shlex.split(command)
    arguments = _pretrain_arguments(words)
    if words[0] == "git":
        assert words[1] in ("clone",)
        return
    if words[0] == "cd":
        return
    if words[0] == "make":
        assert subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True).returncode == 0
        return
    if words[0] == "pip" or words[1:3] == ["-m", "pip"]:
        # The options and the package are right; that what it installs works is tested by test_package.py.
        dry = [sys.executable, "-m", "pip", *words[words.index("pip") + 1 :], "--dry-run", "--no-deps", "--no-index"]
        done = subprocess.run([*dry, "--no-build-isolation"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "Would install fuselm" in done.stdout, done.stderr
        return
    if words[0] == "pytest" or "pytest" in words:
        _run(command + " --collect-only -q", clone, server)
        return
    if arguments is not None:
        config = parse_command_line(arguments, PRESETS, "")  # raises on a wrong option
        if config.preset not in QUICK_PRESETS:
            return
        _run(f"{command} --training.steps 2", clone, server)
        return
    if any("bench_step" in w or "report.py" in w for w in words):
        _run(command.split(".py")[0] + ".py --help", clone, server)
        return
    _run(command, clone, server)


def test_every_link_and_picture_exists():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
