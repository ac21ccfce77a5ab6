"""swiglu(inplace=True): the gradient takes gate_up's memory, in the first backward pass only, and nobody is misled."""

from __future__ import annotations

import functools
from math import gcd

import pytest
import torch

from fuselm.kernels import swiglu as module
from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.launch.swiglu import SwigluLaunch, swiglu_launch
from fuselm.kernels.swiglu import swiglu

LAYOUTS = {
    "dense": lambda x: x * 1.0,
    "rows": lambda x: (x * 1.0)[:, ::2],
    "columns": lambda x: (x * 1.0)[..., ::2],
    "transposed": lambda x: (x * 1.0).transpose(0, 1),
    "four dimensions that do not merge": lambda x: (x * 1.0).view(2, 2, 6, 32)[:, :1],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_a_call_that_is_not_in_place(layout, dtype, device, generator):
    x = torch.randn((4, 6, 32), generator=generator, device=device).to(dtype).requires_grad_()
    grads = []
    for inplace in (False, True):
        gate_up = LAYOUTS[layout](x)
        y = swiglu(gate_up, inplace=inplace, backend="triton")
        dy = torch.randn(y.shape, generator=torch.Generator(device).manual_seed(3), device=device).to(dtype)
        before = dy.clone()
        grads.append(torch.autograd.grad(y, x, dy)[0])
        assert torch.equal(dy, before)
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("leading", [(5,), (2, 5), ()])
def test_no_memory_is_allocated_for_it(leading, device, generator):
    x = torch.randn((*leading, 32), generator=generator, device=device, requires_grad=True)
    gate_up = x * 1.0
    y = swiglu(gate_up, inplace=True, backend="triton")
    (gradient,) = torch.autograd.grad(y.sum(), gate_up)
    assert gradient.data_ptr() == gate_up.data_ptr() and torch.equal(gradient, gate_up.detach())
    assert gradient.grad_fn is None and not gradient.requires_grad


def test_a_second_backward_pass_says_why_it_cannot_run(device, generator):
    x = torch.randn((3, 16), generator=generator, device=device, requires_grad=True)
    loss = swiglu(x * 1.0, inplace=True, backend="triton").sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second backward pass.*inplace=False"):
        loss.backward()


def test_another_op_that_saved_gate_up_raises_instead_of_using_the_gradient(device, generator):
    """The square is recorded first, so its backward runs after swiglu's has overwritten what it saved."""
    x = torch.randn((3, 16), generator=generator, device=device, requires_grad=True)
    gate_up = x * 1.0
    loss = gate_up.square().sum() + swiglu(gate_up, inplace=True, backend="triton").sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_that_is_not_ours_to_write_is_refused(device):
    leaf = torch.ones((3, 16), device=device, requires_grad=True)
    for x in (leaf, leaf[1:]):
        with pytest.raises(ValueError, match="gate_up is a leaf that requires a gradient"):
            swiglu(x, inplace=True, backend="triton")
    expanded = (leaf[0] * 1.0).expand(3, 16)
    overlapping = (leaf.flatten() * 1.0).as_strided((3, 16), (8, 1))
    for x in (expanded, overlapping):
        with pytest.raises(ValueError, match="elements share memory"):
            swiglu(x, inplace=True, backend="triton")


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_where_nothing_is_recorded_nothing_changes(backend, device, generator):
    x = torch.randn((3, 16), generator=generator, device=device)
    before = x.clone()
    y = swiglu(x, inplace=True, backend=backend)
    assert torch.equal(x, before) and torch.equal(y, swiglu(x, backend=backend))


def test_compiled_and_second_derivatives(device, generator):
    """Both take new memory: torch.compile plans its own, and a graph of the gradient must keep gate_up."""
    x = torch.randn((3, 16), generator=generator, device=device, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return swiglu(x * 2.0, inplace=True, backend="triton").square().sum()

    torch._dynamo.reset()
    (got,) = torch.autograd.grad(torch.compile(step, fullgraph=True)(x), x)
    (want,) = torch.autograd.grad(step(x), x)
    torch.testing.assert_close(got, want)
    (dx,) = torch.autograd.grad(step(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        dx.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(
    "launch", [SwigluLaunch(1, 16, 1), SwigluLaunch(4, 8, 2, "evict_last"), SwigluLaunch(2, 64, 4)]
)
def test_full_and_partial_tiles_give_the_same_bits(launch, inplace, device, generator, monkeypatch):
    x = torch.randn((8, 96), generator=generator, device=device, requires_grad=True)
    results = []
    for choice in (SwigluLaunch(1, 64, 1), launch):
        monkeypatch.setattr(module, "swiglu_launch", functools.partial(lambda choice, *_: choice, choice))
        y = swiglu(x * 1.0, inplace=inplace, backend="triton")
        results.append((y, torch.autograd.grad(y.sin().sum(), x)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_tiles_are_full_where_the_width_allows():
    profile = KNOWN_PROFILES[90]
    for ffn, columns in ((14336, 2048), (8192, 2048), (5120, 1024), (2560, 512), (11008, 2048), (16, 16)):
        launch = swiglu_launch(16384, ffn, 2, profile, True)
        assert launch.block_columns == columns
        assert launch.block_rows * launch.block_columns == 32 * launch.num_warps * 8
        assert launch.block_rows == 1 or columns < 512
        assert gcd(ffn, 2048) < 512 or ffn % swiglu_launch(16384, ffn, 2, profile, False).block_columns == 0
