"""A vocabulary in two parts gives the products of the whole."""

from __future__ import annotations

import pytest
import torch

from fuselm.kernels import chunk_products, linear_cross_entropy
from fuselm.kernels.chunk_products import (
    accumulate_dw,
    accumulate_dx,
    logits_buffer,
    multiply_dw,
    multiply_dx,
    multiply_logits,
    vocab_parts,
)
from fuselm.kernels.numerics import check_budget

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("vocab", "dtype", "device", "sizes"),
    [
        (50257, torch.bfloat16, CUDA, [50256, 1]),
        (128255, torch.float16, CUDA, [128248, 7]),
        (50257, torch.float32, CUDA, [50256, 1]),
        (50258, torch.float32, CUDA, [50256, 2]),
        (50304, torch.bfloat16, CUDA, [50304]),
        (50260, torch.float32, CUDA, [50260]),
        (1023, torch.bfloat16, CUDA, [1023]),
        (50257, torch.bfloat16, CPU, [50257]),
    ],
)
def test_parts_end_at_the_last_whole_vector(vocab, dtype, device, sizes):
    parts = vocab_parts(vocab, dtype, device)
    assert [part.stop - part.start for part in parts] == sizes
    assert parts[0].start == 0 and parts[-1].stop == vocab


@pytest.fixture
def in_parts(monkeypatch):
    """Cuts every vocabulary as on a GPU, here."""
    monkeypatch.setattr(chunk_products, "LEAST_APART", 0)
    monkeypatch.setattr(chunk_products, "vocab_parts", lambda v, dtype, device: vocab_parts(v, dtype, CUDA))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [37, 8, 15])
def test_products(vocab, dtype, in_parts):
    generator = torch.Generator().manual_seed(vocab)
    x, w = (torch.randn(n, 24, generator=generator).to(dtype) for n in (11, vocab))
    logits = logits_buffer(11, vocab, dtype, CPU).fill_(float("nan"))
    multiply_logits(x, w, logits)
    check_budget(logits, x.double() @ w.double().t(), x @ w.t(), name="logits")
    dx = torch.full_like(x, float("nan"))
    multiply_dx(logits, w, dx)
    check_budget(dx, logits.double() @ w.double(), logits @ w, name="dx")
    dx = torch.full((11, 24), float("nan"))
    for times, first in ((1, True), (2, False)):
        accumulate_dx(dx, logits, w, first=first)
        check_budget(dx, times * (logits.double() @ w.double()), times * (logits.float() @ w.float()), name="fp32 dx")
    dw = torch.full((vocab, 24), float("nan"), dtype=dtype)
    multiply_dw(dw, logits, x)
    check_budget(dw, logits.double().t() @ x.double(), logits.t() @ x, name="dw in x's dtype")
    dw = torch.full((vocab, 24), float("nan"))
    accumulate_dw(dw, logits, x, first=True)
    once = logits.double().t() @ x.double()
    check_budget(dw, once, logits.float().t() @ x.float(), name="dw")
    accumulate_dw(dw, logits, x, first=False)
    check_budget(dw, 2 * once, 2 * (logits.float().t() @ x.float()), name="dw of two chunks")


def test_the_loss_and_gradients_of_a_vocabulary_in_parts(in_parts, device):
    x = torch.randn(10, 16, device=device, requires_grad=True)
    w = torch.randn(37, 16, device=device, requires_grad=True)
    targets = torch.arange(10, device=device) * 4
    loss = linear_cross_entropy.linear_cross_entropy(x, w, targets, backend="triton", chunk_size=4)
    expected = torch.nn.functional.cross_entropy(x @ w.t(), targets)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(expected, (x, w)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_lies_between_rows_is_no_part_of_a_product(dtype, device, monkeypatch):
    """Memory that nobody has written holds NaN here, as it may anywhere; a CPU multiplied it by 0."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    x, weight = torch.ones(43, 3, dtype=dtype, device=device), torch.ones(49, 3, dtype=dtype, device=device)
    logits = logits_buffer(43, 49, dtype, device)
    multiply_logits(x, weight, logits)
    dx, dw = torch.empty((43, 3), dtype=dtype, device=device), torch.empty((49, 3), device=device)
    multiply_dx(logits, weight, dx)
    accumulate_dw(dw, logits, x, first=True)
    assert (logits == 3).all() and (dx == 147).all() and (dw == 129).all()
