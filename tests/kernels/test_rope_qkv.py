"""rope_qkv: q, k and v of a packed projection, its packed gradient, and the form that works in its memory."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fuselm.kernels import rope as module
from fuselm.kernels._triton import Backend
from fuselm.kernels.launch.rope import RopeLaunch
from fuselm.kernels.rope import rope, rope_qkv

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.arange(12, device=device)[:, None] * 500.0 ** (-torch.arange(HEAD_DIM // 2, device=device) / 8)
    return angle.cos(), angle.sin()


def _packed(shape, dtype, generator) -> torch.Tensor:
    x = torch.randn((*shape, HEADS + 2 * KV_HEADS, HEAD_DIM), generator=generator, device=generator.device)
    return x.to(dtype).requires_grad_()


def _run(qkv, positions, upstream, **options):
    cos, sin = _tables(qkv.device)
    outputs = rope_qkv(
        qkv, cos, sin, num_heads=HEADS, num_kv_heads=KV_HEADS, positions=positions, backend="triton", **options
    )
    return outputs, upstream or [torch.randn_like(x).detach() for x in outputs]


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5), (7,), (1, 1), (3, 0)])
def test_equals_rope_of_the_parts_bit_for_bit(shape, dtype, inplace, device, generator):
    leaf = _packed(shape, dtype, generator)
    cos, sin = _tables(device)
    q, k, v = leaf.split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
    want = *rope(q, k, cos, sin, offset=3, backend="triton"), v
    upstream = [torch.randn(x.shape, generator=generator, device=device).to(dtype) for x in want]
    (want_grad,) = torch.autograd.grad(want, leaf, upstream)
    before = [x.clone() for x in upstream]
    got, _ = _run(leaf * 1.0, None, upstream, inplace=inplace, offset=3)
    (grad,) = torch.autograd.grad(got, leaf, upstream)
    for a, b in zip((*got, grad), (*want, want_grad), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(upstream, before, strict=True))


@pytest.mark.parametrize(
    "launch",
    [RopeLaunch(2, 2, 8, 1), RopeLaunch(4, 4, 8, 1, "evict_last"), RopeLaunch(1, 8, 16, 1)],
    ids=str,
)
@pytest.mark.parametrize("inplace", [False, True])
def test_every_tiling_gives_the_same_bits(launch, inplace, device, generator, monkeypatch):
    """Full tiles, partial ones of tokens and of heads, padded halves; with positions, one of them outside the table."""
    leaf = _packed((2, 6), torch.bfloat16, generator)
    positions = torch.tensor([[0, 3, 11, 2, 1, 5], [7, 8, 12, 0, 0, 4]], device=device)
    for given in (positions,) if inplace else (None, positions):
        want, upstream = _run(leaf * 1.0, given, None, inplace=inplace)
        want = *want, *torch.autograd.grad(want, leaf, upstream)
        with monkeypatch.context() as patch:
            patch.setattr(module, "rope_launch", lambda *_: launch)
            got, _ = _run(leaf * 1.0, given, upstream, inplace=inplace)
            got = *got, *torch.autograd.grad(got, leaf, upstream)
            if not inplace:
                q, k, _ = leaf.detach().split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
                got = *rope(q, k, *_tables(device), positions=given, backend="triton"), *got[2:]
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def test_in_place_the_results_are_views_of_the_projection(device, generator):
    qkv = _packed((2, 5), torch.float32, generator) * 1.0
    v = qkv[:, :, HEADS + KV_HEADS :].detach().clone()
    outputs, _ = _run(qkv, None, None, inplace=True)
    storage = qkv.untyped_storage().data_ptr()
    assert [x.untyped_storage().data_ptr() for x in outputs] == [storage] * 3
    assert torch.equal(outputs[2], v) and torch.equal(torch.cat([x.detach() for x in outputs], 2), qkv.detach())
    with torch.no_grad():
        plain, _ = _run(qkv.detach().clone(), None, None, inplace=True)
    assert not any(x.requires_grad for x in plain)


@pytest.mark.parametrize("layout", ["every second head dim", "transposed", "sliced heads"])
def test_layouts_that_cannot_hold_the_result_get_new_memory(layout, device, generator):
    wide = torch.randn((2, 5, 12, 2 * HEAD_DIM), generator=generator, device=device, requires_grad=True)
    view = {
        "every second head dim": lambda x: x[:, :, :8, ::2],
        "transposed": lambda x: x[:, :, :8, :HEAD_DIM].transpose(0, 1).contiguous().transpose(0, 1),
        "sliced heads": lambda x: x[:, :, 1:9, HEAD_DIM:],
    }[layout](wide * 1.0)
    before = view.detach().clone()
    outputs, upstream = _run(view, None, None, inplace=True)
    want, _ = _run(before.requires_grad_(), None, upstream)
    assert torch.equal(view, before)
    for a, b in zip(outputs, want, strict=True):
        assert torch.equal(a, b) and a.is_contiguous()


def test_the_gradient_is_packed_by_one_launch_without_a_copy(device, generator):
    leaf = _packed((2, 5), torch.float32, generator)
    outputs, _ = _run(leaf, None, None)
    views = [torch.randn((2, *x.shape[2:0:-1], HEAD_DIM), device=device).transpose(1, 2) for x in outputs]
    with profile(activities=[ProfilerActivity.CPU]) as events:
        (grad,) = torch.autograd.grad(outputs, leaf, views, retain_graph=True)
    names = [event.name for event in events.events() or []]
    assert not {"aten::clone", "aten::cat", "aten::add", "aten::zeros"} & set(names)
    (want,) = torch.autograd.grad(outputs, leaf, [x.contiguous() for x in views])
    assert grad.is_contiguous() and torch.equal(grad, want)


def test_one_used_output_and_backward_twice(device, generator):
    leaf = _packed((2, 5), torch.float32, generator)
    for i, inplace in ((0, False), (1, True), (2, True)):
        outputs, _ = _run(leaf * 1.0, None, None, inplace=inplace)
        first, second = (torch.autograd.grad(outputs[i].sum(), leaf, retain_graph=True)[0] for _ in range(2))
        part = first.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        assert torch.equal(first, second)
        assert [bool(x.any()) for x in part] == [i == j for j in range(3)]


def test_an_op_that_saved_the_projection_raises_instead_of_using_rotated_values(device, generator):
    qkv = _packed((2, 5), torch.float32, generator) * 1.0
    square = qkv.square().sum()
    outputs, _ = _run(qkv, None, None, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (square + outputs[0].sum()).backward()


def test_positions_outside_the_table_give_nan_in_q_and_k_only(device, generator):
    qkv = _packed((1, 3), torch.float32, generator) * 1.0
    (q, k, v), _ = _run(qkv, torch.tensor([0, 12, 11], device=device), None, inplace=True)
    for x in (q, k):
        assert x.isnan().flatten(2).all(-1).tolist() == [[False, True, False]]
    assert not v.isnan().any()


def test_compiled_whole_in_place_is_a_permission(device, generator):
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([y.sin().sum() for y in _run(x * 2.0, None, [x], inplace=True)[0]]).sum()

    torch._dynamo.reset()
    leaf = _packed((2, 5), torch.float32, generator)
    (got,) = torch.autograd.grad(torch.compile(step, fullgraph=True)(leaf), leaf)
    torch.testing.assert_close(got, torch.autograd.grad(step(leaf), leaf)[0])


def test_opcheck(device, generator):
    qkv = _packed((2, 3), torch.float32, generator)
    cos, sin = _tables(device)
    torch.library.opcheck(torch.ops.fuselm.rope_qkv_forward.default, (qkv, cos, sin, None, 1, HEADS, KV_HEADS))
    parts = qkv.detach().split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    torch.library.opcheck(torch.ops.fuselm.rope_qkv_backward.default, (*parts, cos, sin, None, 1))


@pytest.mark.parametrize("backend", get_args(Backend)[1:])
def test_bad_input_is_named(backend: Backend, device):
    cos, sin = _tables(device)
    leaf = torch.ones((2, 5, 8, HEAD_DIM), device=device, requires_grad=True)
    options: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "backend": backend}
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 5, 8, 16\) with num_heads=5 and num_kv_heads=2"):
        rope_qkv(leaf, cos, sin, num_heads=5, num_kv_heads=KV_HEADS, backend=backend)
    with pytest.raises(ValueError, match="qkv is a leaf that requires a gradient"):
        rope_qkv(leaf, cos, sin, inplace=True, **options)
    with pytest.raises(ValueError, match="elements share memory"):
        rope_qkv((leaf * 1.0)[:1].expand(2, 5, 8, HEAD_DIM), cos, sin, inplace=True, **options)
    with pytest.raises(ValueError, match="offset=9 with 5 tokens"):
        rope_qkv(leaf, cos, sin, offset=9, **options)
