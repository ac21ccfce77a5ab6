"""Launch choices of the RMSNorm kernels: pure functions of the shape, the element size and the device.

A row that fits is held in registers, in one block or in a power of two plus a smaller tail (768 = 512 + 256,
5,120 = 4,096 + 1,024), whichever covers the width with fewer idle lanes. A wider row is read twice in chunks.

Times in the comments are milliseconds on an H200 (Triton 3.6, bf16, L2 flushed), the best choice before the others.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from fuselm.kernels._triton import DeviceProfile
from fuselm.kernels.launch.cache_hints import load_hint

_VECTOR_BYTES = 16
# Widest rows that are held in registers: compiled ahead of time for sm_80, sm_90 and sm_100 nothing spills up to here,
# but for some registers of unaligned rows. Backward a thread holds x, dy, the weight and dw.
_FORWARD_WIDTH = 16384
_BACKWARD_WIDTH = 8192
# Narrowest unaligned rows that are read in whole vectors: narrower ones were not timed.
_UNALIGNED_WIDTH = 513
# Elements of the rows that one program takes alone, backward: 16 a thread.
_ONE_PROGRAM = 16384
# Half of an L2 cache of 60 MB: what all programs together may read a second time.
_CACHE_BYTES = 2**25
_REGISTERS = 65536  # of a multiprocessor
_RESERVED = 1024  # bytes of shared memory a program, beside the rows in flight


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
        unaligned: the kernels of rms_norm_unaligned_kernels.py, for dense rows that start anywhere. The blocks hold a
            row's whole vectors, and a program's rows begin equally deep in one: `programs` is 0 or a multiple of 8.
        late_weight: forward: load the weight after the sum of squares, when nothing else waits for memory. It needs
            fewer registers, so that more rows are in flight. The first programs bring it into L2 before.
        max_registers: backward, with `unaligned`: registers a thread at most, 0 for no limit: more programs an SM.
        load: forward: eviction policy of the rows that are read, "" or "evict_last".
        blocks: forward, with `late_weight` and as many rows as warps: main blocks side by side, with which a row is in
            one warp: no lane is idle, and no warp waits for another.
    """

    block_rows: int
    block_n: int
    block_tail: int
    num_warps: int
    programs: int = 0
    num_stages: int = 1
    unaligned: bool = False
    late_weight: bool = False
    max_registers: int = 0
    load: str = ""
    blocks: int = 1

    def covers(self, n: int) -> bool:
        """True where a row of `n` elements is held in registers as a whole."""
        return self.unaligned or self.blocks * self.block_n + self.block_tail >= n

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


def _in_vectors(n: int, itemsize: int) -> int:
    """Elements of a row of `n` that whole vectors hold, where it begins at one."""
    return n * itemsize // _VECTOR_BYTES * _VECTOR_BYTES // itemsize


def split_width(n: int) -> tuple[int, int]:
    """(main, tail) blocks that cover a row of `n` elements with the fewest lanes; tail 0 for one block."""
    whole = max(_power_of_two(n), 16)
    main = whole // 2
    tail = max(_power_of_two(n - main), 16)
    return (main, tail) if n >= 256 and tail < main else (whole, 0)


