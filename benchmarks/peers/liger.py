"""Liger-Kernel, with its backward passes out of place where it offers the choice."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from peers.base import Call, Providers, leaves_of, own, restore, transposed

NAME = "Liger"
DISTRIBUTIONS = ("liger-kernel",)


def providers() -> Providers:
    """rms_norm, add_rms_norm, swiglu, rope, cross_entropy, linear_cross_entropy."""

    def op(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply

    rms, add_rms = op("rms_norm", "LigerRMSNormFunction"), op("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    silu_mul, rotate = op("swiglu", "LigerSiLUMulFunction"), op("rope", "LigerRopeFunction")
    loss = op("cross_entropy", "LigerCrossEntropyFunction")
    linear_loss = op("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")

    def rms_norm(inputs: dict[str, Any]) -> Call:
        x, weight, eps = inputs["x"], inputs["weight"], inputs["eps"]
        return Call(lambda: rms(x, weight, eps, 0.0, "llama", False), leaves_of(inputs))

    def add_rms_norm(inputs: dict[str, Any]) -> Call:
        x, residual, weight, eps = inputs["x"], inputs["residual"], inputs["weight"], inputs["eps"]
        return Call(lambda: add_rms(x, residual, weight, eps, 0.0, "llama", False), leaves_of(inputs))

    def swiglu(inputs: dict[str, Any]) -> Call:
        # Its models have two projections, so gate and up are two tensors; the backward pass writes over both.
        halves = [own(t) for t in inputs["gate_up"].detach().requires_grad_().chunk(2, -1)]
        gate, up = halves
        sources = inputs["gate_up"].detach().chunk(2, -1)
        return Call(
            lambda: silu_mul(gate, up),
            {"gate": gate, "up": up},
            gradients=lambda g: {"gate_up": torch.cat((g["gate"], g["up"]), -1)},
            reset=restore(list(zip(halves, sources, strict=True))),
            keeps_graph=False,
        )

    def rope(inputs: dict[str, Any]) -> Call:
        # It rotates in place, q and k forward and their gradients backward, and takes tables of the whole head_dim.
        q, k = own(inputs["q"]), own(inputs["k"])
        seq_len, offset = q.shape[1], inputs["offset"]
        cos, sin = (
            torch.cat((t, t), -1)[offset : offset + seq_len].to(q.dtype)[None] for t in (inputs["cos"], inputs["sin"])
        )
        return Call(
            lambda: rotate(q.transpose(1, 2), k.transpose(1, 2), cos, sin),
            {"q": q, "k": k},
            upstream=lambda gradients: transposed([g.clone() for g in gradients]),
            outputs=transposed,
            reset=restore([(q, inputs["q"]), (k, inputs["k"])]),
            keeps_graph=False,
        )

    def cross_entropy(inputs: dict[str, Any]) -> Call:
        logits, targets = own(inputs["logits"]), inputs["targets"]
        return Call(
            lambda: loss(logits, targets, None, -100, 0.0, 0.0, "mean", None, False)[0],
            {"logits": logits},
            reset=restore([(logits, inputs["logits"])]),
            keeps_graph=False,
        )

    def linear_cross_entropy(inputs: dict[str, Any]) -> Call:
        x, weight, targets = inputs["x"], inputs["weight"], inputs["targets"]
        return Call(lambda: linear_loss(x, weight, targets)[0], leaves_of(inputs), keeps_graph=False)

    return {
        "rms_norm": {NAME: rms_norm},
        "add_rms_norm": {NAME: add_rms_norm},
        "swiglu": {NAME: swiglu},
        "rope": {NAME: rope},
        "cross_entropy": {"Liger, in place": cross_entropy},
        "linear_cross_entropy": {NAME: linear_cross_entropy},
    }
