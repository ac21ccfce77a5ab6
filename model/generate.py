"""Sampling from a model: one prefill of the prompt, then a token at a time with the KV cache.

Filters apply in this order: temperature, top-k, then top-p on what is left (nucleus sampling, Holtzman et al. 2019,
arXiv:1904.09751). A seed gives the same tokens on the same kind of device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fuselm.model.kv_cache import KVCache

if TYPE_CHECKING:
    from fuselm.model.llama import Llama


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int | None = None
    """Only the k likeliest tokens; more than there are means all."""
    top_p: float | None = None
    """Only the likeliest tokens that together reach this probability; the likeliest one always stays."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature={self.temperature}: expected a finite number, at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: expected at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected above 0 and at most 1, or None")

    def pick(self, logits: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draws a token a row.

        Args:
            logits: (batch, vocab), any float dtype.
            generator: on the device of the logits; None uses the global one.

        Returns:
            (batch,) int64.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits = logits.float()
        # Subtracting the largest first keeps tiny temperatures finite.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature
        if self.top_k is None and self.top_p is None:
            return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(-1)
        kept, ids = logits.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            kept, ids = kept[:, : self.top_k], ids[:, : self.top_k]
        probabilities = kept.softmax(dim=-1)
        if self.top_p is not None:
            before = probabilities.cumsum(dim=-1) - probabilities
            before[:, 0] = 0.0
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        picked = torch.multinomial(probabilities, 1, generator=generator)
        return ids.gather(-1, picked).squeeze(-1)


def generate_stream(
    model: Llama,
    tokens: torch.Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    eos_id: int | None = None,
) -> Iterator[torch.Tensor]:
    """Yields the new tokens as they are drawn, (batch,) int64 each.

    Arguments and errors are those of `generate`; values are checked at the call, not when the first token is asked for.
    With an `eos_id` it ends when every row has had one; a row that has is filled up with it.
    """
    sampling = Sampling(temperature, top_k, top_p)
    limit = model.config.max_seq_len
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens is {tuple(tokens.shape)} {tokens.dtype}: expected integers of shape (batch, seq)")
    batch, length = tokens.shape
    if batch < 1 or length < 1:
        raise ValueError(f"tokens has shape {(batch, length)}: expected at least one row of at least one token")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens}: expected at least 0")
    if length > limit:
        raise ValueError(f"tokens: the prompt has {length} tokens, the model takes at most max_seq_len={limit}")
    if length + max_new_tokens > limit:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} after a prompt of {length} tokens is more than max_seq_len={limit}: "
            f"expected at most {limit - length}"
        )
    vocab = model.config.vocab_size
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocab:
        raise ValueError(f"tokens has ids from {lowest} to {highest}: expected 0 to {vocab - 1} (vocab_size={vocab})")
    if generator is not None and seed is not None:
        raise ValueError(f"seed={seed} and generator exclude each other")
    if seed is not None:
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed={seed}: expected an integer from -2**63 to 2**64 - 1")
        generator = torch.Generator(device=tokens.device).manual_seed(seed)
    return _decode(model, tokens.long(), max_new_tokens, sampling, generator, eos_id)


@torch.no_grad()
def _decode(
    model: Llama,
    tokens: torch.Tensor,
    count: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    eos_id: int | None,
) -> Iterator[torch.Tensor]:
    if count == 0:
        return
    batch, length = tokens.shape
    device = tokens.device
    dtype = model.embedding.weight.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    # The last token drawn is never fed back.
    cache = KVCache(model.config, batch, length + count - 1, device, dtype)
    logits = model(tokens, cache=cache)[:, -1]
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    for step in range(count):
        drawn = sampling.pick(logits, generator)
        if eos_id is not None:
            drawn = torch.where(finished, eos_id, drawn)
            finished = finished | (drawn == eos_id)
        yield drawn
        if step + 1 == count or (eos_id is not None and bool(finished.all())):
            return
        logits = model(drawn[:, None], cache=cache)[:, -1]


def generate(
    model: Llama,
    tokens: torch.Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    eos_id: int | None = None,
) -> torch.Tensor:
    """Continues prompts.

    Args:
        model: a Llama on the device of the tokens.
        tokens: (batch, seq) integers, the prompts, all of one length.
        max_new_tokens: tokens to draw; prompt and new tokens together fit in the model's max_seq_len.
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: only the k likeliest tokens; None for all.
        top_p: only the likeliest tokens that together reach this probability, in (0, 1]; None for all.
        generator: source of randomness on the device of the tokens; None for the global one.
        seed: for a generator of its own, instead of `generator`.
        eos_id: a row ends at this token and is filled up with it.

    Returns:
        (batch, seq + max_new_tokens) int64: the prompts and what follows.

    Raises:
        ValueError: a value is out of range, or the prompt is empty or too long; the message names it.
    """
    batch, length = tokens.shape if tokens.dim() == 2 else (0, 0)
    stream = generate_stream(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
        seed=seed,
        eos_id=eos_id,
    )
    result = torch.full((batch, length + max_new_tokens), eos_id or 0, dtype=torch.int64, device=tokens.device)
    result[:, :length] = tokens
    for i, drawn in enumerate(stream):
        result[:, length + i] = drawn
    return result


class IncrementalDecoder:
    """Turns ids that come one by one into text that can be printed at once: a character comes when all its bytes have.

    A token of a byte-level vocabulary may hold part of a UTF-8 character. Decoders show an unfinished one at the end as
    one U+FFFD, so a U+FFFD at the end is held back; anywhere else it is final.

    Args:
        decode: ids to text, such as `tokenizers.Tokenizer.decode`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        # The ids since some border between characters. Those of the step before stay as context, because some
        # tokenizers treat the first token of a text differently.
        self._ids: list[int] = []
        self._given = 0  # characters of decode(self._ids) that were given out
        self._border = 0  # self._ids[:border] decode to whole characters

    def push(self, token: int) -> str:
        """The text that is certain after one more token; may be empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            certain = text[:-1]
            piece = certain[self._given :]
            self._given = max(self._given, len(certain))
            return piece
        piece = text[self._given :]
        self._ids = self._ids[self._border :]
        self._border = len(self._ids)
        self._given = len(self._decode(self._ids))
        return piece

    def flush(self) -> str:
        """What was held back, when no more tokens come; then it begins anew."""
        rest = self._decode(self._ids)[self._given :] if self._ids else ""
        self._ids, self._given, self._border = [], 0, 0
        return rest
