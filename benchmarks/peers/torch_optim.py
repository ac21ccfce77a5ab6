"""torch.optim.AdamW after torch.nn.utils.clip_grad_norm_: the fused implementation and the one of many launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peers.base import Call, NotOfferedError, Providers

NAME = "torch.optim"
DISTRIBUTIONS = ("torch",)
HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def optimizer_call(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Call:
    """A call whose outputs are the parameters, then their first and their second moments."""

    def results(_: Any) -> list[torch.Tensor]:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        states = [optimizer.state[p] for p in params]
        return [*params, *(s["exp_avg"] for s in states), *(s["exp_avg_sq"] for s in states)]

    return Call(step, {}, outputs=results, keeps_graph=False)


def clipped(optimizer: torch.optim.Optimizer, inputs: dict[str, Any]) -> Callable[[], None]:
    """clip_grad_norm_ and then a step."""

    def step() -> None:
        if inputs["max_grad_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(inputs["params"], inputs["max_grad_norm"], foreach=True)
        optimizer.step()

    return step


def _torch(inputs: dict[str, Any], **implementation: Any) -> Call:
    optimizer = torch.optim.AdamW(inputs["params"], **HYPERPARAMETERS, **implementation)
    return optimizer_call(optimizer, clipped(optimizer, inputs))


def _without_master(inputs: dict[str, Any], **implementation: Any) -> Call:
    if inputs["mode"] == "master":
        raise NotOfferedError("torch.optim.AdamW has no fp32 master copy of bf16 parameters")
    return _torch(inputs, **implementation)


def providers() -> Providers:
    """Clip and step."""
    return {
        "adamw": {
            "torch fused": partial(_without_master, fused=True),
            "torch foreach": partial(_without_master, foreach=True),
        }
    }
