"""cross_entropy where precision and memory layout are hard: confident rows, masked rows, rows that start anywhere; the
small kernels around the loss; the launch choices."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.cross_entropy import cross_entropy, row_weight
from fuselm.kernels.launch.cross_entropy import CrossEntropyLaunch, cross_entropy_launch
from fuselm.kernels.loss_scaling import launch_multiply, launch_row_weight, launch_weighted_sum
from fuselm.kernels.numerics import check_budget
from fuselm.kernels.specs.cross_entropy import plain_cross_entropy

LAUNCHERS: Any = importlib.import_module("fuselm.kernels.cross_entropy_launchers")


def both(logits: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor | None = None, **options: Any) -> Any:
    """(loss, gradient) of ours, of plain PyTorch, and of plain PyTorch in fp64."""
    results = []
    for function, dtype in ((cross_entropy, None), (plain_cross_entropy, None), (plain_cross_entropy, torch.float64)):
        leaf = logits.detach().to(dtype or logits.dtype).requires_grad_()
        extra: dict[str, Any] = {"backend": "triton"} if function is cross_entropy else {}
        loss = function(leaf, targets, **options, **extra)
        scale = torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype)
        results.append((loss.detach(), torch.autograd.grad(loss, leaf, scale)[0]))
    return results


def check(logits: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor | None = None, **options: Any) -> Any:
    ours, plain, exact = both(logits, targets, upstream, **options)
    for name, a, e, p in zip(("loss", "gradient"), ours, exact, plain, strict=True):
        check_budget(a, e, p, name=name)
    return ours, exact


def confident(probability: float, vocab: int, offset: float, device: torch.device) -> torch.Tensor:
    """One row whose class 5 has about that probability, the rest shared evenly, around `offset`."""
    logits = torch.full((1, vocab), offset, device=device)
    logits[0, 5] += math.log(probability / (1 - probability) * (vocab - 1))
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("probability", [0.9, 0.99, 0.999, 0.99999])
@pytest.mark.parametrize("offset", [0.0, -40.0, 90.0])
def test_gradient_of_a_likely_target_keeps_its_digits(probability, offset, dtype, device):
    """p - 1 is small beside p: its relative error is that of one rounding to the dtype, not that of p."""
    logits = confident(probability, 1001, offset, device).to(dtype)
    targets = torch.tensor([5], device=device)
    for reduction in ("none", "sum"):  # the backward kernel, and the one launch
        (loss, gradient), _, (exact_loss, exact) = both(logits, targets, reduction=reduction)
        # The sum of exponentials is near 1, the additions to it (16: within vectors and a tree) round to 2^-24 each,
        # and 1 - p is small beside it. Then one rounding to the dtype; the interpreter truncates to bf16.
        allowed = 2.0**-20 / (1 - probability)
        roundings = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
        assert abs(loss.item() / exact_loss.item() - 1) <= allowed
        if abs(exact[0, 5]) > 2.0**-14 or dtype != torch.float16:  # smaller ones are not normal numbers in fp16
            assert abs(gradient[0, 5].item() / exact[0, 5].item() - 1) <= allowed + roundings[dtype]
        assert loss >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-3, "label_smoothing": 0.1}], ids=["plain", "all"])
def test_confident_rows_of_every_probability(options, dtype, device, generator):
    logits = torch.randn((40, 257), device=device, generator=generator)
    targets = torch.randint(0, 257, (40,), device=device, generator=generator)
    logits[torch.arange(40), targets] += torch.linspace(0, 20, 40, device=device)
    upstream = torch.rand(40, device=device, generator=generator) + 0.5
    check(logits.to(dtype), targets, upstream, reduction="none", **options)


@pytest.mark.parametrize("vocab", [37, 4099])
def test_rows_of_which_all_but_one_logit_are_masked(vocab, device):
    logits = torch.full((3, vocab), -math.inf, device=device)
    targets = torch.tensor([0, vocab // 2, vocab - 1], device=device)
    logits[torch.arange(3), targets] = torch.tensor([-300.0, 0.25, 7e4], device=device)
    (loss, gradient), _ = check(logits, targets, reduction="none")
    # 0, but for the roundings (2^-22 of a GPU's exp2) of one exponential near 1 and of its logarithm
    assert (loss >= 0).all() and (loss <= 2.0**-21).all() and (gradient.abs() <= 2.0**-21).all()
    wrong = (targets + 1) % vocab  # the target itself is masked
    (loss, gradient), _, (_, exact) = both(logits, wrong, reduction="none")
    assert (loss == math.inf).all() and ((gradient - exact).abs() <= 2.0**-21).all()


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "softcap": 30.0, "z_loss": 1e-2}], ids=["plain", "all"]
)
def test_a_vocabulary_of_one(options, device, generator):
    """The probability is 1 whatever the logit: what is left is z-loss, and the roundings of an exponential near 1."""
    logits = torch.randn((7, 1), device=device, generator=generator) * 4
    targets = torch.zeros(7, dtype=torch.int64, device=device)
    (loss, gradient), _, (exact_loss, exact) = both(logits, targets, reduction="none", **options)
    assert ((loss - exact_loss).abs() <= 2.0**-21 + 2.0**-21 * exact_loss).all()
    assert ((gradient - exact).abs() <= 2.0**-21 + 2.0**-21 * exact.abs()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [3, 41])
def test_rows_that_start_anywhere(vocab, dtype, device, generator):
    """Every distance from a 16-byte border, of the logits and, apart, of the gradient; nothing beside a row is read (it
    would show: NaN) or written."""
    buffer = torch.full((6 * 160 + 16,), math.nan, dtype=dtype, device=device)
    targets = torch.tensor([0, vocab - 1, vocab // 2, -100, 1, 2], device=device)
    values = torch.randn((6, vocab), device=device, generator=generator).to(dtype)
    for start in range(9):
        for pitch in (vocab, 144, 151):
            logits = buffer.as_strided((6, vocab), (pitch, 1), start)
            logits.copy_(values)
            before = buffer.clone()
            ours, _ = check(logits, targets, reduction="sum", label_smoothing=0.1)
            assert torch.equal(buffer, before) or before.isnan().equal(buffer.isnan())
            view = logits.detach().requires_grad_()
            loss = cross_entropy(view, targets, reduction="sum", label_smoothing=0.1, inplace=True, backend="triton")
            (gradient,) = torch.autograd.grad(loss, view)
            torch.testing.assert_close(gradient, ours[1], rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-6)
            outside = torch.ones_like(buffer, dtype=torch.bool)
            outside.as_strided((6, vocab), (pitch, 1), start).fill_(False)
            assert torch.equal(buffer[outside].isnan(), before[outside].isnan())
            buffer.fill_(math.nan)


@pytest.mark.parametrize("count", [0, 1, 5000])
@pytest.mark.parametrize("integers", [torch.int64, torch.int32])
def test_row_weight_counts_what_is_not_ignored(count, integers, device, generator):
    targets = torch.full((9001,), -100, dtype=integers, device=device)
    targets[torch.randperm(9001, device=device, generator=generator)[:count]] = 3
    assert launch_row_weight(targets, -100).item() == torch.tensor(1 / max(count, 1)).item()
    assert row_weight(targets, -100, "sum").item() == 1.0


def test_weighted_sum_of_many_rows(device, generator):
    values = torch.rand(100_001, device=device, generator=generator)
    weight = torch.tensor(1 / 100_001, device=device)
    total = launch_weighted_sum(values, weight)
    assert abs(total.item() / (values.double().sum() * weight.double()).item() - 1) < 1e-6
    assert torch.equal(total, launch_weighted_sum(values, weight))


@pytest.mark.parametrize("n", [1, 15, 4096, 3 * 8 * 4096 + 7])
@pytest.mark.parametrize("factor", [1.0, -0.375])
def test_multiplication_by_a_number_on_the_device(n, factor, device, generator):
    source = torch.randn(n, device=device, generator=generator)
    kept = source.clone()
    number = torch.tensor(factor, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        half = torch.empty(n, dtype=dtype, device=device)
        launch_multiply(source, half, number)
        assert torch.equal(half, (kept * factor).to(dtype)) and torch.equal(source, kept)
    version = source.data_ptr()
    launch_multiply(source, source, number)
    assert torch.equal(source, kept * factor) and source.data_ptr() == version


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_launches_hold_whole_vectors_and_threads(dtype):
    for profile in KNOWN_PROFILES.values():
        for vocab in (1, 2, 37, 1000, 4099, 32000, 50257, 65536, 128256, 2**20):
            capped = cross_entropy_launch(vocab, dtype, profile, softcap=True)
            launch = cross_entropy_launch(vocab, dtype, profile)
            assert capped.block <= min(launch.block, 64 * capped.num_warps * (16 // dtype.itemsize))
            vector = 16 // dtype.itemsize
            assert launch.block & (launch.block - 1) == 0 and launch.block >= vector
            assert 1 <= launch.num_warps <= 32 and launch.num_warps & (launch.num_warps - 1) == 0
            assert launch.ahead == 0 and capped.ahead == 0  # lost wherever rows begin at 16-byte borders
            assert launch.num_warps == 1 or launch.block >= 32 * launch.num_warps * vector


def test_every_launch_gives_the_same(device, generator, monkeypatch):
    logits = torch.randn((5, 1031), device=device, generator=generator)
    targets = torch.tensor([0, 1030, -100, 512, 7], device=device)
    want = None
    launches: tuple[Any, ...] = ((64, 1), (256, 2), (256, 2, 600), (2048, 8))
    for launch in launches:
        monkeypatch.setattr(LAUNCHERS, "cross_entropy_launch", lambda *_, choice=launch: CrossEntropyLaunch(*choice))
        (loss, gradient), _ = check(logits, targets)
        want = want or (loss, gradient)
        torch.testing.assert_close(loss, want[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient, want[1], rtol=1e-5, atol=1e-9)


def test_the_next_row_is_asked_for_where_the_widest_rows_start_anywhere(device):
    profile = KNOWN_PROFILES[90]
    seen = []
    for start, pitch in ((0, 16), (0, 15), (1, 16), (0, 24)):
        logits = torch.zeros(80, dtype=torch.float16, device=device).as_strided((1, 3, 15), (0, pitch, 1), start)
        aligned = LAUNCHERS._rows_aligned(logits)
        seen.append(cross_entropy_launch(128255, torch.bfloat16, profile, False, aligned).ahead)
    assert seen == [0, 32768, 32768, 0]
    assert cross_entropy_launch(50257, torch.bfloat16, profile, False, False).ahead == 0


def test_rows_of_80_kb_that_start_anywhere_take_larger_blocks():
    def block(vocab: int, aligned: bool, softcap: bool = False, dtype: torch.dtype = torch.bfloat16) -> int:
        return cross_entropy_launch(vocab, dtype, KNOWN_PROFILES[90], softcap, aligned).block

    assert [block(50257, aligned) for aligned in (False, True)] == [16384, 8192]
    assert block(32769, False) == block(50257, False, softcap=True) == 8192
    assert block(25000, False, dtype=torch.float32) == 8192


_WIDE_ACCESSES = """
import json, re, torch
import fuselm.kernels.cross_entropy_launchers as launchers
from fuselm.kernels._triton import triton
from fuselm.kernels.aot import compile_only
from fuselm.kernels.cross_entropy import cross_entropy
from fuselm.kernels.launch.cross_entropy import CrossEntropyLaunch

