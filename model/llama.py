"""Llama: a decoder of RMSNorm, RoPE, grouped-query attention and SwiGLU (Touvron et al. 2023, arXiv:2302.13971), on
fuselm's kernels.

The module knows nothing of processes: sharding, compilation and recomputation are applied from outside, block by block.
The residual stream travels through the blocks as a pair (x, residual): adding them is left to the next norm's kernel.
"""

from __future__ import annotations

import hashlib
import math
import sys
from typing import Literal

import torch
from einops import rearrange
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuselm.kernels._triton import Backend
from fuselm.kernels.direct import may_skip_dispatcher
from fuselm.kernels.linear_cross_entropy import linear_cross_entropy
from fuselm.kernels.qk_norm_rope import qk_norm_rope
from fuselm.kernels.rms_norm import add_rms_norm, rms_norm
from fuselm.kernels.rope import rope_qkv
from fuselm.kernels.swiglu import swiglu
from fuselm.model.attention_backends import DocumentMask, attend
from fuselm.model.config import LlamaConfig
from fuselm.model.flops import parameter_counts
from fuselm.model.kv_cache import KVCache
from fuselm.model.rope_table import rope_tables

INIT_STD = 0.02


def kernel_backend(config: LlamaConfig) -> Backend:
    """The `backend` argument of every op for this model."""
    backends: dict[str, Backend] = {"auto": "auto", "triton": "triton", "eager": "reference"}
    return backends[config.kernels]


class RMSNorm(nn.Module):
    """RMSNorm with a weight of `dim` elements; with a residual, adds it first and gives the sum back too."""

    def __init__(self, dim: int, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = config.norm_eps
        self.backend: Backend = kernel_backend(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.eps, backend=self.backend)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); without a residual (norm(x), x)."""
        if residual is None:
            return self(x), x
        return add_rms_norm(x, residual, self.weight, eps=self.eps, backend=self.backend)


class Attention(nn.Module):
    """Grouped-query attention; the rows of `qkv` are [query heads | key heads | value heads]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        head = config.head_size
        self.qkv = nn.Linear(config.dim, (config.num_heads + 2 * config.num_kv_heads) * head, bias=False)
        self.output = nn.Linear(config.num_heads * head, config.dim, bias=False)
        self.q_norm = RMSNorm(head, config) if config.qk_norm else None
        self.k_norm = RMSNorm(head, config) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None,
        documents: DocumentMask | None,
        cache: KVCache | None,
        layer: int,
    ) -> torch.Tensor:
        config = self.config
        qkv = rearrange(self.qkv(x), "b s (h d) -> b s h d", d=config.head_size)
        heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads}
        backend = kernel_backend(config)
        if self.q_norm is not None and self.k_norm is not None:
            weights = self.q_norm.weight, self.k_norm.weight
            q, k, v = qk_norm_rope(
                qkv, *weights, cos, sin, eps=config.norm_eps, positions=positions, backend=backend, **heads
            )
        else:
            q, k, v = rope_qkv(qkv, cos, sin, positions=positions, inplace=True, backend=backend, **heads)
        if cache is not None and positions is not None:
            out = cache.attend(layer, q, k, v, positions, config)
        else:
            out = attend(q, k, v, config, documents)
        return self.output(rearrange(out, "b s h d -> b s (h d)"))


class MLP(nn.Module):
    """SwiGLU feed-forward; the rows of `gate_up` are [gate | up]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.backend: Backend = kernel_backend(config)
        self.recompute_activation = False  # keep gate_up only, and compute its SwiGLU again in the backward pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up(x)
        if self.recompute_activation:
            return checkpoint(self._project, gate_up, use_reentrant=False, preserve_rng_state=False)
        return self._project(gate_up)

    def _project(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(gate_up, backend=self.backend))


class Block(nn.Module):
    """One transformer block. Takes and gives (x, residual), whose sum is the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: DocumentMask | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.attention_norm.add(x, residual)
        attended = self.attention(normed, cos, sin, positions, documents, cache, layer)
        normed, residual = self.mlp_norm.add(attended, residual)
        return self.mlp(normed), residual


