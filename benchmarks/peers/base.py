"""What a provider of a kernel gives to the benchmarks.

A peer's module has NAME, DISTRIBUTIONS (whose versions go into the result file) and `providers()`, which imports the
peer, raising ImportError where it is missing, and gives op -> {provider name -> maker}. A maker turns the inputs of a
row, the keyword arguments of our public function, into a Call. What a user of the peer prepares once (tables, separate
gate and up, another layout) is prepared there, outside the timed part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

OURS = "fuselm"
DETERMINISTIC = f"{OURS}, deterministic"  # the same bits in every run, where that is not so by itself
Tensors = list[torch.Tensor]


class NotOfferedError(Exception):
    """The provider does not have what the row asks for."""


def is_ours(provider: str) -> bool:
    """Whether a provider is this project's, in whatever form: "fuselm", "fuselm, in place"."""
    return provider.split(",")[0] == OURS


def same(tensors: Any) -> Any:
    """The tensors themselves: for a provider whose results have our shapes."""
    return tensors


@dataclass(frozen=True)
class Call:
    """One provider's calls on one row's inputs.

    Attributes:
        function: the forward pass; gives a tensor or several, in the order of ours.
        leaves: our input name -> the tensor that is differentiated, in the provider's own layout.
        upstream: gradients of our outputs -> gradients of this provider's outputs.
        outputs: this provider's outputs -> the same in our shapes, for the check.
        gradients: name -> gradient, in the provider's layout -> the same under our names in our shapes, for the check.
        reset: puts back what a call has overwritten; runs before each call, untimed.
        context: makes a context in which each call runs, forward and backward; None for none.
        keeps_graph: whether a backward pass can be repeated on a kept graph; False where it overwrites what it needs.
    """

    function: Callable[[], Any]
    leaves: Mapping[str, torch.Tensor]
    upstream: Callable[[Tensors], Sequence[torch.Tensor]] = same
    outputs: Callable[[Tensors], Sequence[torch.Tensor]] = same
    gradients: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = same
    reset: Callable[[], None] | None = None
    context: Callable[[], AbstractContextManager[Any]] | None = None
    keeps_graph: bool = True


Maker = Callable[[dict[str, Any]], Call]
Providers = Mapping[str, Mapping[str, Maker]]


def leaves_of(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs that are differentiated, by name."""
    return {name: t for name, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad}


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of an input as a leaf, for a provider that overwrites its inputs or wants another layout."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).requires_grad_(tensor.requires_grad)


def restore(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """A function that copies the second tensor of each pair over the first."""

    def copy() -> None:
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)

    return copy


def is_packed(inputs: Mapping[str, Any]) -> bool:
    """Whether attention's inputs are documents in one row of tokens: (tokens, heads, head_dim) and their borders."""
    return "cu_seqlens_q" in inputs


def document_sizes(inputs: Mapping[str, Any]) -> list[int]:
    """Lengths of the documents; waits for the device, so for the preparation of a call."""
    return inputs["cu_seqlens_q"].diff().tolist()


def reach_back(inputs: Mapping[str, Any]) -> int | None:
    """Keys that a query sees before its own, as other libraries count a window; None for all."""
    return inputs["window"] - 1 if inputs.get("window") else None


def transposed(tensors: Any) -> Any:
    """(batch, seq, heads, head_dim) <-> (batch, heads, seq, head_dim), as views; of a list or of a dictionary."""
    if isinstance(tensors, dict):
        return {name: t.transpose(1, 2) for name, t in tensors.items()}
    return [t.transpose(1, 2) for t in tensors]
