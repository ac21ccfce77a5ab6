"""linear_cross_entropy in chunks of the vocabulary: the loss and gradients of chunks of rows."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import fuselm.kernels.linear_cross_entropy as module
import fuselm.kernels.vocab_chunks as vocab_chunks
from fuselm.kernels.direct import RepeatedLaunch
from fuselm.kernels.launch import linear_cross_entropy as launch
from fuselm.kernels.launch.linear_cross_entropy import ChunkPlan, chunk_plan, column_chunks
from fuselm.kernels.linear_cross_entropy import linear_cross_entropy
from fuselm.kernels.numerics import check_budget
from fuselm.kernels.specs.cross_entropy import plain_cross_entropy

ROWS, DIM = 7, 16
ALL_ROWS = ChunkPlan(ROWS, 32, lend=False)
LENT = ChunkPlan(ROWS, 16)  # of 81 columns two chunks are lent, two pass through the buffer
BLOCKS = ChunkPlan(4, 16, lend=False)
BOTH = ChunkPlan(4, 32)


@pytest.fixture
def plan(monkeypatch):
    """Sets the plan of memory budgets, whatever they are, and the tile of lent chunks to what small cases can have."""
    monkeypatch.setattr(launch, "_LENT_TILE", 16)
    return lambda value: monkeypatch.setattr(module, "chunk_plan", lambda *_: value)


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
def test_every_combination_of_options(reduction, plan, device, generator):
    x, w, targets = make(49, device, generator)
    upstream = torch.rand(ROWS if reduction == "none" else (), device=device, generator=generator) + 0.5
    lse_upstream = torch.randn(ROWS, device=device, generator=generator)
    plans = itertools.cycle((LENT, BLOCKS, BOTH))
    for smoothing, z_loss, softcap in itertools.product((0.0, 0.1), (0.0, 1e-2), (None, 5.0)):
        plan(next(plans))
        lse = (smoothing > 0) != (z_loss > 0)
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "return_lse": lse}
        everything = (x, w, targets, upstream, lse_upstream if lse else None)
        options |= {"reduction": reduction, "memory_budget": 4096}
        ours = gradients(*everything, **options)
        exact, plain = (gradients(*everything, dtype=d, **options) for d in (torch.float64, torch.float32))
        for name, a, e, p in zip(("loss", "dx", "dw"), ours, exact, plain, strict=True):
            check_budget(a, e, p, name=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_who_needs_a_gradient(dtype, plan, device, generator):
    x, w, targets = make(81, device, generator, dtype)
    rows = gradients(x, w, targets)
    tolerance = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-9
    for value in (LENT, BLOCKS):
        plan(value)
        columns = gradients(x, w, targets, memory_budget=4096)
        assert columns[2].dtype == dtype
        for a, b in zip(columns, rows, strict=True):
            assert (a - b).abs().max() <= tolerance * b.abs().max()
        frozen = linear_cross_entropy(x.detach(), w, targets, backend="triton", memory_budget=4096)
        assert torch.equal(torch.autograd.grad(frozen, w)[0], columns[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_the_weight_its_dtype(dtype, plan, device, generator):
    x, w, targets = make(81, device, generator)
    w = w.detach().to(torch.float32 if dtype == torch.bfloat16 else dtype).requires_grad_()
    for value in (LENT, BLOCKS):
        plan(value)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = linear_cross_entropy(x, w, targets, backend="triton", memory_budget=4096)
        dx, dw = torch.autograd.grad(loss, (x, w))
        assert dx.dtype == torch.float32 and dw.dtype == w.dtype
        expected = gradients(x, w, targets, dtype=torch.float64)
        for a, b in zip((dx, dw), expected[1:], strict=True):
            assert (a - b).abs().max() <= 0.05 * b.abs().max()


@pytest.mark.parametrize("value", [LENT, BLOCKS], ids=["lent", "blocks"])
def test_ignored_rows_and_impossible_targets(value, plan, device, generator):
    x, w, targets = make(49, device, generator)
    plan(value)
    options = {"reduction": "none", "memory_budget": 4096}
    loss, dx, _ = gradients(x, w, torch.full_like(targets, -100), **options)
    assert (loss == 0).all() and (dx == 0).all()
    loss, dx, _ = gradients(x, w, targets, ignore_index=int(targets[0]), **options)
    assert loss[0] == 0 and (dx[0] == 0).all() and loss[2].isnan()  # -100 is impossible now
    targets[3] = 49
    loss, dx, _ = gradients(x, w, targets, **options)
    assert loss[3].isnan() and dx[3].isnan().all() and loss[[0, 1, 2, 4]].isfinite().all()


def test_confident_rows_keep_their_digits(plan, device, generator):
    """Losses of 1e-7 to 1e-1, to which a chunk adds less than a rounding of the target's share: as in one chunk."""
    vocab, rows = 200, torch.arange(ROWS, device=device)
    x = torch.eye(ROWS, DIM, device=device)
    w = torch.rand(vocab, DIM, device=device, generator=generator) * 0.1
    targets = rows * 28 + 1
    w[targets, rows] = torch.linspace(7, 21, ROWS, device=device)
    exact = gradients(x, w, targets, dtype=torch.float64, reduction="none")
    plain = gradients(x, w, targets, dtype=torch.float32, reduction="none")
    whole = (gradients(x, w, targets, reduction="none")[0] - exact[0]).abs().max()
    assert exact[0].min() < 2e-7
    for value in (LENT, BLOCKS):
        plan(value)
        ours = gradients(x, w, targets, reduction="none", memory_budget=4096)
        for name, a, e, p in zip(("loss", "dx", "dw"), ours, exact, plain, strict=True):
            check_budget(a, e, p, name=name)
        assert (ours[0] - exact[0]).abs().max() <= whole + 2.0**-24