class Llama(nn.Module):
    """A LLaMA-style language model.

    Args:
        config: its shape. Construct under `torch.device("meta")`, then `to_empty` and `init_weights`, to allocate
            nothing before sharding.

    With tied embeddings `lm_head` is None and the head is `embedding.weight`: one storage, counted once.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        if self.embedding.weight.device.type != "meta":
            self.init_weights()

    @property
    def head_weight(self) -> torch.Tensor:
        """(vocab_size, dim): the output projection, tied or not."""
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    @torch.no_grad()
    def init_weights(self, seed: int = 0) -> None:
        """Fills every parameter in place by `initial_value`; the same seed gives the same weights on the same kind of
        device."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, self.config, seed, parameter.device))

    def num_parameters(self, *, embedding: bool = True) -> int:
        """Parameters, each counted once; `embedding=False` leaves out an input embedding that is not tied to the
        head."""
        total, lookup = parameter_counts(self.config)
        return total if embedding else total - lookup

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        *,
        reduction: Literal["none", "sum", "mean"] = "sum",
        z_loss: float = 0.0,
        positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        cache: KVCache | None = None,
        logits_at: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Loss against `targets`, or logits.

        Args:
            tokens: (batch, seq) int64 ids below vocab_size.
            targets: (batch, seq) int64, the id that follows each token; -100 is left out of the loss.
            reduction: "sum" over valid tokens (divide by their global count yourself), "mean", or "none" (batch, seq).
            z_loss: weight of the mean-square log-partition term (PaLM), added per valid token.
            positions: (batch, seq) or (seq,) for RoPE; by default 0, 1, ..., restarting with each document.
            cu_seqlens: (documents + 1,) int32 borders in the flattened batch · seq tokens; attention stays within
            documents.
            max_seqlen: longest document, in tokens; a bound is enough, by default all tokens. Only flash_attn reads it.
            cache: keys and values of the tokens before these, which give the positions; is appended to.
            logits_at: (batch,) int64, the place in `tokens` whose logits alone are wanted; all by default.

        Returns:
            With targets an fp32 loss (of the logits there is a part at a time); else logits (batch, seq,
            vocab_size), or (batch, vocab_size) with `logits_at`.

        Raises:
            TypeError: tokens are not int64 or int32.
            ValueError: tokens are not (batch, seq), longer than max_seq_len with what the cache holds or, of those on a
                CPU and outside of torch.compile, not in [0, vocab_size); a GPU's are not looked at.
        """
        if tokens.dim() != 2:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}: expected (batch, seq)")
        if tokens.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"tokens has dtype {tokens.dtype}: expected int64 or int32 token ids")
        _check_range(tokens, self.config.vocab_size)
        batch, seq = tokens.shape
        start = 0 if cache is None or cache.decoding else cache.length  # decoding: known on the device only
        if start + seq > self.config.max_seq_len:
            raise ValueError(
                f"tokens: {seq} after {start} cached ones are more than max_seq_len={self.config.max_seq_len}; shorten "
                "the sequence or raise model.max_seq_len"
            )
        cos, sin = rope_tables(self.config, tokens.device) if cache is None else cache.tables
        documents = None
        if cu_seqlens is not None:
            if cache is not None:
                raise ValueError("cu_seqlens and cache exclude each other: documents are packed in training only")
            # Compiled blocks must not be compiled anew for each batch's number of documents and longest document.
            longest = max_seqlen if self.config.attention_backend == "flash_attn" else None
            documents = DocumentMask(cu_seqlens, batch * seq if longest is None else longest)
            if (dynamo := sys.modules.get("torch._dynamo")) is not None:
                dynamo.maybe_mark_dynamic(cu_seqlens, 0)
            if positions is None:
                positions = document_positions(cu_seqlens, batch, seq)
        if cache is not None:
            if positions is not None:
                raise ValueError("positions and cache exclude each other: positions follow from what the cache holds")
            positions = cache.begin(seq)
        x, residual = self.embedding(tokens), None
        for layer, block in enumerate(self.blocks):
            x, residual = block(x, residual, cos, sin, positions, documents, cache, layer)
        x, _ = self.norm.add(x, residual)
        if cache is not None:
            cache.end(seq)
        if targets is None:
            if logits_at is not None:
                x = x[torch.arange(batch, device=x.device), logits_at]
            return nn.functional.linear(x, self.head_weight)
        return linear_cross_entropy(
            x, self.head_weight, targets, reduction=reduction, z_loss=z_loss, backend=kernel_backend(self.config)
        )


def _check_range(tokens: torch.Tensor, vocab_size: int) -> None:
    """Refuses ids that are no rows of the embedding, where a look needs no device to wait for and nothing is traced."""
    if tokens.device.type != "cpu" or not may_skip_dispatcher(tokens) or tokens.numel() == 0:
        return
    least, most = (int(x) for x in torch.aminmax(tokens))
    if least < 0 or most >= vocab_size:
        wrong = least if least < 0 else most
        raise ValueError(f"tokens holds {wrong}: expected ids from 0 to {vocab_size - 1}, vocab_size={vocab_size}")


def document_positions(cu_seqlens: torch.Tensor, batch: int, seq: int) -> torch.Tensor:
    """(batch, seq) int64 positions that restart at each border of `cu_seqlens`; no host sync."""
    index = torch.arange(batch * seq, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, index, right=True) - 1
    start = cu_seqlens.long()[document.clamp(min=0)]
    return (index - start).view(batch, seq)


def initial_value(
    name: str, shape: torch.Size | tuple[int, ...], config: LlamaConfig, seed: int, device: torch.device
) -> torch.Tensor:
    """The whole initial value of a parameter, a pure function of its name and the seed.

    Norm weights are 1. Matrices are normal with standard deviation 0.02; those that write into the residual stream
    (attention.output, mlp.down) have it divided by sqrt(2 · num_layers), as in GPT-2, so that its variance does not
    grow with depth.

    Args:
        name: the parameter's name in the model, without wrappers' prefixes.
        shape: its whole shape, not a shard's.
        config: the model's.
        seed: of the run.
        device: where to draw it; a CPU and a GPU give different numbers.

    Returns:
        fp32 tensor of `shape`.
    """
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "little"))
    std = INIT_STD
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        std /= math.sqrt(2 * config.num_layers)
    return torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
