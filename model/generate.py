"""Sampling from a model: one prefill of the prompts, then a token at a time with the KV cache.

Prompts of a batch may differ in length. Filters apply in this order: temperature, top-k, then top-p on what is left
(nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751). A seed gives the same tokens on the same kind of device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fuselm.kernels.arguments import autocast_dtype
from fuselm.model.decode_step import DecodeStep
from fuselm.model.kv_cache import KVCache
from fuselm.model.text_stream import Decode, TextStream

if TYPE_CHECKING:
    from fuselm.model.llama import Llama

_GRAPH_STEPS = 16  # recording a CUDA graph takes as long as a few steps without one


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
        if self.top_k is not None:
            kept, ids = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1)
        else:
            kept, ids = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = kept.softmax(dim=-1)
        if self.top_p is not None:
            before = probabilities.cumsum(dim=-1) - probabilities
            before[:, 0] = 0.0
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        picked = torch.multinomial(probabilities, 1, generator=generator)
        return ids.gather(-1, picked).squeeze(-1)


def pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of any lengths as `generate` takes them: (batch, longest) int64, filled up with 0, and (batch,) lengths.

    Raises:
        ValueError: there is no prompt, or one is empty.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts: {len(prompts)} of {[len(p) for p in prompts]} tokens, expected at least one each")
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    return tokens, torch.tensor([len(prompt) for prompt in prompts], device=device)


def generate_stream(
    model: Llama,
    tokens: torch.Tensor,
    *,
    max_new_tokens: int,
    lengths: torch.Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    eos_id: int | None = None,
    compile: bool = False,
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
    if lengths is not None:
        if lengths.shape != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"lengths is {tuple(lengths.shape)} {lengths.dtype}: expected integers of shape ({batch},)"
            )
        if int(lengths.min()) < 1 or int(lengths.max()) > length:
            raise ValueError(f"lengths={lengths.tolist()}: expected 1 to {length}, the columns of tokens")
    if generator is not None and seed is not None:
        raise ValueError(f"seed={seed} and generator exclude each other")
    if seed is not None:
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed={seed}: expected an integer from -2**63 to 2**64 - 1")
        generator = torch.Generator(device=tokens.device).manual_seed(seed)
    return _decode(model, tokens.long(), lengths, max_new_tokens, sampling, generator, eos_id, compile)


@torch.no_grad()
def _decode(
    model: Llama,
    tokens: torch.Tensor,
    lengths: torch.Tensor | None,
    count: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    eos_id: int | None,
    compile: bool,
) -> Iterator[torch.Tensor]:
    if count == 0:
        return
    batch, length = tokens.shape
    device = tokens.device
    dtype = autocast_dtype(device) or model.embedding.weight.dtype
    # The last token drawn is never fed back.
    cache = KVCache(model.config, batch, length + count - 1, device, dtype)
    last = torch.full((batch,), length - 1, device=device) if lengths is None else lengths.long() - 1
    logits = model(tokens, cache=cache, logits_at=last)
    if lengths is not None:
        cache.keep(lengths)
    # Autocast keeps casts of the weights, which a recorded graph must not share with what runs outside it.
    graph = device.type == "cuda" and count > _GRAPH_STEPS and not torch.is_autocast_enabled(device.type)
    step = DecodeStep(model, cache, compile=compile, graph=graph)
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    for number in range(count):
        drawn = sampling.pick(logits, generator)
        if eos_id is not None:
            drawn = torch.where(finished, eos_id, drawn)
            finished = finished | (drawn == eos_id)
        yield drawn
        if number + 1 == count or (eos_id is not None and bool(finished.all())):
            return
        logits = step(drawn)


def generate(
    model: Llama,
    tokens: torch.Tensor,
    *,
    max_new_tokens: int,
    lengths: torch.Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    eos_id: int | None = None,
    compile: bool = False,
) -> torch.Tensor:
    """Continues prompts.

    Args:
        model: a Llama on the device of the tokens.
        tokens: (batch, seq) integers, the prompts; shorter ones are filled up on the right with any id (`pad_prompts`).
        max_new_tokens: tokens to draw; the longest prompt and the new tokens together fit in the model's max_seq_len.
        lengths: (batch,) tokens of each prompt; None where all have seq.
        temperature: divides the logits; 0 takes the likeliest token (greedy).
        top_k: only the k likeliest tokens; None for all.
        top_p: only the likeliest tokens that together reach this probability, in (0, 1]; None for all.
        generator: source of randomness on the device of the tokens; None for the global one.
        seed: for a generator of its own, instead of `generator`.
        eos_id: a row ends at this token and is filled up with it.
        compile: compile the decode step for this batch and number of tokens; worth it for long texts only.

    Returns:
        (batch, seq + max_new_tokens) int64: each prompt and what follows it, filled up with `eos_id` (0 without one).

    Raises:
        ValueError: a value is out of range, or the prompt is empty or too long; the message names it.
    """
    batch, length = tokens.shape if tokens.dim() == 2 else (0, 0)
    stream = generate_stream(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
        seed=seed,
        eos_id=eos_id,
        compile=compile,
    )
    result = torch.full((batch, length + max_new_tokens), eos_id or 0, dtype=torch.int64, device=tokens.device)
    result[:, :length] = tokens
    rows = torch.arange(batch, device=tokens.device)
    ends = torch.full_like(rows, length) if lengths is None else lengths.long()
    if lengths is not None:  # what filled the prompts up
        columns = torch.arange(length, device=tokens.device)
        result[:, :length].masked_fill_(columns >= ends[:, None], eos_id or 0)
    for i, drawn in enumerate(stream):
        result[rows, ends + i] = drawn
    return result


def generate_text(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    decode: Decode,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    eos_id: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
) -> list[str]:
    """Continues prompts of any lengths in one batch, as text; ends when every one of them has ended.

    Args:
        model: a Llama.
        prompts: ids of each.
        decode: ids to text, such as `tokenizers.Tokenizer.decode`.
        max_new_tokens, eos_id, temperature, top_k, top_p, seed: as for `generate`.
        stop: strings that end a text; they are not part of it.

    Returns:
        What follows each prompt.

    Raises:
        ValueError: as for `generate`, and for an empty stop string.
    """
    tokens, lengths = pad_prompts(prompts, model.embedding.weight.device)
    streams = [TextStream(decode, stop=stop, stop_ids=[] if eos_id is None else [eos_id]) for _ in prompts]
    texts = [""] * len(prompts)
    for drawn in generate_stream(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        eos_id=eos_id,
    ):
        for row, (stream, token) in enumerate(zip(streams, drawn.tolist(), strict=True)):
            texts[row] += stream.push(token)
        if all(stream.ended for stream in streams):
            break
    return [text + stream.flush() for text, stream in zip(texts, streams, strict=True)]
