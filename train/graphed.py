"""Forward and backward of a micro-batch as one CUDA graph.

A step of a small model launches hundreds of kernels, and on a GPU of today the host is slower at that than the GPU at
running them: at 124 M parameters an H200 waited for a third of the step. A graph is launched at once.
"""

from __future__ import annotations

import contextlib
import gc
import warnings

import torch
from torch import nn

from fuselm.train.compute_copies import ComputeCopies
from fuselm.train.data_stream import Batch

WARM_UP = 3  # micro-batches that compile, fill caches and allocate what stays, before a pass is captured


class GraphedBackward:
    """Runs micro-batches of one shape by replaying what was captured of an earlier one.

    Args:
        model: on one GPU, not sharded.
        copies: of its parameters; the gradients arrive where these put them.

    The caller's to run are the first micro-batches, which warm up, those of another shape or with document borders
    (whose number changes), one that would add to gradients that the copies hold already, and all of them once a capture
    has failed.
    """

    def __init__(self, model: nn.Module, copies: ComputeCopies) -> None:
        self.model, self.copies = model, copies
        self._graphs: dict[bool, _Captured] = {}  # by whether gradients are summed over micro-batches
        self._shape: torch.Size | None = None
        self._seen: dict[bool, int] = {False: 0, True: 0}
        self._failed = False

    @property
    def captured(self) -> bool:
        """Whether a pass was captured yet."""
        return bool(self._graphs)

    def __call__(self, batch: Batch, count: torch.Tensor) -> torch.Tensor | None:
        """Backward of (sum of the loss) / count; adds to the gradients.

        Args:
            batch: on the CPU.
            count: 0-dim fp32 on the device.

        Returns:
            The sum of the loss, 0-dim, which the next call overwrites. None if nothing was done: the caller runs it.
        """
        if not self._takes(batch):
            return None
        captured = self._graphs.get(self.copies.summing) or self._capture(batch, count)
        return None if captured is None else captured.replay(batch, count)

    def _takes(self, batch: Batch) -> bool:
        if self._failed or batch.cu_seqlens is not None:
            return False
        if self._shape is not None and batch.tokens.shape != self._shape:
            return False
        if any(copy.grad is not None for copy in self.copies.of.values()):
            return False  # a replay puts its own gradients there
        summing = self.copies.summing
        self._seen[summing] += 1
        return self._seen[summing] > WARM_UP

    def _capture(self, batch: Batch, count: torch.Tensor) -> _Captured | None:
        try:
            captured = _Captured(self.model, self.copies, batch, count)
        except RuntimeError as error:  # CUDA's own, or no memory left
            self._failed = True
            for copy in self.copies.of.values():
                copy.grad = None  # of work that was recorded at most
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"steps run without a CUDA graph, whose capture failed ({reason}); training goes on, somewhat slower. "
                "parallel.cuda_graph=False does not try",
                stacklevel=2,
            )
            return None
        self._shape = batch.tokens.shape
        self._graphs[self.copies.summing] = captured
        return captured


def graph_backward(model: nn.Module, copies: ComputeCopies) -> None:
    """Have `evaluation.forward_backward` use a graph for this model; see GraphedBackward."""
    model.graphed_backward = GraphedBackward(model, copies)  # pyright: ignore[reportArgumentType]


def graphed_of(model: nn.Module) -> GraphedBackward | None:
    """What `graph_backward` made for this model, if it did."""
    return getattr(model, "graphed_backward", None)


class _Captured:
    """A pass as it was captured.

    Autograd adds each gradient up on the stream on which it first met the parameter, for as long as any graph of its
    own lives that leads there. So none may be left of an earlier pass, or the capture would reach beyond its stream.

    Raises:
        RuntimeError: the capture failed; current stream, allocator and generator are as before.
    """

    def __init__(self, model: nn.Module, copies: ComputeCopies, batch: Batch, count: torch.Tensor) -> None:
        self.copies = copies
        device = count.device
        self.tokens, self.targets = batch.tokens.to(device), batch.targets.to(device)
        self.count = count.clone()
        if copies.summing:
            copies.fix_sums()
        copies.enter()
        gc.collect()  # graphs of autograd in reference cycles
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # the graph has memory of its own
        self.graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(device)),  # comes back to it, also where a capture fails
                torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"),
            ):
                loss = model(self.tokens, self.targets, reduction="sum")
                (loss / self.count).backward()
                self.loss = loss.detach()
        except RuntimeError:
            _clear_away(device, pool)
            raise
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


def _clear_away(device: torch.device, pool: tuple[int, int]) -> None:
    """What `torch.cuda.graph` leaves behind where CUDA breaks a capture off: it stops at the end that fails."""
    with contextlib.suppress(RuntimeError):  # a capture that could be ended has done this
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())  # the same numbers, and in no capture
