"""Attention as a citizen: strides, leaks between documents, unwritten memory, merging by lse, compilation, messages."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from fuselm.kernels._triton import KNOWN_PROFILES, assume_profile
from fuselm.kernels.attention import dispatch, portable
from fuselm.kernels.attention.api import attention, explain_kernel
from fuselm.kernels.attention.ops import attention_backward, attention_forward
from fuselm.kernels.launch.attention import TileLaunch
from fuselm.kernels.specs.attention import ATTENTION


def make(case: dict, device: torch.device, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> dict:
    return ATTENTION.make_inputs({"head_dim": 16, "heads": (2, 1)} | case, dtype, device, generator)


def run(inputs: dict, dout: torch.Tensor | None = None, **options) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    out = attention(**inputs, **options)
    dout = torch.ones_like(out) if dout is None else dout
    return [out, *torch.autograd.grad(out, [inputs["q"], inputs["k"], inputs["v"]], dout)]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_documents_do_not_leak(device, generator):
    """Changing document A leaves every bit of B's outputs and gradients as it was."""
    before = make({"lengths": (60, 60), "documents_q": (0, 23, 60)}, device, generator)
    after = dict(before)
    for name in "qkv":
        changed = before[name].detach().clone()
        changed[:23] = torch.randn(changed[:23].shape, generator=generator, device=device) * 100
        after[name] = changed.requires_grad_()
    assert same_bits([x[23:] for x in run(before)], [x[23:] for x in run(after)])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_behind_the_last_document_may_hold_anything(value, device, generator):
    clean = make({"lengths": (50, 45), "documents_q": (0, 33), "documents_k": (0, 30)}, device, generator)
    dirty = dict(clean)
    for name, used in (("q", 33), ("k", 30), ("v", 30)):
        x = clean[name].detach().clone()
        x[used:] = value
        dirty[name] = x.requires_grad_()
    assert same_bits(run(clean), run(dirty))


