"""Per-head RMSNorm of q and k followed by the rotary embedding, on a packed qkv projection, in one launch each way.

For a head x of d elements, W = weight_offset + w and R the rotation of rope.py for the token's position:

    forward    rstd = 1 / sqrt(mean(x²) + eps)       x̂ = x · rstd       y = R (x̂ · W)
    backward   g = R⁻¹ dy        dw = Σ g · x̂        dx = rstd · (g · W - x̂ · mean(g · W · x̂))

Saved: qkv, the weights, the tables and the positions; rstd is computed again, which costs no memory traffic. What must
move, in elements of q and k: forward 2, backward 3; of v: nothing forward (a view), 2 backward, where the gradients of
q, k and v become one packed gradient. Everything is computed in fp32 and rounded once, where a norm and a rotation on
their own round twice.

dw is summed in fp32: each program keeps a partial row, a second kernel adds the rows in a fixed order, so that the
result has the same bits in every run.

Method: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters" (normalised queries and keys);
Su et al. 2021, "RoFormer".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from fuselm.kernels._triton import Backend, compute_dtype, device_profile, select_backend
from fuselm.kernels.arguments import check_tensors
from fuselm.kernels.direct import launch_device, may_skip_dispatcher, needs_grad
from fuselm.kernels.launch.qk_norm_rope import QkNormRopeLaunch, backward_launch, forward_launch
from fuselm.kernels.qk_norm_rope_backward import qk_norm_rope_backward_kernel, sum_weight_gradients_kernel
from fuselm.kernels.qk_norm_rope_kernels import qk_norm_rope_forward_kernel
from fuselm.kernels.rms_norm import rms_norm_reference
from fuselm.kernels.rope import check_rope_inputs, rope_reference, split_heads

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SUM_PARTIALS, _SUM_COLUMNS = 256, 16  # a tile of the kernel that adds the partials


def qk_norm_rope_reference(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    positions: Tensor | None = None,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`qk_norm_rope` in plain PyTorch: computes in fp32 (fp64 for fp64 inputs), rounds once."""
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    wide = compute_dtype(qkv)
    q, k = (rms_norm_reference(x.to(wide), w, eps=eps, offset=weight_offset) for x, w in ((q, q_weight), (k, k_weight)))
    q, k = rope_reference(q, k, cos, sin, positions=positions, offset=offset)
    return q.to(qkv.dtype), k.to(qkv.dtype), v


def _is_even(launch: QkNormRopeLaunch, seq_len: int, head_dim: int, heads: int, kv_heads: int) -> bool:
    """True where every tile is full."""
    size = launch.block_heads
    whole = heads % size == 0 and kv_heads % size == 0 and 2 * launch.block_half == head_dim
    return whole and seq_len % launch.block_tokens == 0


def _position_arguments(positions: Tensor | None, cos: Tensor) -> tuple[Tensor, int, int]:
    """What the kernels take for the positions: a pointer and the strides of batch and token."""
    if positions is None:
        return cos, 0, 0
    return positions, positions.stride(0) if positions.dim() == 2 else 0, positions.stride(-1)


