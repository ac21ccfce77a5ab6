"""Launch choices of the rope kernel: a pure function of shape, element size and device."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from fuselm.kernels._triton import DeviceProfile
from fuselm.kernels.launch.cache_hints import load_hint

_THREADS = 128


@dataclass(frozen=True)
class RopeLaunch:
    """How the rope kernel is launched.

    Attributes:
        block_tokens: tokens a program.
        block_heads: heads a program, all of q or all of k.
        block_half: half of head_dim, rounded up to a power of two.
        num_warps: warps a program.
        load: eviction policy of q, k and v as they are read, "" or "evict_last".
        batch_first: programs that follow each other take the same tokens of all sequences, then the next ones.
        late_angles: load the angles after q and k. With v, which has none, it is always so.
        angles: eviction policy of the angles, "" or "evict_last".

    No launch function says anything of `batch_first`, `late_angles` and `angles`: the kernel was not timed with them.
    """

    block_tokens: int
    block_heads: int
    block_half: int
    num_warps: int
    load: str = ""
    batch_first: bool = False
    late_angles: bool = False
    angles: str = ""


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def rope_tile(seq_len: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, vectors: int) -> RopeLaunch:
    """Tiles of (tokens, heads, head_dim / 2) in which each thread holds `vectors` 16-byte vectors of each half.

    Args:
        seq_len: tokens of one sequence (tiles do not cross sequences).
        heads: query heads.
        kv_heads: key heads.
        head_dim: elements of a head, even.
        itemsize: bytes of an element.
        vectors: 16-byte loads of each half in flight a thread.
    """
    block_half = _power_of_two(head_dim // 2)
    block_heads = math.gcd(heads, kv_heads, 8)  # no partial tile
    if block_heads == 1:
        block_heads = min(8, _power_of_two(max(heads, kv_heads)))
    per_thread = vectors * 16 // itemsize
    elements = _THREADS * per_thread
    block_tokens = max(1, min(elements // (block_heads * block_half), _power_of_two(seq_len)))
    tile = block_tokens * block_heads * block_half
    num_warps = max(1, min(4, tile // (32 * per_thread)))
    return RopeLaunch(block_tokens, block_heads, block_half, num_warps)


@functools.lru_cache(1024)
def rope_launch(
    batch: int, seq_len: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, profile: DeviceProfile
) -> RopeLaunch:
    """One vector of each half a thread for `batch` sequences; the other arguments as for rope_tile.

    H200, bf16, 4 x 4096 tokens, 32 + 8 heads of 128, ms: forward, from a packed qkv, 0.0847 over four warps, 0.0844
    over eight, 0.0866 with two vectors a thread; backward, from dense gradients, 0.0847, 0.0843 and 0.0865
    (benchmarks/results/tune_rope_hints.json). All heads of a token in one program, which loads its angles once, took
    0.0891 for 0.0879 and 0.0897 for 0.0896.
    """
    del profile  # unused so far: the op is bound by memory on every device
    tile = rope_tile(seq_len, heads, kv_heads, head_dim, itemsize, 1)
    return dataclasses.replace(tile, load=load_hint(batch * seq_len * (heads + kv_heads) * head_dim * itemsize))