report = []
launch = triton.runtime.jit.JITFunction.run
for vocab in (32000, 50257):
    for ahead in (0, 32768):
        launchers.cross_entropy_launch = lambda *_: CrossEntropyLaunch(8192, 16, ahead)
        kernels = []
        with compile_only(90) as compiled:
            run = triton.runtime.jit.JITFunction.run
            triton.runtime.jit.JITFunction.run = lambda *a, **k: (kernels.append(run(*a, **k)), kernels[-1])[1]
            logits = torch.empty((40, vocab), dtype=torch.bfloat16).requires_grad_()
            cross_entropy(logits, torch.zeros(40, dtype=torch.int64), backend="triton")
            triton.runtime.jit.JITFunction.run = run
        forward = next(k for k in kernels if k.metadata.name == "cross_entropy_forward_kernel")
        ptx = forward.asm["ptx"]
        report.append({
            "vocab": vocab,
            "prefetches": ptx.count("prefetch.global.L2"),
            "ahead": ahead,
            "wide": len(re.findall(r"ld\\.global\\S*\\.v4", ptx)),
            "wide stores": len(re.findall(r"st\\.global\\S*\\.v4", ptx)),
            "spills": max(k.spill_bytes for k in compiled),
        })
print(json.dumps(report))
"""


def test_rows_move_in_vectors_of_16_bytes_wherever_they_start():
    """Compiled for sm_90: both passes read, the second writes, 16 bytes at a time; the next row is asked for where
    the launch says so."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _WIDE_ACCESSES], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 4
    for row in report:
        # two vectors a thread: the loop and the masked last block of both passes
        assert row["wide"] >= 8 and row["wide stores"] >= 4, row
        assert row["spills"] == 0 and (row["prefetches"] > 0) == (row["ahead"] > 0), row
