"""Launch of the kernels in rms_norm_ring_kernels.py: the forward of rms_norm and add_rms_norm on Hopper.

No launch function picks them, and they have not been run on a card: benchmarks/tune.py times them beside what they
would replace.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import DeviceProfile
from fuselm.kernels.attention.hopper_common import HAVE_GLUON, TensorDescriptor, gl
from fuselm.kernels.launch.rms_norm import RingLaunch
from fuselm.kernels.rms_norm_ring_kernels import rms_norm_burst_kernel, rms_norm_ring_kernel

_LINE = 64  # elements of the innermost dimension of a copy: 128 bytes
_LINES = 256  # at most, of a dimension of a copy


def ring_refusal(x: torch.Tensor, residual: torch.Tensor | None, dense: bool, profile: DeviceProfile) -> str | None:
    """Why these kernels cannot take (..., n) inputs, or None where they can. `dense`: of both, row r begins r * n
    elements behind a 16-byte border."""
    if not HAVE_GLUON or profile.arch != 90:
        return "they are written for compute capability 9.0, with Gluon"
    if x.dtype not in (torch.bfloat16, torch.float16) or (residual is not None and residual.dtype != x.dtype):
        return "they take bf16 and fp16, x and the residual alike"
    if not dense:
        return "rows do not lie side by side"
    if x.shape[-1] % _LINE or x.shape[-1] > _LINE * _LINES:
        return f"rows of {x.shape[-1]} elements are no multiple of {_LINE} up to {_LINE * _LINES}"
    return None


def launch_ring(
    launch: RingLaunch,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    y: torch.Tensor,
    h: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    offset: float,
    num_sms: int,
) -> None:
    """Writes y, h and rstd as `launch_forward` does; `ring_refusal` says for what. On the current device."""
    rows, n = rstd.numel(), x.shape[-1]
    lines = 1 << (n // _LINE - 1).bit_length()
    if launch.block_rows * lines < 8:
        raise ValueError(f"{launch}: slots of less than 1024 bytes do not begin where the pattern of their banks does")
    block = [launch.block_rows, lines, _LINE]
    shared = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16)

    def descriptor(tensor: torch.Tensor) -> TensorDescriptor:
        return TensorDescriptor(tensor, [rows, n // _LINE, _LINE], [n, _LINE, 1], block, shared)

    # A warp has four lines of a row, 16 bytes a thread; warps share a row where there are more of them than rows.
    row_warps = min(launch.block_rows, launch.num_warps)
    layout = gl.BlockedLayout([1, 1, 8], [1, 4, 8], [row_warps, launch.num_warps // row_warps, 1], [2, 1, 0])
    tiles = -(-rows // launch.block_rows)
    arguments = (
        descriptor(x),
        descriptor(x if residual is None else residual),
        descriptor(h),
        descriptor(y),
        x if weight is None else weight.contiguous(),
        h,
        y,
        rstd,
        rows,
        tiles,
        eps,
        offset,
        residual is not None,
        weight is not None,
        n,
        launch.by_tma,
        "evict_first" if launch.evict_first else "",
        launch.block_rows,
        lines,
        launch.slots,
        layout,
    )
    registers = {"maxnreg": launch.max_registers} if launch.max_registers else {}
    if launch.programs:
        programs = min(num_sms * launch.programs, tiles)
        rms_norm_ring_kernel[(programs,)](
            *arguments,
            RUNS=launch.runs,
            BEHIND=min(launch.slots - 1, 2),  # as many stores under way, of slots that are not free until they are over
            num_warps=launch.num_warps,
            **registers,
        )
    else:
        rms_norm_burst_kernel[(-(-tiles // launch.slots),)](*arguments, num_warps=launch.num_warps, **registers)
