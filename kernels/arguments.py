"""Checks of arguments that all ops share, and what dtype a linear layer computes in."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

import torch


def check_tensors(required: Mapping[str, object], optional: Mapping[str, object] | None = None) -> None:
    """Refuses arguments, by name, that are no tensors; those in `optional` may be None.

    Raises:
        TypeError: names the argument, its value and its type.
    """
    for name, value in required.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(_refusal(name, value, "a torch.Tensor"))
    for name, value in (optional or {}).items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(_refusal(name, value, "a torch.Tensor or None"))


def check_numbers(optional: Mapping[str, object], expected: str, *, whole: bool = False) -> None:
    """Refuses arguments, by name, that are neither None nor numbers (whole ones); `expected` says what they may be.

    Raises:
        TypeError: names the argument, its value and its type.
    """
    kinds, method = (int, "__index__") if whole else ((int, float), "__float__")
    for name, value in optional.items():
        if value is not None and not isinstance(value, kinds) and not hasattr(value, method):
            shown = reprlib.repr(value)
            raise TypeError(f"{name} is {shown}, of type {type(value).__name__}: expected {expected}")


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What torch.autocast multiplies in on `device`; None outside of it."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # which has no autocast, and would raise
        return None
    return torch.get_autocast_dtype(device.type)


def _refusal(name: str, value: object, expected: str) -> str:
    return (
        f"{name} is {reprlib.repr(value)}, of type {type(value).__name__}: expected {expected}; torch.as_tensor makes "
        "one of numbers or of an array"
    )
