"""AdamW over DTensor parameters: local shards, state of the same placement, and the all-reduce of the gradient norm.

Every rank sums the squares of its own shards. Which process groups hold the other shards differs from parameter to
parameter (tensor parallel and FSDP, FSDP alone, replicated, plain), so sums are kept by class: the set of process
groups over which a parameter is cut. An all-reduce over a group carries all class sums in one message of K + 1
numbers, and only the classes that are cut over that group take the result: whatever is replicated counts once,
without weights or gathers. The last number counts ranks that saw a non-finite sum, so that all of them skip the step,
or none. Where all parameters are cut over one and the same group (FSDP2 alone) every rank sees the same total, and the
message is one number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

GroupKey = tuple[int, ...]  # the sorted global ranks of a process group: the same for two groups over the same ranks


def dtensor_class() -> Any:
    """DTensor, or None where nothing has imported it: then no parameter can be one, and its import is not cheap."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    cls = dtensor_class()
    return cls is not None and isinstance(tensor, cls)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, any other tensor itself; no communication. Call it under no_grad."""
    if not is_dtensor(tensor):
        return tensor
    part = cast(Any, tensor).to_local()
    return part.wait() if hasattr(part, "wait") else part  # a collective that is still under way


def peek(tensor: torch.Tensor) -> torch.Tensor:
    """local() of what was a DTensor when last looked at, for the loop that runs in every step; the checks that local()
    makes take ten times as long."""
    part = getattr(tensor, "_local_tensor", None)
    return part if type(part) is torch.Tensor else local(tensor)


def peek_gradient(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """local_gradient() of a DTensor parameter, quick where both share one specification, as under FSDP2."""
    spec = getattr(grad, "_spec", None)
    return peek(grad) if spec is not None and spec is getattr(param, "_spec", None) else local_gradient(param, grad)


def local_gradient(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """This rank's part of `grad`, cut as `param` is.

    Raises:
        ValueError: the gradient is a partial sum that nobody has reduced, or only one of the two is a DTensor.
    """
    if not is_dtensor(param) and not is_dtensor(grad):
        return grad
    if is_dtensor(param) != is_dtensor(grad):
        kinds = ["a DTensor" if is_dtensor(t) else "a plain tensor" for t in (param, grad)]
        raise ValueError(f"parameter of shape {tuple(param.shape)} is {kinds[0]}, but its gradient is {kinds[1]}")
    p, g = _as_any(param), _as_any(grad)
    if any(placement.is_partial() for placement in g.placements):
        raise ValueError(
            f"gradient of a parameter of shape {tuple(param.shape)} has placements {g.placements}: partial gradients "
            "must be reduced before step()"
        )
    if g.placements != p.placements:
        g = g.redistribute(p.device_mesh, p.placements)
    return local(g)


def _as_any(tensor: torch.Tensor) -> Any:
    return tensor


def like(param: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """`part` as state of `param`: a DTensor of the same placement if `param` is one, otherwise `part` itself."""
    if not is_dtensor(param):
        return part
    p = _as_any(param)
    return dtensor_class().from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


@dataclass(frozen=True)
class Place:
    """Where a shard lies in its whole parameter: element l of the shard is element base + l + (l // run) * gap."""

    base: int
    run: int
    gap: int


def place_of(param: torch.Tensor) -> Place:
    """Where this rank's shard lies. Exact for a plain tensor, and for contiguous shards of which at most one dimension
    beyond the first that is not alone is cut; otherwise as if the shard were one stretch from its first element on."""
    part = local(param)
    if not is_dtensor(param) or part.numel() == 0:
        return Place(0, max(part.numel(), 1), 0)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    p = _as_any(param)
    _, offsets = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    strides = [math.prod(p.shape[d + 1 :]) for d in range(p.ndim)]
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    cut = [d for d in range(p.ndim) if part.shape[d] != p.shape[d] and math.prod(part.shape[:d]) > 1]
    if not cut:
        return Place(base, part.numel(), 0)
    inner = cut[-1]
    run = math.prod(part.shape[inner:])
    return Place(base, run, (p.shape[inner] - part.shape[inner]) * strides[inner])


def _groups_of(param: torch.Tensor) -> dict[GroupKey, Any]:
    if not is_dtensor(param):
        return {}
    from torch.distributed import get_process_group_ranks

    p = _as_any(param)
    groups: dict[GroupKey, Any] = {}
    for dim, placement in enumerate(p.placements):
        if placement.is_partial():
            raise ValueError(
                f"parameter of shape {tuple(p.shape)} has placements {p.placements}: partial is not allowed"
            )
        if not placement.is_replicate() and p.device_mesh.size(dim) > 1:
            group = p.device_mesh.get_group(dim)
            groups[tuple(sorted(get_process_group_ranks(group)))] = group
    return groups


class NormReduction:
    """How the sums of squares of a list of parameters add up over processes.

    Attributes:
        num_classes: K, at least 1.
        classes: class of each parameter, in the order given.
    """

    def __init__(self, params: Iterable[torch.Tensor], device: torch.device) -> None:
        self.groups: dict[GroupKey, Any] = {}
        self.classes: list[int] = []
        numbers: dict[frozenset[GroupKey], int] = {}
        for param in params:
            groups = _groups_of(param)
            for key, group in groups.items():
                self.groups.setdefault(key, group)
            self.classes.append(numbers.setdefault(frozenset(groups), len(numbers)))
        self.num_classes = max(len(numbers), 1)
        self._masks: dict[GroupKey, torch.Tensor | None] = {}
        for key in self.groups:
            takes = [key in cut for cut in numbers] + [True]
            self._masks[key] = None if all(takes) else upload(torch.tensor(takes), device)

    def all_reduce(self, sums: torch.Tensor) -> None:
        """Adds up `sums` over processes, in place.

        Args:
            sums: (K + 1,) fp64: the local sum of squares of each class, then 1 if any of them is not finite, else 0.
        """
        if len(self.groups) == 1 and self.num_classes == 1:
            torch.distributed.all_reduce(sums[:1], group=next(iter(self.groups.values())))
            return
        for key, group in self.groups.items():
            mask = self._masks[key]
            total = sums if mask is None else sums.clone()
            torch.distributed.all_reduce(total, group=group)
            if mask is not None:
                torch.where(mask, total, sums, out=sums)


def upload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor on `device` that the host does not wait for (through pinned memory on CUDA)."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
