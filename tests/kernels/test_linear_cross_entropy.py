"""linear_cross_entropy: options against the formula in fp64, chunks, frozen inputs, repeated backward, autocast."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fuselm.kernels.linear_cross_entropy as module
from fuselm.kernels.launch.linear_cross_entropy import chunk_rows, row_bytes
from fuselm.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from fuselm.kernels.numerics import check_budget, measure
from fuselm.kernels.specs.cross_entropy import plain_cross_entropy


def make(rows, vocab, dim, device, generator, *, dtype=torch.float32, ignored=0.25, ignore_index=-100) -> Any:
    rows = rows if isinstance(rows, tuple) else (rows,)
    x = torch.randn((*rows, dim), device=device, generator=generator).to(dtype)
    weight = (torch.randn((vocab, dim), device=device, generator=generator) * dim**-0.5).to(dtype)
    targets = torch.randint(0, vocab, rows, device=device, generator=generator)
    mask = torch.rand(rows, device=device, generator=generator) < ignored
    return x.requires_grad_(), weight.requires_grad_(), targets.masked_fill(mask, ignore_index)


def plain(x, weight, targets, chunk_size=None, **options) -> Any:
    return plain_cross_entropy(F.linear(x, weight), targets, **options)


def backward(function, x, weight, targets, upstream=None, lse_upstream=None, **options) -> Any:
    """loss, lse (or None), dx, dweight of sum(loss · upstream) + sum(lse · lse_upstream)."""
    leaves = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    outputs = function(*leaves, targets, **options)
    loss, lse = outputs if options.get("return_lse") else (outputs, None)
    total = (loss if upstream is None else loss * upstream.to(loss.dtype)).sum()
    if lse is not None and lse_upstream is not None:
        total = total + (lse * lse_upstream.to(lse.dtype)).sum()
    dx, dw = torch.autograd.grad(total, leaves)
    return loss.detach(), None if lse is None else lse.detach(), dx, dw


def check(x, weight, targets, upstream=None, lse_upstream=None, **options) -> Any:
    """Kernels within the budget of the formula in fp64."""
    both = (targets, upstream, lse_upstream)
    ours = backward(linear_cross_entropy, x, weight, *both, backend="triton", **options)
    exact = backward(plain, x.double(), weight.double(), *both, **options)
    theirs = backward(plain, x, weight, *both, **options)
    for name, a, e, p in zip(("loss", "lse", "dx", "dweight"), ours, exact, theirs, strict=True):
        if a is not None:
            check_budget(a, e, p, name=name, dtype=x.dtype)
    assert ours[2].dtype == x.dtype and ours[3].dtype == weight.dtype
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_every_combination_of_options(reduction, dtype, device, generator):
    x, weight, targets = make((3, 4), 37, 64, device, generator, dtype=dtype)
    upstream = torch.randn((3, 4) if reduction == "none" else (), device=device, generator=generator)
    lse_upstream = torch.randn((3, 4), device=device, generator=generator)
    for smoothing, z_loss, softcap in itertools.product((0.0, 0.1), (0.0, 1e-2), (None, 5.0)):
        lse = (smoothing > 0) != (z_loss > 0)
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "return_lse": lse}
        check(x, weight, targets, upstream, lse_upstream if lse else None, reduction=reduction, chunk_size=5, **options)


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 12, 100])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_any_chunk_size_gives_the_same(reduction, chunk_size, device, generator):
    x, weight, targets = make((3, 4), 37, 16, device, generator)
    want = backward(linear_cross_entropy, x, weight, targets, reduction=reduction, backend="reference")
    got = backward(
        linear_cross_entropy, x, weight, targets, reduction=reduction, backend="triton", chunk_size=chunk_size
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab", [1, 37, 50257])
def test_vocabularies(vocab, device, generator):
    """Rows of 50,257 fp16 logits do not start on 16-byte borders by themselves."""
    x, weight, targets = make(5, vocab, 16, device, generator, dtype=torch.float16, ignored=0.0)
    targets[-1] = vocab - 1
    check(x, weight, targets, chunk_size=3)


def test_ignore_index_inside_the_vocabulary(device, generator):
    x, weight, targets = make(20, 37, 16, device, generator, ignore_index=3)
    check(x, weight, targets, ignore_index=3, label_smoothing=0.1, chunk_size=8)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_all_ignored_is_exactly_zero(reduction, backend, device, generator):
    x, weight, targets = make((2, 5), 37, 16, device, generator, ignored=1.0)
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "reduction": reduction, "backend": backend, "chunk_size": 4}
    loss, _, dx, dw = backward(linear_cross_entropy, x, weight, targets, torch.tensor(3.0, device=device), **options)
    assert (loss == 0).all() and (dx == 0).all() and (dw == 0).all()


def test_a_chunk_that_is_all_ignored(device, generator):
    x, weight, targets = make(12, 37, 16, device, generator, ignored=0.0)
    targets[:4] = -100  # the first chunk writes dw
    targets[8:] = -100
    check(x, weight, targets, chunk_size=4)


def test_impossible_target_shows_as_nan(device, generator):
    x, weight, targets = make(5, 37, 16, device, generator, ignored=0.0)
    targets[3] = 37
    losses = linear_cross_entropy(x, weight, targets, reduction="none", backend="triton", chunk_size=2)
    assert losses.isnan().tolist() == [False, False, False, True, False]
    assert linear_cross_entropy(x, weight, targets, backend="triton").isnan()


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_micro_batches_sum_to_the_whole(splits, device, generator):
    """Sums over micro-batches of unequal counts of valid labels, over the count of all: the whole batch's loss."""
    x, weight, targets = make(16, 37, 16, device, generator, ignored=0.0)
    targets[:7] = -100
    want = backward(plain, x, weight, targets)
    count = (targets != -100).sum()
    leaf_x, leaf_w = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    total = torch.zeros((), device=device)
    for xs, ts in zip(leaf_x.chunk(splits), targets.chunk(splits), strict=True):
        loss = linear_cross_entropy(xs, leaf_w, ts, reduction="sum", backend="triton", chunk_size=3) / count
        loss.backward()
        total += loss.detach()
    for a, b in zip((total, leaf_x.grad, leaf_w.grad), (want[0], *want[2:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_backward_again_and_again(reduction, dtype, device, generator):
    """The first pass may scale the saved gradients in place; it must not be able to spoil the second."""
    x, weight, targets = make(7, 37, 16, device, generator, dtype=dtype)
    loss = linear_cross_entropy(x, weight, targets, reduction=reduction, backend="triton", chunk_size=3).sum()
    three = torch.tensor(3.0, device=device)
    first = torch.autograd.grad(loss, (x, weight), three, retain_graph=True)
    kept = [g.clone() for g in first]
    for g in first:
        g.zero_()
    second = torch.autograd.grad(loss, (x, weight), three, retain_graph=True)
    for a, b in zip(second, kept, strict=True):
        assert torch.equal(a, b)
    loss.backward(retain_graph=True)
    loss.backward()
    for leaf, b in zip((x, weight), kept, strict=True):
        torch.testing.assert_close(leaf.grad, b * 2 / 3, rtol=3e-3, atol=1e-3 if dtype == torch.float16 else 1e-6)
    assert three == 3.0


def test_upstream_gradient_that_differs_by_row(device, generator):
    x, weight, targets = make((3, 4), 37, 64, device, generator)
    wide = torch.randn((4, 6), device=device, generator=generator)
    for upstream in (wide.t()[:3], wide[:3, ::2].repeat(1, 2)[:, :4], torch.tensor(0.3, device=device).expand(3, 4)):
        before = upstream.clone()
        check(x, weight, targets, upstream, reduction="none", chunk_size=5)
        assert torch.equal(upstream, before)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_frozen_inputs_cost_nothing(reduction, device, generator, monkeypatch):
    """None for what is frozen, and no matrix multiplication for it; only the loss under no_grad."""
    count = [0]
    mm, accumulate = torch.mm, module.accumulate_dw

    def counted(function):
        def call(*args, **kwargs):
            count[0] += 1
            return function(*args, **kwargs)

        return call

    x, weight, targets = make(6, 37, 16, device, generator)
    want = backward(plain, x, weight, targets, reduction=reduction)
    monkeypatch.setattr(module, "accumulate_dw", counted(accumulate))
    monkeypatch.setattr(torch, "mm", counted(mm))
    again = 2 if reduction == "none" else 0  # "none" computes the logits of its two chunks once more
    for need_x, need_w, multiplications in ((True, False, 4 + again), (False, True, 4 + again), (False, False, 2)):
        leaf_x, leaf_w = x.detach().requires_grad_(need_x), weight.detach().requires_grad_(need_w)
        monkeypatch.setattr(module, "accumulate_dw", counted(lambda dw, g, a, first: dw.zero_()))
        count[0] = 0
        loss = linear_cross_entropy(leaf_x, leaf_w, targets, reduction=reduction, backend="triton", chunk_size=3)
        assert loss.requires_grad == (need_x or need_w)
        if loss.requires_grad:
            loss.sum().backward()
        assert count[0] == multiplications, (need_x, need_w)
        assert (leaf_x.grad is not None) == need_x and (leaf_w.grad is not None) == need_w
        if need_x:
            torch.testing.assert_close(leaf_x.grad, want[2], rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(module, "accumulate_dw", accumulate)
    only_w = weight.detach().requires_grad_()
    linear_cross_entropy(x.detach(), only_w, targets, reduction=reduction, backend="triton").sum().backward()
    torch.testing.assert_close(only_w.grad, want[3], rtol=1e-5, atol=1e-6)
    count[0] = 0
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets, reduction=reduction, backend="triton", chunk_size=3)
    assert count[0] == 2 and not loss.requires_grad
    torch.testing.assert_close(loss, want[0], rtol=1e-5, atol=1e-6)


def test_logits_never_exist_as_a_whole(device, generator, monkeypatch):
    rows, vocab, chunk = 64, 1000, 8
    x, weight, targets = make(rows, vocab, 4, device, generator)
    sizes = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: (sizes.append((made := empty(*a, **k)).numel()), made)[1])
    linear_cross_entropy(x, weight, targets, backend="triton", chunk_size=chunk).backward()
    assert max(sizes) == chunk * vocab


def test_default_chunks():
    assert chunk_rows(8192, 128256, 2) == 4096
    assert chunk_rows(32768, 50304, 2) == 5504
    assert chunk_rows(5505, 50304, 2) == 2816  # evened out, whole tiles
    assert chunk_rows(100, 1024, 2) == 100
    assert chunk_rows(10000, 2**22, 4) == 512
    for rows in (0, 1, 3, 4097, 16800):
        assert chunk_rows(rows, 128256, 2) >= 1


@pytest.mark.parametrize("vocab", [50257, 50304, 128256])
def test_chunks_keep_to_a_memory_budget(vocab):
    """As many rows as fit, evened out, in whole tiles where a tile fits."""
    size = row_bytes(vocab, 2)
    assert 0 <= size - 2 * vocab < 16 and size % 16 == 0
    for budget in (size, 5 * size + 1, 130 * size, 2**28, 2**30, 2**33):
        for rows in (1, 127, 4097, 16384):
            chunk = chunk_rows(rows, vocab, 2, budget)
            assert 1 <= chunk <= rows and chunk * size <= budget
            fits = budget // size
            assert chunk in (rows, fits) or chunk % 128 == 0 or fits < 128
            tiles = fits // 128 * 128 or fits
            assert -(-rows // chunk) == -(-rows // tiles)  # no more chunks than the budget asks for


def test_memory_budget_limits_the_buffer(device, generator, monkeypatch):
    x, weight, targets = make(64, 1000, 4, device, generator)
    want = backward(linear_cross_entropy, x, weight, targets, backend="triton")
    sizes = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: (sizes.append((made := empty(*a, **k)).nbytes), made)[1])
    got = backward(linear_cross_entropy, x, weight, targets, backend="triton", memory_budget=10 * 4000 + 3999)
    assert max(sizes) == 10 * 4000
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_upstream_gradient_of_one_leaves_the_buffers_alone(dtype, device, generator, monkeypatch):
    """dx and dw of the forward pass are what the backward pass returns; only a 16-bit dw is rounded into new memory."""
    x, weight, targets = make(6, 37, 16, device, generator, dtype=dtype)
    calls = []
    launch = module.launch_multiply
    monkeypatch.setattr(module, "launch_multiply", lambda *a: (calls.append(a), launch(*a))[1])
    loss = linear_cross_entropy(x, weight, targets, reduction="sum", backend="triton", chunk_size=4)
    dx, dw = torch.autograd.grad(loss, (x, weight))
    (dx_buffer, dx_result, one), (dw_buffer, dw_result, _) = calls
    assert dx_buffer is dx_result and dx.data_ptr() == dx_buffer.data_ptr() and one.item() == 1.0
    assert (dw_buffer is dw_result) == (dtype == torch.float32) and dw.data_ptr() == dw_result.data_ptr()
    assert dw_buffer.dtype == torch.float32 and torch.equal(dw, dw_buffer.to(dtype))


def test_dw_is_summed_in_fp32(device, generator):
    """Over 32 chunks a sum in fp16 would lose digits that one rounding at the end does not."""
    x, weight, targets = make(256, 37, 16, device, generator, dtype=torch.float16, ignored=0.0)
    with torch.no_grad():
        x += 1.0
    exact = backward(plain, x.double(), weight.double(), targets, reduction="sum")[3]
    got = backward(linear_cross_entropy, x, weight, targets, reduction="sum", backend="triton", chunk_size=8)[3]
    in_fp16 = torch.zeros_like(weight)
    for xs, ts in zip(x.detach().split(8), targets.split(8), strict=True):
        in_fp16 += backward(plain, xs, weight, ts, reduction="sum")[3]
    assert measure(got, exact).norm < 2**-11 < measure(in_fp16, exact).norm


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_fp32_weights_under_bf16_autocast(reduction, device, generator):
    """As torch under autocast, but dweight keeps the fp32 of its sum."""
    x, weight, targets = make(6, 37, 64, device, generator)
    with torch.autocast(device.type, torch.bfloat16):
        ours = backward(linear_cross_entropy, x, weight, targets, reduction=reduction, backend="triton", chunk_size=4)
        theirs = backward(plain, x, weight, targets, reduction=reduction)
        reference = backward(linear_cross_entropy_reference, x, weight, targets, reduction=reduction)
    outside = linear_cross_entropy(
        x.bfloat16(), weight.bfloat16(), targets, reduction=reduction, backend="triton", chunk_size=4
    )
    assert torch.equal(ours[0], outside)
    for a, b, c in zip(ours, theirs, reference, strict=True):
        if a is not None:
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-3)
            torch.testing.assert_close(b, c, rtol=1e-2, atol=1e-3)
    assert not torch.equal(ours[3], ours[3].bfloat16().float())


def test_backward_inside_autocast_is_the_same(device, generator):
    x, weight, targets = make(6, 37, 16, device, generator)
    want = backward(linear_cross_entropy, x, weight, targets, reduction="none", backend="triton")
    loss = linear_cross_entropy(x, weight, targets, reduction="none", backend="triton")
    with torch.autocast(device.type, torch.bfloat16):
        got = torch.autograd.grad(loss.sum(), (x, weight))
    for a, b in zip(got, want[2:], strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_raise(device, generator):
    x, weight, targets = make(4, 37, 16, device, generator)
    loss = linear_cross_entropy(x, weight, targets, backend="triton")
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.square().sum(), x)


def test_strided_inputs(device, generator):
    x, weight, targets = make((4, 6), 37, 32, device, generator)
    views = (x.detach()[:, 1:, ::2], x.detach()[:, 1:, :16], x.detach()[:1, 1:, :16].expand(4, 5, 16))
    for view, w in itertools.product(views, (weight.detach()[:, ::2], weight.detach()[:, :16])):
        want = backward(linear_cross_entropy, view.contiguous(), w.contiguous(), targets[:, 1:], backend="triton")
        leaves = view.requires_grad_(), w.requires_grad_()
        loss = linear_cross_entropy(*leaves, targets[:, 1:], backend="triton")
        got = torch.autograd.grad(loss, leaves)
        for a, b in zip((loss, *got), (want[0], *want[2:]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_nan_in_fresh_memory_never_shows(reduction, device, generator, monkeypatch):
    make_empty = torch.empty

    def poisoned(*args, **kwargs):
        x = make_empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    x, weight, targets = make(10, 37, 16, device, generator, ignored=0.5, dtype=torch.float16)  # 37: rows are padded
    monkeypatch.setattr(torch, "empty", poisoned)
    loss, lse, dx, dw = backward(
        linear_cross_entropy, x, weight, targets, reduction=reduction, return_lse=True, backend="triton", chunk_size=4
    )
    assert all(t.isfinite().all() for t in (loss, lse, dx, dw))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager_equals_torch(dynamic, device, generator):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x, w, t: linear_cross_entropy(x * 1.0, w, t, backend="triton", chunk_size=24),
        fullgraph=True,
        dynamic=dynamic,
    )
    for fraction in (0.0, 0.25, 1.0):
        rows = 64 if not dynamic else int(80 - 16 * fraction)
        x, weight, targets = make(rows, 259, 16, device, generator, ignored=fraction)
        want = backward(plain, x, weight, targets)
        eager = backward(linear_cross_entropy, x, weight, targets, backend="triton", chunk_size=24)
        for upstream in (1.0, 3.0):
            loss = compiled(x, weight, targets)
            gradients = torch.autograd.grad(loss * upstream, (x, weight))
            assert torch.equal(loss, eager[0])
            torch.testing.assert_close(loss, want[0], rtol=1e-5, atol=1e-6)
            for a, b, c in zip(gradients, eager[2:], want[2:], strict=True):
                torch.testing.assert_close(a, b * upstream, rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(a, c * upstream, rtol=1e-4, atol=1e-6)


def test_opcheck(device, generator):
    x, weight, targets = make(5, 37, 16, device, generator)
    numbers = (-100, 0.1, 1e-3, 5.0)
    ops = torch.ops.fuselm
    for reduction, flags in (
        ("mean", (False, True, True)),
        ("none", (True, False, False)),
        ("sum", (False, True, False)),
    ):
        torch.library.opcheck(
            ops.linear_cross_entropy_forward, (x, weight, targets, *numbers, reduction, torch.float32, 2, 0, *flags)
        )
    saved = (x.detach(), weight.detach(), targets)
    two, per_row = torch.tensor(2.0, device=device), torch.rand(5, device=device)
    for upstream, lse, flags in ((two, None, (True, True)), (per_row, per_row, (False, True))):
        torch.library.opcheck(
            ops.linear_cross_entropy_backward, (*saved, upstream, lse, *numbers, torch.float32, 2, 0, *flags)
        )


def test_reference_is_torch_in_fp64(device, generator):
    x, weight, targets = make((2, 3), 37, 16, device, generator)
    arguments = x.detach().double(), weight.detach().double(), targets
    options = {"softcap": 5.0, "label_smoothing": 0.1, "z_loss": 0.01, "return_lse": True}
    ours = backward(linear_cross_entropy, *arguments, **options)  # fp64 goes to the reference
    for a, b in zip(ours, backward(plain, *arguments, **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(3, 5)}, ValueError, r"x has shape \(3, 5\): expected \(..., 4\)"),
        ({"weight": torch.zeros(4)}, ValueError, r"weight has shape \(4,\)"),
        ({"weight": torch.zeros(5, 4, dtype=torch.bfloat16)}, TypeError, "weight has dtype torch.bfloat16"),
        ({"x": torch.zeros(3, 4, dtype=torch.int64)}, TypeError, "x has dtype torch.int64"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, ValueError, r"targets has shape \(4,\)"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
        ({"chunk_size": 2.0}, TypeError, "chunk_size=2.0, of type float"),
        ({"memory_budget": 1e9}, TypeError, "memory_budget=1000000000.0, of type float"),
        ({"memory_budget": "1GB"}, TypeError, "memory_budget='1GB', of type str"),
        ({"memory_budget": 31}, ValueError, "memory_budget=31 bytes: expected at least 32"),
        ({"memory_budget": 64, "chunk_size": 2}, ValueError, "chunk_size=2 and memory_budget=64"),
        ({"reduction": "avg"}, ValueError, "reduction='avg'"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    arguments = {"x": torch.zeros(3, 4), "weight": torch.zeros(5, 4), "targets": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(error, match=words):
        linear_cross_entropy(**(arguments | change))


@pytest.mark.gpu
def test_no_synchronisation(device, generator):
    x, weight, targets = make(64, 5000, 64, device, generator, dtype=torch.bfloat16)
    linear_cross_entropy(x, weight, targets, chunk_size=48).backward()  # compiles first
    torch.cuda.set_sync_debug_mode("error")
    try:
        for reduction in ("none", "sum", "mean"):
            (linear_cross_entropy(x, weight, targets, chunk_size=48, reduction=reduction).sum() * 3).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_is_a_chunk_of_logits_and_the_gradients(device):
    rows, vocab, dim = 8192, 128256, 1024
    x = torch.randn((rows, dim), device=device, dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn((vocab, dim), device=device, dtype=torch.bfloat16) * dim**-0.5).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(x, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 1.1 * 2**30 + 4 * vocab * dim + 4 * rows * dim
