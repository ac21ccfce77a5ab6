"""fuselm::attention_forward and fuselm::attention_backward: what torch.compile, autograd and checkpoint policies see.

Both take (batch, rows, heads, head_dim) tensors; packed documents come with batch 1 and their borders. 0 stands for "no
window" and "no softcap". The log-sum-exp is in base 2 here, the units of the kernels' exponentials; `api.attention`
converts.
"""

from __future__ import annotations

from typing import Any

import torch

from fuselm.kernels.attention.dispatch import KERNELS, explain_kernel


def _choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float) -> tuple[Any, Any]:
    choice = explain_kernel(
        q.device, dtype=q.dtype, head_dim=q.shape[-1], backend="triton", softcap=softcap, tensors=(q, k, v)
    )
    return KERNELS[choice.name]


@torch.library.custom_op("fuselm::attention_forward", mutates_args=())
def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    forward, _ = _choose(q, k, v, softcap)
    return forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, scale, window, softcap)


@torch.library.custom_op("fuselm::attention_backward", mutates_args=())
def attention_backward(
    dout: torch.Tensor,
    dlse2: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse2: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, backward = _choose(q, k, v, softcap)
    borders = cu_seqlens_q, cu_seqlens_k
    return backward(dout, dlse2, q, k, v, out, lse2, *borders, causal, scale, window, softcap, deterministic)


@attention_forward.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, queries), dtype=torch.float32)


@attention_backward.register_fake
def _(
    dout: torch.Tensor,
    dlse2: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse2: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: torch.Tensor | None, dlse2: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dout is None and dlse2 is None:
        return (None,) * 10
    q, k, v, out, lse2, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    if dout is None:  # only the lse2 was used
        dout = torch.zeros_like(out)
    dq, dk, dv = attention_backward(dout, dlse2, q, k, v, out, lse2, cu_seqlens_q, cu_seqlens_k, *ctx.options)
    return dq, dk, dv, *(None,) * 7


torch.library.register_autograd("fuselm::attention_forward", _backward, setup_context=_setup)
