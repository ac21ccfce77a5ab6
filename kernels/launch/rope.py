"""Launch choices of the rope kernel: a pure function of shape, element size and device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from fuselm.kernels._triton import DeviceProfile

_THREADS = 128
_VECTORS = 2  # 16-byte loads in flight a thread for each half: enough to cover memory latency at low register pressure


@dataclass(frozen=True)
class RopeLaunch:
    """How the rope kernel is launched.

    Attributes:
        block_tokens: tokens a program.
        block_heads: heads a program, all of q or all of k.
        block_half: half of head_dim, rounded up to a power of two.
        num_warps: warps a program.
        in_turn: a program takes all heads of its tokens, block_heads at a time, and loads cos and sin once: for each
            block they are twice the bytes of the q or k that they meet.
    """

    block_tokens: int
    block_heads: int
    block_half: int
    num_warps: int
    in_turn: bool = False


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(1024)
def rope_launch(
    seq_len: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, profile: DeviceProfile
) -> RopeLaunch:
    """Chooses tiles of (tokens, heads, head_dim / 2) in which each thread holds two 16-byte vectors of each half.

    Args:
        seq_len: tokens of one sequence (tiles do not cross sequences).
        heads: query heads.
        kv_heads: key heads.
        head_dim: elements of a head, even.
        itemsize: bytes of an element.
        profile: unused so far: the op is bound by memory on every device.
    """
    del profile
    block_half = _power_of_two(head_dim // 2)
    block_heads = math.gcd(heads, kv_heads, 8)  # no partial tile
    if block_heads == 1:
        block_heads = min(8, _power_of_two(max(heads, kv_heads)))
    per_thread = _VECTORS * 16 // itemsize
    elements = _THREADS * per_thread
    block_tokens = max(1, min(elements // (block_heads * block_half), _power_of_two(seq_len)))
    tile = block_tokens * block_heads * block_half
    num_warps = max(1, min(4, tile // (32 * per_thread)))
    return RopeLaunch(block_tokens, block_heads, block_half, num_warps)
