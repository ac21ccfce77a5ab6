"""Launch choices of the AdamW kernels: pure functions of dtype and the device.

A chunk is what one program handles: `block * iterations` consecutive elements of one tensor. Both kernels are bound by
memory; chunks are long enough to hide the table reads that open each program, and short enough that thousands of
programs exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuselm.kernels._triton import DeviceProfile


@dataclass(frozen=True)
class ChunkLaunch:
    """Launch of one kernel over a table of chunks.

    Attributes:
        block: elements that a program holds at a time (a power of two, at least 16).
        iterations: blocks a program handles, one after the other.
        num_warps: warps a program.
    """

    block: int
    iterations: int
    num_warps: int

    @property
    def chunk(self) -> int:
        """Elements a program."""
        return self.block * self.iterations


def step_launch(dtype: torch.dtype, profile: DeviceProfile) -> ChunkLaunch:
    """The update. 1024 elements over 4 warps are 8 a thread: two 16-byte loads of an fp32 tensor, one of a 16-bit
    one. More a thread costs registers (up to five tensors are alive), and with them occupancy."""
    return ChunkLaunch(block=1024, iterations=4, num_warps=4)


def norm_launch(dtype: torch.dtype, profile: DeviceProfile) -> ChunkLaunch:
    """The sum of squares: one tensor to read and one number to keep, so wide blocks; 65536 elements a program leave few
    partial sums for the second stage, which is a single program."""
    return ChunkLaunch(block=8192, iterations=8, num_warps=8)


SUM_BLOCK = 4096  # partial sums that the second stage adds at a time
SUM_WARPS = 8
TENSOR_BLOCK = 256  # tensors whose step counters the scalar kernel advances at a time
TENSOR_WARPS = 4
