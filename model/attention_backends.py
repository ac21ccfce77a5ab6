"""One switch between attention implementations: ours, PyTorch's SDPA, cuDNN through SDPA, and the flash-attn
package."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fuselm.kernels._triton import explain_backend
from fuselm.kernels.attention.api import attention
from fuselm.model.config import LlamaConfig


class DocumentMask(NamedTuple):
    """Borders of the documents in the flattened tokens of a batch."""

    cu_seqlens: torch.Tensor
    max_seqlen: int


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: LlamaConfig, documents: DocumentMask | None
) -> torch.Tensor:
    """Causal attention, bottom-right aligned where there are more keys than queries.

    Args:
        q: (batch, seq, num_heads, head_dim).
        k, v: (batch, keys, num_kv_heads, head_dim).
        config: its attention_backend and kernels decide who computes.
        documents: attention stays within these; None for whole sequences.

    Returns:
        (batch, seq, num_heads, head_dim).

    Raises:
        ImportError: attention_backend="flash_attn" without the package.
        ValueError: documents, a device or a dtype that the backend does not take.
    """
    require_attention(config, q.device, q.dtype, documents=documents is not None)
    if config.attention_backend == "flash_attn":
        return _flash_attn(q, k, v, documents)
    ours = config.attention_backend == "fuselm"
    use_kernels = ours and (
        config.kernels == "triton" or (config.kernels == "auto" and explain_backend(q.device)[0] == "triton")
    )
    if documents is not None:
        packed = attention(
            *(t.flatten(0, 1) for t in (q, k, v)),
            cu_seqlens_q=documents.cu_seqlens,
            cu_seqlens_k=documents.cu_seqlens,
            max_seqlen_q=documents.max_seqlen,
            max_seqlen_k=documents.max_seqlen,
            deterministic=config.deterministic_attention,
            backend="triton" if use_kernels else "reference",
        )
        return packed.view(q.shape)
    if use_kernels:
        return attention(q, k, v, causal=True, deterministic=config.deterministic_attention, backend="triton")
    if config.attention_backend == "cudnn":
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return _sdpa(q, k, v)
    return _sdpa(q, k, v)


def require_attention(config: LlamaConfig, device: torch.device, dtype: torch.dtype, *, documents: bool) -> None:
    """Refuse what `attend` could not do, so that a run can ask before it begins.

    Args:
        config: its attention_backend is checked.
        device: of q, k and v.
        dtype: of q, k and v.
        documents: whether there will be document masks.

    Raises:
        ImportError: attention_backend="flash_attn" without the package.
        ValueError: the backend does not take such documents, device or dtype.
    """
    name = config.attention_backend
    if name == "flash_attn":
        _flash_attn_package()
    if documents and name in ("sdpa", "cudnn"):
        raise ValueError(
            f"attention_backend={name!r} has no document masks; use 'fuselm' or 'flash_attn', or train without "
            "data.document_mask"
        )
    half = dtype in (torch.bfloat16, torch.float16)
    if name in ("cudnn", "flash_attn") and (device.type != "cuda" or not half):
        raise ValueError(
            f"attention_backend={name!r} takes bfloat16 or float16 on an NVIDIA GPU, not {dtype} on device type "
            f"{device.type!r}; use 'fuselm' or 'sdpa'"
        )


def _flash_attn_package() -> Any:
    try:
        return importlib.import_module("flash_attn")
    except ImportError as error:
        raise ImportError(
            "attention_backend='flash_attn' needs the flash-attn package (see its own installation instructions); or "
            "use attention_backend='fuselm'"
        ) from error


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    queries, keys = q.shape[1], k.shape[1]
    mask = None
    if 1 < queries < keys:  # SDPA's is_causal aligns top-left
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    causal = mask is None and queries > 1
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)


def _flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: DocumentMask | None) -> torch.Tensor:
    package = _flash_attn_package()
    if documents is None:
        return package.flash_attn_func(q, k, v, causal=True)
    cu, longest = documents
    flat = (t.flatten(0, 1) for t in (q, k, v))
    return package.flash_attn_varlen_func(*flat, cu, cu, longest, longest, causal=True).view(q.shape)
