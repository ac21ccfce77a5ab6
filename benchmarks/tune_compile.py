"""Compiling for tune.py in processes beside the one that measures: nothing is launched, Triton's cache on disk fills.

The order is that of trying, so that the measuring process finds what it needs next.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tuning.base import Target

from fuselm.kernels._triton import HAVE_TRITON, INTERPRET, triton


@contextlib.contextmanager
def replaced(attribute: str, value: Any) -> Iterator[None]:
    """Within this context the launch function gives `value`, whatever it is asked.

    Raises:
        AttributeError: the attribute does not exist: a target whose kernel was renamed must not pass silently.
    """
    module_name, _, name = attribute.rpartition(".")
    module = importlib.import_module(module_name)
    before = getattr(module, name)
    setattr(module, name, lambda *_, **__: value)
    try:
        yield
    finally:
        setattr(module, name, before)


def called(run: Callable[[], Any], attribute: str, candidate: Any) -> Callable[[], Any]:
    """`run` with the launch function replaced by one that gives `candidate`."""

    def call() -> Any:
        with replaced(attribute, candidate):
            return run()

    return call


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Within this context launches compile their kernels and do not run them."""
    if not HAVE_TRITON or INTERPRET:
        yield
        return
    jit_function: Any = triton.runtime.jit.JITFunction
    run = jit_function.run

    def compiling(self: Any, *args: Any, **kwargs: Any) -> None:  # the kernel is not given: it could be launched
        run(self, *args, **(kwargs | {"warmup": True}))

    jit_function.run = compiling
    try:
        yield
    finally:
        jit_function.run = run


def turns_of(targets: Sequence[Target]) -> list[tuple[int, int]]:
    """(turn, index of the target) in the order of trying: every target's current choice (turn 0), then every target's
    first candidate."""
    most = max(1 + len(target.candidates) for target in targets)
    return [(turn, i) for turn in range(most) for i, t in enumerate(targets) if turn <= len(t.candidates)]


def compile_part(
    targets: Sequence[Target], device: torch.device, part: tuple[int, int], deadline: float, done: Path | None
) -> None:
    """Compiles every n-th choice, from the i-th, so that Triton's cache on disk has it; failures are not this process's
    business."""
    index, of = part
    for turn, i in turns_of(targets)[index::of]:
        target = targets[i]
        if time.monotonic() > deadline:
            return
        # Kernels of the inputs are not launched either: the card is for the process that measures.
        with contextlib.suppress(Exception), compile_only():
            run, _ = target.make(device)
            (run if turn == 0 else called(run, target.attribute, target.candidates[turn - 1]))()
        run = None
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if done is not None:
            (done / f"{turn}-{i}").touch()


class CompileJobs:
    """Processes that compile choices, each with `command` plus its part and the folder where it says what is done."""

    def __init__(self, command: list[str], jobs: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fuselm-tune-")
        command = [*command, "--done", self._folder.name]
        null = subprocess.DEVNULL
        self._running = [
            subprocess.Popen([*command, "--part", str(i), str(jobs)], stdout=null, stderr=null) for i in range(jobs)
        ]

    def compiled(self, turn: int, index: int) -> bool:
        """Whether a target's choice of a turn is in the cache, or nobody is left who would put it there."""
        if os.path.exists(os.path.join(self._folder.name, f"{turn}-{index}")):
            return True
        return all(process.poll() is not None for process in self._running)

    def stop(self) -> None:
        """Ends the processes that still run; safe to call twice."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()
        self._folder.cleanup()
