"""`pytest benchmarks/bench_kernels.py`: the comparison of compare_kernels.py as a pytest-benchmark suite.

One group a (kernel, shape, direction), one test a provider. A row is measured once, all its providers checked against
fp64 and timed interleaved; those figures are in each test's extra_info. pytest-benchmark's own columns come from the
host's clock around a call that ends with a synchronisation, so they have the cost of launching in them. Without a GPU
the suite runs the small shapes, which shows nothing about GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_kernels import chosen_makers
from measure import Ceilings, Result, RowRun, configure_compile, function_of, release
from peers.registry import load_peers
from rows import ODD_ROWS, ROWS, TINY_ROWS, Row
from timing import copy_bandwidth, environment, matmul_rate

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
CPU_PROVIDERS = ("eager", "torch.compile", "torch foreach", "FA2 (SDPA)")
PEERS = load_peers()


def _makers(row: Row) -> dict[str, Any]:
    return chosen_makers(PEERS, row, () if DEVICE.type == "cuda" else CPU_PROVIDERS)


@functools.cache
def _surroundings() -> tuple[Ceilings, dict[str, str]]:
    """Ceilings and environment, measured once a session."""
    configure_compile()
    on_gpu = DEVICE.type == "cuda"
    ceilings = Ceilings(copy_bandwidth(DEVICE), matmul_rate(DEVICE)) if on_gpu else Ceilings()
    return ceilings, environment(DEVICE) | PEERS.versions | {"shows_gpu": str(on_gpu)}


@functools.lru_cache(maxsize=1)  # tests come row by row: what the one before held is let go
def _measured(row: Row) -> tuple[RowRun, dict[str, Result]]:
    release(DEVICE)
    run = RowRun(row, DTYPE, DEVICE, _surroundings()[0], rounds=50)
    return run, {result.direction: result for result in run.run(_makers(row))}


def _parameters() -> list[Any]:
    return [
        pytest.param(row, direction, provider, id=f"{row.name}-{direction}-{provider}")
        for row in (ROWS + ODD_ROWS if DEVICE.type == "cuda" else TINY_ROWS)
        for direction in row.directions
        for provider in _makers(row)
    ]


def _synchronised(function: Callable[[], Any]) -> Callable[[], None]:
    def call() -> None:
        function()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    return call


@pytest.mark.parametrize(("row", "direction", "provider"), _parameters())
def test_kernel(benchmark, row: Row, direction: str, provider: str) -> None:
    run, results = _measured(row)
    measurement = results[direction].providers[provider]
    if measurement.status.startswith("not timed"):
        pytest.skip(measurement.status)
    assert measurement.status == "ok", measurement.status
    call = run.calls[provider]
    function = function_of(call, direction, call.upstream(run.given(provider)[1]))
    benchmark.group = f"{row.name} {direction}"
    benchmark.extra_info |= dataclasses.asdict(measurement) | _surroundings()[1]
    setup = None if call.reset is None else call.reset
    benchmark.pedantic(_synchronised(function), setup=setup, rounds=10, warmup_rounds=1)
