"""AdamW's tables: tensors of all sizes at all offsets, how many launches a step takes, what a step does on the host."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuselm.kernels import adamw_step
from fuselm.kernels._triton import device_profile
from fuselm.kernels.adamw import AdamW
from fuselm.kernels.launch.adamw import ChunkLaunch, step_launch

OPTIONS: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 64 and 128 elements: many a tensor, without large tensors."""
    monkeypatch.setattr(adamw_step, "step_launch", lambda *_: ChunkLaunch(32, 2, 1))
    monkeypatch.setattr(adamw_step, "norm_launch", lambda *_: ChunkLaunch(32, 4, 1))


def views(sizes, first: int, fill, dtype, device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Views in one buffer, as the gradients of FSDP2 are, with NaN before, between and behind them; the first begins
    `first` elements behind a multiple of 64 bytes, the others wherever one element of NaN leaves them."""
    buffer = torch.full((64 + sum(sizes) + 9 * len(sizes),), math.nan, dtype=dtype, device=device)
    offset = -(buffer.data_ptr() // dtype.itemsize) % (64 // dtype.itemsize) + first
    out = []
    for i, size in enumerate(sizes):
        out.append(buffer[offset : offset + size].copy_(fill(i, size)))
        offset += size + 1
    return buffer, out


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["gradients", "parameters", "both"])
@pytest.mark.parametrize("first", [0, 3])
def test_views_at_every_offset(dtype, where, first, device):
    sizes = [1, 17, 0, 63, 64, 65, 127, 128, 129, 300]

    def weights(i: int, size: int) -> torch.Tensor:
        return torch.linspace(-1, 1, size, device=device) + i / 16

    def gradients(i: int, size: int) -> torch.Tensor:
        return torch.cos(torch.arange(size, device=device) + i) * 10.0 ** -(i % 3)

    buffer, params = views(sizes, first, weights, dtype, device)
    gaps = buffer.isnan()
    _, grads = views(sizes, first + 2, gradients, dtype, device)
    if where == "gradients":
        params = [p.clone() for p in params]
    if where == "parameters":
        grads = [g.clone() for g in grads]
    exact: list[Any] = [p.double().requires_grad_() for p in params]
    ours: list[Any] = [p.requires_grad_() for p in params]
    state_dtype = torch.bfloat16 if dtype == torch.bfloat16 else None
    optimizer = AdamW(ours, **OPTIONS, state_dtype=state_dtype, max_grad_norm=0.5, backend="triton")
    theirs = torch.optim.AdamW(exact, **OPTIONS, betas=(0.9, 0.95))
    for p, e, g in zip(ours, exact, grads, strict=True):
        p.grad, e.grad = g, g.double()
    norm = torch.nn.utils.clip_grad_norm_(exact, 0.5)
    optimizer.step()
    theirs.step()
    torch.testing.assert_close(optimizer.grad_norm.double(), norm, rtol=1e-6, atol=0)
    # The interpreter casts to bf16 by dropping bits: a whole unit in the last place of |p| < 2, and moments likewise.
    limit = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
    for p, e in zip(ours, exact, strict=True):
        torch.testing.assert_close(p.detach().double(), e.detach(), rtol=0, atol=limit)
    if where != "gradients":
        assert torch.equal(buffer.isnan(), gaps), "written between the views"


@pytest.mark.usefixtures("small_chunks")
def test_a_gradient_counts_once_wherever_it_lies(device):
    """Squares of 1, so that a chunk left out or taken twice, or an element of it, is off by a whole number."""
    for size in (1, 31, 127, 128, 253, 257, 600):
        for first in (0, 1, 3):
            _, grads = views([size], first, lambda _, n: torch.ones(n, device=device), torch.float32, device)
            p: Any = torch.zeros(size, device=device).requires_grad_()
            p.grad = grads[0]
            optimizer = AdamW([p], backend="triton")
            optimizer.step()
            assert float(optimizer.grad_norm) ** 2 == pytest.approx(size, rel=1e-6)


class Launches:
    """Stands for a kernel: counts its launches, and runs nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *_, **__: self.grids.append(grid)


KERNELS = ("squares_kernel", "class_sums_kernel", "norm_kernel", "finish_kernel", "adamw_kernel")


@pytest.fixture
def launches(monkeypatch) -> dict[str, Launches]:
    recorded = {name: Launches() for name in KERNELS}
    for name, kernel in recorded.items():
        monkeypatch.setattr(adamw_step, name, kernel)
    return recorded


class Operations(TorchDispatchMode):
    """Counts operations on tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def many(sizes, device, **options) -> tuple[list[Any], AdamW]:
    params: list[Any] = [torch.zeros(n, device=device).requires_grad_() for n in sizes]
    for p in params:
        p.grad = torch.zeros_like(p)
    half = len(params) // 2
    groups = [{"params": params[:half]}, {"params": params[half:], "weight_decay": 0.0, "lr": 0.5}]
    return params, AdamW(groups, backend="triton", **options)


def test_300_tensors_in_two_groups_take_three_launches(launches, device):
    sizes = [1 + 17 * i for i in range(300)]
    _, optimizer = many(sizes, device, max_grad_norm=1.0)
    optimizer.step()
    assert {name: len(kernel.grids) for name, kernel in launches.items()} == {
        "squares_kernel": 1,
        "class_sums_kernel": 0,
        "norm_kernel": 0,
        "finish_kernel": 1,
        "adamw_kernel": 1,
    }
    (update,) = launches["adamw_kernel"].grids
    chunk = step_launch((torch.float32,) * 3, False, device_profile(device)).chunk
    assert update == (sum(-(-n // chunk) for n in sizes),)


@pytest.mark.parametrize("change", ["nothing", "the rates", "the gradients"])
def test_a_later_step_does_the_same_for_3_and_300_tensors(change, launches, device):
    """Operations on tensors after the first step: as many, whatever the number of parameters. Three are left where
    nothing changes: torch.optim marks the step's begin and end for the profiler, and grad_norm is a new tensor."""
    counts = []
    for number in (4, 300):
        params, optimizer = many([8] * number, device)
        for _ in range(2):
            optimizer.step()
        if change == "the rates":
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        if change == "the gradients":
            kept = [p.grad for p in params]
            for p in params:
                p.grad = torch.zeros_like(p)
            assert len(kept) == number
        with Operations() as operations:
            optimizer.step()
        counts.append(operations.count)
    assert counts[0] == counts[1] <= (3 if change == "nothing" else 40)
    assert len(launches["adamw_kernel"].grids) == 6


def test_moved_tensors_are_noticed(device):
    """What a step writes goes where parameter, moments and gradient are now, whoever has moved them."""

    def swapped(p, optimizer):
        p.data = p.data.clone()

    def state_data(p, optimizer):
        optimizer.state[p]["exp_avg"].data = optimizer.state[p]["exp_avg"].clone()

    def state(p, optimizer):
        optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"].clone()

    def whole_state(p, optimizer):
        optimizer.state[p] = {name: t.clone() for name, t in optimizer.state[p].items()}

    def transposed(p, optimizer):
        p.grad = p.grad.t().contiguous().t()

    def dtype(p, optimizer):
        p.data = p.data.double().float()

    for move in (swapped, state_data, state, whole_state, transposed, dtype):
        pair = []
        for moved in (True, False):
            p: Any = torch.linspace(-1, 1, 12, device=device).reshape(3, 4).requires_grad_()
            optimizer = AdamW([p], **OPTIONS, backend="triton")
            for step in range(4):
                p.grad = torch.cos(torch.arange(12.0, device=device) + step).reshape(3, 4)
                if step == 2 and moved:
                    kept = [p.detach(), *optimizer.state[p].values()]  # so that nothing new lies where these lay
                    move(p, optimizer)
                    assert kept
                optimizer.step()
            pair.append([p.detach(), *optimizer.state[p].values()])
        for a, b in zip(*pair, strict=True):
            assert torch.equal(a, b), move.__name__


def test_a_moved_copy_is_noticed(device):
    p: Any = torch.linspace(-1, 1, 12, device=device).requires_grad_()
    copy: Any = p.detach().to(torch.bfloat16).requires_grad_()
    optimizer = AdamW([p], lr=0.5, copies={p: copy}, backend="triton")
    kept = copy.detach()
    for step in range(3):
        copy.grad = torch.ones_like(copy)
        if step == 2:
            copy.data = copy.data.clone()
        optimizer.step()
        torch.testing.assert_close(copy.detach().float(), p.detach(), rtol=2.0**-7, atol=0)
    assert not torch.equal(kept, copy.detach())


def test_a_gradient_that_became_shorter_is_refused(device):
    p: Any = torch.zeros(8, device=device).requires_grad_()
    p.grad = torch.ones(8, device=device)
    optimizer = AdamW([p], backend="triton")
    optimizer.step()
    p.grad.resize_(3)
    with pytest.raises(ValueError, match=r"gradient of shape \(3,\).*\(8,\)"):
        optimizer.step()


def test_gradients_are_not_kept(device):
    """The tables must not hold on to gradients after the step: that memory is the next forward pass's."""
    p: Any = torch.zeros(8, device=device).requires_grad_()
    optimizer = AdamW([p], backend="triton")
    for _ in range(2):
        p.grad = torch.ones(8, device=device)
        gone = weakref.ref(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        assert gone() is None


def test_groups_may_differ_in_everything(device):
    sizes, groups = [3, 40, 7, 90], []
    for i, size in enumerate(sizes):
        lr: Any = [1e-2, torch.tensor(2e-2, device=device), torch.tensor(3e-2, dtype=torch.float64, device=device), 0.0]
        betas = (0.5 + 0.1 * i, 0.6 + 0.1 * i)
        groups.append(dict(lr=lr[i], betas=betas, eps=10.0**-i, weight_decay=0.1 * i, shape=(size,)))
    pair = []
    kinds: list[tuple[Any, torch.dtype, dict[str, Any]]] = [
        (AdamW, torch.float32, {"backend": "triton"}),
        (torch.optim.AdamW, torch.float64, {"foreach": False}),
    ]
    for cls, dtype, extra in kinds:
        params: list[Any] = [torch.linspace(-1, 1, n, device=device).to(dtype).requires_grad_() for n in sizes]
        built = [
            {**{k: v for k, v in g.items() if k != "shape"}, "params": [p]} for g, p in zip(groups, params, strict=True)
        ]
        optimizer = cls(built, **extra)
        for step in range(3):
            for p in params:
                p.grad = torch.cos(torch.arange(p.numel(), device=device) + step).to(dtype)
            optimizer.step()
        pair.append(params)
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a.detach().double(), b.detach(), rtol=0, atol=1e-6)
