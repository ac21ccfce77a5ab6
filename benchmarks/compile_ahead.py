"""What the providers of a comparison compile, compiled beforehand by several processes into the caches on disk.

A task is one provider at one row. All processes make the same list and take from it what no other has taken: a file in
a folder, named by the task's number, says so, and holds the seconds when it is done.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from expected import run_call
from measure import release
from peers.base import OURS, Maker
from rows import FORWARD, Row, make_inputs, make_upstream

NOT_COMPILED = ("eager", "torch foreach", "torch fused", "cuDNN (SDPA)", "FA2 (SDPA)", "flash-attn")
SLOWEST_FIRST = ("FA4", "Flex", OURS, "torch.compile", "QuACK")  # or one of them is what all wait for at the end


@dataclass(frozen=True)
class Task:
    """One provider at one row."""

    row: Row
    provider: str
    maker: Maker

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.provider}, {self.row.name}"


def _code(row: Row, provider: str) -> tuple[object, ...]:
    """What decides about a provider's code: attention's is the same for all lengths, but for FlexAttention's."""
    if row.op != "attention" or provider == "Flex":
        return provider, row.name
    heads, kv_heads = row.case["heads"]
    return provider, row.case["head_dim"], heads // kv_heads, row.case.get("window"), "documents_q" in row.case


def tasks_of(chosen: Sequence[tuple[Row, dict[str, Maker]]]) -> list[Task]:
    """What is to be compiled, in the order in which to take it: what others wait for, then what probably is in the
    cache by then, because an earlier task has the same code."""
    tasks, seen = [], set()
    for row, makers in chosen:
        for provider, maker in makers.items():
            if row.op == "adamw" or provider in NOT_COMPILED:
                continue
            code = _code(row, provider)
            family = provider.split(",")[0]
            rank = SLOWEST_FIRST.index(family) if family in SLOWEST_FIRST else len(SLOWEST_FIRST)
            tasks.append(((code in seen, rank), Task(row, provider, maker)))
            seen.add(code)
    return [task for _, task in sorted(tasks, key=lambda pair: pair[0])]


def compile_tasks(
    tasks: Sequence[Task], folder: Path, limit_s: float, device: torch.device, dtype: torch.dtype
) -> None:
    """Runs once each task that no other process has taken; what fails here fails again where it counts."""
    deadline = time.monotonic() + limit_s
    for number, task in enumerate(tasks):
        file, started = folder / str(number), time.monotonic()
        if started > deadline:
            return
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            continue
        with contextlib.suppress(Exception):
            inputs = make_inputs(task.row, dtype, device)
            call = task.maker(inputs)
            run_call(call, make_upstream(task.row, inputs))
            if FORWARD in task.row.directions:
                with torch.no_grad():  # torch.compile compiles this apart
                    call.function()
            del inputs, call
        release(device)
        file.write_text(f"{time.monotonic() - started:.1f}")


def start(options: Sequence[str], folder: Path, jobs: int) -> list[subprocess.Popen[bytes]]:
    """Starts the processes: compare_kernels.py with the options of the comparison."""
    script, null = Path(__file__).with_name("compare_kernels.py"), subprocess.DEVNULL
    command = [sys.executable, str(script), *options, "--part", str(folder)]
    return [subprocess.Popen(command, stdout=null, stderr=null) for _ in range(jobs)]


def finish(running: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Waits for the processes and ends those that are not done at the deadline (of time.monotonic)."""
    for process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def compiled(tasks: Sequence[Task], folder: Path) -> dict[str, float]:
    """Task -> seconds, of those that were finished; the slowest first."""
    files = [(task, folder / str(number)) for number, task in enumerate(tasks)]
    seconds = {task.name: float(text) for task, file in files if file.exists() and (text := file.read_text())}
    return dict(sorted(seconds.items(), key=lambda pair: -pair[1]))