@pytest.mark.parametrize(
    "case",
    [
        {"lengths": (50, 20)},
        {"lengths": (50, 45), "documents_q": (0, 20, 20, 33), "documents_k": (0, 0, 10, 30)},
        {"lengths": (7, 0)},
        {"lengths": (9, 9), "documents_q": (0,)},
    ],
    ids=str,
)
def test_every_element_is_written(case, device, generator, monkeypatch):
    """torch.empty hands out NaN: also rows without a key, empty documents and tails must be overwritten."""
    inputs = make(case, device, generator)

    def poisoned(original):
        def wrapped(*args, **kwargs):
            x = original(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return wrapped

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    out, lse = attention(**inputs, return_lse=True, backend="triton")
    grads = torch.autograd.grad(
        [out, lse], [inputs["q"], inputs["k"], inputs["v"]], [torch.zeros_like(out), torch.zeros_like(lse)]
    )
    for x in (out, lse, *grads):
        assert not x.isnan().any()
    if "documents_q" in case:
        assert not out[case["documents_q"][-1] :].any()


def test_views_of_a_packed_qkv_need_no_copy(device, generator, monkeypatch):
    qkv = torch.randn(1, 40, 3 + 1 + 1, 16, generator=generator, device=device, requires_grad=True)
    want_qkv = qkv.detach().clone().requires_grad_()
    dout = torch.randn(1, 40, 3, 16, generator=generator, device=device)
    pieces = [x.contiguous() for x in want_qkv.split([3, 1, 1], 2)]
    want = attention(*pieces)
    (want_grad,) = torch.autograd.grad(want, want_qkv, dout)
    views = qkv.split([3, 1, 1], 2)
    copies = []
    contiguous = torch.Tensor.contiguous
    with monkeypatch.context() as patch:
        patch.setattr(
            torch.Tensor, "contiguous", lambda x, *a, **k: (copies.append(x.shape), contiguous(x, *a, **k))[1]
        )
        out = attention(*views)
    assert not copies
    (grad,) = torch.autograd.grad(out, qkv, dout)
    assert torch.equal(out, want) and torch.equal(grad, want_grad)


@pytest.mark.parametrize("layout", ["heads first", "expanded batch", "last dimension strided"])
def test_inputs_of_any_strides(layout, device, generator):
    x = torch.randn(3, 2, 2, 37, 16, generator=generator, device=device)
    if layout == "heads first":
        q, k, v = (y.transpose(1, 2) for y in x)  # (batch, heads, seq, head_dim) in memory
    elif layout == "expanded batch":
        q, k, v = (y[:1].transpose(1, 2).expand(4, -1, -1, -1) for y in x)
    else:
        q, k, v = (y.permute(0, 3, 1, 2) for y in x.transpose(3, 4).contiguous().transpose(3, 4))
    views = [y.detach().requires_grad_() for y in (q, k, v)]
    copies = [y.detach().contiguous().requires_grad_() for y in (q, k, v)]
    got = run(dict(zip("qkv", views, strict=True)))
    want = run(dict(zip("qkv", copies, strict=True)))
    assert same_bits(got, want)


@pytest.mark.parametrize("layout", ["expanded", "every second", "heads first"])
def test_upstream_gradient_of_any_strides(layout, device, generator):
    inputs = make({"lengths": (37, 37)}, device, generator)
    shape = inputs["q"].shape
    if layout == "expanded":
        dout = torch.tensor(0.3, device=device).expand(shape)
    elif layout == "every second":
        dout = torch.randn(*shape[:-1], 32, generator=generator, device=device)[..., ::2]
    else:
        dout = torch.randn(shape[0], shape[2], shape[1], 16, generator=generator, device=device).transpose(1, 2)
    copy = dout.contiguous().clone()
    got = run(inputs, dout)
    assert torch.equal(dout, copy)
    assert same_bits(got, run(inputs, copy))


def test_halves_merge_by_their_lse(device, generator):
    """Attention over two halves of the keys, merged by lse as in ring attention: values and gradients of the whole."""
    inputs = make({"lengths": (20, 50), "causal": False}, device, generator)
    dout = torch.randn(inputs["q"].shape, generator=generator, device=device)
    want = run(inputs, dout)
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    parts = [attention(q, k[:, s], v[:, s], causal=False, return_lse=True) for s in (slice(0, 18), slice(18, 50))]
    lse = torch.stack([part[1] for part in parts])
    weights = torch.softmax(lse, 0).transpose(2, 3)[..., None]  # (2, batch, queries, heads, 1)
    merged = (weights * torch.stack([part[0] for part in parts])).sum(0)
    got = [merged, *torch.autograd.grad(merged, [q, k, v], dout)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_merging_with_a_half_that_sees_nothing(device, generator):
    """The gradient that a merge sends into an lse of -inf is NaN; it must not reach q, k or v."""
    inputs = make({"lengths": (30, 10)}, device, generator)
    out, lse = attention(**inputs, return_lse=True)
    dlse = torch.where(lse == float("-inf"), float("nan"), 1.0)
    for x in torch.autograd.grad([out, lse], [inputs["q"], inputs["k"], inputs["v"]], [torch.ones_like(out), dlse]):
        assert x.isfinite().all()


def test_lse_alone_is_differentiable(device, generator):
    inputs = make({"lengths": (21, 21)}, device, generator)
    lse = attention(**inputs, return_lse=True)[1]
    dq, dk, dv = torch.autograd.grad(lse.sum(), [inputs["q"], inputs["k"], inputs["v"]])
    wide = {n: x.detach().double().requires_grad_() for n, x in inputs.items()}
    want = torch.autograd.grad(attention(**wide, return_lse=True)[1].sum(), [wide["q"], wide["k"]])
    torch.testing.assert_close(dq.double(), want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dk.double(), want[1], rtol=1e-5, atol=1e-6)
    assert not dv.any()


def test_ten_runs_give_the_same_bits(device, generator):
    inputs = make({"lengths": (40, 40), "heads": (4, 1)}, device, generator)
    first = run(inputs, deterministic=True)
    assert all(same_bits(first, run(inputs, deterministic=True)) for _ in range(9))


OPCHECK = [
    {"lengths": (18, 18)},
    {"lengths": (18, 9), "documents_q": (0, 5, 16), "documents_k": (0, 5, 9)},
]


@pytest.mark.parametrize("case", OPCHECK, ids=str)
def test_opcheck(case, device, generator):
    inputs = make(case, device, generator)
    q, k, v, *borders = inputs.values()
    if borders:
        q, k, v = (x.detach()[None].requires_grad_() for x in (q, k, v))
    borders = borders or [None, None]
    options = (*borders, True, 0.25, 5, 3.0)
    torch.library.opcheck(attention_forward, (q, k, v, *options))
    out, lse2 = (x.detach() for x in attention_forward(q, k, v, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    for dlse2 in (None, torch.randn_like(lse2)):
        torch.library.opcheck(attention_backward, (torch.randn_like(out), dlse2, q, k, v, out, lse2, *options))


def test_compiles_whole_with_documents(device, generator):
    inputs = make({"lengths": (40, 40), "documents_q": (0, 13, 30)}, device, generator)
    eager = run(inputs, max_seqlen_q=17, window=8)
    torch.compiler.reset()

    def step(q, k, v, borders):
        out, lse = attention(q, k, v, cu_seqlens_q=borders, max_seqlen_q=17, window=8, return_lse=True)
        return out, lse

    compiled = torch.compile(step, fullgraph=True)
    for borders in (inputs["cu_seqlens_q"], inputs["cu_seqlens_q"].clone()):
        out, _ = compiled(inputs["q"], inputs["k"], inputs["v"], borders)
        grads = torch.autograd.grad(out, [inputs["q"], inputs["k"], inputs["v"]], torch.ones_like(out))
        assert same_bits([out, *grads], eager)


def test_offsets_beyond_int32():
    """Rows 2^30 + 64 elements apart: the third begins beyond 2^31. Only touched pages take memory."""
    program = """
        import torch
        from fuselm.kernels.attention.api import attention
        torch.manual_seed(0)
        torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
        far = [torch.empty_strided((1, 3, 1, 16), (1, 2**30 + 64, 16, 1), dtype=torch.float16) for _ in range(3)]
        near = [torch.randn(1, 3, 1, 16).half().requires_grad_() for _ in range(3)]
        for f, n in zip(far, near):
            f.copy_(n.detach())
            f.requires_grad_()
        for x in (far, near):
            out = attention(*x, backend="triton")
            x.append(out)
            x.extend(torch.autograd.grad(out, x[:3], torch.ones(1, 3, 1, 16).half()))
        assert all(torch.equal(a, b) for a, b in zip(far, near))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_tiles_of_a_launch_do_not_show(device, generator, monkeypatch):
    inputs = make({"lengths": (50, 50), "documents_q": (0, 20, 41)}, device, generator)
    want = run(inputs)
    for name in ("forward_launch", "key_value_launch", "query_launch"):
        monkeypatch.setattr(portable, name, lambda *_: TileLaunch(16, 32, 4, 1))
    for a, b in zip(run(inputs), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


def test_explain_kernel(device, monkeypatch):
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    assert explain_kernel(device).name == ("hopper" if hopper else "portable")
    assert explain_kernel(device, head_dim=80).name == "portable"
    assert explain_kernel("meta").name == "reference"
    assert "float64" in explain_kernel(device, dtype=torch.float64).reason
    assert explain_kernel(device, backend="reference").name == "reference"


def test_on_a_cpu_the_hopper_kernels_ask_for_a_gpu(monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRET", False)
    monkeypatch.setattr(dispatch, "HAVE_GLUON", True)
    monkeypatch.setattr("fuselm.kernels._triton.INTERPRET", False)
    where = {"dtype": torch.bfloat16, "head_dim": 128}
    refusal = dispatch.hopper_refusal(torch.device("cpu"), **where)
    assert refusal == "the Hopper kernels are for GPUs of compute capability 9.0, this is a CPU"
    with assume_profile(KNOWN_PROFILES[80]):  # compiling ahead of time, which CPU tensors stand for
        assert "this is 8.0" in str(dispatch.hopper_refusal(torch.device("cpu"), **where))


def bad_calls():
    q = torch.zeros(1, 8, 4, 16)
    packed, borders = torch.zeros(8, 4, 16), torch.tensor([0, 8], dtype=torch.int32)
    return [
        ((q[0], q, q), {}, ValueError, r"q has shape \(8, 4, 16\)"),
        ((q, q[:, :, :3], q[:, :, :3]), {}, ValueError, "4 heads, k and v have 3"),
        ((q, q, q[:, :5]), {}, ValueError, "v has shape"),
        ((q, q[..., :8], q[..., :8]), {}, ValueError, "k has head_dim 8"),
        ((q, q[..., :8], q), {}, ValueError, "k has head_dim 8: expected that of q, 16"),
        ((q, q.expand(2, -1, -1, -1), q), {}, ValueError, "k has batch size 2: expected that of q, 1"),
        ((q[..., :8],) * 3, {}, ValueError, "head_dim 8: expected 16 to 256"),
        ((q.expand(2, -1, -1, -1), q, q), {}, ValueError, "k has batch size 1"),
        ((q.int(),) * 3, {}, TypeError, "q has dtype torch.int32"),
        ((q, q.half(), q.half()), {}, TypeError, "k has dtype torch.float16"),
        ((q.double(),) * 3, {"backend": "triton"}, TypeError, "torch.float64"),
        ((q, q, q), {"scale": 0.0}, ValueError, "scale=0.0"),
        ((q, q, q), {"window": 0}, ValueError, "window=0"),
        ((q, q, q), {"window": 4, "causal": False}, ValueError, "causal=False"),
        ((q, q, q), {"softcap": -1.0}, ValueError, "softcap=-1.0"),
        ((q, q, q), {"scale": "x"}, TypeError, "scale is 'x', of type str: expected a positive number or None"),
        ((q, q, q), {"softcap": [1]}, TypeError, r"softcap is \[1\], of type list: expected a positive number"),
        ((q, q, q), {"window": 4.5}, TypeError, "window is 4.5, of type float: expected an int or None"),
        ((q, q, q), {"max_seqlen_q": "8"}, TypeError, "max_seqlen_q is '8', of type str: expected an int or None"),
        ((q, q, q), {"max_seqlen_q": 8}, ValueError, "max_seqlen_q=8 without cu_seqlens"),
        ((q, q, q), {"cu_seqlens_k": borders}, ValueError, "cu_seqlens_k is given without cu_seqlens_q"),
        ((q, q, q), {"cu_seqlens_q": borders}, ValueError, r"expected \(tokens, heads, head_dim\)"),
        ((packed,) * 3, {"cu_seqlens_q": borders.long()}, TypeError, "cu_seqlens_q has dtype torch.int64"),
        ((packed,) * 3, {"cu_seqlens_q": borders[None]}, ValueError, r"cu_seqlens_q has shape \(1, 2\)"),
        ((packed,) * 3, {"cu_seqlens_q": borders + 1}, ValueError, r"cu_seqlens_q=\[1, 9\]"),
        (
            (packed,) * 3,
            {"cu_seqlens_q": borders, "cu_seqlens_k": borders[:1]},
            ValueError,
            "cu_seqlens_k has 1 borders",
        ),
        ((q, q, q), {"backend": "cuda"}, ValueError, "backend='cuda'"),
    ]


@pytest.mark.parametrize(("tensors", "options", "error", "message"), bad_calls())
def test_bad_input_is_named(tensors, options, error, message):
    with pytest.raises(error, match=message):
        attention(*tensors, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [True, False])
def test_packed_qkv_beyond_int32_on_a_gpu(deterministic, generator):
    """q, k and v as views of one packed qkv of over 2^31 elements: the last sequence equals itself computed alone, to
    the bit but for a dq that may be added up in any order."""
    device = torch.device("cuda")
    batch, length, heads, head_dim = 180, 1024, 64, 64
    qkv = torch.empty(batch, length, 3 * heads, head_dim, dtype=torch.bfloat16, device=device)
    assert qkv.numel() > 2**31
    qkv.normal_(generator=generator)
    alone = qkv[-1:].clone().requires_grad_()
    qkv.requires_grad_()
    results = []
    for x in (qkv, alone):
        out = attention(*x.split(heads, 2), deterministic=deterministic)
        (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
        results.append([out[-1:].clone(), *grad[-1:].clone().split([heads, 2 * heads], 2)])
        del out, grad
    (out, dq, dkv), (out_alone, dq_alone, dkv_alone) = results
    assert same_bits([out, dkv], [out_alone, dkv_alone])
    if deterministic:
        assert same_bits([dq], [dq_alone])
    else:
        torch.testing.assert_close(dq, dq_alone, rtol=2**-7, atol=1e-4)


@pytest.mark.gpu
def test_ten_runs_give_the_same_bits_on_a_gpu(generator):
    inputs = make(
        {"lengths": (2049, 2049), "head_dim": 128, "heads": (8, 2)}, torch.device("cuda"), generator, torch.bfloat16
    )
    first = run(inputs, deterministic=True)
    assert all(same_bits(first, run(inputs, deterministic=True)) for _ in range(9))
