"""QuACK: CuTe kernels for Hopper and Blackwell."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from peers.base import Call, Providers, leaves_of, own, restore

NAME = "QuACK"
DISTRIBUTIONS = ("quack-kernels", "nvidia-cutlass-dsl")


def providers() -> Providers:
    """rms_norm, add_rms_norm, cross_entropy, linear_cross_entropy. Its norm takes an fp32 weight."""
    quack = importlib.import_module("quack")

    def fp32_weight(inputs: dict[str, Any]) -> torch.Tensor:
        return inputs["weight"].detach().float().requires_grad_()

    def rms_norm(inputs: dict[str, Any]) -> Call:
        x, weight, eps = inputs["x"], fp32_weight(inputs), inputs["eps"]
        return Call(lambda: quack.rmsnorm(x, weight, eps=eps), leaves_of({"x": x, "weight": weight}))

    def add_rms_norm(inputs: dict[str, Any]) -> Call:
        x, residual, weight, eps = inputs["x"], inputs["residual"], fp32_weight(inputs), inputs["eps"]
        return Call(
            lambda: quack.rmsnorm(x, weight, residual=residual, prenorm=True, eps=eps),
            leaves_of({"x": x, "residual": residual, "weight": weight}),
        )

    def cross_entropy(inputs: dict[str, Any]) -> Call:
        return Call(partial(quack.cross_entropy, inputs["logits"], inputs["targets"]), leaves_of(inputs))

    def cross_entropy_in_place(inputs: dict[str, Any]) -> Call:
        logits = own(inputs["logits"])
        return Call(
            partial(quack.cross_entropy, logits, inputs["targets"], inplace_backward=True),
            {"logits": logits},
            reset=restore([(logits, inputs["logits"])]),
            keeps_graph=False,
        )

    def linear_cross_entropy(inputs: dict[str, Any]) -> Call:
        module = importlib.import_module("quack.linear_cross_entropy")  # apart: it does not import everywhere
        call = partial(module.chunked_linear_cross_entropy, inputs["x"], inputs["weight"], inputs["targets"])
        return Call(call, leaves_of(inputs), keeps_graph=False)

    return {
        "rms_norm": {NAME: rms_norm},
        "add_rms_norm": {NAME: add_rms_norm},
        "cross_entropy": {NAME: cross_entropy, "QuACK, in place": cross_entropy_in_place},
        "linear_cross_entropy": {NAME: linear_cross_entropy},
    }
