"""NVIDIA apex: FusedRMSNorm and FusedAdam. The package of that name on PyPI is something else, without the two."""

from __future__ import annotations

import importlib
from typing import Any

from peers.base import Call, Providers, leaves_of
from peers.torch_optim import HYPERPARAMETERS, clipped, optimizer_call

NAME = "apex"
DISTRIBUTIONS = ("apex",)


def providers() -> Providers:
    """rms_norm, and clip and step."""
    norm = importlib.import_module("apex.normalization").FusedRMSNorm
    adam = importlib.import_module("apex.optimizers").FusedAdam

    def rms_norm(inputs: dict[str, Any]) -> Call:
        x, weight = inputs["x"], inputs["weight"]
        module = norm(x.shape[-1], eps=inputs["eps"]).to(x.device, x.dtype)
        module.weight = type(module.weight)(weight.detach().clone())
        return Call(lambda: module(x), leaves_of({"x": x, "weight": module.weight}))

    def adamw(inputs: dict[str, Any]) -> Call:
        master = inputs["mode"] == "master"
        options = {"master_weights": True, "capturable": True} if master else {}
        optimizer = adam(inputs["params"], **HYPERPARAMETERS, adam_w_mode=True, **options)
        return optimizer_call(optimizer, clipped(optimizer, inputs))

    return {"rms_norm": {NAME: rms_norm}, "adamw": {"apex, torch's clip": adamw}}
