"""Launch choices of the qk_norm_rope kernels: pure functions of shape, element size and device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fuselm.kernels._triton import DeviceProfile
from fuselm.kernels.launch.rope import rope_tile

_ELEMENTS = 8  # of each half of a head that a thread holds: two halves, their gradients, tables, weights and sums of dw


@dataclass(frozen=True)
class QkNormRopeLaunch:
    """How a qk_norm_rope kernel is launched.

    Attributes:
        block_tokens: tokens of a tile.
        block_heads: heads of a tile, all of q, of k or of v.
        block_half: half of head_dim, rounded up to a power of two.
        num_warps: warps a program.
        programs: backward: programs that share the tiles; each writes one fp32 partial of a weight's gradient.
    """

    block_tokens: int
    block_heads: int
    block_half: int
    num_warps: int
    programs: int = 0


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(1024)
def forward_launch(
    seq_len: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, profile: DeviceProfile
) -> QkNormRopeLaunch:
    """Forward: tiles as for rope, which moves the same bytes.

    Args:
        seq_len: tokens of one sequence (tiles do not cross sequences).
        heads: query heads.
        kv_heads: key heads.
        head_dim: elements of a head, even.
        itemsize: bytes of an element.
        profile: unused so far: the op is bound by memory on every device.
    """
    del profile
    tile = rope_tile(seq_len, heads, kv_heads, head_dim, itemsize, 2)
    return QkNormRopeLaunch(tile.block_tokens, tile.block_heads, tile.block_half, tile.num_warps)


@functools.lru_cache(1024)
def backward_launch(
    seq_len: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, profile: DeviceProfile
) -> QkNormRopeLaunch:
    """Backward: tiles of four warps, and as many programs as the registers let run at once. Arguments as forward."""
    tile = rope_tile(seq_len, heads, kv_heads, head_dim, itemsize, 2)
    elements = 4 * 32 * _ELEMENTS
    block_heads = tile.block_heads
    while block_heads > 1 and block_heads * tile.block_half > elements:
        block_heads //= 2
    block_tokens = max(1, min(elements // (block_heads * tile.block_half), _power_of_two(seq_len)))
    held = block_tokens * block_heads * tile.block_half
    num_warps = min(max(_power_of_two(held // (32 * _ELEMENTS)), 1), 8)
    return QkNormRopeLaunch(block_tokens, block_heads, tile.block_half, num_warps, profile.num_sms * (16 // num_warps))
