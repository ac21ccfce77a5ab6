"""Which attention kernel a call runs, and why. A further kernel is an entry in `KERNELS` and a rule here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fuselm.kernels._triton import Backend, select_backend
from fuselm.kernels._triton import explain_backend as _explain_backend
from fuselm.kernels.attention.portable import portable_backward, portable_forward

KernelName = Literal["reference", "portable"]
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KERNELS = {"portable": (portable_forward, portable_backward)}


@dataclass(frozen=True)
class KernelChoice:
    """The kernel that a call runs.

    Attributes:
        name: "reference" (plain PyTorch) or "portable" (Triton, kernels/attention/portable.py).
        reason: why, in a few words.
    """

    name: KernelName
    reason: str


def explain_kernel(
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    backend: Backend = "auto",
) -> KernelChoice:
    """Which kernel `attention` runs for tensors on `device`, and why.

    Args:
        device: where q, k and v lie.
        dtype: theirs.
        head_dim: their last dimension.
        backend: as given to `attention`.

    Raises:
        ValueError: `backend` is not one of auto, triton, reference.
        TypeError: backend="triton" with a dtype that no kernel takes.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    device = torch.device(device)
    if backend == "reference":
        return KernelChoice("reference", "backend='reference' was asked for")
    if dtype not in KERNEL_DTYPES and backend == "triton":
        raise TypeError(f"q has dtype {dtype}: the attention kernels take fp32, bf16 and fp16; pass backend='auto'")
    if select_backend(backend, device) == "reference":
        return KernelChoice("reference", _explain_backend(device)[1])
    if dtype not in KERNEL_DTYPES:
        return KernelChoice("reference", f"no kernel takes {dtype}")
    return KernelChoice(
        "portable", f"{_explain_backend(device)[1]}; the portable kernel takes head_dim {head_dim} on every card"
    )
