"""Attention values and gradients against the formula in fp64: lengths, groups, windows, softcap, documents."""

from __future__ import annotations

import pytest
import torch

from fuselm.kernels.attention import portable
from fuselm.kernels.attention.api import attention
from fuselm.kernels.attention.reference import visible_pairs
from fuselm.kernels.launch.attention import TileLaunch
from fuselm.kernels.numerics import check_budget, measure
from fuselm.kernels.specs.attention import ATTENTION, plain_attention


def leaves(inputs: dict, dtype: torch.dtype) -> dict:
    return {
        n: x.detach().to(dtype, copy=True).requires_grad_()
        if isinstance(x, torch.Tensor) and x.is_floating_point()
        else x
        for n, x in inputs.items()
    }


def gradients(function, inputs: dict, dout: torch.Tensor, dlse: torch.Tensor, **options):
    out, lse = function(**inputs, return_lse=True, **options)
    qkv = [inputs["q"], inputs["k"], inputs["v"]]
    return out, lse, *torch.autograd.grad([out, lse], qkv, [dout.to(out.dtype), dlse.to(lse.dtype)])


def gradients_by_delta(inputs: dict, out, lse, dout, dlse) -> list[torch.Tensor]:
    """dq, dk and dv by the formula of FlashAttention's backward pass, with P from the lse and delta from out, in fp32.

    Where a query sees few keys, dP - delta cancels: this formula loses digits that autograd through a stored P keeps.
    It is the price of not storing P, so the budget grants it.
    """
    packed = inputs.get("cu_seqlens_q") is not None
    lift = (lambda x: x.detach()[None]) if packed else (lambda x: x.detach())
    q, k, v, out, dout = (lift(x).float().transpose(1, 2) for x in (inputs["q"], inputs["k"], inputs["v"], out, dout))
    lse, dlse = lift(lse), lift(dlse)
    borders = {n: inputs[n] for n in ("cu_seqlens_q", "cu_seqlens_k") if n in inputs}
    if packed:
        borders.setdefault("cu_seqlens_k", borders["cu_seqlens_q"])
    causal, window, softcap = inputs.get("causal", True), inputs.get("window"), inputs.get("softcap")
    mask = visible_pairs(q.shape[2], k.shape[2], q.device, causal=causal, window=window, **borders)
    group, scale = q.shape[1] // k.shape[1], inputs.get("scale", q.shape[-1] ** -0.5)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores, slope = q @ k.mT * scale, 1.0
    if softcap is not None:
        t = torch.tanh(scores / softcap)
        scores, slope = softcap * t, 1 - t * t
    p = torch.where(mask, torch.exp(scores - lse[..., None]), 0.0)
    ds = p * (dout @ v.mT - ((out * dout).sum(-1) - dlse)[..., None]) * slope * scale
    ds = torch.where(mask, ds, 0.0)
    grouped = (x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q, p.mT @ dout))
    grads = [x.transpose(1, 2) for x in (ds @ k, *grouped)]
    return [x[0] for x in grads] if packed else grads


def check(
    case: dict, dtype: torch.dtype, device: torch.device, generator: torch.Generator, factor: float = 1.0
) -> tuple:
    """The kernels' out, lse, dq, dk and dv, all within the error budget; `factor` scales q."""
    inputs = ATTENTION.make_inputs(case, dtype, device, generator)
    inputs["q"] = (inputs["q"].detach() * factor).requires_grad_()
    lse_shape = (*inputs["q"].shape[:-3], inputs["q"].shape[-2], inputs["q"].shape[-3])
    dout = torch.randn(inputs["q"].shape, generator=generator, device=device).to(dtype)
    dlse = torch.randn(lse_shape, generator=generator, device=device)
    ours = gradients(attention, leaves(inputs, dtype), dout, dlse, backend="triton")
    exact = gradients(plain_attention, leaves(inputs, torch.float64), dout, dlse)
    plain = gradients(plain_attention, leaves(inputs, dtype), dout, dlse)
    by_delta = [None, None, *gradients_by_delta(inputs, plain[0], plain[1].float(), dout, dlse)]
    for name, a, e, p, d in zip(("out", "lse", "dq", "dk", "dv"), ours, exact, plain, by_delta, strict=True):
        assert a.shape == e.shape and a.dtype == (torch.float32 if name == "lse" else dtype)
        if d is not None and measure(d, e).norm > measure(p, e).norm:
            p = d
        check_budget(a, e, p, name=name, dtype=dtype)
    return ours


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 129])
def test_lengths_off_the_block(length, causal, device, generator):
    check({"lengths": (length, length), "head_dim": 16, "causal": causal}, torch.float32, device, generator)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(5, 2), (2, 5), (1, 257), (70, 3), (100, 40), (40, 100)])
