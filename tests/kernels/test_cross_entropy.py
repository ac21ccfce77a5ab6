"""cross_entropy: options against torch in fp64, ignored and impossible targets, in place, upstream gradients."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fuselm.kernels.cross_entropy as module
from fuselm.kernels.cross_entropy import cross_entropy, cross_entropy_reference
from fuselm.kernels.numerics import check_budget
from fuselm.kernels.specs.cross_entropy import plain_cross_entropy

FRACTIONS = (0.0, 0.25, 1.0)


def make(rows, vocab, device, generator, *, dtype=torch.float32, ignored=0.25, ignore_index=-100, spread=1.0):
    rows = rows if isinstance(rows, tuple) else (rows,)
    logits = (torch.randn((*rows, vocab), device=device, generator=generator) * spread).to(dtype)
    targets = torch.randint(0, vocab, rows, device=device, generator=generator)
    mask = torch.rand(rows, device=device, generator=generator) < ignored
    return logits.requires_grad_(), targets.masked_fill(mask, ignore_index)


def backward(function, logits, targets, upstream=None, lse_upstream=None, **options) -> Any:
    """loss, lse (or None) and the gradient of sum(loss · upstream) + sum(lse · lse_upstream)."""
    leaf = logits.detach().clone().requires_grad_()
    outputs = function(leaf, targets, **options)
    loss, lse = outputs if options.get("return_lse") else (outputs, None)
    total = (loss if upstream is None else loss * upstream.to(loss.dtype)).sum()
    if lse is not None and lse_upstream is not None:
        total = total + (lse * lse_upstream.to(lse.dtype)).sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return loss.detach(), None if lse is None else lse.detach(), gradient


def check(logits, targets, upstream=None, lse_upstream=None, **options):
    """Kernels within the budget of torch's own formula in fp64."""
    both = (targets, upstream, lse_upstream)
    ours = backward(cross_entropy, logits, *both, backend="triton", **options)
    exact = backward(plain_cross_entropy, logits.double(), *both, **options)
    plain = backward(plain_cross_entropy, logits, *both, **options)
    for name, a, e, p in zip(("loss", "lse", "gradient"), ours, exact, plain, strict=True):
        if a is not None:
            check_budget(a, e, p, name=name)
    assert ours[2].dtype == logits.dtype
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_every_combination_of_options(reduction, dtype, device, generator):
    logits, targets = make((3, 4), 37, device, generator, dtype=dtype, spread=3.0)
    upstream = torch.randn((3, 4) if reduction == "none" else (), device=device, generator=generator)
    lse_upstream = torch.randn((3, 4), device=device, generator=generator)
    for smoothing, z_loss, softcap, lse in itertools.product((0.0, 0.1), (0.0, 1e-2), (None, 5.0), (False, True)):
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "return_lse": lse}
        check(logits, targets, upstream, lse_upstream if lse else None, reduction=reduction, **options)


@pytest.mark.parametrize("vocab", [37, 2048, 50257, 128256])  # of one: test_a_vocabulary_of_one
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-4}], ids=["plain", "all"]
)
def test_vocabularies(vocab, options, device, generator):
    logits, targets = make(3, vocab, device, generator, ignored=0.0)
    targets[-1] = vocab - 1
    check(logits, targets, **options)


@pytest.mark.parametrize("ignore_index", [-100, -1, 3, 36, 500, 2**40])
def test_ignore_index_anywhere(ignore_index, device, generator):
    """Also inside [0, V), where the class still takes part in the smoothing and in other rows, as in torch."""
    logits, targets = make(40, 37, device, generator, ignore_index=ignore_index)
    loss, _, _ = check(logits, targets, ignore_index=ignore_index, label_smoothing=0.1)
    want = F.cross_entropy(logits.detach(), targets, ignore_index=ignore_index, label_smoothing=0.1)
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)


