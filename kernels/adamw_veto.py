"""AdamW's veto: somebody outside the optimizer may refuse a step between its norm and its update."""

from __future__ import annotations

from collections.abc import Callable

import torch

Veto = Callable[[torch.Tensor], torch.Tensor]


def ask(veto: Veto, norm: torch.Tensor) -> torch.Tensor:
    """The answer of `veto`, checked by what the host knows of it; nothing waits for its value.

    Args:
        veto: called with `norm`.
        norm: () fp64, the global gradient norm before clipping; NaN where it is not finite.

    Returns:
        () bool on the norm's device: whether the step must not be taken.

    Raises:
        TypeError: `veto` cannot be called, or does not return a bool tensor.
        ValueError: the tensor is not (), or on another device.
    """
    if not callable(veto):
        raise TypeError(f"veto={veto!r}: expected a function of the norm, or None")
    answer = veto(norm)
    if not isinstance(answer, torch.Tensor) or answer.dtype != torch.bool:
        kind = f"a {answer.dtype} tensor" if isinstance(answer, torch.Tensor) else repr(answer)
        raise TypeError(f"veto returned {kind}: expected a bool tensor; compare on the device, as in norm > 10")
    if answer.shape != () or answer.device != norm.device:
        raise ValueError(
            f"veto returned a tensor of shape {tuple(answer.shape)} on {answer.device}: expected shape () on "
            f"{norm.device}"
        )
    return answer
