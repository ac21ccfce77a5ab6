"""Launch choices of the RMSNorm kernels: pure functions of the shape, the element size and the device.

A row that fits is held in registers, in one block or in a power of two plus a smaller tail (768 = 512 + 256,
5,120 = 4,096 + 1,024), whichever covers the width with fewer idle lanes. A wider row is read twice in chunks.

Times in the comments are milliseconds on an H200 (Triton 3.6, bf16, L2 flushed), the best choice before the others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fuselm.kernels._triton import DeviceProfile

_VECTOR_BYTES = 16
# Widest rows that are held in registers: compiled ahead of time for sm_80, sm_90 and sm_100 nothing spills up to here.
# Backward a thread holds x, dy, the weight and dw.
_FORWARD_WIDTH = 16384
_BACKWARD_WIDTH = 8192
# Narrowest unaligned rows that are read in whole vectors, one row at a time; shorter ones go several to a program.
_UNALIGNED_WIDTH = 1024
# Elements of the rows that one program takes alone, backward: 16 a thread.
_ONE_PROGRAM = 16384
# Half of an L2 cache of 60 MB: what all programs together may read a second time.
_CACHE_BYTES = 2**25


@dataclass(frozen=True)
class RmsNormLaunch:
    """Launch of one RMSNorm kernel.

    Attributes:
        block_rows: rows a program holds at once (a power of two).
        block_n: columns of the main block (a power of two). The columns that no block covers make the kernel one that
            reads each row twice, in chunks of block_n.
        block_tail: columns of a second block beside the main one (a power of two), 0 for none.
        num_warps: warps a program.
        programs: programs of a persistent grid, whose programs take the next rows in turn; 0 for one program a block
            of rows. Backward, each program writes one fp32 partial of dw.
        num_stages: rows in flight through shared memory in a program's loop; 1 for loads straight to registers.
        unaligned: read and write dense rows that start anywhere in whole vectors, where block_n holds all of a row's
            whole vectors (see rms_norm_kernels.py).
        recompute_rstd: backward: compute 1 / rms again from x instead of reading what the forward pass saved.
        window: with `unaligned`, the kernels of rms_norm_unaligned_kernels.py: vectors that take in the neighbours'
            elements at both ends of a row. The blocks must hold a row that begins 15 bytes into them.
        late_weight: forward, one program a block of rows: load the weight after the sum of squares, when nothing else
            waits for memory. It needs fewer registers, so that more rows are in flight.
        eviction: forward: what the caches are told of x and residual, "evict_first" or "" for nothing. What is read
            then gives way to what is written, which the next kernel may find in L2.
        max_registers: registers a thread at most, 0 for no limit: more programs an SM, if nothing spills.
    """

    block_rows: int
    block_n: int
    block_tail: int
    num_warps: int
    programs: int = 0
    num_stages: int = 1
    recompute_rstd: bool = False
    unaligned: bool = False
    window: bool = False
    late_weight: bool = False
    eviction: str = ""
    max_registers: int = 0

    def covers(self, n: int) -> bool:
        """True where a row of `n` elements is held in registers as a whole."""
        return self.block_n + self.block_tail >= n

    def rows_in_one_thread(self, columns: int, itemsize: int) -> bool:
        """True where the program's threads all lie along a row of `columns`, so that a sum over rows is local."""
        return columns * itemsize // _VECTOR_BYTES >= 32 * self.num_warps


@dataclass(frozen=True)
class SumLaunch:
    """Launch of the kernel that adds the partials of dw.

    Attributes:
        block_partials: partials read at once.
        block_n: columns a program.
        num_warps: warps a program.
    """

    block_partials: int
    block_n: int
    num_warps: int


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def split_width(n: int) -> tuple[int, int]:
    """(main, tail) blocks that cover a row of `n` elements with the fewest lanes; tail 0 for one block."""
    whole = max(_power_of_two(n), 16)
    main = whole // 2
    tail = max(_power_of_two(n - main), 16)
    return (main, tail) if n >= 256 and tail < main else (whole, 0)