def test_parts_add_up(device, generator):
    logits, targets = make(9, 37, device, generator)
    valid = targets != -100
    base = cross_entropy(logits, targets)
    with_z, lse = cross_entropy(logits, targets, z_loss=0.5, return_lse=True)
    z_term = 0.5 * (torch.logsumexp(logits, -1).square() * valid).sum() / valid.sum()
    torch.testing.assert_close(with_z - base, z_term, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1))  # of ignored rows as well
    smooth, none = cross_entropy(logits, targets, label_smoothing=1.0), cross_entropy(logits, targets, reduction="none")
    uniform = (-F.log_softmax(logits, -1).mean(-1) * valid).sum() / valid.sum()
    torch.testing.assert_close(smooth, uniform)
    half = cross_entropy(logits, targets, label_smoothing=0.5)
    torch.testing.assert_close(half, (base + smooth) / 2)
    torch.testing.assert_close(none.sum(), cross_entropy(logits, targets, reduction="sum"))
    torch.testing.assert_close(none.sum() / valid.sum(), base)
    assert (none[~valid] == 0).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_all_ignored_is_exactly_zero(reduction, backend, device, generator):
    logits, targets = make((2, 3), 37, device, generator, ignored=1.0)
    options = {"z_loss": 0.1, "label_smoothing": 0.1, "reduction": reduction, "backend": backend}
    loss, _, gradient = backward(cross_entropy, logits, targets, torch.tensor(3.0, device=device), **options)
    assert (loss == 0).all() and (gradient == 0).all()


def test_ignored_rows_are_zero_whatever_their_logits_hold(device, generator):
    logits, targets = make(6, 37, device, generator, ignored=0.0)
    targets[2] = -100
    clean = backward(cross_entropy, logits, targets, backend="triton")
    with torch.no_grad():
        logits[2] = float("nan")
    dirty = backward(cross_entropy, logits, targets, backend="triton")
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[2], dirty[2]) and (dirty[2][2] == 0).all()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("bad", [-1, 37, 2**31 + 5, -(2**40)])
def test_impossible_target_shows_as_nan_in_its_row_only(bad, reduction, backend, device, generator):
    logits, targets = make(5, 37, device, generator, ignored=0.0)
    targets[1], targets[3] = -100, bad
    options = {"label_smoothing": 0.1, "backend": backend}
    loss, _, gradient = backward(cross_entropy, logits, targets, reduction=reduction, **options)
    rows_with_nan = gradient.isnan().any(-1)
    assert rows_with_nan.tolist() == [False, False, False, True, False] and (gradient[1] == 0).all()
    assert loss.isnan().any() and (reduction == "sum" or loss.isnan().sum() == 1)


def test_confident_logits_keep_their_digits(device, generator):
    """Losses of 1e-6 beside lse of 100: lse - logit alone would cancel all of it."""
    logits, targets = make(16, 37, device, generator, spread=0.5, ignored=0.0)
    with torch.no_grad():
        logits += 90.0
        logits[torch.arange(16), targets] += torch.linspace(5, 14, 16, device=device)
    upstream = torch.rand(16, device=device, generator=generator) + 0.5
    loss, _, _ = check(logits, targets, upstream, reduction="none")
    assert 0 < loss.min() < 1e-4


def test_masked_and_huge_logits(device, generator):
    """-inf (a masked part of the vocabulary, whole blocks of it), 1e4 and -1e4."""
    logits, targets = make(4, 4099, device, generator, ignored=0.0)
    targets.fill_(4090)
    with torch.no_grad():
        logits[0, :4000] = float("-inf")
        logits[1] *= 1e4
        logits[2, 1:4090] = -1e4
    loss, _, gradient = check(logits, targets, reduction="sum", z_loss=1e-4)
    assert loss.isfinite() and (gradient[0, :4000] == 0).all()


