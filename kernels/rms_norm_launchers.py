"""Launches of the kernels in rms_norm_kernels.py and rms_norm_unaligned_kernels.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuselm.kernels._triton import device_profile
from fuselm.kernels.direct import launch_device
from fuselm.kernels.launch.rms_norm import RmsNormLaunch, backward_launch, forward_launch, sum_launch
from fuselm.kernels.rms_norm_kernels import (
    rms_norm_backward_chunked_kernel,
    rms_norm_backward_kernel,
    rms_norm_forward_chunked_kernel,
    rms_norm_forward_kernel,
    sum_partials_kernel,
)
from fuselm.kernels.rms_norm_unaligned_kernels import (
    rms_norm_unaligned_backward_kernel,
    rms_norm_unaligned_forward_kernel,
)


def _merged_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The one stride that walks over dimensions of these sizes in order; None where no single stride does."""
    step = extent = 0
    first = True
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if first:
            step, first = stride, False
        elif stride != extent:
            return None
        extent = stride * size
    return step


def _row_views(*tensors: torch.Tensor) -> tuple[int, list[tuple[torch.Tensor, int, int]]]:
    """How a kernel walks over the rows of tensors (..., n) of one shape.

    Returns:
        inner, and for each tensor (itself, stride_outer, stride_inner): row r lies at (r // inner) * stride_outer +
        (r % inner) * stride_inner. inner is 1 where all leading dimensions merge, else the last leading dimension, as
        for the heads of a packed qkv projection. A tensor that fits neither is copied once.
    """
    if all(x.is_contiguous() for x in tensors):
        return 1, [(x, x.shape[-1], 0) for x in tensors]
    lead = tensors[0].shape[:-1]
    dense = [x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in tensors]
    merged = [_merged_stride(lead, x.stride()[:-1]) for x in dense]
    if None not in merged:
        return 1, [(x, stride or 0, 0) for x, stride in zip(dense, merged, strict=True)]
    views = []
    for x in dense:
        outer = _merged_stride(lead[:-1], x.stride()[:-2])
        if outer is None:
            x = x.contiguous()
            outer = x.stride(-2) * lead[-1]
        views.append((x, outer, x.stride(-2)))
    return lead[-1], views


def _registers(launch: RmsNormLaunch) -> dict[str, int]:
    """The launch option that limits registers, absent where there is no limit."""
    return {"maxnreg": launch.max_registers} if launch.max_registers else {}


def _all_dense(*tensors: torch.Tensor) -> bool:
    """True where row r of each tensor begins r * n elements behind a 16-byte border, all of one element size."""
    itemsize = tensors[0].element_size()
    return all(x.is_contiguous() and x.element_size() == itemsize and x.data_ptr() % 16 == 0 for x in tensors)


