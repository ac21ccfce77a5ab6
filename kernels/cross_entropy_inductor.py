"""How torch.compile hands the gradient that the forward pass of cross_entropy has written to the backward pass: without
a copy.

Compiled graphs are functional: an operator that rewrites a tensor of the forward pass gets a copy of it first, a read
and a write of all logits, which is what computing the gradient at once saves. So the backward graph holds an operator
that returns the gradient as a new tensor, and Inductor's lowering of it below calls another one, which returns the
saved tensor itself where the running backward pass is the last to need it. That is known when the graph runs, not when
it is compiled: compiled graphs come out of caches, whose keys do not say whether retain_graph was given. Inductor is
told to take the saved tensor's memory for nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


def _unknown() -> bool:
    return True


# A private name, so it may go: an absent one reads as "the graph is kept", and the gradient is copied.
_keeps_graph: Callable[[], bool] = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", _unknown
)


def is_traced(x: torch.Tensor) -> bool:
    """Whether `x` is a tensor of a tracer, as torch.compile's are, and holds no values."""
    return type(x) not in (torch.Tensor, torch.nn.Parameter)


def taken(saved: torch.Tensor) -> torch.Tensor:
    """`saved` itself inside a backward pass without retain_graph, after which nobody else reads it; else a copy."""
    return saved.clone() if _keeps_graph() else saved


def install_lowering(operator: Any, taking: Any) -> None:
    """Has Inductor run `taking`(saved, ...) for `operator`(saved, ...) where no other operator reads `saved`.

    Uses names of torch._inductor; where they are missing, `operator` runs as it is. Called whenever `operator` is
    traced, as Inductor is not imported for the sake of this.
    """
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    virtualized: Any = sys.modules.get("torch._inductor.virtualized")
    needed = ("lowerings", "register_lowering", "add_layout_constraint", "constrain_to_fx_strides", "fallback_handler")
    if virtualized is None or not all(hasattr(lowering, name) for name in needed) or operator in lowering.lowerings:
        return
    copy, take = (lowering.fallback_handler(op, add_to_fallback_set=False) for op in (operator, taking))

    def lower(saved: Any, *arguments: Any) -> Any:
        graph = virtualized.V.graph
        reused = getattr(graph, "never_reuse_buffers", None)
        if reused is None or len(graph.current_node.args[0].users) > 1:
            return copy(saved, *arguments)
        saved.realize()
        reused.add(saved.get_name())
        return take(saved, *arguments)

    lowering.add_layout_constraint(operator, lowering.constrain_to_fx_strides)
    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