def _warps(elements: int, per_thread: int, largest: int) -> int:
    return min(max(_power_of_two(elements // (32 * per_thread)), 1), largest)


def _tail_warps(tail: int) -> int:
    """As many warps as a tail has vectors of 8 for: both blocks then lie over the threads alike, and nothing moves
    between threads to meet. One warp, for a tail of 256, needs no barrier either."""
    return _warps(tail, 8, 32)


def _staged(row_bytes: int, per_sm: int, profile: DeviceProfile) -> tuple[int, int]:
    """(programs, stages) of a persistent grid: at most `per_sm` programs a multiprocessor, and two rows on their way
    through shared memory in each, fewer where they do not fit. `row_bytes`: of all tensors that a program reads."""
    for stages in (3, 2):
        fitting = profile.shared_memory // ((stages - 1) * row_bytes + _RESERVED)
        if fitting > 0:
            return profile.num_sms * min(per_sm, fitting), stages
    return profile.num_sms * per_sm, 1


def _unaligned(
    main: int, tail: int, itemsize: int, num_warps: int, tensors: int, registers: int, profile: DeviceProfile
) -> RmsNormLaunch | None:
    """Unaligned rows of `tensors` tensors, so many programs as `registers` a thread and two rows ahead leave room for;
    None where there is none."""
    per_sm = max(_REGISTERS // (32 * num_warps * registers), 1)
    programs, stages = _staged(tensors * (main + tail) * itemsize, per_sm, profile)
    if stages != 3:
        return None
    return RmsNormLaunch(1, main, tail, num_warps, max(programs // 8 * 8, 8), 3, unaligned=True)


def _unaligned_forward(whole: int, itemsize: int, residual: bool, profile: DeviceProfile) -> RmsNormLaunch:
    """Dense unaligned rows of `whole` elements and some more: a program each, which loads the weight late and element
    by element; or, where a block of 2,048 or more has a tail and for the shortest rows without a residual, a persistent
    grid with rows through shared memory.

    A thread has 32 elements, of long rows 64, with a residual half as many. 16384 x 4097: 0.0721 with 32, 0.0754 with
    64, 0.0838 with 16, 0.0790 on a persistent grid; with a residual 0.1378 with 16, 0.1385 with 32, 0.1467 on a grid.
    8192 x 8193: 0.0740 with 64, 0.0749 with 32, 0.0772 on a grid; with a residual 0.1406 with 32, 0.1439 with 16.
    65536 x 769: 0.0576, 0.0601 on a grid; with a residual 0.1067 and 0.1157. But 16384 x 5121 0.0998, on a grid 0.0945,
    with a residual 0.1863 and 0.1826; and 65536 x 513 0.0459 and 0.0427, with a residual 0.0730 and 0.0803.
    """
    main, tail = split_width(whole)
    per_thread = 16 if residual else 32
    if (tail and main >= 2048) or (main <= 512 and not tail and not residual):
        # As many as it takes compiled for sm_80, sm_90 and sm_100, where more than one program fits: one that finds no
        # place begins its rows when the others are done with theirs.
        long_tail = main == 2 * tail
        if residual:
            registers = 96 if itemsize == 2 and not long_tail else 128
        elif tail:
            registers = (232 if long_tail else 168) if itemsize == 4 else (168 if long_tail else 144)
        else:
            registers = 128
        launch = _unaligned(main, tail, itemsize, _warps(main, per_thread, 32), 1 + residual, registers, profile)
        if launch is not None:
            return launch
    per_thread *= 2 if main >= 8192 else 1
    return RmsNormLaunch(1, main, tail, _warps(main, per_thread, 32), unaligned=True, late_weight=True)


@functools.lru_cache(1024)
def forward_launch(
    rows: int, n: int, itemsize: int, profile: DeviceProfile, residual: bool = False, dense: bool = True
) -> RmsNormLaunch:
    """Forward launch.

    Args:
        rows: rows.
        n: elements of a row.
        itemsize: bytes of an element, of the wider one where x and residual differ.
        profile: the device.
        residual: a residual is added first.
        dense: row r begins r * n elements behind a 16-byte border, in x and in residual.
    """
    whole = _in_vectors(n, itemsize)
    if dense and whole < n and _UNALIGNED_WIDTH <= n <= _FORWARD_WIDTH:
        return _unaligned_forward(whole, itemsize, residual, profile)
    if n > _FORWARD_WIDTH:
        # All threads of a multiprocessor on two rows: with more rows at once they would leave the L2 cache.
        return RmsNormLaunch(1, 32768 // itemsize, 0, 32)
    tensors = 2 if residual else 1
    load = load_hint(n * itemsize)
    main, tail = split_width(n)
    if n * itemsize % _VECTOR_BYTES:
        # Narrow loads, many of them a thread. 16384 x 4097: 0.087; early weight, 8193 x 4097: 0.047, with 16 elements
        # a thread 0.051.
        return RmsNormLaunch(1, main, tail, _warps(main if 4 * tail <= main else 2 * main, 32, 32), late_weight=True)
    if main == 2 * tail and tail * itemsize == 32 * _VECTOR_BYTES and not residual:
        # A row a warp in three blocks of a vector a lane. 65536 x 768: 0.0529, 0.0539 with two rows in 1024 columns of
        # two warps, 0.0543 with two rows in 512 + 256 columns of one warp. With a residual 0.1004 for 0.0989. Without a
        # loop, the weight kept in L1, rsqrt, rows read again: 0.0529 to 0.0541 (tune_rms_norm_once.json).
        block_rows = min(4, _power_of_two(rows))
        return RmsNormLaunch(block_rows, tail, 0, block_rows, late_weight=True, load=load, blocks=3)
    if tail and main == 2 * tail and (main == 512 if residual else main <= 512):
        # Idle lanes, but several rows a program.
        block_rows = min(2048 // (2 * main), _power_of_two(rows))
        return RmsNormLaunch(block_rows, 2 * main, 0, 4 if residual else 2, late_weight=not residual, load=load)
    if tail:
        # 16384 x 5120: 0.0831, with the weight late 0.0840.
        return RmsNormLaunch(1, main, tail, max(_tail_warps(tail), _warps(main, 32, 32)), load=load)
    if main > 8192:
        # Two programs an SM, rows through shared memory. 4096 x 16384: 0.074, one program a row 0.094. Not timed with
        # rows that stay in L2.
        programs, stages = _staged(tensors * main * itemsize, 2, profile)
        return RmsNormLaunch(1, main, 0, _warps(main, 32, 32), programs, stages)
    if main >= 2048:
        # Few threads to meet, each with two to four loads in flight. 32768 x 2048: 0.0673 with four warps and a late
        # weight, 0.0677 with two and an early one; 16384 x 4096: 0.0670 with eight and late, 0.0675 with four and
        # early; 8192 x 8192: 0.0676 with eight and late. With a residual, which is twice the loads: 32768 x 2048 0.1292
        # with eight warps, 0.1299 with four; 16384 x 4096 0.1298 with eight, 0.1308 with 16; 8192 x 8192 0.1293 with 16
        # and an early weight, 0.1300 with a late one. All with rows that stay in L2 once they are read; else 0.0692
        # for 16384 x 4096, with a residual 0.1363, and 0.0141 for 0.0134 of 2048 x 4096
        # (benchmarks/results/tune_rms_norm_in_turn.json).
        if residual:
            return RmsNormLaunch(1, main, 0, max(_warps(main, 16, 32), 8), load=load)
        # One row a multiprocessor: nothing waits but for the weight. 1 x 4096 0.0048, late 0.0051; 64 x 4096 the same.
        late = rows > profile.num_sms
        return RmsNormLaunch(1, main, 0, _warps(main, 16, 8), late_weight=late, load=load)
    block_rows = min(max(1, 2048 // main), _power_of_two(rows))
    return RmsNormLaunch(block_rows, main, 0, _warps(block_rows * main, 16, 32), load=load)


@functools.lru_cache(1024)
def backward_launch(
    rows: int, n: int, itemsize: int, profile: DeviceProfile, residual: bool = False, dense: bool = True
) -> RmsNormLaunch:
    """Backward launch: a persistent grid; more programs hide latency, fewer write less of the dw partials.

    Args:
        rows: rows.
        n: elements of a row.
        itemsize: bytes of an element, of the widest where dy, x and dh differ.
        profile: the device.
        residual: a gradient of the residual's sum, dh, is read too.
        dense: row r begins r * n elements behind a 16-byte border, in dy, x and dh.
    """
    aligned = n * itemsize % _VECTOR_BYTES == 0
    tensors = 3 if residual else 2
    whole, few = _power_of_two(n), _power_of_two(rows)
    if n <= _BACKWARD_WIDTH and few * whole <= _ONE_PROGRAM:
        # One program, whose sum is dw itself: no launch that adds partials, which takes as long as a few rows do.
        return RmsNormLaunch(few, max(whole, 16), 0, _warps(few * whole, 16, 32), 1)
    main, tail = split_width(_in_vectors(n, itemsize))
    if not aligned and dense and n >= _UNALIGNED_WIDTH and main + tail <= _BACKWARD_WIDTH:
        # 16384 x 4097: 0.114 with two programs an SM (128 registers) of eight warps, 0.123 of four; with the ends of a
        # row loaded when it comes 0.125. With dh 0.150, 0.152 and 0.161. 65536 x 769: 0.0935 with two warps, one
        # 0.102. 16384 x 5121, 20 elements a thread: 0.140 with 128 registers and two programs an SM, 0.169 with one of
        # more registers, 0.182 with one of twice the threads; with dh 0.213, 0.225 and 0.229. Wider tails spill there.
        # 65536 x 513: 0.075 with two warps of 8 elements a thread, 0.080 with one. Of 84 registers bf16 takes 80, as
        # many as twelve programs an SM have; a tail or fp32 would take 84, for which 88 are set aside.
        num_warps = max(_warps(main, 16, 32), 2)
        per_thread = (main + tail) // (32 * num_warps)
        registers = 128 if per_thread <= (20 if itemsize == 2 else 16) else 168 if itemsize == 2 else 224
        if per_thread <= 8:
            registers = 84 if itemsize == 2 and not tail else 88
        launch = _unaligned(main, tail, itemsize, num_warps, tensors, registers, profile)
        if launch is not None:
            return dataclasses.replace(launch, max_registers=registers)
    if n > _BACKWARD_WIDTH:
        if not aligned:
            # Narrow loads, each with an address of its own: with more of them a thread registers spill.
            return RmsNormLaunch(2, 2048, 0, 16, profile.num_sms)
        if n > 4 * _BACKWARD_WIDTH:
            # 1024 x 65536: 0.222 with short chunks of four rows, which read each chunk of the weight once; 0.254 with
            # 8192 columns of two rows, 0.407 with one row.
            return RmsNormLaunch(4, 4096 // itemsize, 0, 8, profile.num_sms * 2)
        fitting = _CACHE_BYTES // (profile.num_sms * 2 * n * itemsize)
        block_rows = 1 << min(max(fitting, 1).bit_length() - 1, 2)
        # 4096 x 16384: 0.177 with 8192 columns of two rows, 0.180 with 4096. 64 bytes of x a thread: 128 spill.
        columns = min(16384, 32768 // block_rows) // itemsize
        return RmsNormLaunch(block_rows, columns, 0, 16, profile.num_sms)
    main, tail = split_width(n)
    if tail and aligned and main <= 4 * tail:
        # 65536 x 768: 0.086 with two warps and rows through shared memory, 0.091 with one warp that loads straight to
        # registers. 8192 x 5120: 0.074 with eight warps, 0.083 with one block of 8192.
        num_warps = max(_warps(main, 16, 32), min(_warps(tail, 4, 32), 2))
        programs, stages = _staged(tensors * (main + tail) * itemsize, max(1, 16 // num_warps), profile)
        return RmsNormLaunch(1, main, tail, num_warps, programs, stages)
    if tail and aligned:
        # Few threads for a small tail would hold more of the main block than fits their registers: idle lanes instead.
        main, tail = 2 * main, 0
    block_rows = min(max(1, 1024 // main), _power_of_two(rows))
    num_warps = _warps(block_rows * main, 16, 32)
    per_sm = max(1, 16 // num_warps)
    if not aligned:  # narrow loads go straight to registers
        return RmsNormLaunch(block_rows, main, tail, num_warps, profile.num_sms * per_sm)
    programs, stages = _staged(tensors * block_rows * main * itemsize, per_sm, profile)
    return RmsNormLaunch(block_rows, main, tail, num_warps, programs, stages)


@functools.lru_cache(1024)
def sum_launch(partials: int, n: int, profile: DeviceProfile) -> SumLaunch:
    """Launch that adds `partials` fp32 rows of `n` elements: narrow columns, so that many programs share the work."""
    block_n = 16 if n <= 4096 else 32
    return SumLaunch(min(256, max(_power_of_two(partials), 16)), block_n, 4)
