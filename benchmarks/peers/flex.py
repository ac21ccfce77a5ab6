"""FlexAttention, compiled, with a causal block mask made beforehand."""

from __future__ import annotations

from typing import Any

import torch
from peers.base import Call, Providers, transposed
from peers.sdpa import heads_first
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

NAME = "Flex"
DISTRIBUTIONS = ("torch", "triton")


def _causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def _attention(inputs: dict[str, Any]) -> Call:
    leaves = heads_first(inputs)
    queries, keys = inputs["q"].shape[1], inputs["k"].shape[1]
    mask = create_block_mask(_causal, None, None, queries, keys, device=str(inputs["q"].device))
    function: Any = torch.compile(flex_attention, dynamic=False)
    return Call(
        lambda: function(leaves["q"], leaves["k"], leaves["v"], block_mask=mask, enable_gqa=True),
        leaves,
        upstream=transposed,
        outputs=transposed,
        gradients=transposed,
    )


def providers() -> Providers:
    """Causal attention."""
    return {"attention": {NAME: _attention}}
