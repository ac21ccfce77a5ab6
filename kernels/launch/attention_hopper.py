"""Launch choices of the Hopper attention kernels: pure functions of head_dim and the problem's size.

A consumer warpgroup multiplies tiles of 64 rows. Registers: 65,536 an SM, over the consumers and a producer that is
counted as a whole warpgroup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fuselm.kernels._triton import DeviceProfile

CONSUMER_ROWS = 64
MIB = 2**20
Softmax = Literal["fold", "tree", "lazy", "speculative"]
"""How a block of scores becomes P: numbered in this order in the kernel.

fold: the running maximum is updated first. tree: so too, the maxima by four short chains instead of one long one.
lazy: by a maximum that is left behind (hopper_softmax.py). speculative: so too, and P is computed beside the block's
maxima, and once more where a score turns out to be above the limit.
"""
Turns = Literal["none", "mbarrier", "named"]


@dataclass(frozen=True)
class HopperForwardLaunch:
    """Launch of the forward kernel.

    No launch function says anything of `softmax` and what comes after it: other values than the defaults have not been
    run on a card, but for turns, which have also been timed with "none".

    Attributes:
        consumers: warpgroups that multiply, of 64 queries each; 2 or 3.
        block_n: keys a block.
        stages: key and value blocks in flight.
        section_bytes: keys and values of the heads that are worked on together, to fit in L2 with room to spare.
        softmax: how a block of scores becomes P.
        polynomial: with "lazy" and "speculative", a quarter of the exponentials by arithmetic.
        turns: how the consumers take turns at issuing products, "none" where they do not.
        joint: keys and values of a block are handed back together, which takes three stages to be no later.
        query_buffers: 1, or 2 to load a tile's queries while the one before still needs its own.
        ahead: the first scores of a tile are computed beside what ends the tile before.
        early: a program asks for its next tile before it loads the blocks of one, not after.
    """

    consumers: int
    block_n: int
    stages: int
    section_bytes: int
    softmax: Softmax = "fold"
    polynomial: bool = False
    turns: Turns = "mbarrier"
    joint: bool = False
    query_buffers: int = 1
    ahead: bool = False
    early: bool = False

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
        block_m: queries a block: 8192 / head_dim, as dQ of a block is two tiles of 64 x 64, one a consumer.
        stages: query blocks in flight.
        section_bytes: queries and output gradients of the heads that are worked on together.
        lagged: whether dQ of a block is computed one block later, so that the two consumers, which need each other's dS
            for it, need not keep step.
        ordered: whether tiles of keys add to dQ one after the other, always in the same order: the same bits in every
            run.
        rolling: whether a program goes from tile to tile without a pause (hopper_backward_rolling.py); lagged, not
            ordered, two stages. At head_dim 128 no launch function picks it: not run on a card.
    """

    block_m: int
    stages: int
    section_bytes: int
    lagged: bool = True
    ordered: bool = False
    rolling: bool = False

    @property
    def block_n(self) -> int:
        """Keys a tile."""
        return 2 * CONSUMER_ROWS

    def refusal(self, head_dim: int) -> str | None:
        """Why there is no kernel for this launch at `head_dim` (64 or 128), or None where there is one."""
        if self.block_m != 8192 // head_dim:
            return f"block_m={self.block_m}: expected {8192 // head_dim} at head_dim {head_dim}"
        if self.rolling:
            for name, wanted in (("stages", 2), ("lagged", True), ("ordered", False)):
                if getattr(self, name) != wanted:
                    return f"{name}={getattr(self, name)}: expected {wanted} of a rolling launch"
        return None


def hopper_forward_launch(head_dim: int, keys: int, profile: DeviceProfile) -> HopperForwardLaunch:
    """Tiles of the forward kernel for sequences of `keys` keys, of documents the mean.

    Measured on an H200, causal bf16, milliseconds. At head_dim 64 and 16384 keys three consumers take 1.001 and two
    1.078, at 4096 0.587 and 0.584, for 11 documents of 1489 keys 0.462 and 0.439: tiles of 192 read keys less often,
    and waste more of a short row. Consumers that do not take turns: 1.046 and 0.641. Sections of 20 MiB take 0.268 at
    16 x 1024 keys of head_dim 128 and 0.797 at 4 x 4096, of 32 MiB 0.275 and 0.799.
    """
    if head_dim == 64:
        consumers, stages, section = (3, 2, 32) if keys > 4096 else (2, 3, 24)
    else:
        consumers, stages, section = 2, 2, 20
    return HopperForwardLaunch(consumers, 128, stages, section * MIB)


def hopper_backward_launch(
    head_dim: int, keys: int, profile: DeviceProfile, deterministic: bool = False
) -> HopperBackwardLaunch:
    """Tiles of the main backward kernel for sequences of `keys` keys; ordered if `deterministic`.

    Measured on an H200, causal bf16, milliseconds. Lagged: 2.431 at head_dim 128 (4 x 4096) and 1.464 at 64, else 2.787
    and 1.723. Rolling, at head_dim 64: 0.386 (32 x 1024), 1.409 (4 x 4096), 2.407 (16384), else 0.493, 1.518, 2.741.
    Sections of 32 MiB: 4.655 at head_dim 128 (2 x 8192), of 16 4.977. Rolling with 12, 16, 20 and 24 MiB: 1.431, 1.335,
    1.402 and 1.409 (4 x 4096), 2.386, 2.375, 2.383 and 2.407 (16384); with 12, 16 and 20 0.384, 0.386 and 0.399 at 1024
    keys, where many heads share a section. Ordered: 3.841, lagged or not 4.079; "lagged" spills at 64.
    """
    if head_dim == 64:
        if deterministic:
            return HopperBackwardLaunch(128, 2, 0, lagged=False, ordered=True)
        return HopperBackwardLaunch(128, 2, (12 if keys <= 2048 else 16) * MIB, rolling=True)
    if deterministic:
        return HopperBackwardLaunch(64, 2, 0, ordered=True)
    return HopperBackwardLaunch(64, 2, (16 if keys <= 2048 else 32) * MIB)


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
