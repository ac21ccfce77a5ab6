"""Launch choices of the portable attention kernels: pure functions of head_dim, dtype and the device.

Three limits shape the table. Shared memory holds one resident tile and `num_stages` copies of what the loop loads;
registers hold the fp32 accumulators (rows times head_dim over the program's threads); and a tile must be large enough
for the tensor cores to outrun the loads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuselm.kernels._triton import DeviceProfile


@dataclass(frozen=True)
class TileLaunch:
    """Launch of one attention kernel.

    Attributes:
        block_m: query rows of a tile (a power of two, at least 16).
        block_n: key rows of a tile (a power of two, at least 16).
        num_warps: warps a program.
        num_stages: copies of the loop's loads in flight.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile: head_dim rounded up to a power of two, at least 16 (the shortest inner dimension of a dot)."""
    return max(16, 1 << (head_dim - 1).bit_length())


_SMALL_SHARED = (
    160 * 1024
)  # bytes: sm_86, sm_89 and sm_120 have 99 KiB a program, sm_80 has 163, sm_90 and sm_100 have 227


def forward_launch(head_dim: int, dtype: torch.dtype, profile: DeviceProfile) -> TileLaunch:
    """Tiles of the forward kernel, which keeps a query tile and streams keys and values."""
    width = padded_head_dim(head_dim)
    if dtype.itemsize == 4:  # fp32 products run on the plain ALUs, whose operands all sit in registers
        return TileLaunch(64 if width <= 64 else 32, 32 if width <= 128 else 16, 8, 2)
    if profile.shared_memory < _SMALL_SHARED:
        return TileLaunch(128, 64, 4, 2) if width <= 64 else TileLaunch(64, 32, 4 if width <= 128 else 8, 2)
    if width <= 64:
        return TileLaunch(128, 64, 4 if profile.arch < 100 else 8, 3)
    if width <= 128:
        # sm_90 multiplies out of shared memory, so that a wide key tile costs no registers there.
        return TileLaunch(128, 128, 8, 3) if profile.arch == 90 else TileLaunch(128, 64, 8, 3)
    return TileLaunch(64, 64, 8, 2) if profile.arch < 90 else TileLaunch(128, 32, 8, 2)


def key_value_launch(head_dim: int, dtype: torch.dtype, profile: DeviceProfile) -> TileLaunch:
    """Tiles of the dK/dV kernel, which keeps a key and value tile with two accumulators and streams queries."""
    width = padded_head_dim(head_dim)
    if dtype.itemsize == 4:
        return TileLaunch(32 if width <= 64 else 16, 32 if width <= 128 else 16, 8, 1)
    if profile.shared_memory < _SMALL_SHARED:
        return TileLaunch(32, 128, 8, 2) if width <= 64 else TileLaunch(32, 64 if width <= 128 else 32, 8, 1)
    if profile.arch < 90:  # operands pass through registers
        return TileLaunch(32, 128, 8, 2) if width <= 64 else TileLaunch(64 if width <= 128 else 32, 64, 8, 2)
    if profile.arch == 90 and width <= 128:
        # Measured on an H200, causal bf16 4 x 4096, with the dQ kernel: 2.757 ms against 2.892 with two stages at
        # head_dim 64, 4.141 against 4.314 at 128. (64, 64, 4, 2) took 4.098 there, but spills 38 registers.
        return TileLaunch(64, 128, 8, 3)
    return TileLaunch(64, 128, 8, 2) if width <= 128 else TileLaunch(32, 64, 8, 2)


def query_launch(head_dim: int, dtype: torch.dtype, profile: DeviceProfile) -> TileLaunch:
    """Tiles of the dQ kernel, which keeps a query and an output-gradient tile and streams keys and values."""
    width = padded_head_dim(head_dim)
    if dtype.itemsize == 4:
        return TileLaunch(32 if width <= 128 else 16, 32 if width <= 64 else 16, 8, 1)
    if profile.shared_memory < _SMALL_SHARED:
        return TileLaunch(64, 64, 4, 2) if width <= 64 else TileLaunch(64 if width <= 128 else 32, 32, 8, 1)
    if width <= 128:
        # sm_90 at head_dim 128, measured as above: 4.124 ms with three stages, 4.277 with two.
        return TileLaunch(128, 64, 8, 3 if width <= 64 or profile.arch == 90 else 2)
    return TileLaunch(64, 32, 8, 2)
