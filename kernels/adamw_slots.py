"""What AdamW keeps of each parameter between steps, so that a step looks at it only briefly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fuselm.kernels.adamw_sharding import Place, is_dtensor, local, peek, place_of
from fuselm.kernels.adamw_tables import Entry


class Slot:
    """One parameter, and what its last step worked on.

    Attributes:
        param: the parameter.
        group: index of its group.
        shard_class: class of its sum of squares (see adamw_sharding.py).
        number: of the parameter within the optimizer.
        sharded: whether it is a DTensor.
        copy: what the model computes with instead, or None.
        entry: what bind() made last, or None.
    """

    __slots__ = (
        "_addresses",
        "_parts",
        "_placed",
        "_raw",
        "copy",
        "entry",
        "group",
        "number",
        "param",
        "shard_class",
        "sharded",
    )

    def __init__(
        self,
        param: torch.Tensor,
        group: int,
        shard_class: int,
        number: int,
        placed: bool,
        copy: torch.Tensor | None = None,
    ) -> None:
        self.param = param
        self.group = group
        self.shard_class = shard_class
        self.number = number
        self.sharded = is_dtensor(param)
        self.copy = copy
        self.entry: Entry | None = None
        self._placed = placed  # whether anybody asks where the shard lies
        self._raw: tuple[Any, ...] = ()
        self._parts: list[Any] = []
        self._addresses: list[int] = []

    def is_bound_to(self, state: dict[str, Any]) -> bool:
        """Whether the entry still stands for these tensors, and they lie where they lay."""
        raw = self._raw
        if (
            state.get("exp_avg") is not raw[0]
            or state.get("exp_avg_sq") is not raw[1]
            or state.get("step") is not raw[2]
            or state.get("master") is not raw[3]
        ):
            return False
        parts = self._parts
        if self.sharded:
            master = raw[3] if raw[3] is None else peek(raw[3])
            parts = [peek(self.param), peek(raw[0]), peek(raw[1]), raw[2], master]
        return [0 if t is None else t.data_ptr() for t in parts] == self._addresses

    def bind(self, state: dict[str, Any]) -> Entry:
        """Makes the entry of the parameter and its state, and checks them: the kernels write through addresses, and
        what does not fit must not get there.

        Raises:
            ValueError: shapes, devices or dtypes do not fit.
        """
        part = local(self.param)
        self._raw = (state["exp_avg"], state["exp_avg_sq"], state["step"], state.get("master"))
        self._parts = [part, *(t if t is None else local(t) for t in self._raw)]
        self._addresses = [0 if t is None else t.data_ptr() for t in self._parts]
        _, exp_avg, exp_avg_sq, step, master = self._parts
        for tensor in (exp_avg, exp_avg_sq, part if master is None else master):
            if tensor.shape != part.shape or tensor.device != part.device:
                raise ValueError(misfit("state", tensor, part))
        fits = exp_avg.dtype == exp_avg_sq.dtype and step.device == part.device
        if not fits or step.dtype != torch.float32 or (master is not None and master.dtype != torch.float32):
            raise ValueError(
                f"state of a parameter of shape {tuple(part.shape)}: expected moments of one dtype, step and master in "
                f"fp32, all on {part.device}"
            )
        place = place_of(self.param) if self._placed else Place(0, max(part.numel(), 1), 0)
        if self.copy is not None:
            part, master = self.copy.detach(), part  # the parameter is its copy's master
            self._parts.append(self.copy)  # not its detached twin, which would not notice that .data was set
            self._addresses.append(part.data_ptr())
        self.entry = Entry(self.group, self.shard_class, self.number, part, exp_avg, exp_avg_sq, step, master, place)
        return self.entry


def misfit(what: str, tensor: torch.Tensor, part: torch.Tensor) -> str:
    """The message about a tensor that does not fit its parameter."""
    return (
        f"{what} of shape {tuple(tensor.shape)} on {tensor.device} does not fit its parameter of shape "
        f"{tuple(part.shape)} on {part.device}"
    )


def check_copies(copies: Mapping[torch.Tensor, torch.Tensor], params: Iterable[torch.Tensor]) -> None:
    """Refuses what cannot be written beside its parameter.

    Raises:
        ValueError: a copy of something else, or of another shape or device, or of a DTensor.
        TypeError: other dtypes than 16-bit copies of fp32 parameters.
    """
    known = set(params)
    for param, copy in copies.items():
        if param not in known:
            raise ValueError(f"copies: a parameter of shape {tuple(param.shape)} is not one of params")
        if is_dtensor(param) or copy.shape != param.shape or copy.device != param.device:
            raise ValueError(
                f"copies: a copy of shape {tuple(copy.shape)} on {copy.device} does not fit its parameter of shape "
                f"{tuple(param.shape)} on {param.device}, which must not be sharded"
            )
        if param.dtype != torch.float32 or copy.dtype.itemsize != 2 or not copy.is_floating_point():
            raise TypeError(
                f"copies: expected bf16 or fp16 copies of fp32 parameters, got {copy.dtype} of {param.dtype}"
            )
