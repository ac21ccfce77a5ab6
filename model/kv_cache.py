"""KVCache: keys and values of the tokens a model has seen, allocated once, and attention over them.

Sequences of a batch may hold different numbers of tokens. Two ways to go on:

- A prompt, or a further part of a text: any number of tokens at once; how many are held is known on the host.
- Decoding (`decoding = True`): one token a sequence and step. Everything that changes from step to step is a number on
  the device, so that a step is the same work each time: it can be compiled once, or recorded as a CUDA graph.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from fuselm.kernels._triton import explain_backend
from fuselm.kernels.decode_attention import decode_attention
from fuselm.model.attention_backends import attend
from fuselm.model.config import LlamaConfig
from fuselm.model.rope_table import rope_tables


class KVCache:
    """Keys and values of every layer, (batch, max_len, kv_heads, head_dim) each.

    Args:
        config: the model's.
        batch: sequences.
        max_len: tokens a sequence that it can hold, at most config.max_seq_len.
        device: where it lies.
        dtype: of keys and values; the model's compute dtype.

    Attributes:
        tables: cosines and sines for RoPE.
        lengths: (batch,) int64 on the device, tokens that each sequence holds. The model raises them.
        length: tokens that the longest sequence holds, as the host knows it.
        decoding: one token a sequence comes at a time, and `length` is for the caller to raise.

    Raises:
        ValueError: batch or max_len is out of range.
    """

    def __init__(
        self, config: LlamaConfig, batch: int, max_len: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        if batch < 1:
            raise ValueError(f"batch={batch}: expected at least 1")
        if not 1 <= max_len <= config.max_seq_len:
            raise ValueError(f"max_len={max_len}: expected 1 to max_seq_len={config.max_seq_len}")
        shape = (batch, max_len, config.num_kv_heads, config.head_size)
        # A tensor a layer: a compiled step that writes into a part of one large tensor would copy all of it.
        self.keys, self.values = (
            tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)) for _ in range(2)
        )
        # Held here, so that a compiled step takes them as inputs and does not compute them anew.
        self.tables = rope_tables(config, torch.device(device))
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.length = 0
        self.decoding = False
        self._rows = torch.arange(batch, device=device)
        self._even = True  # all sequences hold the same number of tokens

    @property
    def max_len(self) -> int:
        """Tokens a sequence that it can hold."""
        return self.keys[0].shape[1]

    def keep(self, lengths: torch.Tensor) -> None:
        """Forget all but the first tokens of each sequence: after a padded prompt, or to take back a part of a text.

        Args:
            lengths: (batch,) integers, tokens to keep; at most what is held. Waits for the device.

        Raises:
            ValueError: a length is negative or more than is held.
        """
        counts = lengths.tolist()
        held = self.lengths.tolist()
        if len(counts) != len(held) or any(not 0 <= new <= old for new, old in zip(counts, held, strict=True)):
            raise ValueError(f"lengths={counts}: expected {len(held)} numbers from 0 to those held, {held}")
        self.lengths.copy_(lengths)
        self.length = max(counts)
        self._even = min(counts) == self.length

    def begin(self, new: int) -> torch.Tensor:
        """Make room for `new` tokens a sequence; the model calls it before its layers.

        Returns:
            (batch, new) int64, their positions.

        Raises:
            ValueError: there is no room, or more than one token comes while decoding.
        """
        if self.decoding:
            if new != 1:
                raise ValueError(f"{new} tokens a sequence while decoding: expected 1")
        elif self.length + new > self.max_len:
            raise ValueError(
                f"the cache holds {self.max_len} tokens, {self.length + new} are needed; make it with a larger max_len"
            )
        positions = self.lengths[:, None] + torch.arange(new, device=self.lengths.device)
        self.lengths += new
        return positions

    def end(self, new: int) -> None:
        """All layers have appended their keys and values."""
        if not self.decoding:
            self.length += new

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        config: LlamaConfig,
    ) -> torch.Tensor:
        """Appends k and v and gives causal attention over all that is held.

        Args:
            layer: number of the layer.
            q: (batch, new, num_heads, head_dim).
            k, v: (batch, new, num_kv_heads, head_dim).
            positions: from `begin`.
            config: the model's.

        Returns:
            (batch, new, num_heads, head_dim).
        """
        keys, values = self.keys[layer], self.values[layer]
        if not self.decoding and self._even:
            end = self.length + k.shape[1]
            keys[:, self.length : end] = k
            values[:, self.length : end] = v
            return attend(q, keys[:, :end], values[:, :end], config, None)
        keys[self._rows[:, None], positions] = k.to(keys.dtype)
        values[self._rows[:, None], positions] = v.to(values.dtype)
        kernels = config.kernels == "triton" or (config.kernels == "auto" and explain_backend(q.device)[0] == "triton")
        if self.decoding and kernels:
            return decode_attention(q[:, 0], keys, values, self.lengths, backend="triton")[:, None]
        # (batch, 1, new, max_len): a token sees itself and what its own sequence held before.
        seen = (torch.arange(keys.shape[1], device=q.device) <= positions[:, :, None])[:, None]
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        grouped = q.shape[1] != keys.shape[1]
        return scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=grouped).transpose(1, 2)
