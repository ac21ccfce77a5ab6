"""Launch choices of the Hopper attention kernels: pure functions of head_dim and the problem's size.

A consumer warpgroup multiplies tiles of 64 rows. Registers: 65,536 an SM, over the consumers and a producer that is
counted as a whole warpgroup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fuselm.kernels._triton import DeviceProfile

CONSUMER_ROWS = 64
Carry = Literal["wide", "narrow", "packed"]
Hold = Literal["none", "max", "sum"]
Schedule = Literal["deferred", "beside", "lagged"]


@dataclass(frozen=True)
class HopperForwardLaunch:
    """Launch of the forward kernel.

    Attributes:
        consumers: warpgroups that multiply, of 64 queries each; 2 or 3.
        block_n: keys a block.
        stages: key and value blocks in flight.
        ping_pong: whether the consumers take turns at issuing products, so that one's softmax meets the other's.
        persistent: one program an SM takes tiles in turn; otherwise one program a tile.
        section_bytes: keys and values of the heads that are worked on together, to fit in L2 with room to spare.
        carry: how probabilities go from one pass of the loop to the next: "wide", in fp32, for which three consumers
            have no registers; "narrow", in 16 bits; or "packed", two of these in an int32.
        late_sum: whether the threads that share a row add their sums up once a tile, not once a block.
        hold: what of a block's softmax has to be done before the wait for P·V of the block before: its row maxima
            ("max"), all of it ("sum", for which three consumers have no registers), or what ptxas thinks fit ("none":
            next to nothing).
    """

    consumers: int
    block_n: int
    stages: int
    ping_pong: bool
    persistent: bool
    section_bytes: int
    carry: Carry
    late_sum: bool = False
    hold: Hold = "none"

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
    """Launch of the main backward kernel (two consumers of 64 keys).

    Attributes:
        block_m: queries a block.
        stages: query blocks in flight.
        section_bytes: queries and output gradients of the heads that are worked on together.
        schedule: when a block's dQ is computed and leaves the registers. "deferred": computed last, leaves beside the
            first product of the next block. "beside": computed before dK and leaves beside it. "lagged": as "beside",
            but one block later, so that the two consumers, which need each other's dS for it, need not keep step.
        direct: whether dQ is added to device memory from the registers, not by TMA through shared memory.
        turns: whether the consumers take turns at issuing products, so that one's exponentials meet the other's
            products. Only for "lagged": with the others, where each waits for the other's dS, they would wait forever.
        ordered: whether tiles of keys add to dQ one after the other, always in the same order: the same bits in every
            run. Not for "deferred"; needs `direct`, as a TMA does not say when its addition is done.
    """

    block_m: int
    stages: int
    section_bytes: int
    schedule: Schedule = "deferred"
    direct: bool = False
    turns: bool = False
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.turns and self.schedule != "lagged":
            raise ValueError(f"turns=True with schedule={self.schedule!r}: expected schedule='lagged'")
        if self.ordered and (self.schedule == "deferred" or not self.direct):
            raise ValueError(
                f"ordered=True with schedule={self.schedule!r} and direct={self.direct}: "
                "expected 'lagged' or 'beside', and direct=True"
            )

    @property
    def block_n(self) -> int:
        """Keys a tile."""
        return 2 * CONSUMER_ROWS


def hopper_forward_launch(head_dim: int, keys: int, profile: DeviceProfile) -> HopperForwardLaunch:
    """Tiles of the forward kernel for sequences of `keys` keys.

    Measured on an H200, causal bf16, milliseconds. Turns: 0.918 against 0.974 at head_dim 128 (4 x 4096). Sections of
    32 MiB: 0.918, of 16: 0.969. At head_dim 64 two consumers take 0.179 at 1024 keys and 1.283 at 16384, three 0.203
    and 1.147: tiles of 192 read keys less often, and waste more of a short row. At 4096 keys they are alike.
    """
    if head_dim == 64 and keys > 2048:
        return HopperForwardLaunch(3, 128, 2, True, True, 32 * 2**20, "narrow")
    return HopperForwardLaunch(2, 128, 3 if head_dim == 64 else 2, True, True, 32 * 2**20, "wide")


def hopper_backward_launch(
    head_dim: int, keys: int, profile: DeviceProfile, deterministic: bool = False
) -> HopperBackwardLaunch:
    """Tiles of the main backward kernel for sequences of `keys` keys; ordered if `deterministic`.

    Measured on an H200, causal bf16, milliseconds: at head_dim 128 (4 x 4096) 2.762 with sections of 32 MiB and 3.012
    with 16; at head_dim 64 (32 x 1024) 0.538 with 32 and 0.502 with 16.
    """
    if deterministic:
        block_m, schedule = (128, "beside") if head_dim == 64 else (64, "lagged")  # "lagged" spills at 64
        return HopperBackwardLaunch(block_m, 2, 0, schedule, True, False, True)
    if head_dim == 64:
        return HopperBackwardLaunch(128, 2, 16 * 2**20)
    return HopperBackwardLaunch(64, 2, 32 * 2**20)


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
