"""Launch choices of the rope kernel: a pure function of shape, element size and device."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from fuselm.kernels._triton import DeviceProfile
from fuselm.kernels.launch.cache_hints import load_hint


@dataclass(frozen=True)
class RopeLaunch:
    """How the rope kernel is launched.

    Attributes:
        block_tokens: tokens a program.
        block_heads: heads a program, all of q or all of k.
        block_half: half of head_dim, rounded up to a power of two.
        num_warps: warps a program.
        load: eviction policy of q, k and v as they are read, "" or "evict_last".
    """

    block_tokens: int
    block_heads: int
    block_half: int
    num_warps: int
    load: str = ""


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def rope_tile(
    seq_len: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, vectors: int, warps: int = 4
) -> RopeLaunch:
    """Tiles of (tokens, heads, head_dim / 2) in which each thread holds `vectors` 16-byte vectors of each half.

    Args:
        seq_len: tokens of one sequence (tiles do not cross sequences).
        heads: query heads.
        kv_heads: key heads.
        head_dim: elements of a head, even.
        itemsize: bytes of an element.
        vectors: 16-byte loads of each half in flight a thread.
        warps: warps a program, fewer where the sequence is too short for them.
    """
    block_half = _power_of_two(head_dim // 2)
    block_heads = math.gcd(heads, kv_heads, 8)  # no partial tile
    if block_heads == 1:
        block_heads = min(8, _power_of_two(max(heads, kv_heads)))
    per_thread = vectors * 16 // itemsize
    elements = 32 * warps * per_thread
    block_tokens = max(1, min(elements // (block_heads * block_half), _power_of_two(seq_len)))
    tile = block_tokens * block_heads * block_half
    num_warps = max(1, min(warps, tile // (32 * per_thread)))
    return RopeLaunch(block_tokens, block_heads, block_half, num_warps)


@functools.lru_cache(1024)
def rope_launch(
    seq_len: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, profile: DeviceProfile
) -> RopeLaunch:
    """One vector of each half a thread; the arguments are those of rope_tile.

    H200, bf16, 4 x 4096 tokens, 32 + 8 heads of 128, ms: 0.0852 forward, from a packed qkv, and 0.0851 backward, from
    dense gradients. Programs that take the same tokens of all sequences one after another: 0.0849 and 0.0852, but 8 x
    2048 tokens with heads of 64 0.0459 for 0.0450 and 0.0460 for 0.0444 (benchmarks/results/tune_rope_in_turn.json).
    """
    del profile  # unused so far: the op is bound by memory on every device
    tile = rope_tile(seq_len, heads, kv_heads, head_dim, itemsize, 1)
    if tile.block_heads == 4 and head_dim * itemsize == 128:
        # 32 x 1024 tokens, 12 + 12 heads of 64: 0.0524 forward and backward, with four warps 0.0536 and 0.0530; where
        # the runs of a token are twice as long, 8 x 2048, 32 + 8 heads of 64, 0.0454 and 0.0451 for 0.0446 and 0.0451
        # (tune_rope_wide.json).
        tile = rope_tile(seq_len, heads, kv_heads, head_dim, itemsize, 1, warps=2)
    return dataclasses.replace(tile, load=load_hint(head_dim // 2 * itemsize))
