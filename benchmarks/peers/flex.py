"""FlexAttention, compiled, with the block mask of the row made beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peers.base import Call, Providers, document_sizes, is_packed
from peers.sdpa import heads_first, heads_last, to_heads_first
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

NAME = "Flex"
DISTRIBUTIONS = ("torch", "triton")


def _causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def _mask(inputs: dict[str, Any]) -> Callable[..., Any]:
    """The function that says which pairs of positions are visible."""
    window = inputs.get("window")
    if is_packed(inputs):
        lengths = torch.tensor(document_sizes(inputs), device=inputs["q"].device)
        document = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        return lambda batch, head, query, key: (query >= key) & (document[query] == document[key])
    if window is not None:
        return lambda batch, head, query, key: (query >= key) & (query - key < window)
    return _causal


def _attention(inputs: dict[str, Any]) -> Call:
    leaves, packed = heads_first(inputs), is_packed(inputs)
    queries, keys = leaves["q"].shape[2], leaves["k"].shape[2]
    mask = create_block_mask(_mask(inputs), None, None, queries, keys, device=str(inputs["q"].device))
    function: Any = torch.compile(flex_attention, dynamic=False)
    return Call(
        lambda: function(leaves["q"], leaves["k"], leaves["v"], block_mask=mask, enable_gqa=True),
        leaves,
        upstream=to_heads_first(packed),
        outputs=heads_last(packed),
        gradients=heads_last(packed),
    )


def providers() -> Providers:
    """Causal attention, over documents and with a window too."""
    return {"attention": {NAME: _attention}}
