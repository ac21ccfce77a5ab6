"""Stochastic rounding: its bits, that it loses nothing on average, that nothing but the seed decides it."""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import pytest
import torch

from fuselm.kernels import adamw_step
from fuselm.kernels.adamw import AdamW
from fuselm.kernels.adamw_rounding import random_words, round_stochastically
from fuselm.kernels.launch.adamw import ChunkLaunch

BF16 = torch.bfloat16
BACKENDS = ["triton", "reference"]


def words(seed: int, step: int, parameter: int, index: torch.Tensor) -> list[torch.Tensor]:
    return [w.double() for w in random_words(seed, torch.tensor(float(step)), parameter, index)]


def draws(axis: str, count: int) -> list[torch.Tensor]:
    """`count` draws along one coordinate, the others fixed; the three words of each."""
    if axis == "element":
        return words(1, 3, 2, torch.arange(count))
    if axis == "far element":
        return words(1, 3, 2, torch.arange(count) + 2**33)
    if axis == "row":  # elements of one column of a wide matrix
        return words(1, 3, 2, torch.arange(count) * 4096)
    one = torch.tensor([12345])
    coordinates = {"seed": (1, 0, 0), "step": (0, 1, 0), "parameter": (0, 0, 1)}[axis]
    seed, step, parameter = coordinates
    each = [words(k * seed + 1, k * step + 1, k * parameter + 1, one) for k in range(count)]
    return [torch.cat(w) for w in zip(*each, strict=True)]


@pytest.mark.parametrize(
    ("axis", "count"),
    [
        ("element", 1 << 16),
        ("far element", 1 << 16),
        ("row", 1 << 16),
        ("step", 2048),
        ("parameter", 2048),
        ("seed", 2048),
    ],
)
def test_bits_are_uniform_and_independent(axis, count):
    """Each figure is a sum of `count` independent terms if the bits are what they should be: 5 standard deviations."""
    drawn = draws(axis, count)
    limit = 5 / math.sqrt(count)
    for word in drawn:
        assert word.min() >= 0 and word.max() < 2**16
        centred = (word + 0.5) / 2**16 - 0.5  # variance 1/12
        assert abs(float(centred.mean())) * math.sqrt(12) < limit
        for bit in range(16):
            assert abs(float(((word.long() >> bit) & 1).double().mean()) - 0.5) * 2 < limit, bit
        for lag in (1, 2, 3, 8, 64):  # neighbours do not know of each other
            assert abs(float((centred[lag:] * centred[:-lag]).mean())) * 12 < 5 / math.sqrt(count - lag), lag
        cells = torch.bincount((word / 2**10).long(), minlength=64).double()  # chi-square of 63 degrees of freedom
        assert abs(float(((cells - count / 64).square() / (count / 64)).sum()) - 63) < 5 * math.sqrt(2 * 63)
    for a, b in itertools.combinations(drawn, 2):
        assert abs(float((((a + 0.5) / 2**16 - 0.5) * ((b + 0.5) / 2**16 - 0.5)).mean())) * 12 < limit


def test_every_coordinate_counts():
    index = torch.arange(1000)
    base = words(1, 3, 2, index)
    for other in (
        words(2, 3, 2, index),
        words(1 + 2**40, 3, 2, index),
        words(1, 4, 2, index),
        words(1, 3, 3, index),
        words(1, 3, 2, index + 2**32),
        words(2, 3, 1, index),  # seed and parameter exchanged
        words(3, 1, 2, index),
    ):
        for a, b in zip(base, other, strict=True):
            assert int((a == b).sum()) <= 5  # one in 65,536 by chance


def test_rounding_goes_up_with_the_probability_of_what_is_dropped():
    low = torch.tensor([1.0, -1.5, 3e-39, 255.0, 1e30]).to(BF16).float()
    high = (low.view(torch.int32) + 0x10000).view(torch.float32)  # the next bf16 away from zero
    every = torch.arange(2**16, dtype=torch.int32)
    for fraction in (0, 1, 0x4000, 0x8000, 0xFFFF):
        value = (low.view(torch.int32) + fraction).view(torch.float32)
        rounded = round_stochastically(value[:, None].expand(-1, 2**16), every).float()
        assert bool(((rounded == low[:, None]) | (rounded == high[:, None])).all())
        assert (rounded == high[:, None]).sum(1).tolist() == [fraction] * len(low)


