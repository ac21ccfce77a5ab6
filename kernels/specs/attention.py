"""KernelSpec of attention, and the formula in plain PyTorch that tests measure against."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuselm.kernels.attention.api import attention
from fuselm.kernels.specs.base import Case, Direction, KernelSpec, randn


def _mask(queries: int, keys: int, causal: bool, window: int | None, device: torch.device) -> torch.Tensor:
    """(queries, keys) bool, True where visible, written out position by position."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        mask = mask.tril(keys - queries)
    if window is not None:
        mask = mask.triu(keys - queries - window + 1)
    return mask


def _plain_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, rows, heads, head_dim) -> (out, lse): torch's SDPA where it has the option, the formula for the rest."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seen = mask.any(-1)
    scores = scores.masked_fill(~mask, float("-inf"))
    lse = torch.where(seen, torch.where(seen[:, None], scores, 0.0).logsumexp(-1), float("-inf"))
    if softcap is None:
        with sdpa_kernel(SDPBackend.MATH):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        out = torch.where(seen[:, None], torch.where(seen[:, None], scores, 0.0).softmax(-1), 0.0) @ v
    return out.transpose(1, 2), lse


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What a user would write: one SDPA call, or one for each document. The arguments are those of `attention`."""
    factor = float(q.shape[-1] ** -0.5) if scale is None else scale
    if cu_seqlens_q is None:
        mask = _mask(q.shape[1], k.shape[1], causal, window, q.device)
        out, lse = _plain_dense(q, k, v, mask, factor, softcap)
        return (out, lse) if return_lse else out
    q_borders = cu_seqlens_q.tolist()
    k_borders = q_borders if cu_seqlens_k is None else cu_seqlens_k.tolist()
    outs, lses = [], []
    for i in range(len(q_borders) - 1):
        rows, columns = slice(q_borders[i], q_borders[i + 1]), slice(k_borders[i], k_borders[i + 1])
        mask = _mask(rows.stop - rows.start, columns.stop - columns.start, causal, window, q.device)
        if mask.numel() == 0:  # no keys or no queries; an empty softmax is not everywhere defined
            outs.append(torch.zeros_like(q[rows]))
            lses.append(q.new_full((q.shape[1], mask.shape[0]), float("-inf")))
            continue
        out, lse = _plain_dense(q[None, rows], k[None, columns], v[None, columns], mask, factor, softcap)
        outs.append(out[0])
        lses.append(lse[0])
    tail = q.shape[0] - q_borders[-1]
    outs.append(torch.zeros_like(q[q_borders[-1] :]))
    lses.append(q.new_full((q.shape[1], tail), float("-inf")))
    return (torch.cat(outs), torch.cat(lses, 1)) if return_lse else torch.cat(outs)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> dict[str, Any]:
    heads, kv_heads = case.get("heads", (2, 1))
    head_dim, (queries, keys) = case["head_dim"], case["lengths"]
    lead = () if "documents_q" in case else (case.get("batch", 1),)
    inputs: dict[str, Any] = {
        "q": randn((*lead, queries, heads, head_dim), dtype, device, generator),
        "k": randn((*lead, keys, kv_heads, head_dim), dtype, device, generator),
        "v": randn((*lead, keys, kv_heads, head_dim), dtype, device, generator),
    }
    for side in "qk":
        if f"documents_{side}" in case:
            borders = torch.tensor(case[f"documents_{side}"], dtype=torch.int32, device=device)
            inputs[f"cu_seqlens_{side}"] = borders
    options = ("causal", "scale", "window", "softcap", "return_lse")
    return inputs | {name: case[name] for name in options if name in case}


def _pairs(case: Case) -> int:
    """Visible pairs of query and key, over batch and heads."""
    queries, keys = case["lengths"]
    mask = _mask(queries, keys, case.get("causal", True), case.get("window"), torch.device("cpu"))
    return int(mask.sum()) * case.get("batch", 1) * case.get("heads", (2, 1))[0]


def _flops(case: Case, direction: Direction) -> int:
    return _pairs(case) * case["head_dim"] * (4 if direction == "forward" else 10)


def _bytes(case: Case, dtype: torch.dtype, direction: Direction) -> int:
    heads, kv_heads = case.get("heads", (2, 1))
    queries, keys = case["lengths"]
    rows = (queries * heads + keys * kv_heads) * case.get("batch", 1)
    return rows * case["head_dim"] * dtype.itemsize * (2 if direction == "forward" else 4)


def _benchmark(batch: int, length: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    return {"batch": batch, "lengths": (length, length), "heads": (heads, kv_heads), "head_dim": head_dim}


_TEST: tuple[Case, ...] = (
    {"lengths": (17, 17), "head_dim": 16, "return_lse": True},
    {"lengths": (129, 129), "head_dim": 40},
    {"lengths": (2, 5), "head_dim": 64, "return_lse": True},
    {"lengths": (16, 127), "head_dim": 16, "causal": False, "softcap": 2.0},
    {"lengths": (130, 130), "head_dim": 16, "window": 70},
    {"lengths": (60, 50), "head_dim": 16, "documents_q": (0, 20, 20, 45), "documents_k": (0, 30, 35, 50)},
)
_BENCHMARK: tuple[Case, ...] = (
    _benchmark(4, 4096, 32, 8, 128),
    _benchmark(2, 8192, 32, 8, 128),
    _benchmark(1, 16384, 32, 8, 128),
    _benchmark(16, 1024, 32, 8, 128),
    _benchmark(32, 1024, 12, 12, 64),
    _benchmark(4, 4096, 32, 8, 64),
    _benchmark(1, 16384, 16, 16, 64),
)
_GPU: tuple[Case, ...] = (
    {"lengths": (1025, 1025), "head_dim": 64, "heads": (4, 4), "batch": 2},
    {"lengths": (1025, 1025), "head_dim": 128, "heads": (8, 2), "return_lse": True},
    {"lengths": (4097, 4097), "head_dim": 128, "heads": (4, 1)},
    {"lengths": (1, 4097), "head_dim": 64, "heads": (4, 1)},
    {"lengths": (1000, 1537), "head_dim": 80, "heads": (4, 2), "causal": False},
    {"lengths": (1537, 1537), "head_dim": 96, "window": 300},
    {"lengths": (1025, 1025), "head_dim": 256, "softcap": 20.0},
    {"lengths": (513, 513), "head_dim": 192},
    {"lengths": (512, 300), "head_dim": 64, "documents_q": (0, 150, 150, 300), "documents_k": (0, 100, 200, 300)},
)
_AOT: tuple[Case, ...] = (
    _benchmark(1, 1024, 32, 8, 128),
    _benchmark(1, 1024, 12, 12, 64),
    {"lengths": (1024, 1024), "head_dim": 64, "heads": (8, 2), "documents_q": (0, 300, 1024)},
)

ATTENTION = KernelSpec(
    "attention", attention, plain_attention, _inputs, _TEST, _GPU, _AOT, _BENCHMARK, _bytes, flops=_flops
)
