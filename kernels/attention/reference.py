"""Attention in plain PyTorch: the formula, with the whole score matrix in memory. It runs wherever no kernel does."""

from __future__ import annotations

import torch

from fuselm.kernels._triton import compute_dtype


def visible_pairs(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool,
    window: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which keys each query sees: (queries, keys) bool, True where visible. Reads no device value on the host."""
    query = torch.arange(queries, device=device)
    key = torch.arange(keys, device=device)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        position = query + (keys - queries)
        mask = torch.ones((queries, keys), dtype=torch.bool, device=device)
    else:
        documents = cu_seqlens_q.shape[0] - 1
        # Where an empty document begins, several borders coincide; the last of them is the document that holds the row.
        query_document = torch.searchsorted(cu_seqlens_q, query, right=True) - 1
        key_document = torch.searchsorted(cu_seqlens_k, key, right=True) - 1
        mask = (query_document[:, None] == key_document) & (query_document < documents)[:, None]
        owner = query_document.clamp(max=documents - 1) if documents else query_document
        position = query
        key = key[None, :]
        if documents:
            # Aligned at the ends of the document: the last query stands where the last key stands.
            position = query + (cu_seqlens_k[owner + 1] - cu_seqlens_q[owner + 1])
    if causal:
        mask = mask & (key <= position[:, None])
    if window is not None:
        mask = mask & (key > position[:, None] - window)
    return mask


def attention_reference(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q·kᵀ·scale + mask)·v and its lse: differentiable, fp32 inside (fp64 for fp64 input), whole score matrix.

    Args:
        q: (batch, queries, heads, head_dim), or (tokens, heads, head_dim) with `cu_seqlens_q`.
        k: (batch, keys, kv_heads, head_dim), or (tokens, kv_heads, head_dim) with `cu_seqlens_k`.
        v: like k.
        causal: bottom-right aligned causal mask.
        scale: factor on q·k; 1/sqrt(head_dim) by default.
        window: keys a query sees, itself included; None for all.
        softcap: scores become softcap·tanh(score / softcap).
        cu_seqlens_q: (documents + 1,) int32, document borders in the queries.
        cu_seqlens_k: the same for the keys.

    Returns:
        (out like q, contiguous; lse (batch, heads, queries) or (heads, tokens), fp32 or fp64, natural logarithm). A
        query that sees no key gets zeros and -inf.
    """
    if cu_seqlens_q is not None:
        out, lse = attention_reference_batched(
            q[None], k[None], v[None], causal, scale, window, softcap, cu_seqlens_q, cu_seqlens_k
        )
        return out.squeeze(0), lse.squeeze(0)
    return attention_reference_batched(q, k, v, causal, scale, window, softcap, None, None)


def attention_reference_batched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_reference` for tensors that have a batch dimension."""
    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    wide = compute_dtype(q, k, v)
    grouped = q.to(wide).reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k.to(wide)) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    mask = visible_pairs(
        queries, keys, q.device, causal=causal, window=window, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
    )
    seen = mask.any(-1, keepdim=True)
    # Rows without a key are given equal scores first, so that no NaN arises on the way, and are blanked afterwards.
    scores = scores.masked_fill(~mask, float("-inf")).masked_fill(~seen, 0.0)
    lse = torch.logsumexp(scores, -1, keepdim=True) if keys else scores.sum(-1, keepdim=True)
    p = torch.exp(scores - lse).masked_fill(~mask, 0.0)
    out = torch.einsum("bhgqk,bkhd->bqhgd", p, v.to(wide)).reshape(q.shape).to(q.dtype)
    return out.contiguous(), lse.masked_fill(~seen, float("-inf")).reshape(batch, heads, queries)
