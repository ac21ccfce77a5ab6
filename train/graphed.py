"""Forward and backward of a micro-batch as one CUDA graph.

A step of a small model launches hundreds of kernels, and on a GPU of today the host is slower at that than the GPU at
running them: at 124 M parameters an H200 waited for a third of the step. A graph is launched at once.
"""

from __future__ import annotations

import torch
from torch import nn

from fuselm.train.compute_copies import ComputeCopies
from fuselm.train.data_stream import Batch

WARM_UP = 3  # steps that compile, fill caches and allocate what stays, before a pass is captured


class GraphedBackward:
    """Runs micro-batches of one shape, eagerly at first, then by replaying what was captured.

    Args:
        model: on one GPU, not sharded.
        copies: of its parameters; the gradients arrive where these put them.

    The caller's to run are micro-batches of another shape, with document borders (whose number changes), and those of a
    step that has several: autograd adds their gradients up on a stream that it chose before, which a graph cannot hold.
    """

    def __init__(self, model: nn.Module, copies: ComputeCopies) -> None:
        self.model, self.copies = model, copies
        self._graph: _Captured | None = None
        self._shape: torch.Size | None = None
        self._seen = 0

    @property
    def captured(self) -> bool:
        """Whether a pass was captured yet."""
        return self._graph is not None

    def takes(self, batch: Batch) -> bool:
        """Whether this micro-batch can be replayed; the first few, which warm up, cannot."""
        if batch.cu_seqlens is not None or self.copies.summing:
            return False
        if self._shape is not None and batch.tokens.shape != self._shape:
            return False
        self._seen += 1
        return self._seen > WARM_UP

    def __call__(self, batch: Batch, count: torch.Tensor) -> torch.Tensor:
        """Backward of (sum of the loss) / count.

        Args:
            batch: on the CPU.
            count: 0-dim fp32 on the device.

        Returns:
            The sum of the loss, 0-dim, which the next call overwrites.
        """
        if self._graph is None:
            self._shape = batch.tokens.shape
            self._graph = _Captured(self.model, self.copies, batch, count)
        return self._graph.replay(batch, count)


def graph_backward(model: nn.Module, copies: ComputeCopies) -> None:
    """Have `evaluation.forward_backward` use a graph for this model; see GraphedBackward."""
    model.graphed_backward = GraphedBackward(model, copies)  # pyright: ignore[reportArgumentType]


def graphed_of(model: nn.Module) -> GraphedBackward | None:
    """What `graph_backward` made for this model, if it did."""
    return getattr(model, "graphed_backward", None)


class _Captured:
    def __init__(self, model: nn.Module, copies: ComputeCopies, batch: Batch, count: torch.Tensor) -> None:
        self.copies = copies
        device = count.device
        self.tokens, self.targets = batch.tokens.to(device), batch.targets.to(device)
        self.count = count.clone()
        copies.enter()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # the graph has memory of its own
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            loss = model(self.tokens, self.targets, reduction="sum")
            (loss / self.count).backward()
            self.loss = loss.detach()
        self.gradients = {copy: copy.grad for copy in copies.of.values() if copy.grad is not None}

    def replay(self, batch: Batch, count: torch.Tensor) -> torch.Tensor:
        self.copies.enter()
        for target, source in ((self.tokens, batch.tokens), (self.targets, batch.targets)):
            target.copy_(source.pin_memory(), non_blocking=True)
        self.count.copy_(count)
        self.graph.replay()
        for copy, gradient in self.gradients.items():
            copy.grad = gradient
        return self.loss