def test_lse_alone_is_differentiable(device, generator):
    logits, targets = make((2, 3), 37, device, generator, ignored=0.5)
    _, lse = cross_entropy(logits, targets, return_lse=True, softcap=4.0)
    (gradient,) = torch.autograd.grad(lse.sum(), logits)
    leaf = logits.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(torch.logsumexp(4 * torch.tanh(leaf / 4), -1).sum(), leaf)
    torch.testing.assert_close(gradient.double(), want, rtol=1e-5, atol=1e-7)
    assert lse.dtype == torch.float32 and lse.shape == (2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_backward_twice(reduction, dtype, device, generator):
    """The buffer of the first pass belongs to whoever got it; later passes compute their own."""
    logits, targets = make(6, 37, device, generator, dtype=dtype)
    before = logits.detach().clone()
    loss = cross_entropy(logits, targets, reduction=reduction, backend="triton").sum()
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    kept = first.clone()
    first.zero_()
    (second,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (third,) = torch.autograd.grad(loss, logits, torch.tensor(-2.0, device=device), retain_graph=True)
    assert torch.equal(second, kept) and torch.equal(logits, before)
    torch.testing.assert_close(third, -2 * kept, rtol=2e-3, atol=1e-6)
    loss.backward(retain_graph=True)
    loss.backward()
    assert logits.grad is not None and torch.equal(logits.grad, 2 * kept)


def test_two_paths_to_the_logits_and_logits_used_after_the_loss(device, generator):
    logits, targets = make(6, 37, device, generator)
    hidden = logits.detach().clone().requires_grad_()
    middle = hidden * 1.5
    total = cross_entropy(middle, targets, backend="triton") + 0.1 * middle.square().sum()
    (gradient,) = torch.autograd.grad(total, hidden)
    want_leaf = logits.detach().clone().requires_grad_()
    middle = want_leaf * 1.5
    (want,) = torch.autograd.grad(plain_cross_entropy(middle, targets) + 0.1 * middle.square().sum(), want_leaf)
    torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize("scale", [1.0, 65536.0, 1.0 / 4096])
def test_fp16_gradients_survive_a_loss_scale(scale, device, generator):
    """The scale reaches the gradient before it is rounded to fp16: p / n alone would underflow here."""
    logits, targets = make(64, 1000, device, generator, dtype=torch.float16, spread=4.0)
    _, _, gradient = check(logits, targets, torch.tensor(scale, device=device))
    if scale == 65536.0:
        assert (gradient[targets != -100] != 0).float().mean() > 0.95


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_upstream_gradient_is_not_written_to(reduction, device, generator):
    logits, targets = make((3, 4), 37, device, generator)
    loss = cross_entropy(logits, targets, reduction=reduction, backend="triton")
    upstream = (
        torch.full((1,), 0.3, device=device).expand(loss.shape) if loss.dim() else torch.tensor(0.3, device=device)
    )
    (gradient,) = torch.autograd.grad(loss, logits, upstream)
    assert (upstream == torch.tensor(0.3)).all()
    want = backward(plain_cross_entropy, logits, targets, upstream, reduction=reduction)[2]
    torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_inplace_overwrites_the_logits_in_the_backward_pass_only(reduction, return_lse, device, generator):
    leaf, targets = make((2, 3), 37, device, generator)
    want = backward(cross_entropy, leaf, targets, reduction=reduction, backend="triton")
    hidden = leaf.detach().clone().requires_grad_()
    logits = hidden * 1.0
    outputs = cross_entropy(logits, targets, reduction=reduction, inplace=True, return_lse=return_lse, backend="triton")
    loss = (outputs[0] if return_lse else outputs).sum()
    assert torch.equal(logits, leaf)
    loss.backward(retain_graph=True)
    assert hidden.grad is not None and torch.equal(hidden.grad, want[2])
    assert torch.equal(logits.detach(), want[2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inplace_needs_memory_of_its_own(device, generator):
    logits, targets = make((4, 6), 37, device, generator)
    for bad in (logits.detach()[:, :1].expand(4, 6, 37), logits.detach().transpose(0, 2).contiguous().transpose(0, 2)):
        with pytest.raises(ValueError, match="inplace=True needs"):
            cross_entropy(bad.requires_grad_(), targets, inplace=True, backend="triton")
    with torch.no_grad():
        before = logits.clone()
        cross_entropy(logits, targets, inplace=True, backend="triton")
        assert torch.equal(logits, before)


def test_layouts_of_logits(device, generator):
    """Shifted, padded, transposed, expanded logits give what their contiguous copies give, to the bit where rows start
    equally far from a 16-byte border (that decides the order of summation); what can be is a view."""
    big, targets = make((4, 6, 2), 48, device, generator)
    big, targets = big.detach(), targets[:3, :5, 0]
    views = {
        "shifted": big[:3, :5, 0],
        "padded": big[:3, :5, 1, 3:40],
        "every second": big[:3, :5, 0, ::2],
        "transposed": torch.randn((48, 5, 3), device=device).permute(2, 1, 0),
        "expanded": big[0, 0, 0].expand(3, 5, 48),
    }
    for name, view in views.items():
        t = targets.clamp(max=view.shape[-1] - 1)
        want = backward(cross_entropy, view.contiguous(), t, backend="triton")
        leaf = view.detach().requires_grad_()
        loss = cross_entropy(leaf, t, backend="triton")
        (gradient,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(loss, want[0], rtol=3e-7, atol=0, msg=name)
        torch.testing.assert_close(gradient, want[2], rtol=3e-6, atol=1e-9, msg=name)
        if name != "padded":
            assert torch.equal(loss, want[0]) and torch.equal(gradient, want[2]), name
        assert (module.as_outer_inner(view).data_ptr() == view.data_ptr()) == (
            name not in ("every second", "transposed")
        )
    four = make((2, 3, 2), 37, device, generator)
    assert cross_entropy(*four, reduction="none", backend="triton").shape == (2, 3, 2)
    check(*four)


def test_only_what_is_needed_is_computed(device, generator, monkeypatch):
    """No gradient under no_grad or for frozen logits."""
    calls = []
    launch = module.launch_forward
    monkeypatch.setattr(
        module, "launch_forward", lambda *a, **k: (calls.append(k["gradient"] is not None), launch(*a, **k))[1]
    )
    logits, targets = make(4, 37, device, generator)
    want = cross_entropy(logits, targets, backend="triton")
    with torch.no_grad():
        assert torch.equal(cross_entropy(logits, targets, backend="triton"), want)
    frozen = cross_entropy(logits.detach(), targets, backend="triton")
    assert torch.equal(frozen, want) and not frozen.requires_grad
    assert calls == [True, False, False]


def test_second_derivatives_raise(device, generator):
    logits, targets = make(4, 37, device, generator)
    (gradient,) = torch.autograd.grad(cross_entropy(logits, targets, backend="triton"), logits, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradient.square().sum(), logits)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_nan_in_fresh_memory_never_shows(reduction, device, generator, monkeypatch):
    make_empty = torch.empty

    def poisoned(*args, **kwargs):
        x = make_empty(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    logits, targets = make(6, 2049, device, generator, ignored=0.5)
    monkeypatch.setattr(torch, "empty", poisoned)
    for upstream in (1.0, 2.0):
        loss, _, gradient = backward(
            cross_entropy, logits, targets, torch.tensor(upstream, device=device), reduction=reduction, backend="triton"
        )
        assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager_equals_torch(dynamic, device, generator):
    """256 tokens, V 4096, 0, 25 and 100 % ignored."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x, t: cross_entropy(x * 1.0, t, backend="triton"), fullgraph=True, dynamic=dynamic)
    for fraction in FRACTIONS:
        logits, targets = make(32 if not dynamic else int(40 - 8 * fraction), 4096, device, generator, ignored=fraction)
        want = F.cross_entropy(logits, targets, reduction="sum") / (targets != -100).sum().clamp(min=1)
        (want_gradient,) = torch.autograd.grad(want, logits)
        eager = backward(cross_entropy, logits, targets, backend="triton")
        loss = compiled(logits, targets)
        (gradient,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-6)
        assert torch.equal(loss, eager[0])
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(gradient, eager[2], rtol=1e-6, atol=1e-9)


def test_opcheck(device, generator):
    logits, targets = make((1, 5), 37, device, generator)
    targets = targets.view(-1)
    numbers = (-100, 0.1, 1e-3, 5.0)
    ops = torch.ops.fuselm
    for reduction, lse, fused in (("mean", False, True), ("none", True, False)):
        torch.library.opcheck(ops.cross_entropy_forward, (logits, targets, *numbers, reduction, lse, fused, False))
    logits = logits.detach()
    _, lse, low, weight, gradient = ops.cross_entropy_forward(logits, targets, *numbers, "mean", True, True, False)
    saved = (logits, targets, lse, low, weight)
    two, per_row = torch.tensor(2.0, device=device), torch.rand(5, device=device)
    torch.library.opcheck(ops.cross_entropy_backward, (*saved, two, per_row, *numbers))
    torch.library.opcheck(ops.cross_entropy_backward, (*saved, per_row, None, *numbers))
    torch.library.opcheck(ops.cross_entropy_backward_inplace, (*saved, two, None, *numbers))
    torch.library.opcheck(ops.cross_entropy_backward_unless_one, (gradient, *saved, two, *numbers))
    for upstream in (two, torch.ones((), device=device)):
        torch.library.opcheck(ops.cross_entropy_backward_of_saved, (gradient, *saved, upstream, *numbers))


def test_integer_types_and_autocast(device, generator):
    logits, targets = make(5, 37, device, generator)
    want = backward(cross_entropy, logits, targets, backend="triton")
    for cast in (targets.int(), targets[:, None].expand(5, 2)[:, 0]):
        got = backward(cross_entropy, logits, cast, backend="triton")
        assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    with torch.autocast(device.type, torch.bfloat16):
        got = backward(cross_entropy, logits, targets, backend="triton")
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2]) and got[0].dtype == torch.float32
    half = cross_entropy(logits.bfloat16(), targets, backend="triton")
    assert half.dtype == torch.float32


def test_reference_is_torch_in_fp64(device, generator):
    logits, targets = make((2, 6), 37, device, generator)
    logits = logits.detach().double()
    for reduction, softcap in itertools.product(("none", "sum", "mean"), (None, 5.0)):
        options = {
            "reduction": reduction,
            "softcap": softcap,
            "label_smoothing": 0.1,
            "z_loss": 0.01,
            "return_lse": True,
        }
        ours = backward(cross_entropy_reference, logits, targets, **options)
        auto = backward(cross_entropy, logits, targets, **options)  # fp64 goes to the reference
        want = backward(plain_cross_entropy, logits, targets, **options)
        for a, b, c in zip(ours, want, auto, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
            assert torch.equal(a, c)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"targets": torch.zeros(3)}, TypeError, "targets has dtype torch.float32"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, ValueError, r"targets has shape \(4,\): expected \(3,\)"),
        ({"logits": torch.zeros(3, 5, dtype=torch.int64)}, TypeError, "logits has dtype torch.int64"),
        ({"logits": torch.zeros(3, 0)}, ValueError, "vocab >= 1"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing=1.5"),
        ({"z_loss": -1.0}, ValueError, "z_loss=-1.0"),
        ({"softcap": 0.0}, ValueError, "softcap=0.0"),
        ({"reduction": "avg"}, ValueError, "reduction='avg': expected one of 'none', 'sum', 'mean'"),
        ({"backend": "cuda"}, ValueError, "backend='cuda'"),
        (
            {"logits": torch.zeros(3, 5, dtype=torch.float64), "backend": "triton"},
            TypeError,
            "logits has dtype torch.float64",
        ),
    ],
)
def test_bad_arguments_are_named(change, error, words, device):
    arguments = {"logits": torch.zeros(3, 5), "targets": torch.zeros(3, dtype=torch.int64)} | change
    moved: dict[str, Any] = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(error, match=words):
        cross_entropy(**moved)


_OVERFLOW = """
import torch
from fuselm.kernels.cross_entropy import cross_entropy

device = "cuda" if torch.cuda.is_available() else "cpu"
stride = 2**30 + 64  # element offsets of row 2 pass 2**31; only the touched pages take memory
memory = torch.empty_strided((3, 16), (stride, 1), dtype=torch.float16, device=device)
values = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).half().to(device)
memory.copy_(values)
targets = torch.tensor([3, -100, 7], device=device)
want_leaf = values.clone().requires_grad_()
want = cross_entropy(want_leaf, targets, reduction="sum", backend="triton")
want.backward()
for inplace in (False, True):
    leaf = memory.detach().requires_grad_()
    loss = cross_entropy(leaf, targets, reduction="sum", inplace=inplace, backend="triton")
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(loss, want), (loss, want)
    assert torch.equal(gradient.contiguous(), want_leaf.grad), inplace
assert gradient.data_ptr() == memory.data_ptr() and gradient.stride() == (stride, 1)
print("fine")
"""


def test_offsets_beyond_int32_in_a_process_of_its_own():
    code = [sys.executable, "-c", _OVERFLOW]  # where there is no GPU, our environment has the interpreter switched on
    done = subprocess.run(code, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
def test_full_size_beyond_int32(inplace, device):
    """(16800, 128256): the last rows against fp64."""
    rows, vocab = 16800, 128256
    logits = torch.randn((rows, vocab), device=device, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device=device)
    tail = logits.detach()[-8:].double().requires_grad_()
    want = torch.nn.functional.cross_entropy(tail, targets[-8:], reduction="none")
    (want_gradient,) = torch.autograd.grad(want.sum(), tail)
    loss = cross_entropy(logits, targets, reduction="none", inplace=inplace)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(loss[-8:].double(), want, rtol=2e-6, atol=0)
    torch.testing.assert_close(gradient[-8:].double(), want_gradient, rtol=2**-8 + 1e-4, atol=1e-9)


@pytest.mark.gpu
def test_no_synchronisation(device, generator):
    logits, targets = make(64, 5000, device, generator)
    cross_entropy(logits, targets, z_loss=1e-4).backward()  # compiles first
    torch.cuda.set_sync_debug_mode("error")
    try:
        for reduction in ("sum", "mean"):
            (cross_entropy(logits, targets, z_loss=1e-4, reduction=reduction) * 3).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
