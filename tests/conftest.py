"""Shared by all tests: the interpreter switch, one compile cache, GPU marks, a gate against skipped kernel tests."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .fast_interpreter import speed_up
from .forked import Server

# @triton.jit decides at import between compiling and interpreting, so this stands before anything imports triton.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"fuselm-inductor-{os.getuid()}"))
# The C++ that Inductor makes for the CPU is not ours: without vectors it compiles sooner, and no compiler is tried out.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
speed_up()

ROOT = Path(__file__).resolve().parents[1]
# The files that take longest begin first: two workers then end at about the same time.
LONGEST = (
    "test_specs", "test_docs", "test_cross_entropy_vocab_parallel", "test_attention_hopper", "test_cross_entropy",
    "test_linear_cross_entropy", "test_parallel_runs", "test_package", "test_adamw_distributed", "test_faults",
    "test_bench_step_peers", "test_cross_entropy_numerics", "test_checkpoint_writer", "test_prepare_data_resume",
    "test_adamw_aot", "test_vocab_chunks", "test_guard", "test_trainer", "test_compute_copies", "test_finetune",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """pytest-xdist would begin with the files of most tests instead."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count()
    needs = {"gpu": 1, "gpu2": 2}
    dropped = [item for item in items if any(item.get_closest_marker(m) and gpus < n for m, n in needs.items())]
    if not os.environ.get("FUSELM_SLOW_TESTS"):  # `make test-all` sets it
        dropped += [item for item in items if item.get_closest_marker("slow")]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        left = set(dropped)
        items[:] = [item for item in items if item not in left]
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))  # stable: the order within a file stays


def pytest_terminal_summary(terminalreporter, exitstatus, config) -> None:
    skipped = [r.nodeid for r in terminalreporter.stats.get("skipped", []) if "tests/kernels" in r.nodeid]
    if skipped:
        terminalreporter.write_line(
            f"ERROR: {len(skipped)} kernel tests were skipped; kernels must be tested", red=True
        )


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    if exitstatus == 0 and any("tests/kernels" in r.nodeid for r in reporter.stats.get("skipped", [])):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish() -> None:
    """Modules that are loaded by now are never garbage: collections, which the trainer asks for, pass over them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Where programs come from that need no interpreter of their own; see forked.py."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def device() -> torch.device:
    """The device kernels run on: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(0)
