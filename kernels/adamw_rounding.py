"""Random bits for stochastic rounding to bf16: a function of (seed, step, parameter, element), nothing else.

Adding 16 random bits to an fp32 number and dropping the low half rounds it up with a probability of exactly the part
that is dropped, so the expected value of what is stored is the number itself (Gupta et al. 2015, arXiv:1502.02551).

The bits come from a counter, not from a state: element i of parameter p at step t takes

    k = key(seed, t, p)           two 32-bit words
    h = F(F(low(i) ^ k0) ^ high(i) ^ k1)

with F the finalizer of MurmurHash3 (Appleby 2011), a bijection of 32 bits in which every input bit flips every output
bit with a probability close to 1/2. i counts within the whole parameter, also where a process has only a shard of it,
so that the bits do not depend on how it is sharded. The low half of h rounds the parameter, the high half the first
moment, and F(h ^ C) the second moment. About 20 integer instructions an element: Philox costs three times as many,
which all-bf16 steps at the bandwidth of an H200 would feel.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import jit, tl

_WORD = 0xFFFFFFFF


def _finalize(h: torch.Tensor) -> torch.Tensor:
    """F on int64 tensors that hold 32-bit words."""
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def _key(seed: int, step: torch.Tensor, parameter: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two words of key(seed, t, p); step: () of any dtype."""
    count = step.long() & _WORD
    words = []
    for start in (0x9E3779B9, 0x7F4A7C15):
        h = torch.full_like(count, start)
        for word in (seed & _WORD, seed >> 32, count, parameter):
            h = _finalize(h ^ word)
        words.append(h)
    return words[0], words[1]


def random_words(
    seed: int, step: torch.Tensor, parameter: int, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The 16 random bits of every element, for the parameter and its two moments.

    Args:
        seed: 0 to 2^63 - 1.
        step: () the number of the step, fp32 or an integer.
        parameter: its number within the optimizer.
        index: int64, any shape: the elements' numbers within the whole parameter.

    Returns:
        Three int32 tensors of index's shape, 0 to 65535.
    """
    k0, k1 = _key(seed, step, parameter)
    h = _finalize(_finalize((index & _WORD) ^ k0) ^ (index >> 32) ^ k1)
    other = _finalize(h ^ 0x5BF03635)
    return (h & 0xFFFF).int(), (h >> 16).int(), (other & 0xFFFF).int()


def round_stochastically(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """fp32 `value` rounded to bf16 by 16 random bits (int32, 0 to 65535); NaN stays NaN, infinity infinity."""
    value = value.float()
    rounded = ((value.view(torch.int32) + bits) & -0x10000).view(torch.float32)
    return torch.where(value.isnan(), value, rounded).to(torch.bfloat16)


@jit
def _finalize_kernel(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@jit
def key_word(START: tl.constexpr, seed, step, parameter):
    """One word of _key. seed: int64; step: fp32; parameter: int64; all of one shape."""
    h = tl.full(seed.shape, START, tl.uint32)
    h = _finalize_kernel(h ^ seed.to(tl.uint32))
    h = _finalize_kernel(h ^ (seed >> 32).to(tl.uint32))
    h = _finalize_kernel(h ^ step.to(tl.int64).to(tl.uint32))
    return _finalize_kernel(h ^ parameter.to(tl.uint32))


@jit
def first_word(index, key0, key1):
    """h of the module's docstring. index: int64 block; key0, key1: uint32 scalars."""
    return _finalize_kernel(_finalize_kernel(index.to(tl.uint32) ^ key0) ^ (index >> 32).to(tl.uint32) ^ key1)


@jit
def second_word(h):
    """The word for the second moment."""
    return _finalize_kernel(h ^ 0x5BF03635)


@jit
def round_bits(value, bits):
    """fp32 `value` as an fp32 number of bf16's precision, by the low 16 of uint32 `bits`."""
    rounded = (value.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000
    return tl.where(value == value, rounded.to(tl.float32, bitcast=True), value)
