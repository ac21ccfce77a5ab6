"""torch's scaled_dot_product_attention, its backend forced: cuDNN, and FlashAttention-2. Left alone it may take the
slower of the two. It has no documents and no windows; FlashAttention-2 does them by the op underneath."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peers.base import Call, NotOfferedError, Providers, document_sizes, is_packed, leaves_of, reach_back, transposed
from torch.nn.attention import SDPBackend, sdpa_kernel

NAME = "SDPA"
DISTRIBUTIONS = ("torch", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
_BACKENDS = {"cuDNN (SDPA)": SDPBackend.CUDNN_ATTENTION, "FA2 (SDPA)": SDPBackend.FLASH_ATTENTION}

FLASH_DEVICES = ("cuda",)  # where torch has the op


def to_heads_first(packed: bool) -> Callable[[Any], Any]:
    """Our layout -> (batch, heads, seq, head_dim), as views; of packed tensors a batch of one."""
    return (lambda tensors: transposed([t[None] for t in tensors])) if packed else transposed


def heads_last(packed: bool) -> Callable[[Any], Any]:
    """(batch, heads, seq, head_dim) -> our layout, as views; of a list or of a dictionary."""
    if not packed:
        return transposed

    def back(tensors: Any) -> Any:
        if isinstance(tensors, dict):
            return {name: t[0].transpose(0, 1) for name, t in tensors.items()}
        return [t[0].transpose(0, 1) for t in tensors]

    return back


def heads_first(inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """q, k, v as leaves of (batch, heads, seq, head_dim), in memory as (batch, seq, heads, head_dim)."""
    views = to_heads_first(is_packed(inputs))([inputs[name].detach() for name in "qkv"])
    return {name: t.requires_grad_() for name, t in zip("qkv", views, strict=True)}


def _attention(backend: SDPBackend, inputs: dict[str, Any]) -> Call:
    if is_packed(inputs) or reach_back(inputs) is not None:
        if backend == SDPBackend.FLASH_ATTENTION:
            return _flash_attention(inputs)
        raise NotOfferedError("torch's SDPA gives cuDNN neither documents nor windows")
    leaves = heads_first(inputs)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return Call(forward, leaves, upstream=transposed, outputs=transposed, gradients=transposed)


def _flash_attention(inputs: dict[str, Any]) -> Call:
    """torch's FlashAttention-2 with borders of documents or a window, in our layout."""
    q, k, v, borders, longest = inputs["q"], inputs["k"], inputs["v"], None, inputs["q"].shape[1]
    if q.device.type not in FLASH_DEVICES:
        raise NotOfferedError(f"torch has FlashAttention-2's documents and windows on {FLASH_DEVICES}, not {q.device}")
    if is_packed(inputs):
        borders, longest = inputs["cu_seqlens_q"], max(document_sizes(inputs))
    lengths = (borders, borders, longest, longest)
    function = torch.ops.aten._flash_attention_forward
    window = {"window_size_left": reach_back(inputs)}

    # 0.0: no dropout; True: causal; False: no mask of the dropout for debugging
    return Call(lambda: function(q, k, v, *lengths, 0.0, True, False, **window)[0], leaves_of(inputs))


def providers() -> Providers:
    """Causal attention, over documents and with a window too."""
    return {"attention": {name: partial(_attention, backend) for name, backend in _BACKENDS.items()}}
