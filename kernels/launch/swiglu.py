"""Launch choices of the swiglu kernels: a pure function of shape, element size and device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from fuselm.kernels._triton import DeviceProfile
from fuselm.kernels.launch.cache_hints import load_hint

_THREADS = 256
_VECTOR_BYTES = 16  # what a thread loads of each operand
_SMALLEST_FULL = 512  # columns; narrower tiles, taken to need no mask, would cut rows into too short runs of memory


@dataclass(frozen=True)
class SwigluLaunch:
    """How the swiglu kernels are launched.

    Attributes:
        block_rows: rows a program (more than one only where a row is short).
        block_columns: columns of the output a program.
        num_warps: warps a program.
        load: eviction policy of what is read, "" or "evict_last".
    """

    block_rows: int
    block_columns: int
    num_warps: int
    load: str = ""


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


@functools.lru_cache(1024)
def swiglu_launch(rows: int, ffn: int, itemsize: int, profile: DeviceProfile, backward: bool) -> SwigluLaunch:
    """Chooses tiles in which each thread holds one 16-byte vector of gate and one of up; forward two of each.

    Measured on an H200, bf16, ms: forward 16384 x 14336 0.3212 with 512 columns over one warp, 0.3210 with 2048 over
    eight, 0.3215 with 1024 over four; 512 x 14336 0.0154, 0.0155 and 0.0156. Backward 32768 x 8192 0.6134 with 2048
    columns over eight warps, 0.6140 with 1024 over four (benchmarks/results/tune_rope_in_turn.json).

    Args:
        rows: rows that are equally far apart (tiles do not cross a break in the row stride).
        ffn: columns of the output.
        itemsize: bytes of an element.
        profile: unused so far: the op is bound by memory on every device.
        backward: for the gradient.
    """
    del profile
    if ffn * itemsize % _VECTOR_BYTES and ffn >= _SMALLEST_FULL:
        # Rows start anywhere and loads are narrow: short tiles. 8193 x 4097, bf16, H200: 0.067 ms forward and 0.099
        # backward; four warps on 1024 columns 0.073 and 0.121, and 0.072 and 0.121 where L2 is told to keep the rows.
        return SwigluLaunch(1, _SMALLEST_FULL, 2)
    load = load_hint(ffn * itemsize)
    per_thread = _VECTOR_BYTES // itemsize
    elements = _THREADS * per_thread
    block_columns = min(elements, _power_of_two(ffn))
    full = math.gcd(ffn, block_columns)  # the largest power of two that leaves no partial tile
    if full >= _SMALLEST_FULL and not backward:
        return SwigluLaunch(1, _SMALLEST_FULL, _SMALLEST_FULL // (2 * 32 * per_thread), load)
    if full >= _SMALLEST_FULL:
        block_columns = full
    # Two rows of 1024 columns of 16384 x 5120 took longer than one.
    block_rows = 1 if block_columns >= _SMALLEST_FULL else min(elements // block_columns, _power_of_two(rows))
    num_warps = max(1, min(8, block_rows * block_columns // (32 * per_thread)))
    return SwigluLaunch(block_rows, block_columns, num_warps, load)
