"""AdamW on a GPU: no synchronisation, CUDA graphs, no recompilation, one parameter of more than 2^31 elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuselm.kernels.adamw import AdamW
from fuselm.kernels.adamw_kernels import adamw_kernel

pytestmark = pytest.mark.gpu
SHAPES = [(4097,), (3,), (64, 256), (0,)]


def make(dtype=torch.float32, **options) -> tuple[list[Any], AdamW]:
    generator = torch.Generator("cuda").manual_seed(0)
    params = [torch.rand(s, generator=generator, device="cuda").sub_(0.5).to(dtype).requires_grad_() for s in SHAPES]
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    return params, AdamW(groups, **{"lr": 1e-2, "max_grad_norm": 1.0, **options})


def gradients(step: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(100 + step)
    return [torch.randn(s, generator=generator, device="cuda").to(dtype) for s in SHAPES]


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


MODES: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16, "master_weights": True},
    {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 5},
]


@pytest.mark.parametrize("options", [*MODES, {"backend": "reference"}])
def test_no_synchronisation(options):
    params, optimizer = make(**options)
    grads = [gradients(step, params[0].dtype) for step in range(8)]
    grads[5][0][7] = float("inf")
    held = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(8):
            for p, g in zip(params, grads[step], strict=True):
                p.grad = None if step == 3 and p is params[1] else g
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step) if step % 2 else torch.full((), 1e-2, device="cuda")
            optimizer.step()
            held.append(optimizer.grad_norm)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(optimizer.skipped_steps) == 1 and [bool(n.isfinite()) for n in held] == [s != 5 for s in range(8)]
    assert [float(optimizer.state[p]["step"]) for p in params] == [7, 6, 7, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_agree(dtype):
    results = []
    for backend in ("triton", "reference"):
        params, optimizer = make(dtype, backend=backend, master_weights=True)
        for step in range(5):
            for p, g in zip(params, gradients(step, dtype), strict=True):
                p.grad = g
            optimizer.step()
        results.append([optimizer.state[p].get("master", p).detach() for p in params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", MODES)
def test_graph_replays_equal_eager_steps(options):
    """Rates and gradients change between replays; in steps 6 and 8 the optimizer is stepped eagerly, with gradients
    elsewhere, and must see them although a replay has put the graph's addresses into its table in between."""

    def feed(params, step: int) -> None:
        for p, g in zip(params, gradients(step), strict=True):
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(g)
        if step == 4:
            params[0].grad[9] = float("nan")

    eager_lr, graph_lr = (torch.full((), 1e-2, device="cuda") for _ in range(2))
    eager, eager_optimizer = make(lr=eager_lr, **options)
    params, optimizer = make(lr=graph_lr, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(2):
            feed(params, step)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    norm = optimizer.grad_norm
    inside = [p.grad for p in params]
    elsewhere = [torch.empty_like(p) for p in params]
    for step in range(10):
        feed(eager, step)
        eager_lr.fill_(1e-2 if step < 2 else 1e-2 / (1 + step))
        eager_optimizer.step()
        if step < 2:
            continue
        graph_lr.copy_(eager_lr)
        by_hand = step in (6, 8)
        for p, g in zip(params, elsewhere if by_hand else inside, strict=True):
            p.grad = g
        feed(params, step)
        if by_hand:
            optimizer.step()
        else:
            graph.replay()
            assert torch.equal(norm, eager_optimizer.grad_norm) or step == 4
        assert same(params, eager), f"step {step}"
        for p, e in zip(params, eager, strict=True):
            states = optimizer.state[p], eager_optimizer.state[e]
            assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]), f"step {step}"
    assert int(optimizer.skipped_steps) == int(eager_optimizer.skipped_steps) == 1


@pytest.mark.parametrize("options", [*MODES, {"backend": "reference"}])
def test_a_veto_waits_for_nothing_and_is_captured(options):
    """A limit on the norm that lies in device memory: what the graph does follows it between replays."""
    params, optimizer = make(**options)
    others, plain = make(**options)
    limit = torch.full((), 1e9, dtype=torch.float64, device="cuda")
    optimizer.veto = lambda norm: norm > limit

    def feed(params, step: int) -> None:
        for p, g in zip(params, gradients(step, params[0].dtype), strict=True):
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(g)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(2):
            feed(params, step)
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    norm = optimizer.grad_norm
    for step in range(7):
        refused = step in (3, 5)
        if step >= 2:
            feed(params, step)
            limit.fill_(0.0 if refused else 1e9)
            graph.replay()
        if not refused:
            feed(others, step)
            plain.step()
            if step >= 1:  # both warm-up steps have been taken
                assert same(params, others), step
            assert step < 2 or torch.equal(norm, plain.grad_norm)
    assert int(optimizer.skipped_steps) == 2 and float(optimizer.state[params[0]]["step"]) == 5


@pytest.mark.parametrize("options", MODES)
def test_gradients_at_odd_offsets_give_the_bits_of_aligned_ones(options):
    """The update, that is: the order in which squares are summed depends on where they lie."""
    results = []
    for offset in (0, 1, 3):
        params, optimizer = make(**options, max_grad_norm=None)
        for step in range(3):
            for p, g in zip(params, gradients(step), strict=True):
                buffer = torch.full((p.numel() + 16,), float("nan"), device="cuda", dtype=p.dtype)
                p.grad = buffer[offset : offset + p.numel()].view_as(p).copy_(g)
            optimizer.step()
        results.append([p.detach() for p in params])
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_graph_with_gradients_made_inside():
    def loss_of(params) -> torch.Tensor:
        return torch.stack([(p.square() * (i + 1)).sum() for i, p in enumerate(params)]).sum()

    eager, eager_optimizer = make()
    params, optimizer = make()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        loss_of(params).backward()
        optimizer.step()
    for _ in range(3):
        graph.replay()
    for _ in range(5):
        eager_optimizer.zero_grad()
        loss_of(eager).backward()
        eager_optimizer.step()
    assert same(params, eager)


def test_capture_without_state_is_refused():
    params, optimizer = make()
    for p, g in zip(params, gradients(0), strict=True):
        p.grad = g
    with pytest.raises(RuntimeError, match="eager step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_a_new_learning_rate_compiles_nothing():
    def compiled() -> int:
        return sum(len(cache[0]) for cache in adamw_kernel.device_caches.values())

    params, optimizer = make()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    counts = []
    for step in range(20):
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g
        optimizer.step()
        scheduler.step()
        counts.append(compiled())
    assert counts[0] == counts[-1]


def test_one_parameter_beyond_int32():
    numel = 2**31 + 2**26 + 13
    p = torch.full((numel,), 0.5, dtype=torch.bfloat16, device="cuda").requires_grad_()
    p.grad = torch.full_like(p, 2.0**-16)
    optimizer = AdamW([p], lr=0.25, weight_decay=0.0, state_dtype=torch.bfloat16)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(2.0**-16 * numel**0.5, rel=1e-5)
    for begin in range(0, numel, 2**28):
        part = p.detach()[begin : begin + 2**28]
        assert float(part.min()) == float(part.max()) == 0.25, begin
    assert float(p.detach()[-1]) == 0.25
