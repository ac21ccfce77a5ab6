"""Launch of the kernels in cross_entropy_ring_kernels.py and cross_entropy_ring_groups.py: cross-entropy of whole rows
on Hopper, loss and gradient at once, the row in shared memory between the two passes.

They know neither smoothing nor softcap. Rows begin at multiples of 32 bytes, except that two groups of warps take rows
of any length where these lie side by side (`is_flat`) and make whole lines in all. All else has the portable kernel.
"""

from __future__ import annotations

import torch

from fuselm.kernels._triton import DeviceProfile
from fuselm.kernels.attention.hopper_common import HAVE_GLUON, TensorDescriptor, gl
from fuselm.kernels.cross_entropy_ring_groups import cross_entropy_groups_kernel
from fuselm.kernels.cross_entropy_ring_kernels import cross_entropy_ring_kernel
from fuselm.kernels.launch.cross_entropy import RING_COLUMNS, RingLaunch


def ring_refusal(
    logits: torch.Tensor, gradient: torch.Tensor, profile: DeviceProfile, smoothing: bool, softcap: bool
) -> str | None:
    """Why these kernels cannot take (outer, inner, vocab) logits and their gradient, or None where they can, those of a
    flat vocabulary by a launch with writers."""
    if not HAVE_GLUON or profile.arch != 90:
        return "they are written for compute capability 9.0, with Gluon"
    if smoothing or softcap or logits.element_size() != 2:
        return "they know neither smoothing, softcap nor fp32"
    outer, inner, vocab = logits.shape
    if is_flat(vocab):
        return _flat_refusal(logits, gradient)
    for x in (logits, gradient):
        if outer * inner > 1 and not _row_stride(x):
            return "rows share one place, and TMA takes no stride of 0"
        if x.data_ptr() % 32 or (outer * inner > 1 and _row_stride(x) * x.element_size() % 32):
            return "rows do not begin at multiples of 32 bytes, or at no constant distance"
    return None


def is_flat(vocab: int) -> bool:
    """Whether rows of `vocab` logits begin within lines of RING_COLUMNS, so that all are taken as one row of lines."""
    return vocab % RING_COLUMNS != 0


def _flat_refusal(logits: torch.Tensor, gradient: torch.Tensor) -> str | None:
    if logits.numel() % RING_COLUMNS:
        return f"{logits.numel()} logits are no multiple of {RING_COLUMNS}"
    if logits.numel() > 2**36:
        return "the kernel counts lines in 32 bits"
    for x in (logits, gradient):
        if not x.is_contiguous() or x.data_ptr() % 32:
            return "rows do not lie side by side from a multiple of 32 bytes on"
    return None


def _row_stride(x: torch.Tensor) -> int:
    # of (outer, inner, vocab) as one dimension of rows; 1 where there is no such view
    outer, inner, vocab = x.shape
    if outer * inner == 1:
        return vocab
    if outer > 1 and inner > 1 and x.stride(0) != inner * x.stride(1):
        return 1
    return x.stride(1) if inner > 1 else x.stride(0)


def _descriptor(x: torch.Tensor, tile: int) -> TensorDescriptor:
    # chunks of tile x RING_COLUMNS of (outer, inner, vocab)
    rows, vocab, stride = x.shape[0] * x.shape[1], x.shape[2], _row_stride(x)
    if is_flat(vocab):
        rows, vocab, stride = 1, x.numel(), x.numel()
    block = [1, tile, RING_COLUMNS]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor(
        x,
        [rows, vocab // RING_COLUMNS, RING_COLUMNS],
        [stride, RING_COLUMNS, 1],
        block,
        gl.NVMMASharedLayout.get_default_for(block, dtype),
    )


def launch_ring(
    launch: RingLaunch,
    logits: torch.Tensor,
    targets: torch.Tensor,
    loss: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    gradient: torch.Tensor,
    scale: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    ignore_index: int,
    z_loss: float,
    skip_ignored: bool,
    num_sms: int,
) -> None:
    """Loss, lse and gradient as `launch_forward` writes them; `ring_refusal` says for what. On the current device."""
    rows, vocab = logits.shape[0] * logits.shape[1], logits.shape[2]
    if launch.writers:
        if launch.kept or launch.again(vocab):
            raise ValueError(f"{launch}: {vocab} logits do not fit in its slots, and writers keep none of them")
        kernel = cross_entropy_groups_kernel
        form = {
            "AHEAD": 2,
            "FLAT": is_flat(vocab),
            "READERS": launch.num_warps,
            "WRITERS": launch.writers,
            "REGISTERS": launch.max_registers,
        }
    else:
        if is_flat(vocab):
            raise ValueError(f"{launch}: rows of {vocab} logits begin within lines, which takes writers")
        if launch.kept and vocab <= launch.kept * launch.tile * RING_COLUMNS:
            raise ValueError(f"{launch}: {vocab} logits are no more than what is kept in registers")
        kernel, form = cross_entropy_ring_kernel, {"WARPS": launch.num_warps, "KEPT": launch.kept}
    kernel[(min(rows, num_sms),)](
        _descriptor(logits, launch.tile),
        logits,
        targets,
        loss,
        lse,
        lse_low,
        gradient,
        loss if scale is None else scale,
        loss if grad_lse is None else grad_lse,
        0 if scale is None or scale.dim() == 0 else scale.stride(0),
        rows,
        _row_stride(logits),
        _row_stride(gradient),
        vocab,
        ignore_index,
        z_loss,
        SKIP_IGNORED=skip_ignored,
        HAS_SCALE=scale is not None,
        HAS_GRAD_LSE=grad_lse is not None,
        TILE=launch.tile,
        SLOTS=launch.slots,
        **form,
        num_warps=launch.num_warps,
        maxnreg=launch.max_registers,
    )
