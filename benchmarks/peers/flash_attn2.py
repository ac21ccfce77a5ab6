"""The flash-attn package (FlashAttention-2), where it is installed; torch carries the same algorithm, see sdpa.py."""

from __future__ import annotations

import importlib
from typing import Any

from peers.base import Call, Providers, leaves_of

NAME = "flash-attn"
DISTRIBUTIONS = ("flash-attn",)


def providers() -> Providers:
    """Causal attention."""
    module = importlib.import_module("flash_attn")
    if not hasattr(module, "flash_attn_func"):
        raise ImportError("flash_attn has no flash_attn_func: only FlashAttention-4 is installed under that name")

    def attention(inputs: dict[str, Any]) -> Call:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        return Call(lambda: module.flash_attn_func(q, k, v, causal=True), leaves_of(inputs))

    return {"attention": {NAME: attention}}
