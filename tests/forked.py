"""Python programs as forks of one process that has imported the trainer: a start takes a tenth of a second, not four.

Each is a process of its own, with its own environment, folder, arguments, files and end, as a fresh interpreter would
give it; so do those that torchrun starts. Only what happens while modules load is not seen, and all have one
PYTHONHASHSEED: tests of that start an interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

PRELOADED = (
    "torch._dynamo", "torch.distributed.run", "fuselm.train.trainer", "fuselm.train.finetune", "fuselm.train.sample",
    "fuselm.train.prepare_data", "fuselm.train.chat", "fuselm.train.checkpoints", "fuselm.train.watch",
)  # fmt: skip


class Server:
    """The process from which programs are forked; it starts with the first of them.

    Attributes:
        path: of the socket on which it is asked for them.
        python: of an executable that runs a script as such a program, for PYTHON_EXEC, which torchrun heeds.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = _compiling(os.environ)  # now: what a test sets for itself is not for the modules to see
        self._folder = tempfile.TemporaryDirectory()
        self.path, self.python = f"{self._folder.name}/socket", f"{self._folder.name}/python"
        relay = shlex.join([sys.executable, "-S", __file__, "relay", self.path])
        Path(self.python).write_text(f'#!/bin/sh\nexec {relay} "$@"\n')
        os.chmod(self.python, 0o700)

    def connect(self) -> socket.socket:
        """A connection on which one program is asked for."""
        if self._process is None:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(self.path)
                listener.listen(16)
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(listener.fileno())], stdin=subprocess.PIPE,
                    env=self._environment | {"OMP_NUM_THREADS": "1"}, pass_fds=[listener.fileno()],
                )  # fmt: skip
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        return connection

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.communicate()
        self._folder.cleanup()


def _compiling(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != "TRITON_INTERPRET"}


class Program:
    """A running program: what subprocess.Popen is, with text whose ends are known.

    Args:
        server: to fork from; where there are GPUs (CUDA survives no fork), or no Linux, an interpreter is started.
        command: what stands behind "python": a script or -m module, and arguments.
        env: its whole environment; by default ours. TRITON_INTERPRET is never in it, for Triton has read it already.
        cwd: its folder.
        input: what it reads.
    """

    def __init__(
        self,
        server: Server,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        input: str = "",
    ) -> None:
        self.command = list(command)
        self.returncode: int | None = None
        self._files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115
        self._files[0].write(input.encode())
        self._files[0].seek(0)
        environment, folder = _compiling(os.environ if env is None else env), str(cwd or Path.cwd())
        self._interpreter: subprocess.Popen[bytes] | None = None
        if not _can_fork():
            start = functools.partial(subprocess.Popen, [sys.executable, *command], env=environment, cwd=folder)
            self._interpreter = start(stdin=self._files[0], stdout=self._files[1], stderr=self._files[2])
            self.pid = self._interpreter.pid
            return
        self._connection = server.connect()
        request = {"command": self.command, "env": environment | {"PYTHON_EXEC": server.python}, "cwd": folder}
        self._lines, self.pid = _ask(self._connection, request, [file.fileno() for file in self._files])

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and self._interpreter is not None:
            self.returncode = self._interpreter.poll()
        elif self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.returncode = _number(self._lines)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when it has ended."""
        if self.returncode is None:
            if self._interpreter is not None:
                self._interpreter.wait(timeout)
            elif not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.command, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to stdout and stderr, when it has ended."""
        self.wait(timeout)
        texts = []
        for file in self._files[1:]:
            file.seek(0)
            texts.append(file.read().decode())
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            _send(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _can_fork() -> bool:
    import torch  # late: the relay has no use for it

    return sys.platform == "linux" and not torch.cuda.is_available()


def _ask(connection: socket.socket, request: dict[str, Any], files: Sequence[int]) -> tuple[Any, int]:
    """Where the exit code will be read, and the number of the process."""
    data = json.dumps(request).encode() + b"\n"
    socket.send_fds(connection, [data[:1]], files)
    connection.sendall(data[1:])
    lines = connection.makefile()
    return lines, _number(lines)


def _number(lines: Any) -> int:
    line = lines.readline()
    if not line:
        raise ChildProcessError("the process that forks programs, or the one that waits for this program, has died")
    return int(line)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)


def _relay(path: str, command: list[str]) -> None:
    """Stand for a program: hand its signals on, and end as it ends."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    request = {"command": [word for word in command if word != "-u"], "env": dict(os.environ), "cwd": os.getcwd()}
    lines, pid = _ask(connection, request, [0, 1, 2])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: _send(pid, received))
    code = _number(lines)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _serve(listener: socket.socket) -> tuple[dict, list[int]]:
    """Returns in the process of each program: what was asked for, and its three files."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait for a program
    while True:
        ready, _, _ = select.select([listener, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        first, files, _, _ = socket.recv_fds(connection, 1, 3)
        request = json.loads(first + connection.makefile("rb").readline())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pid = os.fork()
        if not pid:
            connection.close()
            return request, files
        connection.sendall(f"{pid}\n".encode())
        ended = os.pidfd_open(pid)
        if ended not in select.select([ended, connection], [], [])[0]:
            os.kill(pid, signal.SIGKILL)  # whoever asked for it has gone
            os.waitpid(pid, 0)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.sendall(f"{code}\n".encode())
        os._exit(0)


def _run(request: dict, files: list[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import numpy
    import torch

    torch.default_generator.seed()  # two programs that forgot a seed must not agree; `random` sees to that itself
    numpy.random.seed()
    command = request["command"]
    if command[0] == "-m":
        import runpy

        sys.argv = command[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    main = ModuleType("__main__")
    main.__file__ = command[0]
    sys.modules["__main__"] = main
    exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), main.__dict__)


if __name__ == "__main__" and sys.argv[1] == "relay":
    _relay(sys.argv[2], sys.argv[3:])
elif __name__ == "__main__":
    # Ctrl-C is for programs, and for whoever asked for them: with that one gone, those who wait end what still runs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _run(*_serve(socket.socket(fileno=int(sys.argv[1]))))
