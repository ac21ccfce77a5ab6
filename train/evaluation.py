"""The loss, in one place for training and validation: sum over all valid tokens / their count, over all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from fuselm.train.data_stream import Batch
from fuselm.train.distributed import World
from fuselm.train.graphed import graphed_of
from fuselm.train.parallelize import accumulate_locally, reshard

IGNORE_INDEX = -100


class Stream(Protocol):
    """What the trainer asks of its data; see `data_stream.DataStream`."""

    @property
    def global_batch_size(self) -> int: ...

    @property
    def sequences_per_epoch(self) -> int: ...

    def batch(
        self,
        step: int,
        *,
        rank: int,
        world_size: int,
        micro_step: int = 0,
        accumulation: int = 1,
        document_mask: bool = False,
    ) -> Batch: ...

    def documents(self, step: int, *, rank: int, world_size: int, accumulation: int = 1) -> list[tuple[int, int]]: ...


@dataclasses.dataclass(frozen=True)
class Feed:
    """A stream as one rank sees it.

    Attributes:
        stream: the global batches.
        world: of the ranks that share them.
        micro_batch_size: sequences a rank puts through the model at once; divides global batch / ranks.
        document_mask: give the borders of documents.
    """

    stream: Stream
    world: World
    micro_batch_size: int
    document_mask: bool = False

    @property
    def accumulation(self) -> int:
        """Micro-batches a step."""
        return self.stream.global_batch_size // (self.micro_batch_size * self.world.size)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, on the CPU."""
        return [
            self.stream.batch(
                step,
                rank=self.world.rank,
                world_size=self.world.size,
                micro_step=micro_step,
                accumulation=self.accumulation,
                document_mask=self.document_mask,
            )
            for micro_step in range(self.accumulation)
        ]

    def documents(self, step: int, rank: int) -> list[tuple[int, int]]:
        """The documents in a rank's part of a step, as ranges of their numbers in the split, both ends included."""
        return self.stream.documents(step, rank=rank, world_size=self.world.size, accumulation=self.accumulation)


def loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Sum of the loss over a micro-batch's valid tokens, fp32."""
    return model(batch.tokens, batch.targets, reduction="sum", cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen)


def valid_tokens(batches: Sequence[Batch]) -> int:
    """How many targets of CPU batches count."""
    return sum(int((batch.targets != IGNORE_INDEX).sum()) for batch in batches)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a CPU batch without waiting for the device."""
    if device.type != "cuda":
        return batch.to(device)
    pinned = Batch(
        batch.tokens.pin_memory(),
        batch.targets.pin_memory(),
        None if batch.cu_seqlens is None else batch.cu_seqlens.pin_memory(),
        batch.max_seqlen,
    )
    return pinned.to(device, non_blocking=True)


def on_device(values: Sequence[float], device: torch.device) -> torch.Tensor:
    """A small fp64 tensor from host numbers, without waiting for the device."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def forward_backward(
    model: nn.Module,
    batches: Sequence[Batch],
    world: World,
    *,
    stop: bool = False,
    rank_losses: torch.Tensor | None = None,
    replay: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Forward and backward of one optimizer step; adds to the parameters' gradients.

    The count of valid tokens is summed over ranks before the first forward pass, so each micro-batch's loss is divided
    by the step's own count: however a step is split, loss and gradient are the same. Gradients cross ranks once, with
    the last micro-batch.

    Args:
        model: sharded by `parallelize`, or plain.
        batches: this rank's micro-batches, on the CPU.
        world: all of its ranks call this together.
        stop: this rank was asked to stop; summed along, so that all ranks hear of it.
        replay: use a CUDA graph where the model has one. (Hooks are not called by it.)
        rank_losses: (ranks,) fp64 on the device, overwritten with each rank's share of the loss, which add up to it.

    Returns:
        (loss, count, stops), 0-dim fp64 on the device: the mean loss and the number of valid tokens over all ranks and
        micro-batches, and how many ranks were asked to stop. Nothing waits for the device.
    """
    header = world.sum(on_device([valid_tokens(batches), float(stop)], world.device))
    count = header[0].clamp(min=1)
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    graphed = graphed_of(model) if replay else None
    for index, batch in enumerate(batches):
        accumulate_locally(model, last=index == len(batches) - 1)
        loss = None if graphed is None else graphed(batch, count.float())
        total += _backward(model, to_device(batch, world.device), count.float()) if loss is None else loss
    # A sum of vectors with one number each gathers them, and adding them up here takes the same order everywhere.
    shares = torch.zeros(world.size, dtype=torch.float64, device=world.device)
    shares[world.rank] = total / count
    world.sum(shares)
    if rank_losses is not None:
        rank_losses.copy_(shares)
    return shares.sum(), header[0], header[1]


def _backward(model: nn.Module, batch: Batch, count: torch.Tensor) -> torch.Tensor:
    """Backward of (sum of the loss) / count, and that sum. Nothing of autograd's graph outlives it: while a loss does,
    the nodes that accumulate gradients do too, each with the stream it was made on, which no CUDA graph can hold."""
    loss = loss_sum(model, batch)
    (loss / count).backward()
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module, feed: Feed, batches: int) -> tuple[float, int]:
    """Mean loss over the first global batches of a stream; waits for the device.

    Args:
        model: as in training; it is not switched to eval mode, for it has no dropout.
        feed: of the validation stream.
        batches: global batches; fewer when the stream's epoch is shorter.

    Returns:
        (loss, valid tokens) over all ranks.
    """
    world = feed.world
    available = max(feed.stream.sequences_per_epoch // feed.stream.global_batch_size, 1)
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    for step in range(min(batches, available)):
        micro_batches = feed.micro_batches(step)
        for batch in micro_batches:
            total[0] += loss_sum(model, to_device(batch, world.device))
        total[1] += valid_tokens(micro_batches)
    reshard(model)
    loss, count = world.sum(total).tolist()
    return loss / max(count, 1), int(count)
