"""The same plain PyTorch under torch.compile. Attention is in flex.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peers.base import Maker, Providers
from peers.fuselm_kernels import plain_call

from fuselm.kernels.specs.registry import SPECS

NAME = "torch.compile"
DISTRIBUTIONS = ("torch", "triton")


def _maker(function: Callable[..., Any]) -> Maker:
    # Compiled anew for each row: a second shape would make it compile for dynamic shapes, a ninth fall back to eager.
    return lambda inputs: plain_call(torch.compile(function, dynamic=False), inputs)


def providers() -> Providers:
    """The plain function of each KernelSpec but attention's."""
    return {spec.name: {NAME: _maker(spec.plain)} for spec in SPECS if spec.name != "attention"}
