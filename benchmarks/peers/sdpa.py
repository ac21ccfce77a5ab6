"""torch's scaled_dot_product_attention, its backend forced: cuDNN, and FlashAttention-2. Left alone it may take the
slower of the two."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peers.base import Call, Providers, transposed
from torch.nn.attention import SDPBackend, sdpa_kernel

NAME = "SDPA"
DISTRIBUTIONS = ("torch", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_BACKENDS = {"cuDNN (SDPA)": SDPBackend.CUDNN_ATTENTION, "FA2 (SDPA)": SDPBackend.FLASH_ATTENTION}


def heads_first(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """q, k, v as leaves of (batch, heads, seq, head_dim), in memory as (batch, seq, heads, head_dim)."""
    return {name: inputs[name].detach().transpose(1, 2).requires_grad_() for name in "qkv"}


def _attention(backend: SDPBackend, inputs: dict[str, Any]) -> Call:
    leaves = heads_first(inputs)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return Call(forward, leaves, upstream=transposed, outputs=transposed, gradients=transposed)


def providers() -> Providers:
    """Causal attention."""
    return {"attention": {name: partial(_attention, backend) for name, backend in _BACKENDS.items()}}
