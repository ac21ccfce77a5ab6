"""KVCache: keys and values of the tokens a model has seen, allocated once."""

from __future__ import annotations

import torch

from fuselm.model.config import LlamaConfig


class KVCache:
    """Keys and values of every layer, (layers, batch, max_len, kv_heads, head_dim).

    Args:
        config: the model's.
        batch: sequences.
        max_len: tokens it can hold, at most config.max_seq_len.
        device: where it lies.
        dtype: of keys and values; the model's compute dtype.
    """

    def __init__(
        self, config: LlamaConfig, batch: int, max_len: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        if not 1 <= max_len <= config.max_seq_len:
            raise ValueError(f"max_len={max_len}: expected 1 to max_seq_len={config.max_seq_len}")
        shape = (config.num_layers, batch, max_len, config.num_kv_heads, config.head_size)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0
        """Tokens held; the model raises it after the last layer."""

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes k and v (batch, new, kv_heads, head_dim) after the held ones; gives all of the layer's as views."""
        end = self.length + k.shape[1]
        if end > self.keys.shape[2]:
            raise ValueError(
                f"the cache holds {self.keys.shape[2]} tokens, {end} are needed; make it with a larger max_len"
            )
        self.keys[layer, :, self.length : end] = k
        self.values[layer, :, self.length : end] = v
        return self.keys[layer, :, :end], self.values[layer, :, :end]
