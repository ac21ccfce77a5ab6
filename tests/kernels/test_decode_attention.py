"""decode_attention: what the cache holds beyond the lengths does not matter, splits agree, bad input is named."""

from __future__ import annotations

import pytest
import torch

from fuselm.kernels import decode_attention as module
from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.attention.api import attention
from fuselm.kernels.decode_attention import decode_attention
from fuselm.kernels.launch.decode_attention import MAX_SPLITS, DecodeLaunch, decode_launch


def draw(generator, batch=2, heads=4, kv_heads=2, head_dim=32, keys=150, dtype=torch.float32):
    device = generator.device
    q = torch.randn(batch, heads, head_dim, generator=generator, device=device).to(dtype)
    k, v = torch.randn(2, batch, keys, kv_heads, head_dim, generator=generator, device=device).to(dtype)
    return q, k, v


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_any_number_of_splits_is_the_attention_of_the_last_query(splits, device, generator, monkeypatch):
    """Against `attention` over exactly the keys held, for lengths at and around the borders of blocks and splits."""
    monkeypatch.setattr(module, "decode_launch", lambda *_: DecodeLaunch(splits, 16, 4, 2))
    lengths = [1, 15, 16, 17, 33, 149, 150]
    q, k, v = draw(generator, batch=len(lengths))
    out = decode_attention(q, k, v, torch.tensor(lengths, device=device), backend="triton")
    for row, n in enumerate(lengths):
        want = attention(q[row][None, None], k[row][None, :n], v[row][None, :n], backend="reference")
        torch.testing.assert_close(out[row], want[0, 0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_rows_beyond_the_lengths_may_hold_anything(backend, device, generator):
    q, k, v = (x.requires_grad_() for x in draw(generator))
    lengths = torch.tensor([70, 3], device=device)
    clean = decode_attention(q, k, v, lengths, backend=backend)
    grads = torch.autograd.grad(clean.sum(), (q, k, v))
    dirty_k, dirty_v = (x.detach().clone() for x in (k, v))
    for x in (dirty_k, dirty_v):
        for row, n in enumerate(lengths.tolist()):
            x[row, n:] = float("nan")
        x.requires_grad_()
    out = decode_attention(q, dirty_k, dirty_v, lengths, backend=backend)
    assert torch.equal(out, clean)
    for got, want in zip(torch.autograd.grad(out.sum(), (q, dirty_k, dirty_v)), grads, strict=True):
        assert torch.equal(got, want)
        if got.dim() == 4:
            assert not got[1, 3:].any() and got[1, :3].any()


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("keys", [40, 150])  # one split, several
def test_lengths_of_none_and_of_more_than_all(keys, backend, device, generator):
    q, k, v = draw(generator, batch=3, keys=keys)
    lengths = torch.tensor([0, keys, keys + 1000], dtype=torch.int32, device=device)
    out = decode_attention(q, k, v, lengths, scale=0.3, backend=backend)
    assert not out[0].any() and out[1:].isfinite().all() and out[1:].any()
    every = decode_attention(q, k, v, torch.full_like(lengths, keys), scale=0.3, backend=backend)
    assert torch.equal(out[1:], every[1:])


def test_views_of_one_cache_are_not_copied(device, generator):
    """Keys and values of a layer, sliced out of one tensor: the results are those of copies."""
    q, _, _ = draw(generator)
    cache = torch.randn(2, 150, 3, 2, 2, 32, generator=generator, device=device)
    k, v = cache[:, :, 1, 0], cache[:, :, 1, 1]
    lengths = torch.tensor([140, 33], device=device)
    out = decode_attention(q, k, v, lengths, backend="triton")
    assert torch.equal(out, decode_attention(q, k.contiguous(), v.contiguous(), lengths, backend="triton"))


@pytest.mark.parametrize("arch", KNOWN_PROFILES)
def test_launches_fill_the_card_and_no_more(arch):
    profile = KNOWN_PROFILES[arch]
    for batch in (1, 3, 64, 4096):
        for keys in (1, 127, 128, 1000, 8192, 1 << 20):
            launch = decode_launch(batch, 8, keys, 128, torch.bfloat16, profile)
            assert 1 <= launch.splits <= MAX_SPLITS
            assert launch.splits == 1 or launch.splits * 2 * launch.block_n <= keys
            assert launch.splits == 1 or (launch.splits - 1) * batch * 8 < 2 * profile.num_sms
    assert decode_launch(1, 8, 8192, 128, torch.bfloat16, profile).splits * 8 >= profile.num_sms


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"q": torch.zeros(2, 1, 4, 32)},
            ValueError,
            r"q has shape \(2, 1, 4, 32\): expected \(batch, heads, head_dim\)",
        ),
        ({"k": torch.zeros(2, 4, 32)}, ValueError, r"k has shape \(2, 4, 32\): expected \(batch, keys"),
        ({"v": torch.zeros(2, 9, 2, 32)}, ValueError, r"v has shape \(2, 9, 2, 32\): expected that of k"),
        ({"k": torch.zeros(2, 150, 2, 32).half()}, TypeError, r"k is torch.float16, q torch.float32"),
        ({"q": torch.zeros(2, 5, 32)}, ValueError, "q has 5 heads, k and v have 2: expected a positive multiple"),
        ({"q": torch.zeros(3, 4, 32)}, ValueError, "q has batch 3, k 2, lengths 2"),
        ({"q": torch.zeros(2, 4, 16)}, ValueError, "q has head_dim 16, k 32: expected the same"),
        ({"lengths": torch.zeros(2)}, TypeError, "lengths is torch.float32: expected int32 or int64"),
        ({"lengths": torch.zeros(1).long()}, ValueError, "lengths 1: expected one batch size"),
        ({"scale": 0.0}, ValueError, r"scale=0\.0: expected a positive number"),
        ({"backend": "cuda"}, ValueError, "backend='cuda'"),
    ],
)
def test_bad_input_is_named(change, error, message):
    q, k, v = draw(torch.Generator().manual_seed(0))
    with pytest.raises(error, match=message):
        decode_attention(**{"q": q, "k": k, "v": v, "lengths": torch.tensor([3, 4])} | change)
    q, k, v = (x.double() for x in (q, k, v))
    with pytest.raises(TypeError, match=r"q is torch.float64: backend='triton' takes"):
        decode_attention(q, k, v, torch.tensor([3, 4]), backend="triton")
