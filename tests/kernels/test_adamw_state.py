"""AdamW as a torch.optim.Optimizer: state dicts both ways with torch.optim.AdamW, pickling, closures, hooks, groups."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

from fuselm.kernels.adamw import AdamW

BACKENDS = ["triton", "reference"]
OPTIONS: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def make(cls, dtype=torch.float32, device="cpu", **options):
    params: list[Any] = [torch.linspace(-0.5, 0.5, n, device=device).to(dtype).requires_grad_() for n in (3, 70)]
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
    return params, cls(groups, **{**OPTIONS, **options})


def train(params, optimizer, steps, first: int = 0, *, without: int | None = None) -> None:
    for step in range(first, first + steps):
        for i, p in enumerate(params):
            p.grad = None if i == without else torch.cos(torch.arange(p.numel(), device=p.device) + step).to(p.dtype)
        optimizer.step()


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direction", ["ours to torch", "torch to ours", "ours to ours"])
def test_state_dicts_are_exchanged(backend, direction, device):
    source_class, target_class = {
        "ours to torch": (AdamW, torch.optim.AdamW),
        "torch to ours": (torch.optim.AdamW, AdamW),
        "ours to ours": (AdamW, AdamW),
    }[direction]
    kinds = {AdamW: {"backend": backend}, torch.optim.AdamW: {"foreach": False}}
    unbroken = make(torch.optim.AdamW, torch.float64, device)
    source = make(source_class, device=device, **kinds[source_class])
    target = make(target_class, device=device, lr=0.5, **kinds[target_class])
    for params, optimizer in (unbroken, source):
        train(params, optimizer, 2)
        train(params, optimizer, 1, 2, without=0)  # steps of the parameters differ from here on
    kept = None
    if direction == "ours to ours":
        train(*target, 1)  # tensors that exist are written in place
        kept = target[1].state[target[0][1]]["exp_avg"]
    target[1].load_state_dict(through_a_file(source[1].state_dict()))
    with torch.no_grad():
        for a, b in zip(target[0], source[0], strict=True):
            a.copy_(b)
    train(*target, 3, 3)
    train(*unbroken, 3, 3)
    for i, (a, b) in enumerate(zip(target[0], unbroken[0], strict=True)):
        torch.testing.assert_close(a.detach().double(), b.detach(), rtol=0, atol=1e-6)
        assert float(target[1].state[a]["step"]) == (5, 6)[i]
    assert kept is None or target[1].state[target[0][1]]["exp_avg"] is kept


def test_loaded_state_is_not_shared(device):
    params, source = make(AdamW, device=device)
    train(params, source, 1)
    others, target = make(AdamW, device=device)
    target.load_state_dict(source.state_dict())
    train(others, target, 1, 1)
    assert [float(source.state[p]["step"]) for p in params] == [1.0, 1.0]
    for a, b in zip(params, others, strict=True):
        assert not torch.equal(source.state[a]["exp_avg"], target.state[b]["exp_avg"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_low_precision_state_survives_bitwise(backend, device):
    options: dict[str, Any] = dict(dtype=torch.bfloat16, device=device, master_weights=True, backend=backend)
    params, source = make(AdamW, **options)
    train(params, source, 3)
    others, target = make(AdamW, **options)
    target.load_state_dict(through_a_file(source.state_dict()))
    for a, b in zip(params, others, strict=True):
        with torch.no_grad():
            b.copy_(a)
        assert source.state[a].keys() == target.state[b].keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
        for name, tensor in source.state[a].items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, target.state[b][name])
    train(params, source, 2, 3)
    train(others, target, 2, 3)
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_master_is_made_when_the_loaded_state_has_none(device):
    params, source = make(torch.optim.AdamW, torch.bfloat16, device)
    train(params, source, 2)
    others, target = make(AdamW, torch.bfloat16, device, master_weights=True)
    with torch.no_grad():
        for a, b in zip(params, others, strict=True):
            b.copy_(a)
    target.load_state_dict(source.state_dict())
    train(others, target, 1, 2)
    assert target.state[others[0]]["exp_avg"].dtype == target.state[others[0]]["master"].dtype == torch.float32


def test_state_dict_has_steps_as_scalar_tensors(device):
    params, optimizer = make(AdamW, device=device)
    train(params, optimizer, 2)
    state = optimizer.state_dict()["state"]
    for values in state.values():
        assert set(values) == {"step", "exp_avg", "exp_avg_sq"}
        assert values["step"].shape == () and values["step"].dtype == torch.float32 and float(values["step"]) == 2


def test_numbers_as_steps_load(device):
    params, optimizer = make(AdamW, device=device)
    train(params, optimizer, 2)
    state_dict = copy.deepcopy(optimizer.state_dict())
    for values in state_dict["state"].values():
        values["step"] = 7
    optimizer.load_state_dict(state_dict)
    train(params, optimizer, 1)
    assert float(optimizer.state[params[0]]["step"]) == 8


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: d["state"][1].update(exp_avg=torch.zeros(3)), r"exp_avg.*\(3,\).*\(70,\)"),
        (lambda d: d["param_groups"][0].update(amsgrad=True), "amsgrad=True"),
        (lambda d: d["param_groups"][1].update(lr=-1.0), r"lr=-1\.0"),
        (lambda d: d["param_groups"].pop(), "different number of parameter groups"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_whole(damage, message, device):
    params, optimizer = make(AdamW, device=device)
    train(params, optimizer, 2)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0]["exp_avg"] += 1
    damage(state_dict)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for i, values in before["state"].items():
        assert all(torch.equal(values[name], after["state"][i][name]) for name in values)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_on_as_the_original(duplicate, device):
    params, optimizer = make(AdamW, torch.bfloat16, device, master_weights=True, max_grad_norm=0.5)
    train(params, optimizer, 2)
    params[0].grad[0] = float("nan")
    optimizer.step()
    twin = duplicate(optimizer)
    twins = [p for group in twin.param_groups for p in group["params"]]
    assert twin.max_grad_norm == 0.5 and twin.master_weights and int(twin.skipped_steps) == 1
    train(params, optimizer, 2, 2)
    train(twins, twin, 2, 2)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_closure_hooks_and_groups(device):
    params, optimizer = make(AdamW, device=device)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_load_state_dict_pre_hook(lambda _, d: {**d, "param_groups": copy.deepcopy(d["param_groups"])})
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append(len(o.state)))

    def closure():
        optimizer.zero_grad()
        loss = torch.stack([p.square().sum() for p in params]).sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(3)]
    assert losses[0] > losses[1] > losses[2] and calls == ["pre", "post"] * 3
    extra = torch.ones(2, device=device).requires_grad_()
    optimizer.add_param_group({"params": [extra], "lr": 0.1})
    assert optimizer.param_groups[-1]["betas"] == OPTIONS["betas"]
    params.append(extra)
    optimizer.step(closure)
    assert float(extra.detach()[0]) == pytest.approx(1 - 0.1 * 0.1 - 0.1, abs=1e-6)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls[-1] == 3 and len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    optimizer.zero_grad()
    assert extra.grad is None and "lr: 0.1" in repr(optimizer)


def test_changing_betas_by_a_scheduler(device):
    params, optimizer = make(AdamW, device=device)
    exact, theirs = make(torch.optim.AdamW, torch.float64, device)
    for p, o in ((params, optimizer), (exact, theirs)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.01, total_steps=6, cycle_momentum=True)
        for step in range(5):
            train(p, o, 1, step)
            scheduler.step()
    for a, b in zip(params, exact, strict=True):
        torch.testing.assert_close(a.detach().double(), b.detach(), rtol=0, atol=1e-6)