def launch_forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, h, rstd); without a residual h is y."""
    n = x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = y if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    rows = rstd.numel()
    if rows == 0:
        return y, h, rstd
    inner, views = _row_views(x) if residual is None else _row_views(x, residual)
    (x_in, *x_strides), (residual_in, *residual_strides) = views[0], views[-1]
    itemsize = max(x_in.element_size(), residual_in.element_size())
    dense = _all_dense(x_in, residual_in)
    launch = forward_launch(rows, n, itemsize, device_profile(x.device), residual is not None, dense)
    blocks = -(-rows // launch.block_rows)
    programs = min(launch.programs or blocks, blocks)
    arguments = (
        x_in,
        residual_in,
        x_in if weight is None else weight.contiguous(),
        y,
        h,
        rstd,
        *x_strides,
        *residual_strides,
        rows,
        inner,
        eps,
        offset,
        residual is not None,
        weight is not None,
        n,
    )
    with launch_device(x):
        if launch.unaligned:
            rms_norm_unaligned_forward_kernel[(programs,)](
                *arguments[:6],
                rows,
                eps,
                offset,
                residual is not None,
                weight is not None,
                n,
                BLOCK_N=launch.block_n,
                BLOCK_TAIL=launch.block_tail,
                VECTOR=16 // itemsize,
                LATE_WEIGHT=launch.late_weight,
                STAGES=launch.num_stages,
                num_warps=launch.num_warps,
            )
        elif launch.covers(n):
            rms_norm_forward_kernel[(programs,)](
                *arguments,
                EVEN_ROWS=rows % launch.block_rows == 0,
                BLOCK_ROWS=launch.block_rows,
                BLOCKS=launch.blocks,
                BLOCK_N=launch.block_n,
                BLOCK_TAIL=launch.block_tail,
                STAGES=launch.num_stages,
                LATE_WEIGHT=launch.late_weight,
                LOAD=launch.load,
                num_warps=launch.num_warps,
            )
        else:
            rms_norm_forward_chunked_kernel[(rows,)](*arguments, BLOCK_N=launch.block_n, num_warps=launch.num_warps)
    return y, h, rstd


def launch_backward(
    dy: torch.Tensor,
    dh: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx in x's dtype, dw in weight's dtype or an empty tensor)."""
    rows, n = rstd.numel(), x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw_dtype = torch.float32 if weight is None else weight.dtype
    if rows == 0:
        return dx, torch.zeros(n if need_dw else 0, dtype=dw_dtype, device=x.device)
    inner, views = _row_views(dy, x) if dh is None else _row_views(dy, x, dh)
    (dy_in, *dy_strides), (x_in, *x_strides), (dh_in, *dh_strides) = views[0], views[1], views[-1]
    profile, itemsize = device_profile(x.device), max(view[0].element_size() for view in views)
    launch = backward_launch(rows, n, itemsize, profile, dh is not None, _all_dense(dy_in, x_in, dh_in))
    programs = min(launch.programs or rows, -(-rows // launch.block_rows))
    partial_stride = -(-n // 16) * 16  # aligned rows: the partials are read in vectors, whatever n is
    dw = torch.empty(n if need_dw else 0, dtype=dw_dtype, device=x.device)
    alone = programs == 1 and launch.covers(n)  # a single program's partial is dw
    shape = (programs, partial_stride) if need_dw else 0
    partial = dw if alone else torch.empty(shape, dtype=torch.float32, device=x.device)
    arguments = (
        dy_in,
        dh_in,
        x_in,
        x_in if weight is None else weight.contiguous(),
        rstd.contiguous(),
        dx,
        partial,
        *dy_strides,
        *dh_strides,
        *x_strides,
        rows,
        inner,
        offset,
        dh is not None,
        weight is not None,
        need_dw,
        n,
        partial_stride,
    )
    with launch_device(x):
        if launch.unaligned:
            rms_norm_unaligned_backward_kernel[(programs,)](
                *arguments[:7],
                rows,
                offset,
                dh is not None,
                weight is not None,
                need_dw,
                n,
                partial_stride,
                BLOCK_N=launch.block_n,
                BLOCK_TAIL=launch.block_tail,
                VECTOR=16 // itemsize,
                STAGES=launch.num_stages,
                num_warps=launch.num_warps,
                **_registers(launch),
            )
        elif launch.covers(n):
            rms_norm_backward_kernel[(programs,)](
                *arguments,
                EVEN_ROWS=rows % launch.block_rows == 0,
                SUM_ROWS=launch.rows_in_one_thread(launch.block_n, itemsize),
                SUM_TAIL_ROWS=launch.rows_in_one_thread(launch.block_tail, itemsize),
                BLOCK_ROWS=launch.block_rows,
                BLOCK_N=launch.block_n,
                BLOCK_TAIL=launch.block_tail,
                STAGES=launch.num_stages,
                num_warps=launch.num_warps,
            )
        else:
            rms_norm_backward_chunked_kernel[(programs,)](
                *arguments, BLOCK_ROWS=launch.block_rows, BLOCK_N=launch.block_n, num_warps=launch.num_warps
            )
        if need_dw and not alone:
            choice = sum_launch(programs, n, profile)
            sum_partials_kernel[(-(-n // choice.block_n),)](
                partial,
                dw,
                programs,
                N=n,
                PARTIAL_STRIDE=partial_stride,
                BLOCK_PARTIALS=choice.block_partials,
                BLOCK_N=choice.block_n,
                num_warps=choice.num_warps,
            )
    return dx, dw
