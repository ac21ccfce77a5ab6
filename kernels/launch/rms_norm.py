"""Launch choices of the RMSNorm kernels: a pure function of the row width and the device."""

from __future__ import annotations

from dataclasses import dataclass

from fuselm.kernels._triton import DeviceProfile


@dataclass(frozen=True)
class RmsNormLaunch:
    """Launch of one RMSNorm kernel.

    Attributes:
        block_rows: rows a program holds at once (a power of two).
        block_n: columns a program holds, the row width rounded up to a power of two.
        num_warps: warps a program.
        programs: programs of the persistent backward grid; each writes one fp32 partial of dw.
    """

    block_rows: int
    block_n: int
    num_warps: int
    programs: int


def _next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def forward_launch(n: int, profile: DeviceProfile) -> RmsNormLaunch:
    """Forward launch for rows of `n` elements: 16 elements a thread, short rows several to a program."""
    block_n = max(_next_power_of_2(n), 16)
    block_rows = max(1, 2048 // block_n)  # a program of 4 warps at 16 elements a thread
    num_warps = min(max(block_rows * block_n // 512, 1), 32)
    return RmsNormLaunch(block_rows, block_n, num_warps, 0)


def backward_launch(rows: int, n: int, profile: DeviceProfile) -> RmsNormLaunch:
    """Backward launch: a persistent grid; more programs hide latency, fewer write less of the dw partials."""
    block_n = max(_next_power_of_2(n), 16)
    block_rows = max(1, 1024 // block_n)
    num_warps = min(max(block_rows * block_n // 512, 1), 32)
    per_sm = min(max(32 // num_warps, 1), 8)
    programs = min(profile.num_sms * per_sm, -(-max(rows, 1) // block_rows))
    return RmsNormLaunch(block_rows, block_n, num_warps, programs)
