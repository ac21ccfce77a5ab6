"""cross_entropy of few rows, each shared out over several programs: the values of whole rows, in every mode."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.cross_entropy import cross_entropy
from fuselm.kernels.launch.cross_entropy import PartsLaunch, parts_launch

LAUNCHERS: Any = importlib.import_module("fuselm.kernels.cross_entropy_launchers")
CLASSES = 517  # three parts of 192 logits, the last one shorter, and rows that start anywhere
SPLIT = PartsLaunch(3, 192, 64, 1)
MODES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum, everything": {"reduction": "sum", "z_loss": 1e-2, "label_smoothing": 0.1, "softcap": 5.0, "return_lse": True},
    "each row": {"reduction": "none", "return_lse": True, "z_loss": 1e-2},
    "in place": {"inplace": True, "label_smoothing": 0.2},
    "in place, each row": {"inplace": True, "reduction": "none", "softcap": 3.0},
}


def _run(logits: torch.Tensor, targets: torch.Tensor, scale: float, options: dict[str, Any]) -> list[torch.Tensor]:
    """Loss, lse where it is asked for, and the gradient with `scale` (and half of it from lse) upstream."""
    leaf = logits.detach().clone().requires_grad_()
    outputs = cross_entropy(leaf * 1.0, targets, backend="triton", **options)
    loss, *lse = outputs if options.get("return_lse") else (outputs,)
    total = (loss * scale).sum() + sum((x * (scale / 2)).nan_to_num().sum() for x in lse)
    (gradient,) = torch.autograd.grad(total, leaf)
    return [loss.detach(), *(x.detach() for x in lse), gradient]


@pytest.mark.parametrize(
    ("mode", "dtype", "classes"),
    [
        *((mode, torch.float32, CLASSES) for mode in MODES),
        ("mean", torch.float16, 520),
        ("each row", torch.float16, 520),
    ],
)
def test_parts_give_what_whole_rows_give(mode, dtype, classes, device, generator, monkeypatch):
    options = MODES[mode]
    logits = (3 * torch.randn((7, classes), device=device, generator=generator)).to(dtype)
    logits[5, :192] = float("-inf")  # a part without any probability
    targets = torch.tensor([0, 191, 192, -100, 516, 300, 512], device=device)
    for scale in (1.0, 0.375):
        monkeypatch.setattr(LAUNCHERS, "parts_launch", lambda *_: None)
        whole = _run(logits, targets, scale, options)
        monkeypatch.setattr(LAUNCHERS, "parts_launch", lambda *_: SPLIT)
        split = _run(logits, targets, scale, options)
        again = split if scale == 1.0 else _run(logits, targets, scale, options)
        rtol = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]
        for a, b, c in zip(whole, split, again, strict=True):
            torch.testing.assert_close(b, a, rtol=rtol, atol=1e-7)
            assert torch.equal(b.nan_to_num(7.0), c.nan_to_num(7.0))
        assert not split[-1][3].any() or options.get("return_lse")  # the ignored row


def test_the_gradient_may_take_the_place_of_the_logits_in_the_forward_launch(device, generator, monkeypatch):
    """As linear_cross_entropy asks: scaled by row, with a gradient of lse."""
    logits = torch.randn((1, 4, CLASSES), device=device, generator=generator)
    targets = torch.tensor([191, -100, 192, 516], device=device)
    scale, grad_lse = (torch.randn(4, device=device, generator=generator) for _ in range(2))
    results = []
    for split in (None, SPLIT):
        monkeypatch.setattr(LAUNCHERS, "parts_launch", lambda *_, choice=split: choice)
        buffer = logits.clone()
        loss, lse, lse_low = (torch.empty(4, device=device) for _ in range(3))
        LAUNCHERS.launch_forward(
            buffer,
            targets,
            loss,
            lse,
            lse_low,
            options=(-100, 0.1, 1e-2, 0.0),
            skip_ignored=True,
            gradient=buffer,
            scale=scale,
            grad_lse=grad_lse,
        )
        results.append([buffer, loss, lse.double() + lse_low.double()])
    for whole, parts in zip(*results, strict=True):
        torch.testing.assert_close(parts, whole, rtol=2e-6, atol=1e-7)
    assert not torch.equal(results[1][0], logits)


def test_an_ignored_row_and_an_impossible_target(device, generator, monkeypatch):
    """What the logits of an ignored row hold does not show; an impossible target shows in its row alone."""
    monkeypatch.setattr(LAUNCHERS, "parts_launch", lambda *_: SPLIT)
    logits = torch.randn((4, CLASSES), device=device, generator=generator)
    logits[1] = float("nan")
    targets = torch.tensor([3, -100, 517, 4], device=device)
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, targets, reduction="none", backend="triton")
    (gradient,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
    assert loss[1] == 0 and not gradient[1].any()
    assert loss[2].isnan() and gradient[2].isnan().all()
    assert loss[[0, 3]].isfinite().all() and gradient[[0, 3]].isfinite().all()


def test_strided_rows_and_rows_of_two_dimensions(device, generator, monkeypatch):
    base = torch.randn((2, 4, CLASSES + 11), device=device, generator=generator)
    logits = base[:, 1:3, 3 : 3 + CLASSES]
    targets = torch.tensor([[0, 200], [400, 516]], device=device)
    want = torch.nn.functional.cross_entropy(logits.reshape(4, -1).double(), targets.reshape(-1))
    monkeypatch.setattr(LAUNCHERS, "parts_launch", lambda *_: SPLIT)
    torch.testing.assert_close(cross_entropy(logits, targets, backend="triton").double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_cover_a_row_and_fill_the_device_where_rows_are_few(dtype):
    profile = KNOWN_PROFILES[90]
    for rows in (1, 2, 7, 33):
        for vocab in (32000, 50257, 128256):
            launch = parts_launch(rows, vocab, dtype, profile)
            assert launch is not None and launch.part_size % launch.block == 0
            assert (launch.parts - 1) * launch.part_size < vocab <= launch.parts * launch.part_size
            assert rows * launch.parts <= 2 * profile.num_sms and 1 < launch.parts <= 128
    measured = {1: (126, 1024, 1024, 4), 16: (16, 8192, 2048, 8), 32: (4, 32768, 2048, 8)}
    for rows, best in measured.items():
        assert parts_launch(rows, 128256, torch.bfloat16, profile) == PartsLaunch(*best)
    assert parts_launch(34, 128256, dtype, profile) is None and parts_launch(1, 512, dtype, profile) is None