def test_query_and_key_lengths_differ(lengths, causal, device, generator):
    out, lse, dq, *_ = check({"lengths": lengths, "head_dim": 16, "causal": causal}, torch.float32, device, generator)
    blind = max(lengths[0] - lengths[1], 0) if causal else 0  # bottom-right alignment: the first queries see no key
    assert not out[:, :blind].any() and not dq[:, :blind].any()
    assert (lse[:, :, :blind] == float("-inf")).all() and lse[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 17, 40, 64, 80, 128, 256])
def test_head_dimensions(head_dim, dtype, device, generator):
    check({"lengths": (33, 33), "head_dim": head_dim, "heads": (1, 1)}, dtype, device, generator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sixteen_bit_dtypes_over_several_tiles(dtype, device, generator):
    check({"lengths": (150, 150), "head_dim": 32}, dtype, device, generator)


@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (3, 1)])
def test_grouped_heads(heads, device, generator):
    check({"batch": 2, "lengths": (35, 35), "head_dim": 16, "heads": heads}, torch.float32, device, generator)


@pytest.mark.parametrize("lengths", [(70, 70), (40, 70), (70, 40)])
@pytest.mark.parametrize("window", [1, 16, 33, 1000, 2**31 - 1])
def test_sliding_window(window, lengths, device, generator):
    check({"lengths": lengths, "head_dim": 16, "window": window}, torch.float32, device, generator)


@pytest.mark.parametrize(("softcap", "factor"), [(0.5, 1.0), (30.0, 1.0), (5.0, 40.0)])
def test_softcap(softcap, factor, device, generator):
    check({"lengths": (40, 40), "head_dim": 16, "softcap": softcap}, torch.float32, device, generator, factor)


def test_large_logits(device, generator):
    """Scores of several hundred: exp would overflow without the running maximum."""
    case = {"lengths": (70, 70), "head_dim": 64, "heads": (1, 1), "scale": 1.0}
    out, lse, *_ = check(case, torch.bfloat16, device, generator, 50.0)
    assert out.isfinite().all() and lse.max() > 300


def test_large_logits_in_fp32(device, generator):
    """A score s in fp32 is known to |s|·2^-24 at best, and so is the logarithm of its probability."""
    inputs = ATTENTION.make_inputs({"lengths": (70, 70), "head_dim": 64}, torch.float32, device, generator)
    inputs |= {"q": (inputs["q"].detach() * 50).requires_grad_(), "scale": 1.0}
    dout = torch.randn(inputs["q"].shape, generator=generator, device=device)
    dlse = torch.randn((1, 2, 70), generator=generator, device=device)
    ours = gradients(attention, inputs, dout, dlse, backend="triton")
    exact = gradients(plain_attention, leaves(inputs, torch.float64), dout, dlse)
    for a, e in zip(ours, exact, strict=True):
        assert measure(a, e).norm < 4 * exact[1].abs().max().item() * 2**-24