@pytest.mark.parametrize("backend", BACKENDS)
def test_special_values(backend, device):
    values = torch.tensor([math.nan, 3.389e38, -3.389e38, 0.0, -0.0], device=device).to(BF16)
    p: Any = values.clone().requires_grad_()
    p.grad = torch.zeros_like(p)
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.0, stochastic_rounding=True, backend=backend)
    for _ in range(20):
        optimizer.step()
    assert torch.equal(p.detach().isnan(), values.isnan())
    assert torch.equal(p.detach()[1:], values[1:])  # what bf16 holds exactly stays
    infinite, ones = torch.tensor([math.inf, -math.inf, math.nan]), torch.full((3,), 0xFFFF, dtype=torch.int32)
    assert torch.equal(round_stochastically(infinite, ones)[:2].float(), infinite[:2])
    assert bool(round_stochastically(infinite, ones)[2].isnan())


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_an_fp32_original_is_rounded_to_nearest(backend, device):
    """Only the moments are rounded stochastically beside a copy that the model computes with."""
    p: Any = torch.linspace(-1, 1, 257, device=device).requires_grad_()
    copy = p.detach().to(BF16).requires_grad_()
    copy.grad = torch.full_like(copy, 0.5)
    optimizer = AdamW([p], lr=1e-3, copies={p: copy}, stochastic_rounding=True, state_dtype=BF16, backend=backend)
    optimizer.step()
    exact = torch.linspace(-1, 1, 257, device=device) * (1 - 1e-4) - 1e-3
    # m and v have errors of at most a bf16 distance each.
    torch.testing.assert_close(p.detach(), exact, rtol=0, atol=1e-3 * 2.0**-6)
    assert optimizer.state[p]["exp_avg"].unique().numel() == 2
    if backend == "triton" and device.type == "cpu":  # the interpreter's cast to bf16 drops bits
        assert float(((copy - p) / p).detach().abs().max()) <= 2.0**-7
    else:
        assert torch.equal(copy.detach(), p.detach().to(BF16))


@pytest.mark.parametrize("options", [{}, {"state_dtype": BF16}])
def test_kernel_and_reference_draw_the_same_bits(options, monkeypatch, device):
    """Several chunks, views at odd offsets, transposed and with gaps: with moments in bf16 everything that is stored
    has been rounded by the same bits, from fp32 values that differ in their last bit now and then."""
    monkeypatch.setattr(adamw_step, "step_launch", lambda *_: ChunkLaunch(64, 2, 1))
    pair = []
    backends: list[Any] = BACKENDS
    for backend in backends:
        x, y, z = (torch.linspace(-1, 1, 1000, device=device).to(BF16) for _ in range(3))
        views = [x[3:700], x[700:], y.reshape(20, 50).t(), z.reshape(40, 25)[:, ::2]]
        params: list[Any] = [view.detach().requires_grad_() for view in views]
        optimizer = AdamW(params, lr=1e-2, stochastic_rounding=True, seed=2**40 + 7, backend=backend, **options)
        for step in range(3):
            for p in params:
                g = torch.cos(torch.arange(p.numel(), device=device) * (step + 1.0)).to(BF16)
                p.grad = g.reshape(p.shape)
            optimizer.step()
        pair.append([t for p in params for t in (p.detach(), *optimizer.state[p].values())])
    for a, b in zip(*pair, strict=True):
        if a.dtype == BF16:
            assert float((a == b).double().mean()) > 0.99
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def _decay(options: dict[str, Any], backend: Any, device: torch.device, steps: int, numel: int) -> torch.Tensor:
    w: Any = torch.ones(numel, dtype=BF16, device=device).requires_grad_()
    w.grad = torch.zeros_like(w)
    optimizer = AdamW([w], lr=2e-3, weight_decay=0.1, backend=backend, **options)
    for _ in range(steps):
        optimizer.step()
    return w.detach().double()


@pytest.mark.parametrize(("backend", "steps", "numel"), [("triton", 30, 4096), ("reference", 500, 4096)])
def test_decay_arrives_on_average_where_plain_rounding_loses_it(backend, steps, numel, device):
    """w = 1, lr 2e-3, λ 0.1: every step takes off 2e-4, a 19th of the distance to the next bf16 below 1. Each step's
    error is at most one such distance u = 2^-8 and 0 on average: 5 standard deviations, each at most u/2 √steps."""
    w = _decay({"stochastic_rounding": True, "seed": 3}, backend, device, steps, numel)
    exact = (1 - 2e-4) ** steps
    assert abs(float(w.mean()) - exact) < 5 * 2.0**-9 * math.sqrt(steps / numel) < (1 - exact) / 5
    assert float(w.std()) < 2.0**-9 * math.sqrt(steps) * 1.05 and w.unique().numel() > 3
    # What plain rounding does with it (the interpreter's cast drops bits instead: too much is lost there).
    plain = _decay({}, "reference", device, steps, 10)
    assert bool((plain == 1.0).all())


@pytest.mark.filterwarnings("ignore:betas")
@pytest.mark.parametrize("backend", BACKENDS)
def test_second_moment_grows_where_plain_rounding_stalls(backend, device):
    """β2 = 0.999: v closes a thousandth of its distance in each step, less than half of bf16's last bit once it has
    come halfway."""
    steps, numel = (30, 2000) if backend == "triton" else (400, 4000)
    means = []
    for stochastic in (True, False):
        p: Any = torch.zeros(numel, dtype=BF16, device=device).requires_grad_()
        p.grad = torch.full_like(p, 2.0)
        kind: Any = backend if stochastic else "reference"
        optimizer = AdamW(
            [p], lr=0.0, betas=(0.9, 0.999), state_dtype=BF16, stochastic_rounding=stochastic,
            backend=kind,
        )  # fmt: skip
        optimizer.step()
        optimizer.state[p]["exp_avg_sq"].fill_(3.0)
        for _ in range(steps):
            optimizer.step()
        means.append(float(optimizer.state[p]["exp_avg_sq"].double().mean()))
    exact = 4.0 - 0.999**steps
    assert abs(means[0] - exact) < 5 * 2.0**-7 * math.sqrt(steps / numel) + 1e-3
    assert means[1] == 3.0


