"""Which layer went non-finite first: the offending batch once more, with a check behind every module.

Nothing is changed: no weight, no moment; the gradients that the re-run leaves are dropped. Modules that torch.compile
took run eagerly here, for hooks inside a compiled block are never called.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fuselm.train.compute_copies import take_gradients
from fuselm.train.data_stream import Batch
from fuselm.train.distributed import World
from fuselm.train.evaluation import forward_backward
from fuselm.train.parallelize import WRAPPER

_PHASES = ("weights", "activations", "gradients")


@dataclass(frozen=True)
class Finding:
    """The first number that is not finite, in the order of the computation.

    Attributes:
        phase: "weights", "activations" or "gradients".
        where: name of the parameter or module.
        ranks: where it was.
    """

    phase: str
    where: str
    ranks: list[int]

    def __str__(self) -> str:
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return {
            "weights": f"the weights {self.where} are not finite on {who}",
            "activations": f"the first activations that are not finite are the output of {self.where}, on {who}",
            "gradients": f"activations are finite, the first gradient that is not is that of {self.where}, on {who}",
        }[self.phase]


def first_nonfinite(model: nn.Module, batches: Sequence[Batch], world: World) -> Finding | None:
    """Run a batch again and find where it leaves the finite numbers. Waits for the device.

    Args:
        model: as in training.
        batches: this rank's micro-batches, on the CPU.
        world: all of its ranks call this together.

    Returns:
        The same on every rank; None where everything is finite this time.
    """
    # (phase, name, flag), in the order of the computation.
    checks: list[tuple[str, str, torch.Tensor]] = [
        ("weights", name, _broken(parameter)) for name, parameter in _named(model.named_parameters())
    ]
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in _named(model.named_modules()):
            stack.callback(module.register_forward_hook(partial(_watch, name or "the model", checks)).remove)
        forward_backward(model, batches, world, replay=False)
    for name, grad in _named(take_gradients(model)):
        if grad is not None:
            checks.append(("gradients", name, _broken(grad)))
    flags = torch.stack([flag for *_, flag in checks]).tolist()
    broken = [(_PHASES.index(phase), i, name) for i, (phase, name, _) in enumerate(checks) if flags[i]]
    found = world.gather_dicts({str(world.rank): min(broken, default=None)})

    def conclude() -> Finding | None:
        places = {int(rank): place for rank, place in found.items() if place is not None}
        if not places:
            return None
        first = min((place[0], place[1]) for place in places.values())
        ranks = sorted(rank for rank, place in places.items() if (place[0], place[1]) == first)
        return Finding(_PHASES[first[0]], places[ranks[0]][2], ranks)

    return world.from_main(conclude)


def largest_gradient(model: nn.Module, batches: Sequence[Batch], world: World) -> tuple[str, float]:
    """Run a batch again; the parameter with the largest gradient norm, and its share of the square of the whole norm.

    All ranks call this together; waits for the device.
    """
    forward_backward(model, batches, world, replay=False)
    names, squares = [], []
    for name, grad in _named(take_gradients(model)):
        names.append(name)
        zero = torch.zeros((), dtype=torch.float64, device=world.device)
        squares.append(zero if grad is None else _local(grad).double().square().sum())
    sums = world.sum(torch.stack(squares)).tolist()
    largest = max(range(len(sums)), key=sums.__getitem__)
    return names[largest], sums[largest] / max(sum(sums), 1e-300)


def _watch(name: str, checks: list[tuple[str, str, torch.Tensor]], module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook: checks the output, and gradients of input and output when they come by.

    (A full backward hook would refuse outputs that are changed in place.)
    """
    for tensor in _tensors(output):
        checks.append(("activations", name, _broken(tensor)))
    for what, values in (("input", args), ("output", output)):
        for tensor in _tensors(values):
            if tensor.requires_grad:
                where = f"the {what} of {name}"
                tensor.register_hook(lambda grad, where=where: checks.append(("gradients", where, _broken(grad))))


def _tensors(values: Any) -> list[torch.Tensor]:
    values = values if isinstance(values, (tuple, list)) else (values,)
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]


def _broken(tensor: torch.Tensor) -> torch.Tensor:
    return (~torch.isfinite(_local(tensor))).any()


def _local(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _named(pairs: Any) -> list[tuple[str, Any]]:
    return [(name.replace(WRAPPER, ""), value) for name, value in pairs]
