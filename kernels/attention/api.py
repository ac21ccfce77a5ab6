"""`attention`, the public function: grouped heads, packed documents, sliding window, softcap, differentiable lse."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch

from fuselm.kernels._triton import Backend
from fuselm.kernels.arguments import check_numbers, check_tensors
from fuselm.kernels.attention import ops
from fuselm.kernels.attention.dispatch import KernelChoice, explain_kernel, prefer_hopper, runs_reference
from fuselm.kernels.attention.reference import attention_reference

__all__ = ["KernelChoice", "attention", "attention_reference", "explain_kernel", "prefer_hopper"]

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool) -> None:
    check_tensors({"q": q, "k": k, "v": v})
    form = "(tokens, heads, head_dim) with cu_seqlens" if packed else "(batch, seq, heads, head_dim) without cu_seqlens"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}: expected a floating-point tensor")
        if x.dim() != (3 if packed else 4):
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {form}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype}, q {q.dtype}: expected one dtype")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: move them to one device")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]}: expected that of q, {q.shape[-1]}")
    if not MIN_HEAD_DIM <= q.shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"q has head_dim {q.shape[-1]}: expected {MIN_HEAD_DIM} to {MAX_HEAD_DIM}")
    if not packed and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}: expected that of q, {q.shape[0]}")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}: expected the shape of k, {tuple(k.shape)}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k and v have {kv_heads}: expected a positive multiple")


def _check_borders(name: str, cu_seqlens: torch.Tensor, rows: int, device: torch.device) -> None:
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {cu_seqlens.dtype}: expected torch.int32")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name} has shape {tuple(cu_seqlens.shape)}: expected (documents + 1,)")
    if cu_seqlens.device != device:
        raise ValueError(f"{name} is on {cu_seqlens.device}, q on {device}: move them to one device")
    if device.type == "cpu" and not torch.compiler.is_compiling():  # on a GPU the look would stall the stream
        borders = cu_seqlens.tolist()
        if borders[0] != 0 or borders != sorted(borders) or borders[-1] > rows:
            raise ValueError(
                f"{name}={borders}: expected borders that rise from 0 to at most {rows}, the number of tokens"
            )


def _check_options(
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    packed: bool,
    max_seqlens: dict[str, int | None],
) -> None:
    check_numbers({"scale": scale, "softcap": softcap}, "a positive number or None")
    check_numbers({"window": window, **max_seqlens}, "an int or None", whole=True)
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale={scale}: expected a positive number or None for 1/sqrt(head_dim)")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: expected at least 1 key (the query's own) or None for all")
    if window is not None and not causal:
        raise ValueError(
            f"window={window} with causal=False: a window reaches back from the query, expected causal=True"
        )
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap={softcap}: expected a positive number or None for no bound")
    for name, value in max_seqlens.items():
        if value is not None and not packed:
            raise ValueError(f"{name}={value} without cu_seqlens: expected None, as the sequences have one length")
        if value is not None and value < 0:
            raise ValueError(f"{name}={value}: expected a length >= 0 or None")


@overload
def attention(
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
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
    backend: Backend = "auto",
) -> torch.Tensor: ...


@overload
def attention(
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
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    return_lse: Literal[True],
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
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
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ·scale + mask)·v, after FlashAttention-2 (arXiv:2307.08691).

    Args:
        q: (batch, queries, heads, head_dim), or packed (tokens, heads, head_dim) with `cu_seqlens_q`; bf16, fp16 or
            fp32 (fp64 runs the reference), head_dim 16 to 256. Any strides; only a last dimension that is not
            contiguous is copied, so views of one packed qkv tensor are free.
        k: (batch, keys, kv_heads, head_dim), or packed (tokens, kv_heads, head_dim). heads is a multiple of kv_heads
            (GQA, MQA).
        v: like k.
        causal: a query sees no key behind it. Where the lengths differ, the last query stands at the last key
            (bottom-right alignment).
        scale: factor on q·k, positive; 1/sqrt(head_dim) by default.
        window: a query sees the last `window` keys, its own included; needs causal=True. None for all.
        softcap: scores become softcap·tanh(score / softcap). None for no bound.
        cu_seqlens_q: (documents + 1,) int32 on q's device, rising from 0: document i owns query rows [cu[i], cu[i + 1])
            and sees no other document. Tokens behind the last border belong to none: they get zeros, an lse of -inf and
            no gradient. Not checked on a GPU, where a look would stall the stream.
        cu_seqlens_k: the same for the keys; by default that of the queries. A document may have other numbers of
            queries and keys, or none.
        max_seqlen_q: longest document in queries (tokens); accepted because other libraries need it. The portable
            kernel does not: its grid follows from the number of tokens.
        max_seqlen_k: the same for the keys.
        deterministic: asks for the same bits in every run. The portable kernel and the reference on a CPU always give
            them; the Hopper backward kernel then adds dq up in a fixed order, which takes longer.
        return_lse: also return the log-sum-exp of the scores, which is differentiable.
        backend: "auto", "triton" or "reference".

    Returns:
        out, shaped like q and contiguous; with `return_lse` (out, lse), lse fp32, natural logarithm, (batch, heads,
        queries), or (heads, tokens) when packed. A query that sees no key gets zeros, -inf, and contributes no
        gradient.

    Raises:
        ValueError, TypeError: shapes, dtypes, devices or options do not fit; the message names the argument.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    packed = cu_seqlens_q is not None
    _check_tensors(q, k, v, packed)
    _check_options(causal, scale, window, softcap, packed, {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k})
    if cu_seqlens_q is not None:
        if cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
        _check_borders("cu_seqlens_q", cu_seqlens_q, q.shape[0], q.device)
        _check_borders("cu_seqlens_k", cu_seqlens_k, k.shape[0], q.device)
        if cu_seqlens_k.shape != cu_seqlens_q.shape:
            borders = f"cu_seqlens_k has {cu_seqlens_k.shape[0]} borders, cu_seqlens_q {cu_seqlens_q.shape[0]}"
            raise ValueError(f"{borders}: expected as many documents in both")
    elif cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k is given without cu_seqlens_q: expected both, or neither for unpacked tensors")
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if runs_reference(q.device, q.dtype, backend):
        out, lse = attention_reference(
            q,
            k,
            v,
            causal=causal,
            scale=scale,
            window=window,
            softcap=softcap,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
        )
    else:
        # Copied here rather than in the op, so that the copy is what autograd saves and the backward pass needs no
        # second one.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            q, k, v = q[None], k[None], v[None]
            cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()  # read without strides
        out, lse2 = ops.attention_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, window or 0, softcap or 0.0, deterministic
        )
        if packed:
            # Not [0], whose gradient is written into zeros of a batch of one.
            out, lse2 = out.squeeze(0), lse2.squeeze(0)
        lse = lse2 * math.log(2) if return_lse else lse2
    return (out, lse) if return_lse else out
