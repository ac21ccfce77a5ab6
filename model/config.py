"""LlamaConfig: the shape of a model, and the published shapes by name."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

AttentionBackend = Literal["fuselm", "sdpa", "cudnn", "flash_attn"]
Kernels = Literal["auto", "triton", "eager"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's frequency scaling for contexts longer than those trained on (rope_type "llama3")."""

    factor: float = 8.0
    """Low frequencies are divided by this."""
    low_freq_factor: float = 1.0
    """Wavelengths above original_max_seq_len / low_freq_factor count as low frequencies."""
    high_freq_factor: float = 4.0
    """Wavelengths below original_max_seq_len / high_freq_factor stay as they are; between the two, a linear blend."""
    original_max_seq_len: int = 8192
    """Context length of the first training, in tokens."""

    def __post_init__(self) -> None:
        ordered = 0 < self.low_freq_factor < self.high_freq_factor < math.inf
        if not 0 < self.factor < math.inf or not ordered or self.original_max_seq_len < 1:
            raise ValueError(
                f"rope_scaling: factor={self.factor}, low_freq_factor={self.low_freq_factor}, "
                f"high_freq_factor={self.high_freq_factor}, original_max_seq_len={self.original_max_seq_len}: expected "
                "finite numbers with factor > 0, 0 < low_freq_factor < high_freq_factor, original_max_seq_len >= 1"
            )


@dataclass(frozen=True)
class LlamaConfig:
    """A LLaMA-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    vocab_size: int = 1024
    """Rows of the embedding and the head, in tokens; at least the tokenizer's vocabulary."""
    dim: int = 64
    """Width of the residual stream."""
    num_layers: int = 2
    """Transformer blocks."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads; divides num_heads."""
    ffn_dim: int = 192
    """Width of the SwiGLU's hidden layer."""
    head_dim: int | None = None
    """Width of a head; dim / num_heads if not given."""
    max_seq_len: int = 256
    """Longest sequence, in tokens; the RoPE table has this many rows."""
    norm_eps: float = 1e-5
    """Added to the mean of squares in RMSNorm."""
    rope_theta: float = 10_000.0
    """RoPE base: the longest wavelength is 2π · rope_theta tokens or nearly so."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's frequency scaling, or none."""
    tie_embeddings: bool = True
    """The head is the embedding matrix; stored and counted once."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before RoPE."""
    attention_backend: AttentionBackend = "fuselm"
    """fuselm (our kernels; PyTorch's SDPA where they cannot run), sdpa, cudnn (SDPA held to cuDNN), flash_attn (if
    installed)."""
    deterministic_attention: bool = False
    """The same bits in every run from fuselm's attention. Only its Hopper kernels need to be asked: they sum dQ in no
    fixed order; this takes the slower portable backward pass."""
    kernels: Kernels = "auto"
    """auto: Triton where it can run; triton: an error where it cannot; eager: plain PyTorch everywhere, attention by
    SDPA."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "max_seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value < 2**31:
                raise ValueError(f"{name}={value!r}: expected an integer from 1 to {2**31 - 1}")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps={self.norm_eps!r}: expected a finite number >= 0")
        if not 0 < self.rope_theta < math.inf:
            raise ValueError(f"rope_theta={self.rope_theta!r}: expected a finite number > 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(f"dim={self.dim} does not divide by num_heads={self.num_heads}; give head_dim")
        if self.head_size % 2 or self.head_size < 2:
            raise ValueError(f"head_dim={self.head_size}: expected an even number, RoPE turns pairs")
        if self.attention_backend not in get_args(AttentionBackend):
            raise ValueError(
                f"attention_backend={self.attention_backend!r}: expected one of {get_args(AttentionBackend)}"
            )
        if self.kernels not in get_args(Kernels):
            raise ValueError(f"kernels={self.kernels!r}: expected one of {get_args(Kernels)}")

    @property
    def head_size(self) -> int:
        """Width of a head, whether given or derived."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> LlamaConfig:
        """The configuration called `name` in PRESETS, with fields replaced by `overrides`.

        Raises:
            ValueError: there is no such preset or field; the message has the nearest name.
        """
        if name not in PRESETS:
            raise ValueError(f"unknown model preset {name!r}{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
        known = [f.name for f in fields(cls)]
        for key in overrides:
            if key not in known:
                raise ValueError(f"unknown field {key!r} of LlamaConfig{nearest(key, known)}")
        return replace(PRESETS[name], **overrides)


def nearest(name: str, known: Any) -> str:
    """', did you mean ...?' for the closest of `known`, in whatever case it is written, or nothing."""
    written = {str(one).casefold(): one for one in known}
    close = difflib.get_close_matches(name.casefold(), list(written), n=1, cutoff=0.5)
    return f", did you mean {written[close[0]]!r}?" if close else ""


def _llama3(
    dim: int, layers: int, heads: int, ffn: int, *, factor: float, tied: bool = False, head_dim: int = 128
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        ffn_dim=ffn,
        head_dim=head_dim,
        max_seq_len=131072,
        rope_theta=500_000.0,
        rope_scaling=RopeScaling(factor=factor),
        tie_embeddings=tied,
    )


def _gpt2_sized(dim: int, layers: int, heads: int, ffn: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=50304, dim=dim, num_layers=layers, num_heads=heads, num_kv_heads=heads, ffn_dim=ffn, max_seq_len=1024
    )


PRESETS: dict[str, LlamaConfig] = {
    "debug": LlamaConfig(),
    "demo": LlamaConfig(dim=256, num_layers=4, num_heads=4, num_kv_heads=4, ffn_dim=640),
    "124m": _gpt2_sized(768, 12, 12, 2048),
    "350m": _gpt2_sized(1024, 24, 16, 2816),
    # Llama 3.2 1B and 3B, Llama 3.1 8B, 70B and 405B, as published
    "llama3_1b": _llama3(2048, 16, 32, 8192, factor=32.0, tied=True, head_dim=64),
    "llama3_3b": _llama3(3072, 28, 24, 8192, factor=32.0, tied=True),
    "llama3_8b": _llama3(4096, 32, 32, 14336, factor=8.0),
    "llama3_70b": _llama3(8192, 80, 64, 28672, factor=8.0),
    "llama3_405b": _llama3(16384, 126, 128, 53248, factor=8.0),
}
