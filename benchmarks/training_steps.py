"""Training steps as train/trainer.py does them, without a run around them: for benchmarks of what belongs to a step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Literal

import torch

from fuselm.train import distributed
from fuselm.train.config import TrainConfig, resolve
from fuselm.train.data_stream import Batch
from fuselm.train.distributed import World
from fuselm.train.errors import UserError
from fuselm.train.evaluation import forward_backward
from fuselm.train.graphed import graphed_of
from fuselm.train.guard import Guard
from fuselm.train.presets import PRESETS
from fuselm.train.trainer import build

_BATCHES = 4  # the tokens are random; no more are needed for a step to be as dear as in training
_LR = 1e-5  # weights move, and the loss of random tokens stays where it is


def configuration(
    preset: str,
    *,
    compile: bool | None = None,
    kernels: Literal["auto", "triton", "eager"] = "auto",
    micro_batch_size: int = 0,
) -> TrainConfig:
    """A preset for one process.

    Args:
        preset: of train/pretrain.py.
        compile: as parallel.compile.
        kernels: as model.kernels.
        micro_batch_size: sequences a step; 0 for the preset's.

    Raises:
        UserError: there is no such preset.
    """
    if preset not in PRESETS:
        raise UserError(f"--preset is {preset!r}: it must be one of {', '.join(PRESETS)}")
    config = PRESETS[preset]()
    sequences = micro_batch_size or config.training.micro_batch_size
    training = dataclasses.replace(config.training, micro_batch_size=sequences, global_batch_size=0)
    parallel = dataclasses.replace(config.parallel, compile=compile)
    model = dataclasses.replace(config.model, kernels=kernels)
    return resolve(dataclasses.replace(config, training=training, parallel=parallel, model=model), 1)


class Steps:
    """A model in training on random tokens, in one process; a context manager, which leaves the process group.

    Args:
        config: resolved for one process.

    Attributes:
        world, model, optimizer, guard: as in a run.
        milliseconds: what each step took that was read: on a GPU from the end of the step before to its own end, by the
            GPU's events, on a CPU by the clock. NaN for the first one after a pause.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.world: World = distributed.start(config.parallel.device)
        self.model, self.optimizer = build(config, self.world)
        for group in self.optimizer.param_groups:
            group["lr"] = _LR
        self.guard = Guard(config.guard, self.world, self.optimizer)
        self.milliseconds: list[float] = []
        generator = torch.Generator().manual_seed(config.training.seed)
        shape = config.training.micro_batch_size, config.training.seq_len + 1
        rows = [torch.randint(config.model.vocab_size, shape, generator=generator) for _ in range(_BATCHES)]
        self._batches: Sequence[Batch] = [Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in rows]
        self._done = 0
        self._events: list[torch.cuda.Event | None] = []
        self._ended: float | None = None
        self._host: list[torch.Tensor] = []

    @property
    def uses_graph(self) -> bool:
        """Whether forward and backward are replayed from a CUDA graph."""
        graphed = graphed_of(self.model)
        return graphed is not None and graphed.captured

    def step(self, *, guarded: bool = True) -> None:
        """Queue one step; on a GPU wait for the one before it, as a run does.

        Args:
            guarded: False leaves the guard's verdict out; the numbers of the step reach the host all the same.
        """
        self.optimizer.veto = self.guard.judge if guarded else None
        batch = self._batches[self._done % len(self._batches)]
        loss, count, stops = forward_backward(self.model, [batch], self.world)
        if guarded:
            self.guard.expect(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        record = self.guard.record if guarded else torch.stack([loss, self.optimizer.grad_norm.double()])
        values = torch.cat([record, torch.stack([count, stops])])
        self._done += 1
        if not values.is_cuda:
            now = time.perf_counter()
            self.milliseconds.append(math.nan if self._ended is None else (now - self._ended) * 1e3)
            self._ended = now
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.append(host.copy_(values, non_blocking=True))
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._read(leave=1)

    def pause(self) -> None:
        """Wait for every queued step; the time until the next one belongs to no step."""
        self._read(leave=0)
        self._events, self._ended = [], None

    def _read(self, leave: int) -> None:
        # The last event that was read stays first in the list: the next step is measured from it.
        while len(self._host) > leave:
            position = len(self._events) - len(self._host)
            event, before = self._events[position], self._events[position - 1] if position else None
            assert event is not None
            event.synchronize()
            self.milliseconds.append(math.nan if before is None else before.elapsed_time(event))
            self._host.pop(0)
        del self._events[: max(len(self._events) - len(self._host) - 1, 0)]

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *exception: object) -> None:
        self.pause()
        del self.model, self.optimizer, self.guard
        distributed.stop(self.world)
