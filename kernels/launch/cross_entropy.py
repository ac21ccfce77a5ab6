"""Launch choices of the cross-entropy kernels: a pure function of the vocabulary, the dtype and the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuselm.kernels._triton import DeviceProfile


@dataclass(frozen=True)
class CrossEntropyLaunch:
    """Launch of one cross-entropy kernel, one row of logits a program.

    Attributes:
        block: logits a program handles at a time (a power of two).
        num_warps: warps a program.
    """

    block: int
    num_warps: int


def cross_entropy_launch(vocab: int, dtype: torch.dtype, profile: DeviceProfile) -> CrossEntropyLaunch:
    """Launch for rows of `vocab` logits.

    Wide rows take 32 warps: one program an SM then keeps few enough rows in flight that their second read hits L2. Each
    thread holds four logits, so that fp32 state (maximum, sum) stays far below the 64 registers a thread that 32 warps
    leave.
    """
    block = min(max(1 << max(vocab - 1, 0).bit_length(), 64), 4096 if vocab > 40000 else 2048)
    return CrossEntropyLaunch(block, max(block // 128, 1))
