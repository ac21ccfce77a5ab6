"""RMSNorm beyond what test_specs.py asks of every op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuselm
from fuselm.kernels.numerics import measure


def _grad(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad


def test_dw_over_many_rows_is_summed_in_fp32(device):
    """1e4 equal rows (1e5 on a GPU): a bf16 running sum would stall at a few hundred."""
    rows = 100_000 if device.type == "cuda" else 10_000
    x = torch.ones(rows, 16, device=device, dtype=torch.bfloat16)
    w = torch.ones(16, device=device, requires_grad=True)
    fuselm.rms_norm(x, w, backend="triton").sum().backward()
    torch.testing.assert_close(_grad(w), torch.full((16,), float(rows), device=device), rtol=1e-5, atol=0)


def test_residual_gradient_sums_both_paths(device, generator):
    """x and residual get the same gradient, the sum through the norm and around it."""
    x, r = (torch.randn(6, 33, device=device, generator=generator, requires_grad=True) for _ in range(2))
    w = torch.randn(33, device=device, generator=generator, requires_grad=True)
    y, h = fuselm.add_rms_norm(x, r, w, backend="triton")
    (y.sin().sum() + (h * 3).sum()).backward()
    xd, rd, wd = (t.detach().double().requires_grad_() for t in (x, r, w))
    hd = xd + rd
    (torch.nn.functional.rms_norm(hd, (33,), wd, 1e-6).sin().sum() + (hd * 3).sum()).backward()
    assert torch.equal(_grad(x), _grad(r))
    torch.testing.assert_close(_grad(x), _grad(xd).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(_grad(w), _grad(wd).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("used", ["normed", "sum"])
def test_one_output_of_add_rms_norm_used(used, device, generator):
    x, r = (torch.randn(4, 16, device=device, generator=generator, requires_grad=True) for _ in range(2))
    y, h = fuselm.add_rms_norm(x, r, None, backend="triton")
    (y if used == "normed" else h).square().sum().backward()
    xd = x.detach().double().requires_grad_()
    hd = xd + r.detach().double()
    (torch.nn.functional.rms_norm(hd, (16,), None, 1e-6) if used == "normed" else hd).square().sum().backward()
    torch.testing.assert_close(_grad(x), _grad(xd).float(), rtol=1e-4, atol=1e-4)


def test_gradient_that_goes_two_ways(device, generator):
    """h = x + norm(x): one gradient feeds both branches; an in-place backward would spoil the other."""
    x = torch.randn(5, 24, device=device, generator=generator, requires_grad=True)
    (x + fuselm.rms_norm(x, backend="triton")).square().sum().backward()
    xd = x.detach().double().requires_grad_()
    (xd + torch.nn.functional.rms_norm(xd, (24,), None, 1e-6)).square().sum().backward()
    torch.testing.assert_close(_grad(x), _grad(xd).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("view", ["sliced", "transposed", "expanded", "heads"])
def test_inputs_of_any_strides(view, device, generator):
    base = torch.randn(12, 48, device=device, generator=generator)
    x = {
        "sliced": base[:, 8:40],
        "transposed": base.t(),
        "expanded": base[:1].expand(5, 48),
        "heads": base.view(3, 4, 3, 16)[:, :, 1],
    }[view].requires_grad_()
    y = fuselm.rms_norm(x, backend="triton")
    y.sin().sum().backward()
    xc = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    want = fuselm.rms_norm(xc, backend="triton")
    want.sin().sum().backward()
    assert torch.equal(y, want)
    assert torch.equal(_grad(x), _grad(xc))


def test_fp32_weight_with_bf16_input_keeps_the_input_dtype(device, generator):
    x = torch.randn(3, 64, device=device, generator=generator).bfloat16()
    w = torch.randn(64, device=device, generator=generator, requires_grad=True)
    y = fuselm.rms_norm(x, w, backend="triton")
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and _grad(w).dtype == torch.float32
    exact = torch.nn.functional.rms_norm(x.double(), (64,), w.double(), 1e-6)
    assert measure(y, exact).norm < 2.0**-8


def test_rows_of_one_element(device):
    """y = x / sqrt(x² + eps): its gradient is what a cancellation leaves, small against rstd, not against itself."""
    x = torch.tensor([[2.0], [-0.5], [0.0]], device=device, requires_grad=True)
    y = fuselm.rms_norm(x, eps=1e-3, backend="triton")
    y.sum().backward()
    xd = x.detach().double()
    torch.testing.assert_close(y, (xd / (xd * xd + 1e-3).sqrt()).float(), rtol=1e-6, atol=0)
    want = 1e-3 / (xd * xd + 1e-3) ** 1.5
    torch.testing.assert_close(_grad(x), want.float(), rtol=1e-3, atol=1e-6)


def test_opcheck(device, generator):
    x = torch.randn(4, 32, device=device, generator=generator, requires_grad=True)
    w = torch.randn(32, device=device, generator=generator, requires_grad=True)
    torch.library.opcheck(torch.ops.fuselm.rms_norm_forward.default, (x, w, 1e-6))
    torch.library.opcheck(torch.ops.fuselm.rms_norm_forward.default, (x, None, 1e-6))
    torch.library.opcheck(torch.ops.fuselm.add_rms_norm_forward.default, (x, x.detach().clone(), w, 1e-6))
    x, w = x.detach(), w.detach()
    rstd = torch.ops.fuselm.rms_norm_forward(x, w, 1e-6)[1]
    for dh, weight in ((None, w), (x.sin(), w), (x.sin(), None)):
        arguments = (x.cos(), dh, x, weight, rstd, 0.0, weight is not None)
        torch.library.opcheck(torch.ops.fuselm.rms_norm_backward.default, arguments)


def test_runs_are_bitwise_equal(device, generator):
    x = torch.randn(257, 96, device=device, generator=generator)
    w = torch.ones(96, device=device, requires_grad=True)
    grads = [torch.autograd.grad(fuselm.rms_norm(x, w, backend="triton").square().sum(), w)[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


@pytest.mark.gpu
@pytest.mark.parametrize("n", [4096, 4097])
def test_more_elements_than_int32_holds(n, device):
    """524,300 rows: the last 100 lie beyond 2**31 elements, and begin as deep in a vector as those of their copy."""
    x = torch.randn(524_300, n, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = fuselm.rms_norm(x, backend="triton")
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    tail = x.detach()[-100:].clone().requires_grad_()
    want = fuselm.rms_norm(tail, backend="triton")
    (want_dx,) = torch.autograd.grad(want, tail, torch.ones_like(want))
    assert torch.equal(y[-100:], want) and torch.equal(dx[-100:], want_dx)


def test_a_row_stride_beyond_int32(device):
    """Three rows 2**30 + 64 elements apart: the last starts beyond 2**31; only touched pages are committed."""
    x = torch.empty_strided((3, 16), (2**30 + 64, 1), dtype=torch.float16, device=device)
    x.copy_(torch.arange(48, device=device).view(3, 16))
    torch.testing.assert_close(fuselm.rms_norm(x, backend="triton"), fuselm.rms_norm(x.clone(), backend="triton"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.ones(2, 4, dtype=torch.int64)}, "x has dtype torch.int64"),
        ({"x": torch.ones(2, 4), "weight": torch.ones(3)}, r"weight has shape \(3,\): expected \(4,\)"),
        ({"x": torch.ones(2, 4), "eps": -1.0}, "eps=-1.0"),
        ({"x": torch.tensor(1.0)}, "x is a scalar"),
        ({"x": torch.ones(2, 4), "backend": "cuda"}, "backend='cuda'"),
        ({"x": torch.ones(2, 4, dtype=torch.float64), "backend": "triton"}, "fp32, bf16 and fp16"),
    ],
)
def test_bad_input_names_the_argument(arguments, message, device):
    moved: Any = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        fuselm.rms_norm(**moved)


def test_residual_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"residual has shape \(2, 3\): expected x's shape \(2, 4\)"):
        fuselm.add_rms_norm(torch.ones(2, 4), torch.ones(2, 3))
