"""Processes whose lines are waited for with a limit of time, and what ends them: silence, or a signal to the script."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence

EXIT_S = 5.0  # that a process has for its exit after its last line


class StoppedError(BaseException):
    """A signal asks this script to end. No Exception, so that nothing takes it for a failed measurement.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within this context the first SIGTERM or SIGINT raises StoppedError.

    Later ones (`timeout` sends two) are ignored, so that what is known by then can be written.
    """

    def handle(signum: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise StoppedError(signum)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    for each in before:
        signal.signal(each, handle)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Watched:
    """A command in a session of its own, so that it ends with all that it started.

    Args:
        command: words.
        env: its environment; None for this process's.
        stderr: where it goes, as for subprocess.Popen; None leaves it on this process's.
        asked: whether lines will be sent to it.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, *, stderr: int | None = None, asked: bool
    ) -> None:
        self._process = subprocess.Popen(
            [*command], env=None if env is None else dict(env), stdin=subprocess.PIPE if asked else subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=stderr, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._arrived: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._arrived.put(line)
        self._arrived.put(None)

    def send(self, line: str) -> None:
        """Sends a line; to a process that has ended it sends nothing, and `line` tells of the end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def line(self, seconds: float) -> str | None:
        """Its next line, or None where there will be no more.

        Raises:
            TimeoutError: none came within `seconds`.
        """
        try:
            return self._arrived.get(timeout=max(seconds, 0.001))
        except queue.Empty:
            raise TimeoutError(f"no line within {seconds:g} s") from None

    def exit_code(self) -> int:
        """Its exit code once there are no more lines; one that does not end then is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)
        self.end()
        return self._process.returncode

    def kill(self) -> None:
        """Kills it and all of its session, and leaves it to another thread to read its end."""
        if self._process.returncode is None:  # not waited for yet, so that its number is still its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills it and all of its session; safe to call twice."""
        self.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
