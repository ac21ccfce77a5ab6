"""Launch choices of the cross-entropy kernels: a pure function of the vocabulary, the dtype and the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuselm.kernels._triton import DeviceProfile


@dataclass(frozen=True)
class CrossEntropyLaunch:
    """Launch of one cross-entropy kernel, one row of logits a program.

    Attributes:
        block: logits a program handles at a time (a power of two, at least 16 bytes of them).
        num_warps: warps a program.
        read_stages: blocks of the first pass (the logsumexp) under way at a time, all but one in shared memory; 1 loads
            straight into registers.
        write_stages: the same of the second pass (the gradient).
        ahead: logits for which a program asks L2 while it writes the gradient: the first ones of the row that takes its
            place on the SM.
        resident: programs that run on an SM at a time; says which row that is.
        carry: load each block a pass before it is used, in both passes; takes the place of stages.
    """

    block: int
    num_warps: int
    read_stages: int = 1
    write_stages: int = 1
    ahead: int = 0
    resident: int = 1
    carry: bool = False


@dataclass(frozen=True)
class PartsLaunch:
    """Launch for few rows, each shared out over several programs.

    Attributes:
        parts: programs a row.
        part_size: logits a program, the last one's aside; a multiple of block.
        block: logits a program handles at a time.
        num_warps: warps a program.
    """

    parts: int
    part_size: int
    block: int
    num_warps: int


def parts_launch(rows: int, vocab: int, dtype: torch.dtype, profile: DeviceProfile) -> PartsLaunch | None:
    """Launch for `rows` rows of `vocab` logits where one program a row would leave most of the device idle, else None.

    A thread holds one vector of 16 bytes at a time, so that a part of a single row is one step; more than 64 parts
    would cost more to put together than they save.
    """
    block = 256 * 16 // dtype.itemsize
    if rows * 4 > profile.num_sms or vocab < 4 * block:
        return None
    part_size = -(-vocab // (min(profile.num_sms // rows, 64) * block)) * block
    return PartsLaunch(-(-vocab // part_size), part_size, block, 8)


def cross_entropy_launch(
    vocab: int, dtype: torch.dtype, profile: DeviceProfile, softcap: bool = False
) -> CrossEntropyLaunch:
    """Launch for rows of `vocab` logits.

    Wide rows take many warps, so that few rows are in flight: their second read then hits L2 (132 rows of 128,256 bf16
    logits are 34 MB). A thread holds two vectors of 16 bytes at a time, four in the widest rows, where a single program
    an SM has to keep enough bytes in flight. Loss and gradient on an H200, bf16: 8192 x 128256 1.27 ms, with two
    vectors 1.45; 16384 x 50304 0.95 ms, with one 1.28; 16384 x 32000 0.53 ms, with one 0.58. Asking L2 for the next row
    (`ahead`) is off: 0.59 ms with it at 16384 x 32000; 1.28 with and 1.36 without at 8192 x 128255, but no gain at
    8192 x 128256. A softcap's tanh needs the registers of two vectors: with four
    it spills up to 1 KB on sm_100.
    """
    vector = 16 // dtype.itemsize
    whole = max(1 << max(vocab - 1, 0).bit_length(), 8 * vector)
    if vocab * dtype.itemsize > 128 * 1024:
        block, num_warps = 4096 * vector, 32
    elif vocab * dtype.itemsize > 32 * 1024:
        block, num_warps = 1024 * vector, 16
    else:
        block, num_warps = 256 * vector, 8
    block = min(block, whole, 64 * vector * num_warps if softcap else whole)
    return CrossEntropyLaunch(block, min(num_warps, max(block // vector // 32, 1)))
