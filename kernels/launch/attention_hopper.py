"""Launch choices of the Hopper attention kernels: pure functions of head_dim and the problem's size.

A consumer warpgroup multiplies tiles of 64 rows. Registers: 65,536 an SM, over the consumers and a producer that is
counted as a whole warpgroup.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuselm.kernels._triton import DeviceProfile

CONSUMER_ROWS = 64
MIB = 2**20


@dataclass(frozen=True)
class HopperForwardLaunch:
    """Launch of the forward kernel.

    Attributes:
        consumers: warpgroups that multiply, of 64 queries each; 2 or 3.
        block_n: keys a block.
        stages: key and value blocks in flight; 3 or more, but 2 will do for two consumers with one buffer of queries.
        section_bytes: keys and values of the heads that are worked on together, to fit in L2 with room to spare.
        query_buffers: 1, or 2 to load a tile's queries while the one before still needs its own.
    """

    consumers: int
    block_n: int
    stages: int
    section_bytes: int
    query_buffers: int = 1

    def __post_init__(self) -> None:
        """Who passes over blocks (hopper_forward.py) would hand back a slot that another consumer still reads."""
        if self.stages < 3 and (self.consumers > 2 or self.query_buffers > 1):
            raise ValueError(f"{self}: expected three stages, or two consumers and one buffer of queries")

    @property
    def joint(self) -> bool:
        """Whether keys and values of a block are handed back together, which takes three stages to be no later."""
        return self.stages >= 3

    @property
    def block_m(self) -> int:
        """Queries a tile."""
        return self.consumers * CONSUMER_ROWS

    @property
    def producer_registers(self) -> int:
        """Registers a thread of the producer."""
        return 24 if self.consumers == 2 else 32

    @property
    def consumer_registers(self) -> int:
        """Registers a thread of a consumer."""
        return 240 if self.consumers == 2 else 160

    @property
    def max_registers(self) -> int:
        """Registers a thread with which the program starts."""
        return 168 if self.consumers == 2 else 128


@dataclass(frozen=True)
class HopperBackwardLaunch:
    """Launch of the main backward kernel of calls that are not deterministic.

    Attributes:
        section_bytes: queries and output gradients of the heads that are worked on together.
        held: eighths of the tiles of keys, those with the least work, that come after all others (`short_tiles_last`
            in hopper_backward_rolling.py).
    """

    section_bytes: int
    held: int = 0


def hopper_forward_launch(head_dim: int, keys: int, profile: DeviceProfile) -> HopperForwardLaunch:
    """Tiles of the forward kernel for sequences of `keys` keys, of documents the mean.

    Measured on an H200, causal bf16, milliseconds. Two and three consumers at head_dim 64: 0.1445 and 0.158 (32 x
    1024), 0.572 and 0.528 (4 x 4096), 0.410 and 0.377 (11 documents of 1489 keys, the mean); tiles of 192 queries read
    keys less often, and waste more of a short row. Sections of 20 MiB take 0.268 at 16 x 1024 keys of head_dim 128 and
    0.797 at 4 x 4096, of 32 MiB 0.275 and 0.799.
    """
    if head_dim == 64:
        consumers, section = (3, 24 if keys <= 4096 else 32) if keys > 1024 else (2, 24)
        return HopperForwardLaunch(consumers, 128, 3, section * MIB, query_buffers=2)
    return HopperForwardLaunch(2, 128, 2, 20 * MIB)


def hopper_backward_launch(head_dim: int, keys: int, profile: DeviceProfile, packed: bool) -> HopperBackwardLaunch:
    """Launch of the main backward kernel for `keys` keys, of all documents if `packed`.

    Measured on an H200, causal bf16, milliseconds. Sections of 16, 24, 32 and 48 MiB at head_dim 128: 2.620, 2.600,
    2.422 and 2.786 (4 x 4096), 5.042, 5.042, 4.673 and 5.239 (2 x 8192), 0.926, 0.950, 0.928 and 1.075 (16 x 1024). One
    MiB more holds at 4097 keys what 32 hold at 4096: 2.458 for 2.670. No eighth of the tiles held back, one, two and
    four: 2.398, 2.394, 2.418 and 2.731 (4 x 4096), 4.745, 4.711, 4.739 and 5.161 (2 x 8192), 0.926, 0.888 (32 MiB),
    0.899 and 1.012 (16 x 1024), 2.670, 2.473, 2.486 and 2.525 (4 x 4097), 9.345, 9.465, 9.227 and 10.04 (16384), 1.825,
    1.871, 1.843 and 1.776 (11 documents of 16384 together).

    At head_dim 64 none held back, one and two: 1.258, 1.261 and 1.268 (4 x 4096), 0.369, 0.373 and 0.383 (32 x 1024);
    sections of 12, 16, 20 and 24 MiB: 1.356, 1.258, 1.328 and 1.343 (4 x 4096), 2.264, 2.250, 2.271 and 2.272 (16384),
    of 8, 12 and 16 0.369, 0.369 and 0.375 (32 x 1024); the documents in sections of 28, 32, 40 and 48 MiB 0.991, 0.923,
    0.923 and 0.937, without 0.982. A MiB more than 16 and 32 for the same reason as above.
    """
    if head_dim == 64:
        return HopperBackwardLaunch((33 if packed else 12 if keys <= 2048 else 17) * MIB)
    return HopperBackwardLaunch(33 * MIB, 4 if packed else 1 if keys <= 8192 else 2)


def heads_a_section(head_bytes: int, heads: int, section_bytes: int, step: int = 1) -> int:
    """Heads that are worked on together: as many of `head_bytes` each as `section_bytes` hold, a multiple of `step`.

    Args:
        head_bytes: what one head reads again and again.
        heads: how many there are over all batches, a multiple of `step`.
        section_bytes: how much may be in use.
        step: heads that share keys and values.
    """
    fit = section_bytes // max(head_bytes, 1) // step * step
    return min(max(fit, step), heads)
