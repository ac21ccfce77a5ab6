"""Attention of one query a sequence over a cache of keys and values, split over the keys.

For each sequence, with n = lengths[sequence] keys in the cache, and for each head of the group that shares them:

    out = Σ_j softmax(q·k_j·scale)_j · v_j                    j < n

One query reads every key once, so memory is the bound and one program a head would leave most multiprocessors idle.
The keys are therefore read in parts side by side (Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding"): part s yields its
normalised output o_s and lse_s = log2 Σ exp2(score), and a second kernel joins them,

    out = Σ_s w_s·o_s / Σ_s w_s        w_s = exp2(lse_s - max lse)

in a fixed order, so that results are the same bits in every run. Lengths stay on the device: the launch is the same at
every step, which a CUDA graph needs. All heads of a group are the rows of one tile, so that keys are read once.

Bytes that must move for elements of size s: 2·Σn·kv_heads·head_dim·s. The backward pass is there for completeness, in
plain PyTorch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op

from fuselm.kernels._triton import INTERPRET, Backend, compute_dtype, device_profile, jit, select_backend, tl
from fuselm.kernels.arguments import check_tensors
from fuselm.kernels.attention.tiles import load_tile, store_tile
from fuselm.kernels.launch.decode_attention import decode_launch

_LOG2E = 1.4426950408889634
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_ROWS = 16  # the shortest side of a product on tensor cores


def _probabilities(q: Tensor, k: Tensor, lengths: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Grouped queries (batch, kv_heads, group, head_dim), keys without what lies beyond the lengths, and the softmax
    (batch, kv_heads, group, keys), all in the compute dtype."""
    wide = compute_dtype(q, k)
    batch, heads, head_dim = q.shape
    grouped = q.to(wide).reshape(batch, k.shape[2], heads // k.shape[2], head_dim)
    held = torch.arange(k.shape[1], device=k.device) < lengths[:, None]
    k = torch.where(held[:, :, None, None], k, 0).to(wide)
    scores = torch.einsum("bhgd,bnhd->bhgn", grouped, k) * scale
    held = held[:, None, None]
    scores = scores.masked_fill(~held, -math.inf)
    # A sequence without keys: equal scores first, so that no NaN arises on the way.
    p = scores.masked_fill((lengths < 1)[:, None, None, None], 0.0).softmax(-1).masked_fill(~held, 0.0)
    return grouped, k, p


def _held_values(v: Tensor, lengths: Tensor, wide: torch.dtype) -> Tensor:
    held = torch.arange(v.shape[1], device=v.device) < lengths[:, None]
    return torch.where(held[:, :, None, None], v, 0).to(wide)


def decode_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float | None = None
) -> Tensor:
    """`decode_attention` in plain PyTorch: computes in fp32 (fp64 for fp64 inputs), rounds once; differentiable."""
    _, _, p = _probabilities(q, k, lengths, float(q.shape[-1] ** -0.5) if scale is None else scale)
    return torch.einsum("bhgn,bnhd->bhgd", p, _held_values(v, lengths, p.dtype)).reshape(q.shape).to(q.dtype)


@jit
def _decode_split_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, out_ptr, lse2_ptr,
    q_batch, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, lengths_stride,
    keys, kv_heads, group, splits, score_scale,
    WHOLE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    score_scale = tl.cast(score_scale, tl.float32)
    program = tl.program_id(0)
    split = program % splits
    kv_head = (program // splits % kv_heads).to(tl.int64)
    batch = (program // splits // kv_heads).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + batch * lengths_stride), keys).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    begin = split * share
    end = tl.minimum(begin + share, length)
    row = tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_D)
    q_base = q_ptr + batch * q_batch + kv_head * group * q_head
    k_base = k_ptr + batch * k_batch + kv_head * k_head
    v_base = v_ptr + batch * v_batch + kv_head * v_head
    q = load_tile(q_base, row, q_head, col, group, True, HEAD_DIM, BLOCK_D, UPCAST)  # [M, D], a head a row
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_N):  # each step has a key, so the maximum is finite from the first one on
        key = start + tl.arange(0, BLOCK_N)
        k = load_tile(k_base, key, k_row, col, end, True, HEAD_DIM, BLOCK_D, UPCAST)  # [N, D]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale  # [M, N], in units of log2(e)
        scores = tl.where((key < end)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp2(scores - new_max[:, None])
        decay = tl.exp2(row_max - new_max)
        row_sum = row_sum * decay + tl.sum(p, 1)
        v = load_tile(v_base, key, v_row, col, end, True, HEAD_DIM, BLOCK_D, UPCAST)  # [N, D]
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    seen = row_sum > 0.0
    acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
    # (batch, heads, splits, HEAD_DIM); a whole result is one split.
    first = (batch * kv_heads + kv_head) * group * splits + split
    store_tile(out_ptr + first * HEAD_DIM, row, splits * HEAD_DIM, col, group, acc, HEAD_DIM, UPCAST)
    if not WHOLE:
        lse2 = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
        tl.store(lse2_ptr + first + row * splits, lse2, mask=row < group)


@jit
def _decode_merge_kernel(
    part_ptr, lse2_ptr, out_ptr, splits,
    HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # of batch * heads
    split = tl.arange(0, BLOCK_S)
    col = tl.arange(0, BLOCK_D)
    lse2 = tl.load(lse2_ptr + head * splits + split, mask=split < splits, other=float("-inf"))
    largest = tl.max(lse2, 0)
    weight = tl.exp2(lse2 - tl.where(largest == float("-inf"), 0.0, largest))  # [S]
    part = load_tile(part_ptr + head * splits * HEAD_DIM, split, HEAD_DIM, col, splits, True, HEAD_DIM, BLOCK_D, False)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(largest == float("-inf"), 1.0, total)  # [D]
    row = tl.arange(0, 1)
    store_tile(out_ptr + head * HEAD_DIM, row, HEAD_DIM, col, 1, out[None, :], HEAD_DIM, UPCAST)


@custom_op("fuselm::decode_attention_forward", mutates_args=())
def _decode_attention_forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    batch, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    launch = decode_launch(batch, kv_heads, keys, head_dim, k.dtype, device_profile(q.device))
    splits: int = launch.splits
    group = heads // kv_heads
    width = max(16, _power_of_two(head_dim))
    part = out if splits == 1 else q.new_empty((batch, heads, splits, head_dim), dtype=torch.float32)
    lse2 = q.new_empty((batch, heads, splits) if splits > 1 else (0,), dtype=torch.float32)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        _decode_split_kernel[(batch * kv_heads * splits,)](
            q, k, v, lengths, part, lse2,
            *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], lengths.stride(0),
            keys, kv_heads, group, splits, scale * _LOG2E,
            WHOLE=splits == 1, HEAD_DIM=head_dim, BLOCK_M=max(_MIN_ROWS, _power_of_two(group)), BLOCK_N=launch.block_n,
            BLOCK_D=width, UPCAST=INTERPRET, num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip
        if splits > 1:
            _decode_merge_kernel[(batch * heads,)](
                part, lse2, out, splits,
                HEAD_DIM=head_dim, BLOCK_S=_power_of_two(splits), BLOCK_D=width, UPCAST=INTERPRET,
                num_warps=4, num_stages=1,
            )  # fmt: skip
    return out


@_decode_attention_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape)


@custom_op("fuselm::decode_attention_backward", mutates_args=())
def _decode_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grouped, held_k, p = _probabilities(q, k, lengths, scale)
    dout = grad.to(p.dtype).reshape(grouped.shape)
    dv = torch.einsum("bhgn,bhgd->bnhd", p, dout)
    dp = torch.einsum("bhgd,bnhd->bhgn", dout, _held_values(v, lengths, p.dtype))
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bhgn,bnhd->bhgd", ds, held_k).reshape(q.shape)
    dk = torch.einsum("bhgn,bhgd->bnhd", ds, grouped)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous()


@_decode_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_decode_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None)


