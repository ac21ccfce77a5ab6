"""This project's kernels, as any other provider."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peers.base import DETERMINISTIC, OURS, Call, Maker, NotOfferedError, Providers, leaves_of, own, restore
from peers.torch_optim import HYPERPARAMETERS, optimizer_call

from fuselm.kernels.adamw import AdamW
from fuselm.kernels.attention import dispatch
from fuselm.kernels.attention.api import attention
from fuselm.kernels.specs.registry import SPECS

NAME = OURS
DISTRIBUTIONS: tuple[str, ...] = ()


def plain_call(function: Callable[..., Any], inputs: dict[str, Any]) -> Call:
    """A call of a function that takes our inputs and leaves them alone."""
    return Call(partial(function, **inputs), leaves_of(inputs))


def _compiled(function: Callable[..., Any]) -> Maker:
    return lambda inputs: plain_call(torch.compile(function, dynamic=False), inputs)


def _inplace(function: Callable[..., Any], inputs: dict[str, Any]) -> Call:
    logits = own(inputs["logits"])
    call = partial(function, **(inputs | {"logits": logits}), inplace=True)
    return Call(call, {"logits": logits}, reset=restore([(logits, inputs["logits"])]), keeps_graph=False)


def _small_chunks(function: Callable[..., Any], inputs: dict[str, Any]) -> Call:
    """With a buffer of logits no larger than Liger's, whose rows are the next power of two of rows · dim / vocab."""
    (rows, dim), vocab = inputs["x"].shape, inputs["weight"].shape[0]
    chunk = min(1 << (-(-rows // -(-vocab // dim)) - 1).bit_length(), rows)
    return plain_call(partial(function, memory_budget=chunk * vocab * inputs["x"].element_size()), inputs)


def _other_attention(inputs: dict[str, Any]) -> Call:
    """The kernels that a Hopper card would not run of itself: portable ones if the Hopper ones are the default."""
    hopper, q = not dispatch.HOPPER_BY_DEFAULT, inputs["q"]
    with dispatch.prefer_hopper():
        refusal = dispatch.hopper_refusal(q.device, dtype=q.dtype, head_dim=q.shape[-1])
    if refusal is not None:
        raise NotOfferedError(refusal)
    call = plain_call(attention, inputs)
    return dataclasses.replace(call, context=partial(dispatch.prefer_hopper, hopper))


def _deterministic_attention(inputs: dict[str, Any]) -> Call:
    """With the Hopper backward that adds dQ up in a fixed order: what the same bits in every run cost."""
    q = inputs["q"]
    refusal = dispatch.hopper_refusal(q.device, dtype=q.dtype, head_dim=q.shape[-1])
    if refusal is not None:
        raise NotOfferedError(refusal)
    return plain_call(partial(attention, deterministic=True), inputs)


def _adamw(inputs: dict[str, Any]) -> Call:
    mode = inputs["mode"]
    state_dtype = torch.bfloat16 if mode == "bf16" else None
    optimizer = AdamW(
        inputs["params"],
        **HYPERPARAMETERS,
        max_grad_norm=inputs["max_grad_norm"],
        master_weights=mode == "master",
        state_dtype=state_dtype,
    )
    return optimizer_call(optimizer, optimizer.step)


def providers() -> Providers:
    """Every op; "fuselm, compiled" is the op inside torch.compile, whose time must be that of the eager launch."""
    made: dict[str, dict[str, Maker]] = {}
    for spec in SPECS:
        made[spec.name] = {"fuselm": partial(plain_call, spec.function), "fuselm, compiled": _compiled(spec.function)}
    functions = {spec.name: spec.function for spec in SPECS}
    made["cross_entropy"]["fuselm, in place"] = partial(_inplace, functions["cross_entropy"])
    made["linear_cross_entropy"]["fuselm, Liger's chunk"] = partial(_small_chunks, functions["linear_cross_entropy"])
    other = "portable" if dispatch.HOPPER_BY_DEFAULT else "Hopper"
    made["attention"][f"fuselm, {other} kernels"] = _other_attention
    made["attention"][DETERMINISTIC] = _deterministic_attention
    made["adamw"] = {"fuselm": _adamw}
    return made
