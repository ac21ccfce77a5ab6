"""Launch choices of the cross-entropy kernels: a pure function of the vocabulary, the dtype and the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fuselm.kernels._triton import DeviceProfile


@dataclass(frozen=True)
class CrossEntropyLaunch:
    """Launch of one cross-entropy kernel, one row of logits a program.

    Attributes:
        block: logits a program handles at a time (a power of two, at least 16 bytes of them).
        num_warps: warps a program.
        ahead: logits for which a program, alone on its SM, asks L2 while it writes the gradient: the first ones of the
            row that takes its place.
    """

    block: int
    num_warps: int
    ahead: int = 0


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


RING_COLUMNS = 64  # of a chunk as TMA sees it: 128 bytes, one row of its widest swizzle
_RING_SHARED = 232448  # bytes that a program may have on Hopper, of which the rings below leave some 2400
_SPLIT_ROWS = 4096


@dataclass(frozen=True)
class RingLaunch:
    """Launch of the Hopper kernels that keep rows in shared memory (cross_entropy_ring.py).

    Attributes:
        tile: a chunk is tile x RING_COLUMNS logits; a power of two, at most 256 (what a TMA box may have), and at least
            4 x num_warps and 4 x writers.
        slots: chunks that shared memory holds.
        num_warps: warps that compute, or only read where there are writers; a producer counts as four warps more.
        writers: warps that write the gradient of a row while the others read the next one; 0 for one group that does
            both, and loads what does not stay in the slots twice.
        kept: chunks at a row's beginning that stay in registers instead, fewer than a row has; without writers.
    """

    tile: int
    slots: int
    num_warps: int
    writers: int = 0
    kept: int = 0

    @property
    def max_registers(self) -> int:
        """Registers a thread with which a program fits on an SM of 65,536."""
        return min(65536 // (32 * (self.num_warps + self.writers + 4)) // 8 * 8, 248)

    def again(self, vocab: int) -> int:
        """Chunks of a row of `vocab` logits for which slots and registers have no room, wherever in a line of
        RING_COLUMNS the row begins: they are brought twice."""
        in_front = RING_COLUMNS - 1 if vocab % RING_COLUMNS else 0
        return max(-(-(in_front + vocab) // (self.tile * RING_COLUMNS)) - self.kept - self.slots, 0)


def ring_launch(vocab: int, profile: DeviceProfile) -> RingLaunch | None:
    """Launch for rows of `vocab` 16-bit logits in shared memory on Hopper, else None: the portable kernel.

    Two groups of warps where the slots hold a row, of any length. Longer ones have one group, which keeps chunks in
    registers, while at most six are brought twice; not if they begin within lines of RING_COLUMNS, which this group
    does not know.

    Loss and gradient on an H200, bf16, beside the portable kernel: 16384 x 40960 0.686 ms for 0.727, x 50304 0.840 for
    0.946, x 65536 1.130 for 1.287, x 50257, within lines, 0.875 for 0.980, 8192 x 73448, within lines too, 0.635 for
    0.834; with chunks of 128 lines (128 x 14) 0.707, 0.855, 1.132, 0.876 and 0.646. 16384 x 32000 takes 0.557 to 0.565
    for 0.533: the border lies between 32,000 and 40,960, and was not looked for. One group: 8192 x 128256 1.106 ms for
    1.270, with 13 slots 1.108; x 151936 1.306 for 1.566; x 202048, of whose 25 chunks six are brought twice, 1.928 for
    2.017; x 262144, 13 of whose 32 are, 2.646 for 2.590; with eight warps that keep six chunks 1.123, 1.323, 1.905 and
    2.627. At 8192 x 102400 one group takes 0.893 ms, two 0.897.
    """
    if profile.arch != 90 or profile.shared_memory < _RING_SHARED or vocab < 40960:
        return None
    groups, kept = RingLaunch(tile=64, slots=28, num_warps=8, writers=8), RingLaunch(128, 14, 16, kept=5)
    if not groups.again(vocab):
        return groups
    return kept if vocab % RING_COLUMNS == 0 and kept.again(vocab) <= 6 else None


def ring_rows(rows: int, vocab: int) -> int:
    """How many of `rows` rows of `vocab` logits that lie side by side are for the ring: the most that make whole lines
    of RING_COLUMNS. The others, fewer than RING_COLUMNS, have a launch of their own: loss and gradient of 4159 x 50257
    bf16 on an H200 take 0.2562 ms so, all in the portable kernel 0.2704 (tune_cross_entropy_left_over.json), in blocks
    of 8,192 logits, half of what it takes by now. Fewer than `_SPLIT_ROWS` rows are offered to the ring as they are."""
    return rows if rows < _SPLIT_ROWS else rows - rows % (RING_COLUMNS // math.gcd(vocab, RING_COLUMNS))


def parts_launch(rows: int, vocab: int, dtype: torch.dtype, profile: DeviceProfile) -> PartsLaunch | None:
    """Launch for `rows` rows of `vocab` logits where one program a row would leave most of the device idle, else None.

    A thread holds one vector of 16 bytes at a time, so that a part of a single row is one step; more than 128 parts
    would cost more to put together than they save. Up to an eighth as many rows as SMs take two programs an SM: loss
    and gradient of 16 x 128256 bf16 on an H200 0.0198 ms, with one program 0.0233. One row: 126 parts of 4 warps 0.0175
    ms, 63 of 8 warps 0.0182. 32 rows: 4 parts of 8 warps 0.0265 ms, 8 of 16 warps 0.0355.
    """
    vector = 16 // dtype.itemsize
    if rows * 4 > profile.num_sms or vocab < 1024 * vector:
        return None
    parts = min(profile.num_sms * (2 if rows * 8 <= profile.num_sms else 1) // rows, 128)
    num_warps = 8 if vocab > parts * 256 * vector else 4
    block = 32 * num_warps * vector
    part_size = -(-vocab // (parts * block)) * block
    return PartsLaunch(-(-vocab // part_size), part_size, block, num_warps)


def cross_entropy_launch(
    vocab: int, dtype: torch.dtype, profile: DeviceProfile, softcap: bool = False, aligned: bool = True
) -> CrossEntropyLaunch:
    """Launch for rows of `vocab` logits, each of which begins at a 16-byte border where `aligned`.

    Wide rows take many warps, so that few rows are in flight: their second read then hits L1 and L2 (132 rows of
    128,256 bf16 logits are 34 MB). A thread holds two vectors of 16 bytes at a time, four in the widest rows, where a
    single program an SM has to keep enough bytes in flight. Loss and gradient on an H200, bf16: 8192 x 128256 1.26 ms,
    with two vectors 1.45; 16384 x 50304 0.944 ms, with one 0.980; 16384 x 32000 0.535 ms, with one 0.660. Loading each
    block a pass before its use made 1.25 of the 1.26 ms, within what two runs of one launch differ by, and cost 2 to
    18 % in the narrower rows; staging blocks in shared memory (cp.async) cost 17 % at 50304. Rows that start anywhere
    take four vectors from 80 KB on: 4095 x 50257 0.254 ms for 0.268, 2047 x 50257 0.141 for 0.145; in aligned rows of
    32,768 four cost 10 %.

    Asking L2 for the next row (`ahead`) pays where the widest rows start anywhere: 8192 x 128255 1.257 ms with and
    1.379 without; elsewhere it costs (1.41 for 1.26 ms at 8192 x 128256, 0.59 for 0.535 at 16384 x 32000). A softcap's
    tanh needs the registers of two vectors: with four it spills up to 1 KB on sm_100.
    """
    vector = 16 // dtype.itemsize
    whole = max(1 << max(vocab - 1, 0).bit_length(), 8 * vector)
    widest = vocab * dtype.itemsize > 128 * 1024
    if widest:
        block, num_warps = 4096 * vector, 32
    elif vocab * dtype.itemsize > 32 * 1024:
        four = not aligned and vocab * dtype.itemsize > 80 * 1024
        block, num_warps = 1024 * vector * (2 if four else 1), 16
    else:
        block, num_warps = 256 * vector, 8
    block = min(block, whole, 64 * vector * num_warps if softcap else whole)
    ahead = 4096 * vector if widest and not aligned and not softcap else 0
    return CrossEntropyLaunch(block, min(num_warps, max(block // vector // 32, 1)), ahead)
