"""The flash-attn package (FlashAttention-2), where it is installed; torch carries the same algorithm, see sdpa.py."""

from __future__ import annotations

import importlib
from typing import Any

from peers.base import Call, Providers, document_sizes, is_packed, leaves_of, reach_back

NAME = "flash-attn"
DISTRIBUTIONS = ("flash-attn",)


def providers() -> Providers:
    """Causal attention, over documents and with a window too."""
    module = importlib.import_module("flash_attn")
    if not hasattr(module, "flash_attn_func"):
        raise ImportError("flash_attn has no flash_attn_func: only FlashAttention-4 is installed under that name")

    def attention(inputs: dict[str, Any]) -> Call:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        reach = reach_back(inputs)
        options: dict[str, Any] = {"causal": True, "window_size": (-1 if reach is None else reach, -1)}
        if not is_packed(inputs):
            return Call(lambda: module.flash_attn_func(q, k, v, **options), leaves_of(inputs))
        borders, longest = inputs["cu_seqlens_q"], max(document_sizes(inputs))
        lengths = (borders, borders, longest, longest)
        return Call(lambda: module.flash_attn_varlen_func(q, k, v, *lengths, **options), leaves_of(inputs))

    return {"attention": {NAME: attention}}