@pytest.mark.parametrize("window", [None, 1, 7, 16, 20])
def test_every_tile_range(window, device, generator, monkeypatch):
    """With the smallest tiles, short sequences mix inner tiles, edges on both sides and skipped tiles."""
    for name in ("forward_launch", "key_value_launch", "query_launch"):
        monkeypatch.setattr(portable, name, lambda *_: TileLaunch(16, 16, 4, 1))
    for lengths in ((50, 50), (16, 48), (48, 16), (33, 64)):
        check({"lengths": lengths, "head_dim": 16, "heads": (1, 1), "window": window}, torch.float32, device, generator)


@pytest.mark.parametrize(
    "queries,keys", [((0, 150, 150, 300), (0, 100, 200, 300)), ((0, 0, 17, 18, 18), (0, 5, 5, 40, 41))]
)
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 40}], ids=str)
def test_documents(queries, keys, options, device, generator):
    """Empty documents, documents of unequal lengths, and rows behind the last one."""
    case = {"lengths": (queries[-1] + 30, keys[-1] + 20), "head_dim": 16, "heads": (1, 1)}
    case |= {"documents_q": queries, "documents_k": keys} | options
    out, lse, dq, dk, dv = check(case, torch.float32, device, generator)
    assert not out[queries[-1] :].any() and (lse[:, queries[-1] :] == float("-inf")).all()
    for gradient, borders in ((dq, queries), (dk, keys), (dv, keys)):
        assert not gradient[borders[-1] :].any()
    for i in range(len(queries) - 1):  # a document without keys
        if keys[i] == keys[i + 1]:
            assert not out[queries[i] : queries[i + 1]].any()
            assert (lse[:, queries[i] : queries[i + 1]] == float("-inf")).all()


def test_many_documents_find_their_tiles(device, generator, monkeypatch):
    for name in ("forward_launch", "key_value_launch", "query_launch"):
        monkeypatch.setattr(portable, name, lambda *_: TileLaunch(16, 16, 4, 1))
    lengths = torch.tensor([1, 16, 0, 0, 17, 15, 33, 1, 0, 2])
    borders = (0, *lengths.cumsum(0).tolist())
    case = {"lengths": (100, 100), "head_dim": 16, "heads": (1, 1), "documents_q": borders}
    check(case, torch.float32, device, generator)


def test_512_rows_of_which_300_are_used(device, generator):
    case = {"lengths": (512, 512), "head_dim": 16, "heads": (1, 1), "documents_q": (0, 150, 300)}
    for tensor, rows in zip(check(case, torch.float32, device, generator), (0, 1, 0, 0, 0), strict=True):
        tail = tensor.narrow(rows, 300, 212)
        assert (tail == float("-inf")).all() if rows else not tail.any()


@pytest.mark.parametrize(
    "case",
    [
        {"lengths": (40, 30), "head_dim": 16},
        {"lengths": (40, 40), "head_dim": 16, "window": 9, "softcap": 3.0},
        {
            "lengths": (40, 41),
            "head_dim": 16,
            "documents_q": (0, 10, 10, 30),
            "documents_k": (0, 0, 7, 40),
            "causal": False,
        },
        {"lengths": (40, 41), "head_dim": 16, "documents_q": (0, 10, 30), "documents_k": (0, 20, 21), "window": 4},
        {"lengths": (5, 0), "head_dim": 16},
    ],
    ids=str,
)
def test_reference_is_the_formula(case, device, generator):
    """Our reference and the spec's formula, written apart, agree in fp64, where "auto" takes the reference."""
    inputs = ATTENTION.make_inputs(case, torch.float64, device, generator)
    dout = torch.randn(inputs["q"].shape, device=device)
    dlse = torch.randn((*inputs["q"].shape[:-3], inputs["q"].shape[-2], inputs["q"].shape[-3]), device=device)
    ours = gradients(attention, leaves(inputs, torch.float64), dout, dlse)
    if case["lengths"][1]:
        want = gradients(plain_attention, leaves(inputs, torch.float64), dout, dlse)
    else:
        want = [torch.zeros_like(x) for x in ours]
        want[1].fill_(float("-inf"))
    for a, b in zip(ours, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, check_dtype=False)
