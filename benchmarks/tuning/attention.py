"""Launch choices of attention to be timed: the Hopper kernels at the shapes of the performance table, the portable
kernels at two of them, over packed documents as well. Causal, bf16; outputs are checked against torch's SDPA."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from rows import document_lengths
from tuning.base import Target

from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.attention.hopper_backward import hopper_backward
from fuselm.kernels.attention.hopper_forward import hopper_forward
from fuselm.kernels.attention.portable import portable_backward, portable_forward
from fuselm.kernels.launch.attention import TileLaunch
from fuselm.kernels.launch.attention_hopper import (
    MIB,
    HopperBackwardLaunch,
    HopperForwardLaunch,
    hopper_backward_launch,
    hopper_forward_launch,
)

# batch, length, heads, kv_heads, head_dim
ROWS = (
    (4, 4096, 32, 8, 128),
    (1, 16384, 32, 8, 128),
    (16, 1024, 32, 8, 128),
    (2, 8192, 32, 8, 128),
    (4, 4096, 32, 8, 64),
    (32, 1024, 12, 12, 64),
    (16, 2048, 12, 12, 64),
    (1, 16384, 16, 16, 64),
)
BACKWARD_ROWS = (*ROWS, (4, 4097, 32, 8, 128))
DOCUMENT_ROWS = ((1, 16384, 32, 8, 128), (1, 16384, 32, 8, 64))
DOCUMENTS = (0, *accumulate(document_lengths(16384, 64, 8192)))  # those of the benchmark
PORTABLE_ROWS = ((4, 4096, 32, 8, 128), (4, 4096, 32, 8, 64))


def _inputs(row: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k, v as views of one packed qkv, as the model has them, and a gradient of the output."""
    batch, length, heads, kv_heads, head_dim = row
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(
        (batch, length, heads + 2 * kv_heads, head_dim), generator=generator, device=device, dtype=torch.bfloat16
    )
    dout = torch.randn((batch, length, heads, head_dim), generator=generator, device=device, dtype=torch.bfloat16)
    return (*qkv.split([heads, kv_heads, kv_heads], 2), dout)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: tuple[int, ...] = ()) -> torch.Tensor:
    outs = []
    for begin, end in pairwise(documents or (0, q.shape[1])):
        queries, keys, values = (x[:, begin:end].transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        outs.append(out.transpose(1, 2))
    return torch.cat(outs, 1)


def _borders(documents: tuple[int, ...], device: torch.device) -> torch.Tensor | None:
    return torch.tensor(documents, dtype=torch.int32, device=device) if documents else None


def _forward(
    function: Callable[..., Any], row: tuple[int, ...], device: torch.device, documents: tuple[int, ...] = ()
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v, _ = _inputs(row, device)
    scale, borders = row[-1] ** -0.5, _borders(documents, device)
    return lambda: function(q, k, v, borders, borders, True, scale, 0, 0.0)[0], lambda: _sdpa(q, k, v, documents)


def _backward(
    function: Callable[..., Any], row: tuple[int, ...], device: torch.device, documents: tuple[int, ...] = ()
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    q, k, v, dout = _inputs(row, device)
    scale, borders = row[-1] ** -0.5, _borders(documents, device)
    out, lse2 = portable_forward(q, k, v, borders, borders, True, scale, 0, 0.0)

    def reference() -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(_sdpa(*leaves, documents=documents), leaves, dout)

    return lambda: function(dout, None, q, k, v, out, lse2, borders, borders, True, scale, 0, 0.0), reference


def forward_candidates(length: int, head_dim: int) -> tuple[HopperForwardLaunch, ...]:
    """Numbers of consumers, stages and tiles of queries; sections."""
    section = hopper_forward_launch(head_dim, length, KNOWN_PROFILES[90]).section_bytes
    # At head_dim 128 shared memory has no room for a third stage of 128 keys.
    choices = [(3, 3, 2), (2, 3, 2), (3, 3, 1), (3, 4, 2), (2, 2, 1)] if head_dim == 64 else [(2, 2, 1)]
    launches = [HopperForwardLaunch(consumers, 128, stages, section, tiles) for consumers, stages, tiles in choices]
    sections = [dataclasses.replace(launches[0], section_bytes=s * MIB) for s in (16, 20, 24, 32) if s * MIB != section]
    return (*launches, *sections)


def backward_candidates(length: int, head_dim: int, packed: bool = False) -> tuple[HopperBackwardLaunch, ...]:
    """Short tiles at the end; sections."""
    launch = hopper_backward_launch(head_dim, length, KNOWN_PROFILES[90], packed)
    others = [dataclasses.replace(launch, held=held) for held in (0, 1, 2, 4) if held != launch.held]
    others += [dataclasses.replace(launch, section_bytes=launch.section_bytes * n // 4) for n in (3, 2, 6)]
    return tuple(others)


def _tile_candidates(ms: tuple[int, ...], ns: tuple[int, ...], stages: tuple[int, ...]) -> tuple[TileLaunch, ...]:
    """Tiles of at most 128 x 128, and warps for them: four hold a warpgroup's 64 rows, eight two."""
    choices = itertools.product(ms, ns, (8, 4), stages)
    return tuple(
        TileLaunch(m, n, w, s) for m, n, w, s in choices if m * n <= 128 * 128 and not (m == 64 == n and w == 8)
    )


def _name(direction: str, kernel: str, row: tuple[int, ...], documents: tuple[int, ...] = ()) -> str:
    batch, length, heads, kv_heads, head_dim = row
    packed = f" in {len(documents) - 1} documents" if documents else ""
    return f"attention {kernel} {direction} B{batch} S{length}{packed} H{heads}/{kv_heads} D{head_dim} bf16"


_HOPPER, _PORTABLE = "fuselm.kernels.attention.hopper_", "fuselm.kernels.attention.portable."
TARGETS = (
    [
        Target(
            _name("forward", "hopper", row, documents),
            f"{_HOPPER}forward.hopper_forward_launch",
            forward_candidates(row[1] // max(len(documents) - 1, 1), row[-1]),
            functools.partial(_forward, hopper_forward, row, documents=documents),
            0,
        )
        for rows, documents in ((ROWS, ()), (DOCUMENT_ROWS, DOCUMENTS))
        for row in rows
    ]
    + [
        Target(
            _name("backward", "hopper", row, documents),
            f"{_HOPPER}backward.hopper_backward_launch",
            backward_candidates(row[1], row[-1], bool(documents)),
            functools.partial(_backward, hopper_backward, row, documents=documents),
            0,
        )
        for rows, documents in ((BACKWARD_ROWS, ()), (DOCUMENT_ROWS, DOCUMENTS))
        for row in rows
    ]
    + [
        Target(
            _name(name, "portable", row), _PORTABLE + attribute, candidates, functools.partial(make, function, row), 0
        )
        for row in PORTABLE_ROWS
        for name, attribute, function, make, candidates in (
            (
                "forward",
                "forward_launch",
                portable_forward,
                _forward,
                _tile_candidates((128, 64), (128, 64, 32), (3, 2, 4)),
            ),
            (
                "backward dk dv",
                "key_value_launch",
                portable_backward,
                _backward,
                _tile_candidates((64, 32, 128), (128, 64), (2, 3)),
            ),
            (
                "backward dq",
                "query_launch",
                portable_backward,
                _backward,
                _tile_candidates((128, 64), (64, 128, 32), (2, 3)),
            ),
        )
    ]
)
