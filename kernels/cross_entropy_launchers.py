"""Launches of the kernels in cross_entropy_kernels.py and, for few rows, cross_entropy_parts_kernels.py."""

from __future__ import annotations

import torch

from fuselm.kernels._triton import DeviceProfile, device_profile
from fuselm.kernels.cross_entropy_kernels import (
    VECTOR_BYTES,
    cross_entropy_backward_kernel,
    cross_entropy_forward_kernel,
)
from fuselm.kernels.cross_entropy_parts_kernels import cross_entropy_parts_gradient_kernel, cross_entropy_parts_kernel
from fuselm.kernels.cross_entropy_ring import launch_ring, ring_refusal
from fuselm.kernels.direct import launch_device
from fuselm.kernels.launch.cross_entropy import PartsLaunch, cross_entropy_launch, parts_launch, ring_launch, ring_rows

Options = tuple[int, float, float, float]
"""ignore_index, label_smoothing, z_loss, softcap (0 for none)."""


def _geometry(logits: torch.Tensor, gradient: torch.Tensor) -> dict[str, int]:
    """Kernel arguments that say where 16-byte borders lie in the rows of (outer, inner, vocab) tensors."""
    vector = VECTOR_BYTES // logits.element_size()

    def phases(x: torch.Tensor) -> tuple[int, ...]:
        strides = [stride for size, stride in zip(x.shape[:2], x.stride()[:2], strict=True) if size > 1]
        return tuple(n % vector for n in (x.data_ptr() // x.element_size(), *strides))

    mine = phases(logits)
    return {
        "shift": mine[0],
        "RAGGED": any(mine) or logits.shape[2] % vector != 0,
        "ALIGNMENT": VECTOR_BYTES if mine == phases(gradient) else 1,  # of vectors in the gradient
        "VECTOR": vector,
    }


def _rows_aligned(logits: torch.Tensor) -> bool:
    # whether every row of (outer, inner, vocab) logits begins at a 16-byte border
    steps = (stride for size, stride in zip(logits.shape[:2], logits.stride()[:2], strict=True) if size > 1)
    return not any(n % VECTOR_BYTES for n in (logits.data_ptr(), *(n * logits.element_size() for n in steps)))


def _rows_in_ring(
    logits: torch.Tensor, gradient: torch.Tensor, profile: DeviceProfile, smoothing: bool, softcap: bool
) -> int:
    # how many rows of (outer, inner, vocab) logits, from the first one on, launch_ring takes
    rows, vocab = logits.shape[0] * logits.shape[1], logits.shape[2]
    some = ring_rows(rows, vocab)
    if some < rows:
        if not (logits.is_contiguous() and gradient.is_contiguous()):
            return 0
        logits, gradient = (x.view(1, rows, vocab)[:, :some] for x in (logits, gradient))
    return some if ring_refusal(logits, gradient, profile, smoothing, softcap) is None else 0


def _launch_parts(
    split: PartsLaunch,
    logits: torch.Tensor,
    targets: torch.Tensor,
    loss: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    gradient: torch.Tensor | None,
    scale: torch.Tensor | None,
    weight: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    options: Options,
    combine: bool,
    skip_ignored: bool = False,
    keep_if_one: bool = False,
) -> None:
    """Few rows: what launch_forward (`combine`) and launch_backward do, with several programs a row."""
    outer, inner, vocab = logits.shape
    rows = outer * inner
    ignore_index, label_smoothing, z_loss, softcap = options
    written = logits if gradient is None else gradient
    geometry = _geometry(logits, written)
    alignment = geometry.pop("ALIGNMENT")
    shared = {
        "vocab": vocab,
        "part_size": split.part_size,
        "softcap": softcap,
        "HAS_SMOOTHING": label_smoothing != 0,
        "HAS_SOFTCAP": softcap != 0,
        "PARTS": split.parts,
        "BLOCK": split.block,
        "num_warps": split.num_warps,
        **geometry,
    }
    parts = lse
    with launch_device(logits):
        if combine:
            parts = torch.empty((4, rows, split.parts), dtype=torch.float32, device=logits.device)
            cross_entropy_parts_kernel[(rows * split.parts,)](
                logits, targets, parts, rows, inner, logits.stride(0), logits.stride(1), **shared
            )
        cross_entropy_parts_gradient_kernel[(rows * split.parts if gradient is not None else rows,)](
            logits,
            targets,
            parts,
            loss,
            lse,
            lse_low,
            written,
            lse if scale is None else scale,
            lse if weight is None else weight,
            lse if grad_lse is None else grad_lse,
            0 if scale is None or scale.dim() == 0 else scale.stride(0),
            rows,
            inner,
            logits.stride(0),
            logits.stride(1),
            written.stride(0),
            written.stride(1),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            COMBINE=combine,
            SKIP_IGNORED=skip_ignored,
            WRITE_GRADIENT=gradient is not None,
            KEEP_IF_ONE=keep_if_one,
            HAS_SCALE=scale is not None,
            HAS_WEIGHT=weight is not None,
            HAS_GRAD_LSE=grad_lse is not None,
            ALIGNMENT=alignment,
            BLOCK_PARTS=max(1 << (split.parts - 1).bit_length(), 32),
            **shared,
        )


def launch_forward(
    logits: torch.Tensor,
    targets: torch.Tensor,
    loss: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    *,
    options: Options,
    skip_ignored: bool,
    gradient: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> None:
    """Loss and lse of each row and, in the same launch, the gradient.

    Args:
        logits: (outer, inner, vocab), unit stride in the last dimension.
        targets, loss, lse, lse_low: (outer * inner,) contiguous; the last three are written, fp32.
        options: see Options.
        skip_ignored: leave lse 0 for ignored rows, whose logits are then not read.
        gradient: shape of logits, or logits itself to overwrite them; None writes none.
        scale: fp32, what each row's loss gradient is multiplied by: (rows,) or 0-dim; None for 1.
        grad_lse: (rows,) contiguous fp32, the upstream gradient of lse; None for 0.
        total: where logits are a part of the vocabulary: (rows,) fp32, gets the sum of each row's (capped) logits if
            there is smoothing. `loss` then gets the target's (capped) logit, 0 where the target is in another part.
    """
    outer, inner, vocab = logits.shape
    rows = outer * inner
    if rows == 0:
        return
    ignore_index, label_smoothing, z_loss, softcap = options
    written = logits if gradient is None else gradient
    profile = device_profile(logits.device)
    split = None if total is not None else parts_launch(rows, vocab, logits.dtype, profile)
    if split is not None:
        skip = skip_ignored and grad_lse is None
        _launch_parts(split, logits, targets, loss, lse, lse_low, gradient, scale, None, grad_lse, options, True, skip)
        return
    skip = skip_ignored and grad_lse is None
    ring = None if gradient is None or total is not None else ring_launch(vocab, profile)
    first = 0 if ring is None else _rows_in_ring(logits, written, profile, label_smoothing != 0, softcap != 0)
    if ring is not None and first == rows:
        tensors = (logits, targets, loss, lse, lse_low, written, scale, grad_lse)
        with launch_device(logits):
            launch_ring(ring, *tensors, ignore_index, z_loss, skip, profile.num_sms)
        return
    if first:
        for part in (slice(first), slice(first, None)):
            launch_forward(
                logits.view(1, rows, vocab)[:, part],
                targets[part],
                loss[part],
                lse[part],
                lse_low[part],
                options=options,
                skip_ignored=skip_ignored,
                gradient=written.view(1, rows, vocab)[:, part],
                scale=scale if scale is None or scale.dim() == 0 else scale[part],
                grad_lse=None if grad_lse is None else grad_lse[part],
            )
        return
    launch = cross_entropy_launch(vocab, logits.dtype, profile, softcap != 0, _rows_aligned(logits))
    with launch_device(logits):
        cross_entropy_forward_kernel[(rows,)](
            logits,
            targets,
            loss,
            lse,
            lse_low,
            loss if total is None else total,
            written,
            loss if scale is None else scale,
            loss if grad_lse is None else grad_lse,
            0 if scale is None or scale.dim() == 0 else scale.stride(0),
            inner,
            logits.stride(0),
            logits.stride(1),
            written.stride(0),
            written.stride(1),
            vocab=vocab,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            ahead=profile.num_sms,
            PARTIAL=total is not None,
            SKIP_IGNORED=skip,
            WRITE_GRADIENT=gradient is not None,
            HAS_SCALE=scale is not None,
            HAS_GRAD_LSE=grad_lse is not None,
            HAS_SMOOTHING=label_smoothing != 0,
            HAS_SOFTCAP=softcap != 0,
            AHEAD=launch.ahead if gradient is not None else 0,
            THREADS=32 * launch.num_warps,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            **_geometry(logits, written),
        )


def launch_backward(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    lse_low: torch.Tensor,
    weight: torch.Tensor,
    grad_loss: torch.Tensor,
    grad_lse: torch.Tensor | None,
    options: Options,
    keep_if_one: bool = False,
    classes: int | None = None,
) -> None:
    """The gradient of each row from its saved lse = lse (high part) + lse_low.

    Args:
        gradient: written; shape of logits, or logits itself to overwrite them.
        logits: (outer, inner, vocab), unit stride in the last dimension.
        targets, lse, lse_low: (outer * inner,) contiguous, as the forward launch had or wrote them.
        weight: 0-dim fp32, multiplies grad_loss.
        grad_loss: fp32 upstream gradient of the loss, 0-dim or (rows,).
        grad_lse: (rows,) fp32 upstream gradient of lse, or None for 0.
        options: see Options.
        keep_if_one: leave `gradient` as it is where grad_loss, 0-dim, is exactly 1.
        classes: where logits are a part of the vocabulary: how many classes there are in all. Targets outside the part
            are then right, and lse is that of all classes.
    """
    outer, inner, vocab = logits.shape
    rows = outer * inner
    if rows == 0:
        return
    ignore_index, label_smoothing, z_loss, softcap = options
    profile = device_profile(logits.device)
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    split = None if classes is not None else parts_launch(rows, vocab, logits.dtype, profile)
    if split is not None:
        _launch_parts(
            split,
            logits,
            targets,
            lse,
            lse,
            lse_low,
            gradient,
            grad_loss,
            weight,
            grad_lse,
            options,
            combine=False,
            keep_if_one=keep_if_one,
        )
        return
    launch = cross_entropy_launch(vocab, logits.dtype, profile, softcap != 0, _rows_aligned(logits))
    with launch_device(logits):
        cross_entropy_backward_kernel[(min(rows, profile.num_sms * max(64 // launch.num_warps, 1)),)](
            logits,
            targets,
            lse,
            lse_low,
            gradient,
            grad_loss,
            weight,
            lse if grad_lse is None else grad_lse,
            0 if grad_loss.dim() == 0 else grad_loss.stride(0),
            rows,
            inner,
            logits.stride(0),
            logits.stride(1),
            gradient.stride(0),
            gradient.stride(1),
            vocab=vocab,
            classes=vocab if classes is None else classes,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            KEEP_IF_ONE=keep_if_one,
            HAS_GRAD_LSE=grad_lse is not None,
            HAS_SMOOTHING=label_smoothing != 0,
            HAS_SOFTCAP=softcap != 0,
            PARTIAL=classes is not None,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            **_geometry(logits, gradient),
        )