def test_a_chunk_of_minus_infinity(plan, device, generator):
    """A first block without a finite logit, and whole rows without one."""
    x, w, targets = make(81, device, generator)
    x, w = x.detach().abs(), w.detach()
    w[:16] = -torch.inf
    targets = targets.clamp(min=16)
    plan(BLOCKS)
    loss, lse = linear_cross_entropy(
        x, w, targets, reduction="none", return_lse=True, backend="triton", memory_budget=4096
    )
    exact = torch.logsumexp(x.double() @ w[16:].double().t(), 1)
    assert (lse - exact).abs().max() < 1e-5 and loss.isfinite().all()


def test_twice_gives_the_same_bits(plan, device, generator):
    x, w, targets = make(81, device, generator, torch.float16)
    for value in (LENT, BLOCKS):
        plan(value)
        once, twice = (gradients(x, w, targets, memory_budget=4096) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_logits_that_stay_are_computed_once(plan, device, generator, monkeypatch):
    x, w, targets = make(81, device, generator)
    sizes = []
    multiply = vocab_chunks.multiply_logits
    monkeypatch.setattr(vocab_chunks, "multiply_logits", lambda *a: (sizes.append(a[2].numel()), multiply(*a))[1])
    kept = ((LENT, 48 + 16), (BOTH, 48), (ALL_ROWS, 32), (BLOCKS, 0), (ChunkPlan(ROWS, 96), 81))
    for value, columns in kept:
        plan(value)
        sizes.clear()
        linear_cross_entropy(x, w, targets, backend="triton", memory_budget=4096).backward()
        assert sum(sizes) == (2 * 81 - columns) * ROWS


def test_memory(plan, device, generator, monkeypatch):
    """The buffer is what the plan says, dW exists in the weight's dtype only, its fp32 sums are those of one chunk."""
    x, w, targets = make(81, device, generator, torch.float16)
    shapes = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: (shapes.append(made := empty(*a, **k)), made)[1])
    for value in (LENT, ALL_ROWS, BLOCKS):
        plan(value)
        shapes.clear()
        linear_cross_entropy(x, w, targets, backend="triton", memory_budget=4096).backward()
        halves = sorted(t.numel() for t in shapes if t.dtype == torch.float16)
        assert halves == [value.rows * value.columns, 81 * DIM]
        assert max(t.numel() for t in shapes if t.dtype == torch.float32) == ROWS * DIM  # dx


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_launch_past_the_jit_is_what_the_jit_would_compile(dtype, plan, device, generator, monkeypatch):
    """All launches of one RepeatedLaunch have the types, the alignment and the ints of its first, whatever those of
    the caller's tensors are: odd places in memory and dims, int32 targets, one row."""
    keys: dict[RepeatedLaunch, set[str]] = {}

    def only_look(self: RepeatedLaunch, programs: int, *arguments: Any) -> None:
        names = list(inspect.signature(self._kernel.fn).parameters)
        assert names[len(arguments) :] == list(self._constants)
        _, key, _ = binder(self._kernel)(*arguments, *self._constants.values())
        keys.setdefault(self, set()).add(str(key))

    monkeypatch.setattr(RepeatedLaunch, "__call__", only_look)
    plans = (LENT, ALL_ROWS, BLOCKS, BOTH, ChunkPlan(1, 16), ChunkPlan(3, 48))
    for vocab, softcap, value in itertools.product((33, 81), (None, 5.0), plans):
        x, w, targets = make(vocab, device, generator, dtype)
        x, w = x[:, 1:], w[:, 1:]
        odd = torch.empty(ROWS + 1, dtype=torch.int32, device=device)[1:].copy_(targets)
        for rows, ts, reduction in ((ROWS, targets, "none"), (ROWS, odd, "mean"), (1, odd[:1], "mean")):
            plan(value._replace(rows=min(value.rows, rows)))
            gradients(x[:rows], w, ts, softcap=softcap, label_smoothing=0.1, reduction=reduction, memory_budget=4096)
    assert len(keys) > 50 and max(map(len, keys.values())) == 1