_decode_attention_forward.register_autograd(_backward, setup_context=_setup_context)


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float | None) -> None:
    check_tensors({"q": q, "k": k, "v": v, "lengths": lengths})
    for name, x, dims, form in (
        ("q", q, 3, "(batch, heads, head_dim)"),
        ("k", k, 4, "(batch, keys, kv_heads, head_dim)"),
        ("v", v, 4, "(batch, keys, kv_heads, head_dim)"),
        ("lengths", lengths, 1, "(batch,)"),
    ):
        if x.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {form}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q on {q.device}: move them to one device")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != q.dtype or x.dtype not in (*_KERNEL_DTYPES, torch.float64):
            raise TypeError(
                f"{name} is {x.dtype}, q {q.dtype}: expected the same of float32, bfloat16, float16 (float64: "
                "reference)"
            )
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"lengths is {lengths.dtype}: expected int32 or int64")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}: expected that of k, {tuple(k.shape)}")
    if k.shape[0] != q.shape[0] or lengths.shape[0] != q.shape[0]:
        raise ValueError(
            f"q has batch {q.shape[0]}, k {k.shape[0]}, lengths {lengths.shape[0]}: expected one batch size"
        )
    if k.shape[-1] != q.shape[-1] or not 1 <= q.shape[-1] <= 256:
        raise ValueError(f"q has head_dim {q.shape[-1]}, k {k.shape[-1]}: expected the same, 1 to 256")
    if q.shape[1] == 0 or k.shape[2] == 0 or q.shape[1] % k.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads, k and v have {k.shape[2]}: expected a positive multiple")
    if k.shape[1] < 1:
        raise ValueError("k has room for 0 keys: expected at least 1")
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale={scale}: expected a positive number or None for 1/sqrt(head_dim)")


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, scale: float | None = None, backend: Backend = "auto"
) -> Tensor:
    """softmax(q·kᵀ·scale)·v of one query a sequence over the first `lengths` rows of a cache.

    Args:
        q: (batch, heads, head_dim), bf16, fp16 or fp32 (fp64 runs the reference), head_dim up to 256. Any strides; only
            a last dimension that is not contiguous is copied.
        k: (batch, keys, kv_heads, head_dim), the cache; heads is a multiple of kv_heads. Rows from `lengths` on may
            hold anything.
        v: like k.
        lengths: (batch,) int32 or int64 on q's device: keys that each sequence sees. Values beyond the cache count as
            all of it, to look would stall the stream; 0 gives zeros.
        scale: factor on q·k, positive; 1/sqrt(head_dim) by default.
        backend: "auto", "triton" or "reference".

    Returns:
        Shaped like q, contiguous.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; the message names the argument.
        RuntimeError: backend="triton" where Triton cannot run.
    """
    _check_inputs(q, k, v, lengths, scale)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if q.dtype not in _KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(f"q is {q.dtype}: backend='triton' takes float32, bfloat16, float16")
        backend = "reference"
    if select_backend(backend, q.device) == "reference":
        return decode_attention_reference(q, k, v, lengths, scale=scale)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _decode_attention_forward(q, k, v, lengths, scale)
