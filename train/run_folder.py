"""The folder of a run: one run at a time, space enough before it starts, no temporary files left behind."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fuselm.train import checkpointing
from fuselm.train.errors import UserError, in_words
from fuselm.train.shards import hold

TEMPORARY = "tmp"
_COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_CACHE_BYTES = 256 << 20  # what compiled blocks take at most, by far


class RunFolder:
    """A run's folder on rank 0, locked while the run lives.

    Args:
        path: runs/NAME.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: weakref.finalize[..., Any] | None = None

    def claim(self, *, goes_on: bool, needed: int, what: str, compiles: bool, files: dict[str, bytes]) -> Path | None:
        """Check space, move an earlier run aside, create the folder and some files in it.

        Args:
            goes_on: this run continues the one whose folder it is.
            needed: bytes that it will write.
            what: for what, for the message.
            compiles: blocks will be compiled, whose cache takes room too.
            files: name to content.

        Returns:
            Where the earlier run lies now, or None.

        Raises:
            UserError: another process trains there, there is too little space, or the folder cannot be written.
        """
        moved = None
        try:
            if self.path.is_dir():
                self._hold()
            folder = next(parent for parent in (self.path, *self.path.absolute().parents) if parent.exists())
            checkpointing.require_space(folder, needed, what)
            if compiles:
                cache = Path(os.environ.get(_COMPILE_CACHE, tempfile.gettempdir()))
                there = next(parent for parent in (cache, *cache.absolute().parents) if parent.exists())
                checkpointing.require_space(there, _CACHE_BYTES, f"the cache of compiled kernels ({_COMPILE_CACHE})")
            if not goes_on and (self.path / "metrics.jsonl").exists():
                self.clean()  # nobody will start there again to do it
                number = 1
                while (moved := self.path.with_name(f"{self.path.name}.{number}")).exists():
                    number += 1
                self.path.rename(moved)
                self.release()
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold()
            self.clean()
            for name, content in files.items():
                checkpointing.write_atomically(self.path / name, content)
        except OSError as error:
            raise UserError(f"the run folder {self.path} cannot be written: {in_words(error)}") from error
        return moved

    def _hold(self) -> None:
        """Lock the run folder while this run lives, so that no two write to it."""
        if self._lock is not None:
            return
        try:
            handle = hold(self.path)
        except BlockingIOError as error:
            raise UserError(
                f"another process is training in {self.path}: wait for it, or give this run another --name"
            ) from error
        self._lock = None if handle is None else weakref.finalize(self, os.close, handle)

    def clean(self) -> None:
        """Remove what interrupted saves and runs left: unfinished checkpoints and temporary files."""
        checkpointing.clean(self.path)
        shutil.rmtree(self.path / TEMPORARY, ignore_errors=True)
        for stale in self.path.glob("*.tmp"):
            stale.unlink(missing_ok=True)

    def release(self) -> None:
        """Give the lock back; safe to call twice."""
        if self._lock is not None:
            self._lock()
            self._lock = None


@contextmanager
def temporary_folder(run: Path) -> Iterator[Path]:
    """Meanwhile this process and its children put temporary files under the run folder; in the end they are deleted.

    The cache of compiled kernels stays where it was: it is worth keeping from run to run.

    Args:
        run: the run folder, which exists.
    """
    cache = str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")
    folder = (run / TEMPORARY / f"{socket.gethostname()}.{os.getpid()}").absolute()
    before, before_python = {name: os.environ.get(name) for name in ("TMPDIR", _COMPILE_CACHE)}, tempfile.tempdir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault(_COMPILE_CACHE, cache)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        yield folder
    finally:
        tempfile.tempdir = before_python
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        compiler: Any = sys.modules.get("torch._inductor.async_compile")
        if compiler is not None:  # its processes outlive the run, and would go on to write there
            compiler.shutdown_compile_workers()
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another rank is still there
            folder.parent.rmdir()
