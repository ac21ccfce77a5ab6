"""FlashAttention-4, CuTe kernels; on Hopper its sm_90 ones."""

from __future__ import annotations

import importlib
import os
from typing import Any

from peers.base import Call, Providers, document_sizes, is_packed, leaves_of, reach_back

NAME = "FA4"
DISTRIBUTIONS = ("flash-attn-4", "nvidia-cutlass-dsl")


def providers() -> Providers:
    """Causal attention, over documents and with a window too."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read at import: compile once a machine
    module = importlib.import_module("flash_attn.cute")

    def attention(inputs: dict[str, Any]) -> Call:
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        options: dict[str, Any] = {"causal": True, "window_size": (reach_back(inputs), None)}
        function = module.flash_attn_func
        if is_packed(inputs):
            function, borders, longest = (
                module.flash_attn_varlen_func,
                inputs["cu_seqlens_q"],
                max(document_sizes(inputs)),
            )
            options |= {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
            options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return Call(lambda: function(q, k, v, **options)[0], leaves_of(inputs))

    return {"attention": {NAME: attention}}