@functools.cache
def binder(kernel: Any) -> Any:
    """Gives, of a kernel's arguments, what Triton would compile it for on Hopper."""
    options = getattr(kernel, "kwargs", None) or {"do_not_specialize": kernel.do_not_specialize}
    compiled = JITFunction(kernel.fn, do_not_specialize=options["do_not_specialize"])
    return create_function_from_signature(compiled.signature, compiled.params, make_backend(GPUTarget("cuda", 90, 32)))


def test_compiled(plan, device, generator):
    x, w, targets = make(81, device, generator)
    plan(LENT)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, w, targets, backend="triton", memory_budget=4096)

    want = gradients(x, w, targets, memory_budget=4096)
    torch._dynamo.reset()
    loss = torch.compile(function, fullgraph=True)(x, w)
    for a, b in zip((loss, *torch.autograd.grad(loss, (x, w))), want, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "budget_rows", "columns"), [(3, 2, 640), (7, 3, 384), (9, 8, 768)])
def test_what_a_budget_chooses(rows, budget_rows, columns, device, generator):
    """Nothing is set by hand: odd vocabulary, int32 targets, a row ignored, a gradient of lse."""
    vocab = 1001
    x, w = (torch.randn(n, DIM, device=device, generator=generator) for n in (rows, vocab))
    targets = torch.randint(0, vocab, (rows,), device=device, generator=generator, dtype=torch.int32)
    targets[0], targets[-1] = -100, vocab - 1
    budget = budget_rows * launch.row_bytes(vocab, 4)
    assert chunk_plan(rows, vocab, 4, 0, budget, True).columns == columns
    upstream = torch.tensor(0.5, device=device), torch.randn(rows, device=device, generator=generator)
    options = {"z_loss": 1e-3, "return_lse": True, "memory_budget": budget}
    ours = gradients(x, w, targets, *upstream, **options)
    exact, plain = (
        gradients(x, w, targets.long(), *upstream, dtype=d, **options) for d in (torch.float64, torch.float32)
    )
    for name, a, e, p in zip(("loss", "dx", "dw"), ours, exact, plain, strict=True):
        check_budget(a, e, p, name=name)


def test_the_plan():
    liger = 256 * 128256 * 2  # of 8192 x 4096 x 128256
    assert chunk_plan(8192, 128256, 2, 0, liger, True) == ChunkPlan(8192, 3968)
    assert chunk_plan(8192, 128256, 2, 0, liger, False) == ChunkPlan(256)  # there is no dW to save on
    assert chunk_plan(8192, 128256, 2, 0, 4 * liger, True) == ChunkPlan(1024)
    assert chunk_plan(8192, 128256, 2, 0, 0, True) == ChunkPlan(4096)
    assert chunk_plan(8192, 128256, 2, 300, 0, True) == ChunkPlan(300)
    assert chunk_plan(131072, 128256, 2, 0, liger, True) == ChunkPlan(8192, 3968)
    assert chunk_plan(64, 128256, 2, 0, liger, True) == ChunkPlan(64)
    assert chunk_plan(8192, 128256, 2, 0, 128256 * 2, True) == ChunkPlan(256, 384)  # one row's bytes
    assert chunk_plan(64, 1000, 4, 0, 4000, True) == ChunkPlan(1)  # too small for blocks


@pytest.mark.parametrize(
    ("rows", "dim", "vocab"), [(8192, 4096, 128256), (16384, 2048, 128256), (32768, 768, 50257), (1000, 4096, 50257)]
)
@pytest.mark.parametrize("budget", [2**18, 2**24, 2**26])
def test_blocks_and_lent_memory(rows, dim, vocab, budget):
    plan = chunk_plan(rows, vocab, 2, 0, budget, True)
    if plan.columns == 0:
        return
    assert plan.rows * plan.columns * 2 <= budget and plan.columns % 16 == 0
    rounds = column_chunks(rows, vocab, plan, dim)
    memory = vocab * dim
    for chunks in (rounds.first, rounds.second):
        borders = sorted((c.start, c.stop) for c in chunks)
        assert [a for a, _ in borders] == [0, *(b for _, b in borders[:-1])] and borders[-1][1] == vocab
        for c in chunks:
            columns = -(-(c.stop - c.start) // 16) * 16
            assert columns <= plan.columns if c.lent is None else c.lent + rows * columns <= memory
            assert c.lent is None or c.lent % 8 == 0
    assert rounds.first[0].start == 0
    lent = [c for c in rounds.second if c.lent is not None]
    assert rounds.second[: len(lent)] == lent == sorted(lent)
    assert all(c.lent >= c.stop * dim for c in lent)  # dW up to the chunk's own is written while its logits are read
    through_buffer = [c for c in rounds.second if c.lent is None]
    for c in rounds.ready:  # nobody writes over it between its place in the first round and that in the second
        later = rounds.first[rounds.first.index(c) + 1 :]
        if c.lent is None:
            assert plan.rows >= rows and later == [] and through_buffer[0] == c
        else:
            assert rounds.second[0] == c
            ends = [n.lent + rows * -(-(n.stop - n.start) // 16) * 16 for n in later if n.lent is not None]
            assert max(ends, default=0) <= c.lent
