"""Commands end with a line and an exit code where the operating system refuses something: paths, stdout, stdin."""

from __future__ import annotations

import errno
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuselm.train.errors import command, report, warn

TOO_LONG = "n" * 300
COMMANDS = {
    "prepare_data": [TOO_LONG, "out"],
    "sample": [TOO_LONG],
    "chat": [TOO_LONG],
    "watch": [TOO_LONG, "--once"],
    "checkpoints": ["list", TOO_LONG],
    "compare": [TOO_LONG],
    "source_loss": [TOO_LONG],
    "multiple_choice": ["run", TOO_LONG],
    "lm_eval_adapter": [TOO_LONG, "--tasks", "hellaswag"],
}
PROGRAM = """
import sys
from fuselm.train.errors import command

@command
def main(args=None):
    text = sys.stdin.readline()
    print(repr(text) if "repr" in sys.argv else "\\xe9\\U0001f600 done")
    return 0

sys.exit(main())
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_that_cannot_be_looked_at_is_one_line(name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    code = importlib.import_module(f"fuselm.train.{name}").main(COMMANDS[name])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1
    assert TOO_LONG in err and os.strerror(errno.ENAMETOOLONG) in err
    assert list(tmp_path.iterdir()) == []


def run(*arguments: str, stdout: int | None = None, **more) -> tuple[int, bytes, str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | more.pop("env", {})
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        env=environment,
    )
    out, err = process.communicate(more.get("given", b"\n"), timeout=60)
    return process.returncode, out or b"", err.decode()


def test_a_reader_that_has_gone():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run(stdout=writer) == (141, b"", "")
    finally:
        os.close(writer)


def test_a_full_disk_behind_stdout():
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, _, err = run(stdout=full)
    finally:
        os.close(full)
    assert (code, err) == (2, f"error: reading or writing failed: {os.strerror(errno.ENOSPC)}\n")


def test_letters_that_stdout_has_no_code_for():
    assert run(env={"PYTHONIOENCODING": "ascii"}) == (0, b"?? done\n", "")


def test_bytes_of_stdin_that_are_no_text():
    code, out, err = run("repr", given=b"a\xff\n", env={"PYTHONUTF8": "1"})
    assert (code, out, err) == (0, rb"'a\udcff\n'" + b"\n", "")


def test_a_broken_pipe_elsewhere_is_an_error(capsys):
    """A worker that died is no reader of stdout."""

    @command
    def main(args=None) -> int:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    assert main() == 2 and capsys.readouterr().err == "error: reading or writing failed: Broken pipe\n"


class Full(io.StringIO):
    def write(self, text: str, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_behind_stderr_stops_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Full())
    warn("the disk is full")
    assert report("the disk is full") == 2


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_pretrain_behind_a_stdout_of_few_letters(encoding):
    """Its help has Greek letters; what the model refuses comes from a box that is drawn with what stdout has."""
    script = str(Path(__file__).resolve().parents[2] / "train" / "pretrain.py")
    environment = os.environ | {"PYTHONIOENCODING": encoding}

    def outcome(*options: str) -> tuple[int, bytes, bytes]:
        done = subprocess.run([sys.executable, script, *options], env=environment, capture_output=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    code, out, err = outcome("--preset", "debug", "--help")
    assert (code, err) == (0, b"") and b"--model.rope_theta" in out and b"--logging.wandb" in out
    code, out, err = outcome("--preset", "debug", "--model.dim", "63")
    assert (code, out, err) == (2, b"", b"error: dim=63 does not divide by num_heads=4; give head_dim\n")
