"""qk_norm_rope beyond what test_specs.py asks of every op: launches, views, frozen weights, odd tiles, bad input."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fuselm.kernels import qk_norm_rope as module
from fuselm.kernels._triton import KNOWN_PROFILES, Backend
from fuselm.kernels.launch.qk_norm_rope import QkNormRopeLaunch, backward_launch, forward_launch
from fuselm.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from fuselm.kernels.rms_norm import rms_norm
from fuselm.kernels.rope import rope

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
COUNTS: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}


def _inputs(shape, generator, dtype=torch.float32) -> list[torch.Tensor]:
    """qkv, the weights of q and k, cos, sin."""
    device = generator.device
    qkv = torch.randn((*shape, HEADS + 2 * KV_HEADS, HEAD_DIM), generator=generator, device=device).to(dtype)
    weights = [torch.randn(HEAD_DIM, generator=generator, device=device).to(dtype) for _ in range(2)]
    angle = torch.arange(64, device=device)[:, None] * 500.0 ** (-torch.arange(HEAD_DIM // 2, device=device) / 8)
    return [qkv.requires_grad_(), *(w.requires_grad_() for w in weights), angle.cos(), angle.sin()]


LAUNCHES = {
    "full tiles": QkNormRopeLaunch(2, 2, 8, 2, 5),
    "partial tiles of tokens": QkNormRopeLaunch(4, 2, 8, 1, 4),
    "partial tiles of heads": QkNormRopeLaunch(2, 8, 8, 1, 3),
    "padded halves": QkNormRopeLaunch(1, 1, 16, 1, 3),
    "more programs than tiles": QkNormRopeLaunch(2, 2, 8, 1, 1000),
}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_every_launch_agrees_with_the_parts(launch, device, generator, monkeypatch):
    """Programs take many tiles each; eps = 0, where a masked row would divide by zero."""
    monkeypatch.setattr(module, "forward_launch", lambda *_: launch)
    monkeypatch.setattr(module, "backward_launch", lambda *_: launch)
    qkv, wq, wk, cos, sin = _inputs((3, 6), generator)
    got = qk_norm_rope(qkv, wq, wk, cos, sin, eps=0.0, weight_offset=1.0, offset=2, backend="triton", **COUNTS)
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    q, k = (rms_norm(x, w, eps=0.0, offset=1.0, backend="triton") for x, w in ((q, wq), (k, wk)))
    want = *rope(q, k, cos, sin, offset=2, backend="triton"), v
    upstream = [torch.randn(x.shape, generator=generator, device=device) for x in want]
    grads, again = (torch.autograd.grad(got, (qkv, wq, wk), upstream, retain_graph=True) for _ in range(2))
    want_grads = torch.autograd.grad(want, (qkv, wq, wk), upstream)
    for a, b in zip((*got, *grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


def test_packed_tokens_give_the_bits_of_a_batch(device, generator):
    qkv, wq, wk, cos, sin = _inputs((2, 5), generator, torch.bfloat16)
    positions = torch.randint(64, (2, 5), generator=generator, device=device)
    batch = qk_norm_rope(qkv, wq, wk, cos, sin, positions=positions, backend="triton", **COUNTS)
    flat = qk_norm_rope(
        qkv.flatten(0, 1), wq, wk, cos, sin, positions=positions.flatten().int(), backend="triton", **COUNTS
    )
    for a, b in zip(batch, flat, strict=True):
        assert a.dtype == torch.bfloat16 and torch.equal(a.flatten(0, 1), b)


def test_v_is_a_view_and_the_gradient_packed_without_a_copy(device, generator):
    qkv, wq, wk, cos, sin = _inputs((2, 5), generator)
    outputs = qk_norm_rope(qkv, wq, wk, cos, sin, backend="triton", **COUNTS)
    assert outputs[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    assert outputs[2].requires_grad and outputs[0].is_contiguous() and outputs[1].is_contiguous()
    views = [torch.randn((2, *x.shape[2:0:-1], HEAD_DIM), device=device).transpose(1, 2) for x in outputs]
    with profile(activities=[ProfilerActivity.CPU]) as events:
        (grad,) = torch.autograd.grad(outputs, qkv, views, retain_graph=True)
    assert not {"aten::clone", "aten::cat", "aten::add"} & {event.name for event in events.events() or []}
    (want,) = torch.autograd.grad(outputs, qkv, [x.contiguous() for x in views])
    assert torch.equal(grad, want)


@pytest.mark.parametrize("trained", ["q_weight", "k_weight", "qkv", "none"])
def test_frozen_inputs(trained, device, generator):
    qkv, wq, wk, cos, sin = _inputs((2, 5), generator)
    outputs = qk_norm_rope(qkv, wq, wk, cos, sin, backend="triton", **COUNTS)
    loss = torch.stack([x.sin().sum() for x in outputs]).sum()
    every = dict(zip(("qkv", "q_weight", "k_weight"), torch.autograd.grad(loss, (qkv, wq, wk)), strict=True))
    leaves = {n: x.detach().requires_grad_(n == trained) for n, x in zip(every, (qkv, wq, wk), strict=True)}
    qkv, wq, wk = leaves.values()
    outputs = qk_norm_rope(qkv, wq, wk, cos, sin, backend="triton", **COUNTS)
    assert any(x.requires_grad for x in outputs) == (trained != "none")
    if trained != "none":
        (grad,) = torch.autograd.grad([x.sin().sum() for x in outputs[:2]], leaves[trained])
        mask = torch.ones_like(grad, dtype=torch.bool)
        if trained == "qkv":  # v is left out of this loss
            mask[:, :, HEADS + KV_HEADS :] = False
        assert torch.equal(grad[mask], every[trained][mask]) and not grad[~mask].any()


def test_fp64_runs_the_reference(generator):
    qkv, wq, wk, cos, sin = (x.detach().double() for x in _inputs((1, 3), generator))
    got = qk_norm_rope(qkv, wq, wk, cos, sin, **COUNTS)
    for a, b in zip(got, qk_norm_rope_reference(qkv, wq, wk, cos, sin, **COUNTS), strict=True):
        assert a.dtype == torch.float64 and torch.equal(a, b)
    with pytest.raises(TypeError, match="float64"):
        qk_norm_rope(qkv, wq, wk, cos, sin, backend="triton", **COUNTS)


def test_opcheck(device, generator):
    inputs = _inputs((2, 3), generator)
    ops = torch.ops.fuselm
    torch.library.opcheck(ops.qk_norm_rope_forward.default, (*inputs, None, 1, 1e-6, 0.0, HEADS))
    parts = inputs[0].detach().split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    free = [x.detach() for x in inputs]
    for need_dw in (True, False):
        torch.library.opcheck(ops.qk_norm_rope_backward.default, (*parts, *free, None, 1, 1e-6, 0.0, need_dw))


@pytest.mark.parametrize("backend", get_args(Backend)[1:])
def test_bad_input_is_named(backend: Backend, device, generator):
    qkv, wq, wk, cos, sin = _inputs((2, 5), generator)
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 5, 8, 16\) with num_heads=4 and num_kv_heads=3"):
        qk_norm_rope(qkv, wq, wk, cos, sin, num_heads=4, num_kv_heads=3, backend=backend)
    with pytest.raises(ValueError, match=r"k_weight is torch.float32 of shape \(15,\).*\(16,\)"):
        qk_norm_rope(qkv, wq, wk[1:], cos, sin, backend=backend, **COUNTS)
    with pytest.raises(ValueError, match="eps=-1"):
        qk_norm_rope(qkv, wq, wk, cos, sin, eps=-1.0, backend=backend, **COUNTS)
    with pytest.raises(ValueError, match="offset=60 with 5 tokens"):
        qk_norm_rope(qkv, wq, wk, cos, sin, offset=60, backend=backend, **COUNTS)
    with pytest.raises(ValueError, match="q_weight is on meta"):
        qk_norm_rope(qkv, wq.to("meta"), wk, cos, sin, backend=backend, **COUNTS)


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128, 256])
def test_launches_are_possible(head_dim):
    for arch in (80, 90, 100):
        for choose in (forward_launch, backward_launch):
            for seq_len, heads, kv_heads in ((1, 32, 8), (4096, 32, 8), (4096, 71, 1), (77, 12, 12)):
                launch = choose(seq_len, heads, kv_heads, head_dim, 2, KNOWN_PROFILES[arch])
                elements = launch.block_tokens * launch.block_heads * launch.block_half
                assert 2 * launch.block_half >= head_dim and elements <= 32 * launch.num_warps * 16
                assert launch.num_warps in (1, 2, 4, 8)
                assert (launch.programs > 0) == (choose is backward_launch)
