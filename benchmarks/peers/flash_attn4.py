"""FlashAttention-4, CuTe kernels; on Hopper its sm_90 ones."""

from __future__ import annotations

import importlib
import os
from typing import Any

from peers.base import Call, Providers, leaves_of

NAME = "FA4"
DISTRIBUTIONS = ("flash-attn-4", "nvidia-cutlass-dsl")


def providers() -> Providers:
    """Causal attention."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read at import: compile once a machine
    function = importlib.import_module("flash_attn.cute").flash_attn_func

    def attention(inputs: dict[str, Any]) -> Call:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        return Call(lambda: function(q, k, v, causal=True)[0], leaves_of(inputs))

    return {"attention": {NAME: attention}}