def _train(params, optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for p in params:
            p.grad = torch.cos(torch.arange(p.numel(), device=p.device) + step).to(p.dtype).view_as(p)
        optimizer.step()


def _make(device, **options) -> tuple[list[Any], AdamW]:
    params: list[Any] = [torch.linspace(-1, 1, n, device=device).to(BF16).requires_grad_() for n in (300, 40)]
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
    return params, AdamW(groups, lr=1e-3, stochastic_rounding=True, **options)


def test_the_seed_decides(device):
    runs = []
    for seed in (0, 0, 1):
        params, optimizer = _make(device, seed=seed)
        _train(params, optimizer, 3)
        runs.append([p.detach() for p in params])
    for a, b, c in zip(*runs, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize("state_dtype", [None, BF16])
def test_a_resumed_run_goes_on_bit_by_bit_with_the_saved_seed(state_dtype, device):
    params, optimizer = _make(device, seed=2**62 + 11, state_dtype=state_dtype)
    _train(params, optimizer, 2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others, resumed = _make(device, seed=5, state_dtype=state_dtype)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    twin = copy.deepcopy(optimizer)
    twins = [p for group in twin.param_groups for p in group["params"]]
    with torch.no_grad():
        for a, b in zip(others, params, strict=True):
            a.copy_(b)
    assert [group["seed"] for group in resumed.param_groups] == [2**62 + 11] * 2
    for run in ((params, optimizer), (others, resumed), (twins, twin)):
        _train(*run, 3, 2)
    for a, b, c in zip(params, others, twins, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


@pytest.mark.parametrize("flatten", [False, True])
def test_the_seed_goes_through_a_distributed_checkpoints_state_dict(flatten, device):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    pair = []
    for seed in (2**40 + 1, 5):
        model = torch.nn.Linear(30, 20, device=device, dtype=BF16)
        optimizer = AdamW(model.parameters(), lr=1e-3, stochastic_rounding=True, seed=seed)
        pair.append((model, list(model.parameters()), optimizer))
    (model, params, optimizer), (other, others, resumed) = pair
    _train(params, optimizer, 2)
    states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
    set_state_dict(other, resumed, model_state_dict=states[0], optim_state_dict=states[1], options=options)
    for each in ((params, optimizer), (others, resumed)):
        _train(*each, 3, 2)
    assert resumed.param_groups[0]["seed"] == 2**40 + 1
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_state_dicts_without_a_seed_load_and_with_one_are_taken_by_torch(device):
    params, optimizer = _make(device, seed=9)
    _train(params, optimizer, 1)
    plain = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=1e-3)
    _train(params, plain, 1)
    state = plain.state_dict()
    optimizer.load_state_dict(state)
    assert [group["seed"] for group in optimizer.param_groups] == [9, 9]
    plain.load_state_dict(optimizer.state_dict())
    _train(params, plain, 1, 1)
    assert float(plain.state[params[0]]["step"]) == 2


def test_a_second_moment_that_would_stall_draws_a_warning(recwarn):
    p = torch.ones(2).requires_grad_()
    AdamW([p], betas=(0.9, 0.995), state_dtype=BF16)
    AdamW([p], betas=(0.9, 0.999), state_dtype=BF16, stochastic_rounding=True)
    AdamW([p], betas=(0.9, 0.999))
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"betas\[1\]=0\.999.*stalls"):
        AdamW([{"params": [p], "betas": (0.9, 0.999)}], state_dtype=BF16)


def test_what_cannot_be_combined_is_refused():
    def parameter(dtype):
        return torch.ones(2, dtype=dtype).requires_grad_()

    with pytest.raises(ValueError, match=r"master_weights=True, stochastic_rounding=True"):
        AdamW([parameter(BF16)], stochastic_rounding=True, master_weights=True)
    with pytest.raises(ValueError, match=r"stochastic_rounding=True.*float32"):
        AdamW([parameter(torch.float32)], stochastic_rounding=True)
    with pytest.raises(ValueError, match=r"stochastic_rounding=True.*float16"):
        AdamW([parameter(BF16), parameter(torch.float16)], stochastic_rounding=True)
    AdamW([parameter(torch.float32)], stochastic_rounding=True, state_dtype=BF16)
    AdamW([parameter(torch.float32), parameter(BF16)], stochastic_rounding=True)
    for seed in (-1, 2**63, 0.5, None):
        with pytest.raises(ValueError, match=rf"seed={seed}"):
            AdamW([parameter(BF16)], stochastic_rounding=True, seed=seed)  # pyright: ignore[reportArgumentType]
