"""Plain PyTorch, eager: what a user would write, and no more than the row asks for. The plain functions of the
KernelSpecs know every option of ours, which would count against them when timed. Attention is here for documents
alone, one after another: the formula holds all scores."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peers.base import Call, Maker, NotOfferedError, Providers, document_sizes, is_packed, leaves_of, same

NAME = "eager"
DISTRIBUTIONS = ("torch",)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As torch has it."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, and its norm."""
    h = x + residual
    return rms_norm(h, weight, eps), h


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """On the packed output of one layer."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    x1, x2 = x.chunk(2, -1)
    return torch.cat((-x2, x1), -1)


def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, seq, heads, head_dim); cos and sin (seq, 1, head_dim), as a model makes them once for all its layers."""
    return q * cos + _half_turned(q) * sin, k * cos + _half_turned(k) * sin


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean, in fp32."""
    return F.cross_entropy(logits.float(), targets)


def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """All logits at once."""
    return cross_entropy(F.linear(x, weight), targets)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f for f in (rms_norm, add_rms_norm, swiglu, rope, cross_entropy, linear_cross_entropy)
}


def _prepared(op: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The function's arguments: of rope, tables of the whole head_dim in q's dtype for its positions."""
    if op != "rope":
        return {name: inputs[name] for name in inspect.signature(FUNCTIONS[op]).parameters}
    at = slice(inputs["offset"], inputs["offset"] + inputs["q"].shape[1])
    tables = {n: torch.cat((inputs[n], inputs[n]), -1)[at].unsqueeze(-2).to(inputs["q"].dtype) for n in ("cos", "sin")}
    return {"q": inputs["q"], "k": inputs["k"]} | tables


def maker(op: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = same) -> Maker:
    """A maker of calls of an op's plain function, `wrap`ped anew for each row."""

    def make(inputs: dict[str, Any]) -> Call:
        return Call(partial(wrap(FUNCTIONS[op]), **_prepared(op, inputs)), leaves_of(inputs))

    return make


def _attention(inputs: dict[str, Any]) -> Call:
    """A call of torch's attention for each document, by the backend that torch picks."""
    if not is_packed(inputs):
        raise NotOfferedError("the formula holds all scores; torch's own attention is there as SDPA")
    lengths = document_sizes(inputs)

    def forward() -> torch.Tensor:
        parts = (inputs[name].split(lengths) for name in "qkv")
        outs = [
            F.scaled_dot_product_attention(
                *(t[None].transpose(1, 2) for t in document), is_causal=True, enable_gqa=True
            ).transpose(1, 2)[0]
            for document in zip(*parts, strict=True)
        ]
        return torch.cat(outs)

    return Call(forward, leaves_of(inputs))


def providers() -> Providers:
    """Every op but AdamW, which is in torch_optim.py."""
    return {op: {NAME: maker(op)} for op in FUNCTIONS} | {"attention": {NAME: _attention}}
