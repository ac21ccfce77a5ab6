"""AdamW's veto: a refused step is as one that nobody has asked for, and the norm is known all the same."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch

from fuselm.kernels import adamw_step
from fuselm.kernels.adamw import AdamW

from .test_adamw_tables import Launches

BACKENDS = ["triton", "reference"]
SIZES = (3, 300, 0, 70)
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "master": (torch.bfloat16, {"master_weights": True}),
    "rounded": (torch.bfloat16, {"stochastic_rounding": True, "seed": 3, "state_dtype": torch.bfloat16}),
    "copies": (torch.float32, {"copies": {}}),
}


def make(mode: str, device: torch.device, **options: Any) -> tuple[list[Any], AdamW]:
    """What holds the gradients, and the optimizer."""
    dtype, extra = MODES[mode]
    params: list[Any] = [torch.linspace(-1, 1, n, device=device).to(dtype).requires_grad_() for n in SIZES]
    holders = params
    if "copies" in extra:
        holders = [p.detach().bfloat16().requires_grad_() for p in params]
        extra = {"copies": dict(zip(params, holders, strict=True))}
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0, "lr": 0.03}]
    return holders, AdamW(groups, **{"lr": 0.01, "max_grad_norm": 0.5, **extra, **options})


def set_grads(holders: list[Any], step: int) -> None:
    for i, p in enumerate(holders):
        p.grad = torch.cos(torch.arange(p.numel(), device=p.device) + step + i).mul(10.0 ** -(step % 3)).to(p.dtype)


def everything(holders: list[Any], optimizer: AdamW) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in params for _, t in sorted(optimizer.state[p].items())]
    return [t.detach().clone() for t in (*holders, *params, *states)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_refused_step_is_as_none_at_all(mode, backend, device):
    """Bitwise as an optimizer without veto that is never given the refused steps; their norms are right all the same,
    and the first step may be among them."""
    refused = (0, 3, 4)
    answers = torch.tensor([step in refused for step in range(8)], device=device)
    holders, optimizer = make(mode, device, backend=backend)
    others, plain = make(mode, device, backend=backend)
    asked: list[torch.Tensor] = []

    def veto(norm: torch.Tensor) -> torch.Tensor:
        asked.append(norm)
        return answers[len(asked) - 1]  # at any address

    optimizer.veto = veto
    for step in range(8):
        set_grads(holders, step)
        optimizer.step()
        exact = torch.cat([p.grad.double() for p in holders]).norm()
        torch.testing.assert_close(asked[-1], exact, rtol=1e-6, atol=0)
        assert asked[-1].shape == () and torch.equal(asked[-1].float(), optimizer.grad_norm)
        assert int(optimizer.skipped_steps) == sum(s <= step for s in refused)
        if step not in refused:
            set_grads(others, step)
            plain.step()
            assert same(everything(holders, optimizer), everything(others, plain)), step
            assert torch.equal(optimizer.grad_norm, plain.grad_norm)
    assert len({norm.data_ptr() for norm in asked}) == len(asked) == 8, "each step's own tensor"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("answer", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_nan_and_skipped_once(value, answer, backend, device):
    holders, optimizer = make("fp32", device, backend=backend)
    asked: list[float] = []

    def veto(norm: torch.Tensor) -> torch.Tensor:
        asked.append(float(norm))
        return torch.full((), answer, device=device)

    set_grads(holders, 0)
    optimizer.step()
    before = everything(holders, optimizer)
    optimizer.veto = veto
    holders[1].grad[7] = value
    optimizer.step()
    assert math.isnan(asked[0]) and not bool(optimizer.grad_norm.isfinite())
    assert int(optimizer.skipped_steps) == 1 and same(before, everything(holders, optimizer))


def test_norms_in_fp64_are_exact():
    p: Any = torch.zeros(2, dtype=torch.float64).requires_grad_()
    p.grad = torch.tensor([3e-60, 4e-60], dtype=torch.float64)
    optimizer = AdamW([p])
    asked: list[float] = []
    optimizer.veto = lambda norm: asked.append(float(norm)) or norm > 4e-60
    optimizer.step()
    assert asked == [pytest.approx(5e-60, rel=1e-14)] and float(optimizer.grad_norm) == 0.0  # too small for fp32
    assert int(optimizer.skipped_steps) == 1 and not p.detach().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_gradients_the_norm_is_0(backend, device):
    optimizer = AdamW([torch.ones(3, device=device).requires_grad_()], backend=backend)
    asked: list[float] = []
    optimizer.veto = lambda norm: asked.append(float(norm)) or norm > 1
    optimizer.step()
    assert asked == [0.0] and int(optimizer.skipped_steps) == 0


def test_two_launches_more_in_one_process(monkeypatch, device):
    names = ("squares_kernel", "class_sums_kernel", "norm_kernel", "finish_kernel", "adamw_kernel")
    launches = {name: Launches() for name in names}
    for name, kernel in launches.items():
        monkeypatch.setattr(adamw_step, name, kernel)
    holders, optimizer = make("fp32", device, backend="triton")
    set_grads(holders, 0)
    for veto, expected in ((None, [1, 0, 0, 1, 1]), (lambda norm: norm > 1, [2, 1, 1, 2, 2]), (None, [3, 1, 1, 3, 3])):
        optimizer.veto = veto
        optimizer.step()
        assert [len(launches[name].grids) for name in names] == expected


def not_to_be_pickled(norm: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"asked about {norm}")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_duplicates_go_without_and_loaded_state_keeps_it(duplicate, device):
    holders, optimizer = make("fp32", device)
    optimizer.veto = not_to_be_pickled
    set_grads(holders, 0)
    twin = duplicate(optimizer)
    assert twin.veto is None
    twin.step()
    optimizer.load_state_dict(twin.state_dict())
    assert optimizer.veto is not_to_be_pickled
    with pytest.raises(AssertionError, match="asked"):
        optimizer.step()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("veto", "error", "message"),
    [
        (lambda norm: True, TypeError, "veto returned True: expected a bool tensor"),
        (lambda norm: None, TypeError, "veto returned None"),
        (lambda norm: norm, TypeError, r"veto returned a torch\.float64 tensor"),
        (lambda norm: (norm > 1).view(1), ValueError, r"shape \(1,\).*expected shape \(\)"),
        (lambda norm: torch.empty((), dtype=torch.bool, device="meta"), ValueError, "on meta: expected"),
        (0.5, TypeError, r"veto=0\.5: expected a function"),
    ],
)
def test_other_answers_are_errors_that_change_nothing(veto, error, message, backend, device):
    holders, optimizer = make("fp32", device, backend=backend)
    set_grads(holders, 0)
    optimizer.step()
    before = everything(holders, optimizer)
    optimizer.veto = veto
    with pytest.raises(error, match=message):
        optimizer.step()
    assert same(before, everything(holders, optimizer)) and int(optimizer.skipped_steps) == 0
    optimizer.veto = None
    optimizer.step()
    assert not same(before, everything(holders, optimizer))
