"""Which attention kernel a call runs, and why. A further kernel is an entry in `KERNELS` and a rule here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from fuselm.kernels._triton import INTERPRET, Backend, device_profile, select_backend
from fuselm.kernels._triton import explain_backend as _explain_backend
from fuselm.kernels.attention.hopper_backward import hopper_backward
from fuselm.kernels.attention.hopper_common import HAVE_GLUON, tma_refusal
from fuselm.kernels.attention.hopper_forward import hopper_forward
from fuselm.kernels.attention.portable import portable_backward, portable_forward

KernelName = Literal["reference", "portable", "hopper"]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = {"portable": (portable_forward, portable_backward), "hopper": (hopper_forward, hopper_backward)}
HOPPER_HEAD_DIMS = (64, 128)
HOPPER_BY_DEFAULT = True
"""Whether calls that the Hopper kernels take run them without being asked (`prefer_hopper`)."""

_hopper_enabled = HOPPER_BY_DEFAULT


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that a call runs.

    Attributes:
        name: "reference" (plain PyTorch), "portable" (Triton, kernels/attention/portable.py) or "hopper" (Gluon,
            hopper_forward.py and hopper_backward.py).
        reason: why, in a few words; for "portable" also why not "hopper".
    """

    name: KernelName
    reason: str


@contextlib.contextmanager
def prefer_hopper(enabled: bool = True) -> Iterator[None]:
    """Within this context the Hopper kernels run wherever they can (or, with False, nowhere); for comparisons.

    Args:
        enabled: whether they run at all.
    """
    global _hopper_enabled
    before = _hopper_enabled
    _hopper_enabled = enabled
    try:
        yield
    finally:
        _hopper_enabled = before


def hopper_refusal(
    device: torch.device,
    *,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float = 0.0,
    tensors: tuple[torch.Tensor, ...] = (),
) -> str | None:
    """Why a call does not run the Hopper kernels, or None where it does.

    Args:
        device: where q, k and v lie.
        dtype: theirs.
        head_dim: their last dimension.
        softcap: as given to the op, 0 for none.
        tensors: q, k and v as (batch, rows, heads, head_dim), where they are known: TMA constrains their strides.
    """
    if not _hopper_enabled:
        return "the Hopper kernels are switched off (fuselm.kernels.attention.dispatch.prefer_hopper)"
    if not HAVE_GLUON:
        return "this Triton has no Gluon: it begins with Triton 3.6"
    if INTERPRET:
        return "Triton's interpreter does not run Gluon"
    if device.type == "cpu" and _explain_backend(device)[0] == "reference":  # but when compiling ahead of time
        return "the Hopper kernels are for GPUs of compute capability 9.0, this is a CPU"
    arch = device_profile(device).arch
    if arch != 90:
        return f"the Hopper kernels are for compute capability 9.0, this is {arch / 10:.1f}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the Hopper kernels take bf16 and fp16, not {dtype}"
    if head_dim not in HOPPER_HEAD_DIMS:
        return f"the Hopper kernels take head_dim {' and '.join(map(str, HOPPER_HEAD_DIMS))}, not {head_dim}"
    if softcap:
        return "the Hopper kernels have no softcap"
    for name, x in zip("qkv", tensors, strict=False):
        if x.numel() == 0:
            return f"{name} is empty"
        refusal = tma_refusal(name, x)
        if refusal is not None:
            return refusal
    return None


def _reference_choice(device: torch.device, dtype: torch.dtype, backend: Backend) -> KernelChoice | None:
    if backend == "reference":
        return KernelChoice("reference", "backend='reference' was asked for")
    if dtype not in KERNEL_DTYPES and backend == "triton":
        raise TypeError(f"q has dtype {dtype}: the attention kernels take fp32, bf16 and fp16; pass backend='auto'")
    if select_backend(backend, device) == "reference":
        return KernelChoice("reference", _explain_backend(device)[1])
    if dtype not in KERNEL_DTYPES:
        return KernelChoice("reference", f"no kernel takes {dtype}")
    return None


def runs_reference(device: torch.device, dtype: torch.dtype, backend: Backend) -> bool:
    """Whether plain PyTorch runs instead of a kernel; what torch.compile may trace of the choice.

    Raises:
        ValueError, TypeError, RuntimeError: as `explain_kernel`.
    """
    return _reference_choice(device, dtype, backend) is not None


def explain_kernel(
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    backend: Backend = "auto",
    softcap: float = 0.0,
    tensors: tuple[torch.Tensor, ...] = (),
) -> KernelChoice:
    """Which kernel `attention` runs for tensors on `device`, forward and backward, and why.

    Args:
        device: where q, k and v lie.
        dtype: theirs.
        head_dim: their last dimension.
        backend: as given to `attention`.
        softcap: as given to `attention`, 0 for none.
        tensors: q, k and v, (batch, seq, heads, head_dim) or (tokens, heads, head_dim): their strides matter to TMA.

    Raises:
        ValueError: `backend` is not one of auto, triton, reference.
        TypeError: backend="triton" with a dtype that no kernel takes.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    device = torch.device(device)
    choice = _reference_choice(device, dtype, backend)
    if choice is not None:
        return choice
    why = _explain_backend(device)[1]
    refusal = hopper_refusal(
        device,
        dtype=dtype,
        head_dim=head_dim,
        softcap=softcap,
        tensors=tuple(x[None] if x.dim() == 3 else x for x in tensors),
    )
    if refusal is None:
        return KernelChoice("hopper", why)
    return KernelChoice("portable", f"{why}; {refusal}; the portable kernel takes head_dim {head_dim} on every card")
