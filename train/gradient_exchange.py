"""Gradients between the ranks of one machine: half the bytes of FSDP2's reduce-scatter, for the same sums.

FSDP2 casts gradients to fp32 and sends them so. Those of a single micro-batch come out of the backward pass in the
compute dtype: sent as they are and added up in fp32 behind the exchange, they give the same sums, for half the bytes on
the wire and half of those written before it. Each rank sends every other one its part and adds up in the order of the
ranks, so the bits do not depend on how the library orders a reduction.

Only within a machine: between machines a reduce-scatter adds up on the way, and sends each machine's sum once, which an
exchange does not. Gradients that were added up over micro-batches are fp32 already and go as before.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class GradientExchange:
    """What all FSDP2 modules of a model need to know of the backward pass that comes.

    Attributes:
        dtype: of a single micro-batch's gradients.
        narrow: whether gradients are exchanged in it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.narrow = False
        self._summed = False

    def before_backward(self, *, last: bool) -> None:
        """Before each micro-batch of a step, the last of which is reduced over the ranks."""
        self.narrow = last and not self._summed
        self._summed = not last


class ExchangeThenSum(ReduceScatter):
    """Reduce-scatter for one FSDP2 module; with narrow gradients an all-to-all and a sum in fp32.

    FSDP2 asks for the memory of input and output, in this order, and then calls.
    """

    def __init__(self, exchange: GradientExchange) -> None:
        self._exchange = exchange
        self._input: torch.Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of `size` elements: the input in the gradients' own dtype where they are narrow, else `dtype`."""
        if self._input is not None:
            return torch.empty(*size, dtype=dtype, device=device)
        self._input = torch.empty(*size, dtype=self._exchange.dtype if self._exchange.narrow else dtype, device=device)
        return self._input

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sums `input_tensor` over the ranks of `group` and leaves this rank's part in `output_tensor`.

        Raises:
            RuntimeError: narrow gradients are to be reduced otherwise than by a sum, or later.
        """
        self._input = None
        if input_tensor.dtype == output_tensor.dtype:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        if op != dist.ReduceOp.SUM or async_op:
            raise RuntimeError(f"op={op}, async_op={async_op}: gradients in {input_tensor.dtype} are summed at once")
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), 0, dtype=output_tensor.dtype, out=output_tensor)
        return None


def exchange_within_machine(model: FSDPModule, dtype: torch.dtype, ranks: int) -> None:
    """Have a model's gradients exchanged in `dtype`, where all its ranks are on one machine and that is less than fp32.

    Args:
        model: the root, with FSDP2 applied.
        dtype: of the forward and backward pass.
        ranks: over which the model is sharded.
    """
    if dtype == torch.float32 or not 1 < ranks == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return
    exchange = GradientExchange(dtype)
    for module in model.modules():  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(ExchangeThenSum(exchange))
    model.gradient_exchange = exchange  # pyright: ignore[reportAttributeAccessIssue]


def before_backward(model: Any, *, last: bool) -> None:
    """Tell a model's exchange, if it has one, which micro-batch comes."""
    exchange = getattr(model, "gradient_exchange", None)
    if exchange is not None:
        exchange.before_backward(last=last)
