"""Launch choices of decode attention: a pure function of the cache's shape, the dtype and the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuselm.kernels._triton import DeviceProfile

_WAVES = 2  # programs a multiprocessor: enough loads in flight to fill the memory bus
_BLOCKS_A_SPLIT = 2  # a split that reads less is not worth the merge
MAX_SPLITS = 128  # the merge kernel holds one row a split


@dataclass(frozen=True)
class DecodeLaunch:
    """How the decode kernels are launched.

    Attributes:
        splits: parts that the keys of a sequence are read in, side by side; 1 needs no merge.
        block_n: keys a step (a power of two, at least 16).
        num_warps: warps a program.
        num_stages: copies of the loop's loads in flight.
    """

    splits: int
    block_n: int
    num_warps: int
    num_stages: int


def decode_launch(
    batch: int, kv_heads: int, keys: int, head_dim: int, dtype: torch.dtype, profile: DeviceProfile
) -> DecodeLaunch:
    """Splits the keys until every multiprocessor has work.

    The choice depends on the room in the cache, not on how full it is: that is known on the device only, where each
    sequence divides what it has by the number of splits.

    Args:
        batch: sequences.
        kv_heads: key and value heads.
        keys: rows of the cache.
        head_dim: width of a head.
        dtype: of the cache.
        profile: of the device.
    """
    wide = head_dim > 128 or dtype.itemsize == 4
    block_n = 32 if wide else 64
    wanted = -(-_WAVES * profile.num_sms // max(batch * kv_heads, 1))
    splits = max(1, min(wanted, keys // (_BLOCKS_A_SPLIT * block_n), MAX_SPLITS))
    return DecodeLaunch(splits, block_n, 4, 2 if wide else 3)
