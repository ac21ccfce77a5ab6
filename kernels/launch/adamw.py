"""Launch choices of the AdamW kernels: pure functions of dtypes and the device.

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
        vector: consecutive elements a thread (4 or 8). Every tensor of the launch is cut alike, so that with fp32
            beside bf16, 4 makes fp32 accesses 16 bytes and bf16 accesses 8, all of them whole lines; 8 makes bf16
            accesses 16 bytes, and leaves every fp32 access two strides of half a line.
        eviction: Triton's eviction policy of loads and stores, "" or "evict_first".
    """

    block: int
    iterations: int
    num_warps: int
    vector: int = 4
    eviction: str = ""

    @property
    def chunk(self) -> int:
        """Elements a program."""
        return self.block * self.iterations


def step_launch(dtypes: tuple[torch.dtype, ...], has_master: bool, profile: DeviceProfile) -> ChunkLaunch:
    """The update.

    Args:
        dtypes: of parameter, gradient and moments.
        has_master: whether there is an fp32 master copy.
        profile: the device.

    Returns:
        1024 elements over 4 warps are 8 a thread: two 16-byte loads of an fp32 tensor, one of a 16-bit one. More a
        thread costs registers (up to five tensors are alive), and with them occupancy. On an H200, norm and step of
        1.236e9 parameters: fp32 9.23 ms with one block a program, 9.49 with four; bf16 4.65 with two, 4.69 with four;
        fp32 master and moments with bf16 parameters and gradients 8.88 with one and vectors of 8, 8.90 with vectors
        of 4, 9.16 with four blocks and vectors of 4.
    """
    if has_master:
        return ChunkLaunch(block=1024, iterations=1, num_warps=4, vector=8)
    if all(dtype.itemsize == 2 for dtype in dtypes):
        return ChunkLaunch(block=1024, iterations=2, num_warps=4, vector=8)
    return ChunkLaunch(block=1024, iterations=1, num_warps=4, vector=4)


def norm_launch(dtype: torch.dtype, profile: DeviceProfile) -> ChunkLaunch:
    """The sum of squares: one tensor to read and one number to keep, so wide blocks; 65536 elements a program leave few
    partial sums for the second stage, which is a single program. 1.236e9 bf16 gradients on an H200: 0.559 ms, 0.565
    with blocks of 8192."""
    return ChunkLaunch(block=16384, iterations=4, num_warps=16)


SUM_BLOCK = 4096  # partial sums that the second stage adds at a time
FINISH_BLOCK = 256  # tensors whose step counters it advances at a time
FINISH_WARPS = 8
