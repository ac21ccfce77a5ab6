"""Timing shared by the benchmarks: providers interleaved, the L2 cache flushed between calls, medians and spreads."""

from __future__ import annotations

import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fuselm.env import versions

ROOT = Path(__file__).resolve().parents[1]
L2_FLUSH_BYTES = 256 * 2**20  # several times the largest L2
LAUNCH_CYCLES = 1_200_000  # about 600 microseconds at 2 GHz: what a backward pass costs a fast host, with room to spare
CYCLES_A_SECOND = 2e9  # of a GPU at its highest clock
PRODUCT_SIDE = 8192
PRODUCT_OPERATIONS = 2 * PRODUCT_SIDE**3
LONGEST_PAUSE_S = 0.004  # a host that needs longer mostly waits for the GPU in the call, which nothing hides


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one provider.

    Attributes:
        median_ms: the figure to quote.
        low_ms, high_ms: 20th and 80th percentile.
    """

    median_ms: float
    low_ms: float
    high_ms: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        ordered = sorted(samples)
        return cls(statistics.median(ordered), ordered[len(ordered) // 5], ordered[len(ordered) * 4 // 5])


def describe(error: BaseException) -> str:
    """An exception in one line, for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _nothing() -> None:
    pass


def tensors_of(outputs: Any) -> list[Any]:
    """What a function gave, one tensor or several, as a list."""
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def pause_cycles(queued_s: float) -> int:
    """Clocks that the GPU sleeps while the host queues a call, which took it `queued_s` seconds once: twice as long, as
    it may be slower the next time, and no less than for a fast host."""
    return max(LAUNCH_CYCLES, int(min(2 * queued_s, LONGEST_PAUSE_S) * CYCLES_A_SECOND))


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    device: torch.device,
    repeats: int = 50,
    *,
    warmup: int = 3,
    hide_launch: bool = False,
    resets: Mapping[str, Callable[[], None]] | None = None,
    before: Callable[[], Any] = _nothing,
) -> dict[str, Timing]:
    """Times the functions in turn, `repeats` rounds, so that drift of the card's clock meets all of them alike.

    The order is another one in every round (the same in every run): what a kernel tells L2 to keep outlives the flush
    in part, and whoever reads the same memory next would always be the faster for it.

    Args:
        functions: provider name -> a call without arguments.
        device: CUDA (events, L2 flushed before each call) or CPU (host clock).
        repeats: timed rounds.
        warmup: untimed rounds before them.
        hide_launch: let the GPU sleep before each call while the host queues it, so that the host's part of a call is
            not in the times. How long is seen in one more round, untimed.
        resets: provider name -> what puts back what its calls overwrite; runs before each call, untimed.
        before: runs before each call, and before the flush, untimed.

    Returns:
        provider name -> Timing.
    """
    resets = resets or {}
    if not functions:
        return {}
    for _ in range(warmup):
        for name, function in functions.items():
            resets.get(name, _nothing)()
            function()
    samples: dict[str, list[float]] = {name: [] for name in functions}
    order, shuffled = list(functions.items()), random.Random(0).shuffle
    if device.type != "cuda":
        for _ in range(repeats):
            shuffled(order)
            for name, function in order:
                resets.get(name, _nothing)()
                before()
                started = time.perf_counter()
                function()
                samples[name].append((time.perf_counter() - started) * 1e3)
        return {name: Timing.of(values) for name, values in samples.items()}
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device=device)
    events = {name: [] for name in functions}
    pauses = dict.fromkeys(functions, 0)

    def queue(name: str, function: Callable[[], Any]) -> None:
        resets.get(name, _nothing)()
        before()
        if pauses[name]:
            torch.cuda._sleep(pauses[name])
        flush.zero_()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        function()
        pair[1].record()
        events[name].append(pair)

    if hide_launch:
        for name, function in order:
            torch.cuda.synchronize(device)
            started = time.perf_counter()
            queue(name, function)
            pauses[name] = pause_cycles(time.perf_counter() - started)
        events = {name: [] for name in functions}
    for _ in range(repeats):
        shuffled(order)
        for name, function in order:
            queue(name, function)
    torch.cuda.synchronize(device)
    return {name: Timing.of([a.elapsed_time(b) for a, b in pairs]) for name, pairs in events.items()}


def product_of(device: torch.device) -> Callable[[], Any]:
    """A call that multiplies two large bf16 matrices: PRODUCT_OPERATIONS operations."""
    generator = torch.Generator(device).manual_seed(0)
    size = (PRODUCT_SIDE, PRODUCT_SIDE)
    a, b = (torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def load_of(product: Callable[[], Any], rate: float, seconds: float = 0.025) -> Callable[[], Any]:
    """A call that keeps a GPU multiplying for about so long, as most of a training step does. A card at its power limit
    lowers its clock: what ran before a long call then decides how fast that one is.

    Args:
        product: what `product_of` gave.
        rate: the card's operations a second (`matmul_rate`).
        seconds: for how long.
    """
    times = max(round(seconds * rate / PRODUCT_OPERATIONS), 1)

    def multiply() -> None:
        for _ in range(times):
            product()

    return multiply


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of a large copy on a GPU: the ceiling of memory-bound kernels."""
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    timing = interleaved({"copy": lambda: target.copy_(source)}, device, 10)["copy"]
    return 2 * source.nbytes / (timing.median_ms * 1e-3)


def matmul_rate(device: torch.device) -> float:
    """Floating-point operations a second of a large bf16 multiplication on a GPU: the ceiling of what multiplies."""
    timing = interleaved({"matmul": product_of(device)}, device, 10)["matmul"]
    return PRODUCT_OPERATIONS / (timing.median_ms * 1e-3)


def card_state() -> str:
    """Clock, power, temperature and load of the GPU at this moment, in nvidia-smi's words; "" without it."""
    fields = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu,utilization.gpu"
    return " | ".join(_output(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]).splitlines())


def environment(device: torch.device) -> dict[str, str]:
    """What a result file must say of where it was measured: card, driver, versions, commit."""
    facts = versions()
    facts["card"] = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = _output(query).splitlines()[0] if _output(query) else "unknown"
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
    commit = _output(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"])
    commit = commit or os.environ.get("FUSELM_COMMIT", "")  # for a copy of the tree without its history
    changed = _output(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"])
    facts["commit"] = (commit or "unknown") + (" with uncommitted changes" if changed else "")
    return facts


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
