"""linear_cross_entropy in chunks of the vocabulary: the loss and gradients of chunks of rows."""

from __future__ import annotations

import itertools

import pytest
import torch

import fuselm.kernels.launch.linear_cross_entropy as launch
from fuselm.kernels.launch.linear_cross_entropy import ChunkPlan, chunk_plan
from fuselm.kernels.linear_cross_entropy import linear_cross_entropy
from fuselm.kernels.numerics import check_budget
from fuselm.kernels.specs.cross_entropy import plain_cross_entropy

ROWS, DIM = 11, 24


@pytest.fixture
def narrow(monkeypatch):
    """Sizes at which the small cases here take the chunks of the vocabulary: columns are multiples of 16."""
    monkeypatch.setattr(launch, "_TILE_ROWS", 16)
    monkeypatch.setattr(launch, "_LEAST_COLUMNS", 16)


def budget(columns: int, itemsize: int, vocab: int) -> int:
    found = columns * ROWS * itemsize
    assert chunk_plan(ROWS, vocab, itemsize, 0, found, True) == ChunkPlan(ROWS, columns)
    return found


def make(vocab, device, generator, dtype=torch.float32):
    x, w = (torch.randn(n, DIM, device=device, generator=generator) for n in (ROWS, vocab))
    targets = torch.randint(0, vocab, (ROWS,), device=device, generator=generator)
    targets[2], targets[5] = -100, vocab - 1
    return x.to(dtype).requires_grad_(), (w * 0.3).to(dtype).requires_grad_(), targets


def gradients(x, w, targets, upstream=None, lse_upstream=None, dtype=None, **options):
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in (x, w)]
    if dtype is None:
        out = linear_cross_entropy(leaves[0], leaves[1], targets, backend="triton", **options)
    else:
        options = {k: v for k, v in options.items() if k != "memory_budget"}
        out = plain_cross_entropy(leaves[0] @ leaves[1].t(), targets, **options)
    loss, lse = out if options.get("return_lse") else (out, None)
    total = loss.sum() if upstream is None else (loss * upstream.to(loss.dtype)).sum()
    if lse is not None and lse_upstream is not None:
        total = total + (lse * lse_upstream.to(lse.dtype)).sum()
    return loss.detach(), *torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocab", [64, 81])
def test_every_combination_of_options(vocab, reduction, narrow, device, generator):
    x, w, targets = make(vocab, device, generator)
    upstream = torch.rand(ROWS if reduction == "none" else (), device=device, generator=generator) + 0.5
    lse_upstream = torch.randn(ROWS, device=device, generator=generator)
    for smoothing, z_loss, softcap, lse in itertools.product((0.0, 0.1), (0.0, 1e-2), (None, 5.0), (False, True)):
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "return_lse": lse}
        everything = (x, w, targets, upstream, lse_upstream if lse else None)
        options |= {"reduction": reduction, "memory_budget": budget(16, 4, vocab)}
        ours = gradients(*everything, **options)
        exact, plain = (gradients(*everything, dtype=d, **options) for d in (torch.float64, torch.float32))
        for name, a, e, p in zip(("loss", "dx", "dw"), ours, exact, plain, strict=True):
            check_budget(a, e, p, name=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_who_needs_a_gradient(dtype, narrow, device, generator):
    x, w, targets = make(81, device, generator, dtype)
    size = budget(32, 2, 81)
    rows = gradients(x, w, targets)
    columns = gradients(x, w, targets, memory_budget=size)
    assert columns[2].dtype == dtype
    tolerance = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-9
    for a, b in zip(columns, rows, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max()
    frozen = linear_cross_entropy(x.detach(), w, targets, backend="triton", memory_budget=size)
    assert torch.equal(torch.autograd.grad(frozen, w)[0], columns[2])


def test_autocast_gives_the_weight_its_dtype(narrow, device, generator):
    x, w, targets = make(81, device, generator)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, w, targets, backend="triton", memory_budget=budget(16, 2, 81))
    dx, dw = torch.autograd.grad(loss, (x, w))
    assert dx.dtype == dw.dtype == torch.float32
    expected = gradients(x, w, targets, dtype=torch.float64)
    for a, b in zip((dx, dw), expected[1:], strict=True):
        assert (a - b).abs().max() <= 0.05 * b.abs().max()


def test_ignored_rows_and_impossible_targets(narrow, device, generator):
    x, w, targets = make(81, device, generator)
    options = {"reduction": "none", "memory_budget": budget(16, 4, 81)}
    loss, dx, _ = gradients(x, w, torch.full_like(targets, -100), **options)
    assert (loss == 0).all() and (dx == 0).all()
    loss, dx, _ = gradients(x, w, targets, ignore_index=int(targets[0]), **options)
    assert loss[0] == 0 and (dx[0] == 0).all() and loss[2].isnan()  # -100 is impossible now
    targets[3] = 81
    loss, dx, _ = gradients(x, w, targets, **options)
    assert loss[3].isnan() and dx[3].isnan().all() and loss[[0, 1, 2, 4]].isfinite().all()


def test_the_logits_keep_to_the_budget_and_no_fp32_dw_exists(narrow, device, generator, monkeypatch):
    x, w, targets = make(81, device, generator, torch.float16)
    size = budget(32, 2, 81)
    shapes = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: (shapes.append(made := empty(*a, **k)), made)[1])
    linear_cross_entropy(x, w, targets, backend="triton", memory_budget=size).backward()
    assert size in [t.nbytes for t in shapes]
    assert not [t for t in shapes if t.dtype == torch.float32 and t.numel() >= 81 * DIM]


def test_compiled(narrow, device, generator):
    x, w, targets = make(81, device, generator)
    size = budget(16, 4, 81)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, w, targets, backend="triton", memory_budget=size)

    want = gradients(x, w, targets, memory_budget=size)
    torch._dynamo.reset()
    loss = torch.compile(function, fullgraph=True)(x, w)
    for a, b in zip((loss, *torch.autograd.grad(loss, (x, w))), want, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-5, atol=1e-6)


def test_the_plan():
    liger = 256 * 128256 * 2  # of 8192 x 4096 x 128256
    assert chunk_plan(8192, 128256, 2, 0, liger, True) == ChunkPlan(8192, 3968)
    assert chunk_plan(8192, 128256, 2, 0, liger, False) == ChunkPlan(256)  # there is no dW to save on
    assert chunk_plan(8192, 128256, 2, 0, 4 * liger, True) == ChunkPlan(1024)
    assert chunk_plan(8192, 128256, 2, 0, 0, True) == ChunkPlan(4096)
    assert chunk_plan(8192, 128256, 2, 300, 0, True) == ChunkPlan(300)
    assert chunk_plan(131072, 128256, 2, 0, liger, True) == ChunkPlan(256)  # too few columns for so many rows
    assert chunk_plan(64, 128256, 2, 0, liger, True) == ChunkPlan(64)
