"""Apple's cut cross-entropy: the least memory; its default setting drops gradients below a threshold."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from peers.base import Call, Providers, leaves_of

NAME = "CCE"
DISTRIBUTIONS = ("cut-cross-entropy",)


def providers() -> Providers:
    """linear_cross_entropy."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def linear_cross_entropy(inputs: dict[str, Any]) -> Call:
        call = partial(function, inputs["x"], inputs["weight"], inputs["targets"])
        return Call(call, leaves_of(inputs), keeps_graph=False)

    return {"linear_cross_entropy": {NAME: linear_cross_entropy}}
