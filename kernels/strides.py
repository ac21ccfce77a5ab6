"""How kernels take tensors of any strides: as rows with a contiguous last dimension, copied only where they must be."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` (..., n) as (rows, n) with unit stride in the last dimension.

    A view where the leading dimensions collapse; otherwise one copy (an expanded gradient, a transposed input).
    """
    n = x.shape[-1]
    if x.stride(-1) != 1 and n > 1:
        x = x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, n)
