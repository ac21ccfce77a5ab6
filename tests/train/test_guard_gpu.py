"""On a GPU: the guard and the optimizer never make the host wait, and a background save copies what was there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fuselm.kernels.adamw import AdamW
from fuselm.train import distributed
from fuselm.train.checkpoint_writer import CheckpointWriter, Retention
from fuselm.train.checkpointing import load_checkpoint
from fuselm.train.guard import Guard
from fuselm.train.guard_config import GuardConfig
from fuselm.train.trainer import build


def local(parameter: Any) -> torch.Tensor:
    """This rank's part of a parameter."""
    parameter = parameter.detach()
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.fixture
def gpu_world() -> Iterator[distributed.World]:
    """A process group of this process alone, on the GPU."""
    world = distributed.start("cuda")
    yield world
    distributed.stop(world)


@pytest.mark.gpu
def test_no_step_waits_for_the_device(gpu_world):
    parameters = [torch.nn.Parameter(torch.randn(64, 64, device=gpu_world.device)) for _ in range(3)]
    optimizer = AdamW(parameters, lr=0.1, max_grad_norm=1.0)
    guard = Guard(GuardConfig(min_history=4), gpu_world, optimizer)
    records = []

    def step(loss: float, grad: float) -> None:
        for p in parameters:
            p.grad = torch.full_like(p, grad)
        guard.expect(torch.full((), loss, dtype=torch.float64, device=gpu_world.device))
        optimizer.step()
        records.append(guard.record)

    step(3.0, 0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for k in range(12):
            step(3.0 + 0.01 * (k % 3), 0.1)
        for loss, grad in ((9.0, 0.1), (3.0, 50.0), (float("nan"), 0.1)):
            step(loss, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    kinds = [guard.read(record.tolist()).kind for record in records]
    assert kinds == [None] * 13 + ["spike", "spike", "nonfinite"]
    assert int(optimizer.skipped_steps) == 3


@pytest.mark.gpu
def test_background_saves_hold_what_was_there_and_memory_stays_flat(make_config, gpu_world, tmp_path):
    config = make_config(tmp_path, parallel__device="cuda")
    model, optimizer = build(config, gpu_world)
    writer = CheckpointWriter(
        tmp_path, model, optimizer, world=gpu_world, retention=Retention(1), config={}, position={}, asynchronous=True
    )
    memory = []
    for step in range(6):
        before = [local(p).clone() for p in model.parameters()]
        writer.save({"step": step})
        with torch.no_grad():
            for p in model.parameters():
                local(p).add_(1.0)
        outcome = writer.outcome()
        assert outcome is not None and outcome.error is None
        fresh, fresh_optimizer = build(config, gpu_world)
        load_checkpoint(outcome.folder, fresh, fresh_optimizer, world=gpu_world)
        for mine, expected in zip(fresh.parameters(), before, strict=True):
            assert torch.equal(local(mine), expected)
        del fresh, fresh_optimizer, before
        gc.collect()  # a model under FSDP2 is a cycle, which a process with other things in it collects late
        memory.append(torch.cuda.memory_allocated())
    writer.close()
    assert memory[-1] <= memory[1]