def _launch_forward(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    eps: float,
    weight_offset: float,
    num_heads: int,
    copy_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v: v in memory of its own, or as a view of qkv."""
    batch, seq_len, all_heads, head_dim = qkv.shape
    kv_heads = (all_heads - num_heads) // 2
    q = torch.empty((batch, seq_len, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    k = torch.empty((batch, seq_len, kv_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    v = torch.empty_like(k) if copy_v else split_heads(qkv.detach(), num_heads, kv_heads)[2]
    if q.numel() == 0:
        return q, k, v
    cos, sin = cos.contiguous(), sin.contiguous()
    at, *positions_strides = _position_arguments(positions, cos)
    profile = device_profile(qkv.device)
    launch = forward_launch(seq_len, num_heads, kv_heads, head_dim, qkv.element_size(), profile)
    size = launch.block_heads
    parts = -(-num_heads // size) + (2 if copy_v else 1) * -(-kv_heads // size)
    with launch_device(qkv):
        qk_norm_rope_forward_kernel[(batch * -(-seq_len // launch.block_tokens) * parts,)](
            qkv,
            q_weight.contiguous(),
            k_weight.contiguous(),
            q,
            k,
            v,
            cos,
            sin,
            at,
            *qkv.stride(),
            *positions_strides,
            seq_len,
            cos.shape[0],
            offset,
            eps,
            weight_offset,
            num_heads,
            kv_heads,
            COPY_V=copy_v,
            HEAD_DIM=head_dim,
            HAS_POSITIONS=positions is not None,
            EVEN=_is_even(launch, seq_len, head_dim, num_heads, kv_heads),
            BLOCK_TOKENS=launch.block_tokens,
            BLOCK_HEADS=size,
            BLOCK_HALF=launch.block_half,
            num_warps=launch.num_warps,
            num_stages=1,
        )
    return q, k, v


def _launch_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    eps: float,
    weight_offset: float,
    need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """d(qkv), packed, and the gradients of the weights in their dtypes (empty where not needed)."""
    batch, seq_len, num_heads, head_dim = dq.shape
    kv_heads = dk.shape[2]
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    make = torch.zeros if dqkv.numel() == 0 else torch.empty
    width = head_dim if need_dw else 0
    dq_weight = make(width, dtype=q_weight.dtype, device=qkv.device)
    dk_weight = make(width, dtype=k_weight.dtype, device=qkv.device)
    if dqkv.numel() == 0:
        return dqkv, dq_weight, dk_weight
    cos, sin = cos.contiguous(), sin.contiguous()
    at, *positions_strides = _position_arguments(positions, cos)
    profile = device_profile(qkv.device)
    launch = backward_launch(seq_len, num_heads, kv_heads, head_dim, qkv.element_size(), profile)
    blocks = batch * -(-seq_len // launch.block_tokens)
    tiles = [blocks * -(-count // launch.block_heads) for count in (num_heads, kv_heads, kv_heads)]
    # Programs in proportion to the tiles of q, k and v, at least one each and at most one a tile.
    programs = [min(max(launch.programs * count // sum(tiles), 1), count) for count in tiles]
    partial = torch.empty((programs[0] + programs[1], width), dtype=torch.float32, device=qkv.device)
    with launch_device(qkv):
        qk_norm_rope_backward_kernel[(sum(programs),)](
            dq,
            dk,
            dv,
            qkv,
            dqkv,
            q_weight.contiguous(),
            k_weight.contiguous(),
            partial,
            cos,
            sin,
            at,
            *dq.stride(),
            *dk.stride(),
            *dv.stride(),
            *qkv.stride(),
            *positions_strides,
            programs[0],
            programs[1],
            batch,
            seq_len,
            cos.shape[0],
            offset,
            eps,
            weight_offset,
            num_heads,
            kv_heads,
            HEAD_DIM=head_dim,
            NEED_DW=need_dw,
            HAS_POSITIONS=positions is not None,
            EVEN=_is_even(launch, seq_len, head_dim, num_heads, kv_heads),
            BLOCK_TOKENS=launch.block_tokens,
            BLOCK_HEADS=launch.block_heads,
            BLOCK_HALF=launch.block_half,
            num_warps=launch.num_warps,
            num_stages=1,
        )
        if need_dw:
            sum_weight_gradients_kernel[(-(-head_dim // _SUM_COLUMNS), 2)](
                partial,
                dq_weight,
                dk_weight,
                programs[0],
                programs[1],
                HEAD_DIM=head_dim,
                BLOCK_PARTIALS=_SUM_PARTIALS,
                BLOCK_N=_SUM_COLUMNS,
                num_warps=4,
            )
    return dqkv, dq_weight, dk_weight


@custom_op("fuselm::qk_norm_rope_forward", mutates_args=())
def _qk_norm_rope_forward(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    eps: float,
    weight_offset: float,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _launch_forward(
        qkv, q_weight, k_weight, cos, sin, positions, offset, eps, weight_offset, num_heads, copy_v=True
    )


@_qk_norm_rope_forward.register_fake
def _(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    eps: float,
    weight_offset: float,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = split_heads(qkv, num_heads, (qkv.shape[2] - num_heads) // 2)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@custom_op("fuselm::qk_norm_rope_backward", mutates_args=())
def _qk_norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    eps: float,
    weight_offset: float,
    need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _launch_backward(
        dq, dk, dv, qkv, q_weight, k_weight, cos, sin, positions, offset, eps, weight_offset, need_dw
    )


@_qk_norm_rope_backward.register_fake
def _(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    offset: int,
    eps: float,
    weight_offset: float,
    need_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = qkv.shape[-1] if need_dw else 0
    return qkv.new_empty(qkv.shape), q_weight.new_empty(width), k_weight.new_empty(width)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.numbers = inputs[6:9]


def _backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
    need_q, need_k = ctx.needs_input_grad[1:3]
    arguments = (dq, dk, dv, *ctx.saved_tensors, *ctx.numbers, need_q or need_k)
    # With gradients recorded (create_graph) the op says that it has no second derivative.
    direct = not torch.is_grad_enabled() and may_skip_dispatcher(dq, dk, dv)
    dqkv, dq_weight, dk_weight = _launch_backward(*arguments) if direct else _qk_norm_rope_backward(*arguments)
    return dqkv, dq_weight if need_q else None, dk_weight if need_k else None, *(None,) * 7


_qk_norm_rope_forward.register_autograd(_backward, setup_context=_setup_context)


class _QkNormRope(torch.autograd.Function):
    """qk_norm_rope without the dispatcher; v is a view of qkv."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        outputs = _launch_forward(*arguments, copy_v=False)
        _setup_context(ctx, arguments, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _backward(ctx, *grad_outputs)


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    positions: Tensor | None = None,
    offset: int = 0,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a packed projection into q, k and v, normalises each head of q and k, and rotates them.

    Args:
        qkv: (batch, seq, num_heads + 2 * num_kv_heads, head_dim) or packed (tokens, heads, head_dim), heads of q, then
            k, then v; fp32/bf16/fp16 (fp64: reference), any strides.
        q_weight: (head_dim,), scale of every head of q; may be of another dtype than qkv.
        k_weight: (head_dim,), scale of every head of k.
        cos: (max_seq, head_dim // 2), fp32: cosines of position times frequency. No gradient flows to it.
        sin: as cos.
        num_heads: heads of q.
        num_kv_heads: heads of k and of v.
        eps: added to the mean of squares.
        weight_offset: added to both weights; 1 for weights that are stored as their distance from one.
        positions: (seq,) or (batch, seq), for packed inputs (tokens,); int32 or int64: each token's row of the tables.
            A value below 0 or from max_seq on gives NaN for that token.
        offset: without `positions`, the position of the first token.
        backend: "auto", "triton" or "reference".

    Returns:
        q (batch, seq, num_heads, head_dim) and k (batch, seq, num_kv_heads, head_dim), contiguous, and v, a view of qkv
        in eager calls, all in the input dtype. The gradient of qkv is packed, whatever the upstream strides are.

    Raises:
        ValueError: shapes, head counts or devices do not fit, eps is negative, offset + seq exceeds the tables.
        TypeError: a dtype is not supported.
        RuntimeError: backend="triton" where it cannot run.
    """
    check_tensors({"qkv": qkv, "q_weight": q_weight, "k_weight": k_weight})
    if qkv.dim() not in (3, 4) or num_heads < 1 or num_kv_heads < 1 or qkv.shape[-2] != num_heads + 2 * num_kv_heads:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)} with num_heads={num_heads} and num_kv_heads={num_kv_heads}: expected "
            f"(batch, seq, {num_heads + 2 * num_kv_heads}, head_dim) or (tokens, heads, head_dim), heads of q, k, v"
        )
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight.shape != qkv.shape[-1:] or not weight.is_floating_point():
            raise ValueError(
                f"{name} is {weight.dtype} of shape {tuple(weight.shape)}: expected floating point of shape "
                f"({qkv.shape[-1]},), the head_dim of qkv"
            )
        if weight.device != qkv.device:
            raise ValueError(f"{name} is on {weight.device}, qkv on {qkv.device}: move them to one device")
    if not eps >= 0:
        raise ValueError(f"eps={eps}: expected a number >= 0")
    whole = qkv if qkv.dim() == 4 else qkv.unsqueeze(0)
    q, k, _ = split_heads(whole, num_heads, num_kv_heads)
    check_rope_inputs(q if qkv.dim() == 4 else q[0], k if qkv.dim() == 4 else k[0], cos, sin, positions, offset)
    if qkv.dtype not in _KERNEL_DTYPES:
        if backend == "triton":
            raise TypeError(f"qkv is {qkv.dtype}: backend='triton' takes float32, bfloat16, float16")
        backend = "reference"
    if select_backend(backend, qkv.device) == "reference":
        return qk_norm_rope_reference(
            qkv,
            q_weight,
            k_weight,
            cos,
            sin,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            eps=eps,
            weight_offset=weight_offset,
            positions=positions,
            offset=offset,
        )
    arguments = whole, q_weight, k_weight, cos, sin, positions, offset, eps, weight_offset, num_heads
    if not may_skip_dispatcher(qkv, q_weight, k_weight, cos, sin, positions):
        q, k, v = _qk_norm_rope_forward(*arguments)
    elif needs_grad(qkv, q_weight, k_weight):
        q, k, v = _QkNormRope.apply(*arguments)
    else:
        q, k, v = _launch_forward(*arguments, copy_v=False)
    return (q, k, v) if qkv.dim() == 4 else (q.squeeze(0), k.squeeze(0), v.squeeze(0))
