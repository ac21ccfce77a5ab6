"""Shared by the training tests: a small data set, tiny configurations, and processes that meet on this machine."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fuselm.model.config import LlamaConfig
from fuselm.train import distributed
from fuselm.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    TrainingConfig,
)
from fuselm.train.distributed import World
from fuselm.train.lr_schedule import ScheduleConfig
from fuselm.train.prepare_data import prepare

from ..forked import Program, Server


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of some thousand tokens with a vocabulary of 261, which no number of ranks divides."""
    folder = tmp_path_factory.mktemp("tiny")
    source = folder / "texts"
    source.mkdir()
    for number in range(20):
        lines = [f"Line {line} of text {number}: {line * number} and {line + number}.\n" for line in range(40)]
        (source / f"{number:02d}.txt").write_text("".join(lines))
    prepare(source, folder / "tokens", vocab_size=261, validation_fraction=0.1)
    return folder / "tokens"


@pytest.fixture(scope="session")
def make_config(tiny_data: Path) -> Callable[..., TrainConfig]:
    """Makes a configuration of a model with 20 thousand parameters; overrides are given as section__field=value."""

    def make(runs: Path, **overrides: Any) -> TrainConfig:
        config = TrainConfig(
            name="tiny",
            runs=runs,
            model=LlamaConfig(
                vocab_size=263,
                dim=32,
                num_layers=2,
                num_heads=2,
                num_kv_heads=1,
                ffn_dim=48,
                max_seq_len=32,
                kernels="eager",
            ),
            training=TrainingConfig(steps=6, seq_len=32, global_batch_size=8, micro_batch_size=8),
            data=DataConfig(path=tiny_data),
            optimizer=OptimizerConfig(lr=1e-2),
            schedule=ScheduleConfig(warmup_steps=2),
            parallel=ParallelConfig(device="cpu", param_dtype="float32", sharding="fsdp"),  # one rank as many are
            evaluation=EvaluationConfig(every=3, batches=1),
            checkpoint=CheckpointConfig(every=3),
            logging=LoggingConfig(tensorboard=False, plot=False),
        )
        for key, value in overrides.items():
            section, _, field = key.partition("__")
            if field:
                value = dataclasses.replace(getattr(config, section), **{field: value})
            config = dataclasses.replace(config, **{section: value})
        return config

    return make


@pytest.fixture
def world() -> Iterator[World]:
    """A process group of this process alone, on the CPU."""
    world = distributed.start("cpu")
    yield world
    if dist.is_initialized():
        distributed.stop(world)


class Processes:
    """Programs with the environment that torchrun would give them; see forked.py."""

    def __init__(self, server: Server, command: list[str], count: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        self.members = [Program(server, command, env=environment) for environment in ranks]

    def wait(self, timeout: float = 240) -> list[tuple[int, str, str]]:
        """(exit code, stdout, stderr) of each."""
        try:
            return [(member.wait(timeout), *member.communicate()) for member in self.members]
        finally:
            for member in self.members:
                member.kill()


@pytest.fixture(scope="session")
def launch(server: Server) -> Callable[[list[str], int], Processes]:
    """launch(command, count): see the class."""
    return functools.partial(Processes, server)


@pytest.fixture(scope="session")
def losses_of() -> Callable[[Path], dict[int, float]]:
    """losses_of(run): training loss by step."""
    return _losses


def _losses(run: Path) -> dict[int, float]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [entry["step"] for entry in entries if "loss" in entry]
    assert steps == sorted(set(steps)), "a step was written twice or out of order"
    return {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
