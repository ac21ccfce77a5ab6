"""Programs that are forks end, fail and differ as interpreters of their own would."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from . import forked
from .forked import Program, Server

needs_forks = pytest.mark.skipif(not forked._can_fork(), reason="programs are interpreters here")


@pytest.fixture
def start(server, tmp_path):
    """start(text, ...) runs a program of that text."""

    def start(text: str, *arguments: str, **options) -> Program:
        (tmp_path / "program.py").write_text(text)
        return Program(server, [str(tmp_path / "program.py"), *arguments], **options)

    return start


@pytest.mark.parametrize(
    ("text", "code", "error"),
    [
        ("print('written', end='')", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("import os; os._exit(7)", 7, ""),
        ("assert False, 'because'", 1, "AssertionError: because\n"),
        ("assert", 1, "SyntaxError: invalid syntax\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'last')", 0, "last"),
    ],
)
def test_ends(text, code, error, start):
    program = start(text)
    out, err = program.communicate(60)
    assert program.returncode == code and err.endswith(error) and bool(err) == bool(error)
    assert out == ("written" if "written" in text else "")


def test_sees_what_it_was_given_and_nothing_else(start, tmp_path, monkeypatch):
    text = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ.get('OURS'), os.environ.get('HERS'), input())"
    monkeypatch.setenv("OURS", "1")
    environment = {k: v for k, v in os.environ.items() if k != "OURS"} | {"HERS": "2"}
    program = start(text, "a", "-u", env=environment, cwd=tmp_path, input="line\n")
    assert program.communicate(60) == (f"['a', '-u'] {tmp_path} None 2 line\n", "")
    assert start(text, input="x\n").communicate(60)[0] == f"[] {Path.cwd()} 1 None x\n"


def test_nobody_agrees_by_having_forgotten_a_seed(start):
    text = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    once, twice = (start(text).communicate(60)[0].split() for _ in range(2))
    assert len(once) == 3 and all(a != b for a, b in zip(once, twice, strict=True))


def test_time_runs_out_and_a_signal_ends_it(start):
    program = start("import time; print('up', flush=True); time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.1)
    assert program.poll() is None
    program.send_signal(signal.SIGTERM)
    assert program.wait(60) == -signal.SIGTERM
    program.kill()  # nothing where it has ended


def _started(start) -> Program:
    """One that runs already, and goes on."""
    program = start("import time; print('up', flush=True); time.sleep(600)")
    while not os.pread(program._files[1].fileno(), 2, 0):
        time.sleep(0.02)
    return program


def _leave(program: Program) -> None:
    """As who asked for it would by ending, and the program with it."""
    program._lines.close()
    program._connection.close()
    end = time.monotonic() + 60
    while Path(f"/proc/{program.pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{program.pid}").exists()


@needs_forks
def test_a_program_ends_with_whoever_asked_for_it(start):
    _leave(start("import time; time.sleep(600)"))


@needs_forks
def test_ctrl_c_leaves_no_program_behind(start, server):
    """It reaches everybody: a program may take its time, but those that wait for it must be there to end it."""
    program = _started(start)
    waits = int(Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[1])
    for pid in (waits, server._process.pid):
        os.kill(pid, signal.SIGINT)
    assert start("print(1)").communicate(60) == ("1\n", "")
    assert program.poll() is None
    _leave(program)
    program = _started(start)
    program.send_signal(signal.SIGINT)
    assert program.communicate(60)[1].endswith("KeyboardInterrupt\n")


@needs_forks
def test_a_waiting_process_that_dies_is_an_error_and_no_success(start):
    program = start("import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(1)")
    with pytest.raises(ChildProcessError, match="has died"):
        program.wait(60)


@needs_forks
def test_a_server_that_cannot_load_is_an_error(monkeypatch, tmp_path):
    """And what a test sets for itself is not there when modules load."""
    seen = tmp_path / "environment"
    (tmp_path / "torch.py").write_text(
        f"import os, pathlib; pathlib.Path({str(seen)!r}).write_text(' '.join(os.environ)); raise ImportError"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = Server()
    monkeypatch.setenv("LATER", "1")
    try:
        server.connect().close()
        assert server._process is not None
        server._process.wait(60)
        names = seen.read_text().split()
        assert "PYTHONPATH" in names and "LATER" not in names
        with pytest.raises((ChildProcessError, ConnectionError)):
            Program(server, ["-m", "this"])
    finally:
        server.close()
