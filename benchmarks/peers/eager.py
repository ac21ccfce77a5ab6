"""Plain PyTorch, eager: what a user would write. Attention is not here: its formula holds all scores."""

from __future__ import annotations

from functools import partial

from peers.base import Providers
from peers.fuselm_kernels import plain_call

from fuselm.kernels.specs.registry import SPECS

NAME = "eager"
DISTRIBUTIONS = ("torch",)


def providers() -> Providers:
    """The plain function of each KernelSpec but attention's."""
    return {spec.name: {NAME: partial(plain_call, spec.plain)} for spec in SPECS if spec.name != "attention"}