def _unaligned_blocks(n: int, itemsize: int) -> tuple[int, int]:
    """(main, tail) of rows that start anywhere: the main block holds all whole vectors that a row may have."""
    vector = _VECTOR_BYTES // itemsize
    main = max(_power_of_two(n // vector * vector), 16)
    return main, 0 if main >= n else 16


def _multiple_of_vector(programs: int) -> int:
    """So many programs that the rows of each, a grid apart, start equally far from alignment."""
    return max(programs // 8 * 8, 8)


def _warps(elements: int, per_thread: int, largest: int) -> int:
    return min(max(_power_of_two(elements // (32 * per_thread)), 1), largest)


def _tail_warps(tail: int) -> int:
    """As many warps as a tail has vectors of 8 for: both blocks then lie over the threads alike, and nothing moves
    between threads to meet. One warp, for a tail of 256, needs no barrier either."""
    return _warps(tail, 8, 32)


@functools.lru_cache(1024)
def forward_launch(rows: int, n: int, itemsize: int, profile: DeviceProfile, residual: bool = False) -> RmsNormLaunch:
    """Forward launch for `rows` rows of `n` elements of `itemsize` bytes, to which a residual is added first or not."""
    if n > _FORWARD_WIDTH:
        # All threads of a multiprocessor on two rows: with more rows at once they would leave the L2 cache.
        return RmsNormLaunch(1, 32768 // itemsize, 0, 32)
    if n * itemsize % _VECTOR_BYTES and n >= _UNALIGNED_WIDTH:
        # A persistent grid loads the weight, shifted against the rows' vectors, once.
        main, tail = _unaligned_blocks(n, itemsize)
        num_warps = _warps(main, 16, 32)
        programs = _multiple_of_vector(profile.num_sms * max(1, 32 // num_warps))
        return RmsNormLaunch(1, main, tail, num_warps, programs, 3, unaligned=True)
    main, tail = split_width(n)
    if n * itemsize % _VECTOR_BYTES:
        # Rows start anywhere, so loads are narrow: many of them a thread. 8193 x 4097: 0.047, with 16 elements a
        # thread 0.051.
        return RmsNormLaunch(1, main, tail, _warps(main, 32, 32))
    if tail:
        return RmsNormLaunch(1, main, tail, _tail_warps(tail))
    if main > 8192:
        # Two programs an SM, rows through shared memory. 4096 x 16384: 0.074, one program a row 0.094.
        num_warps = _warps(main, 32, 32)
        return RmsNormLaunch(1, main, 0, num_warps, profile.num_sms * 2, 3)
    if main >= 2048:
        # 32 elements a thread keep four loads in flight and few threads to meet. 16384 x 4096: 0.070, 16 elements
        # 0.072; 8192 x 8192: 0.071, 16 elements 0.088. With a residual there are twice the loads: 8 elements
        # (16384 x 4096: 0.134, 32 elements 0.136, 16 elements 0.137).
        return RmsNormLaunch(1, main, 0, _warps(main, 8 if residual and main <= 4096 else 32, 32))
    block_rows = min(max(1, 2048 // main), _power_of_two(rows))
    return RmsNormLaunch(block_rows, main, 0, _warps(block_rows * main, 16, 32))


@functools.lru_cache(1024)
def backward_launch(rows: int, n: int, itemsize: int, profile: DeviceProfile) -> RmsNormLaunch:
    """Backward launch: a persistent grid; more programs hide latency, fewer write less of the dw partials."""
    if n > _BACKWARD_WIDTH:
        if n > 4 * _BACKWARD_WIDTH:
            # 1024 x 65536: 0.222 with short chunks of four rows, which read each chunk of the weight once; 0.254 with
            # 8192 columns of two rows, 0.407 with one row.
            return RmsNormLaunch(4, 4096 // itemsize, 0, 8, profile.num_sms * 2)
        fitting = _CACHE_BYTES // (profile.num_sms * 2 * n * itemsize)
        block_rows = 1 << min(max(fitting, 1).bit_length() - 1, 2)
        # 4096 x 16384: 0.177 with 8192 columns of two rows, 0.180 with 4096.
        return RmsNormLaunch(block_rows, 16384 // itemsize, 0, 16, profile.num_sms)
    whole, few = _power_of_two(n), _power_of_two(rows)
    if few * whole <= _ONE_PROGRAM:
        # One program, whose sum is dw itself: no launch that adds partials, which takes as long as a few rows do.
        return RmsNormLaunch(few, max(whole, 16), 0, _warps(few * whole, 16, 32), 1)
    if n * itemsize % _VECTOR_BYTES and n >= _UNALIGNED_WIDTH:
        main, tail = _unaligned_blocks(n, itemsize)
        # 8 elements a thread: Triton 3.6 spreads the tail so that 16 need 182 registers (112 with 8).
        num_warps = _warps(main, 8, 32)
        programs = _multiple_of_vector(profile.num_sms * max(2, 16 // num_warps))
        return RmsNormLaunch(1, main, tail, num_warps, programs, 3, unaligned=True)
    main, tail = split_width(n)
    aligned = n * itemsize % _VECTOR_BYTES == 0
    if tail and aligned and main <= 4 * tail:
        # 65536 x 768: 0.086 with two warps and rows through shared memory, 0.091 with one warp that loads straight to
        # registers. 8192 x 5120: 0.074 with eight warps, 0.083 with one block of 8192.
        num_warps = max(_warps(main, 16, 32), min(_warps(tail, 4, 32), 2))
        return RmsNormLaunch(1, main, tail, num_warps, profile.num_sms * max(1, 16 // num_warps), 3)
    if tail and aligned:
        # Few threads for a small tail would hold more of the main block than fits their registers: idle lanes instead.
        main, tail = 2 * main, 0
    block_rows = min(max(1, 1024 // main), _power_of_two(rows))
    num_warps = _warps(block_rows * main, 16, 32)
    # Rows through shared memory, two ahead of the one that is computed, where vectors can be copied.
    stages = 3 if aligned else 1
    return RmsNormLaunch(block_rows, main, tail, num_warps, profile.num_sms * max(1, 16 // num_warps), stages)


@functools.lru_cache(1024)
def sum_launch(partials: int, n: int, profile: DeviceProfile) -> SumLaunch:
    """Launch that adds `partials` fp32 rows of `n` elements: narrow columns, so that many programs share the work."""
    block_n = 16 if n <= 4096 else 32
    return SumLaunch(min(256, max(_power_of_two(partials), 16)), block_n, 4)
