"""AdamW's values: against torch.optim.AdamW in fp64, clipping, low precision, skipped steps, awkward memory,
arguments."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fuselm.kernels import adamw_tables
from fuselm.kernels.adamw import AdamW

BACKENDS = ["triton", "reference"]
SHAPES = [(1,), (3,), (255,), (4097,), (0,), (17, 65), ()]


def make_params(generator, dtype=torch.float32, shapes=SHAPES) -> list[Any]:
    """Leaves of several sizes and one view at an odd offset, all with |p| < 0.5."""
    device = generator.device
    params = [torch.rand(s, generator=generator, device=device).sub_(0.5).to(dtype) for s in shapes]
    params.append(torch.rand(1000, generator=generator, device=device).sub_(0.5).to(dtype)[1:501])
    return [p.requires_grad_() for p in params]


def set_grads(params, generator, scale: float = 1.0) -> None:
    """Gradients of very different sizes, the same in every dtype that can hold them."""
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator, device=p.device).mul_(scale * 10.0 ** (i % 4 - 3))
        p.grad = g.to(torch.bfloat16).to(p.dtype)


def run(make, dtype, device, steps: int, *, clip: float | None = None, schedule=None):
    generator = torch.Generator(device=device).manual_seed(0)
    params = [p.detach().to(dtype).requires_grad_() for p in make_params(generator)]
    odd = torch.empty(1000, dtype=dtype, device=device)[1:501].copy_(params[-1].detach())
    params[-1] = odd.requires_grad_()
    optimizer = make([{"params": params[:3], "lr": 2e-3}, {"params": params[3:], "weight_decay": 0.02}])
    scheduler = None if schedule is None else torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    norms = []
    for _ in range(steps):
        set_grads(params, generator)
        if clip is not None and not isinstance(optimizer, AdamW):
            norms.append(torch.nn.utils.clip_grad_norm_(params, clip))
        optimizer.step()
        if isinstance(optimizer, AdamW):
            norms.append(optimizer.grad_norm)
        if scheduler is not None:
            scheduler.step()
    return params, norms, optimizer


def assert_close(actual, exact, tolerance: float = 1e-6) -> None:
    for a, e in zip(actual, exact, strict=True):
        assert a.shape == e.shape
        torch.testing.assert_close(a.detach().double(), e.detach().double(), rtol=0, atol=tolerance)


def truncates(backend: str, device: torch.device) -> bool:
    """The interpreter casts fp32 to bf16 by dropping bits; the compiled kernel and torch round to nearest."""
    return backend == "triton" and device.type == "cpu"


def assert_rounded(param, master, backend: str) -> None:
    if param.dtype == torch.bfloat16 and truncates(backend, param.device):
        torch.testing.assert_close(param.detach().to(master.dtype), master, rtol=2**-7, atol=0)
    else:
        assert torch.equal(param.detach(), master.to(param.dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_torch(backend, device):
    options: dict[str, Any] = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-3, weight_decay=0.1)

    def schedule(k):
        return 1.0 / (1 + k)

    make = partial(AdamW, **options, backend=backend)
    ours, _, optimizer = run(make, torch.float32, device, 21, schedule=schedule)
    exact, _, theirs = run(lambda p: torch.optim.AdamW(p, **options), torch.float64, device, 21, schedule=schedule)
    assert_close(ours, exact)
    for i, (a, b) in enumerate(zip(ours, exact, strict=True)):
        assert float(optimizer.state[a]["step"]) == 21
        size = 10.0 ** (i % 4 - 3)  # of the gradient
        for name, scale in (("exp_avg", size), ("exp_avg_sq", size**2)):
            moments = optimizer.state[a][name].double(), theirs.state[b][name]
            torch.testing.assert_close(*moments, rtol=1e-6, atol=1e-6 * scale)


def test_fp64_takes_the_reference(device):
    options: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1)
    ours, _, _ = run(lambda p: AdamW(p, **options), torch.float64, device, 20)
    exact, _, _ = run(lambda p: torch.optim.AdamW(p, betas=(0.9, 0.95), **options), torch.float64, device, 20)
    assert_close(ours, exact, 1e-13)
    with pytest.raises(TypeError, match="float64"):
        AdamW([ours[0]], backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr(backend, shape, device):
    def make(cls, **extra):
        def build(groups):
            for group in groups:
                group["lr"] = torch.full(shape, 2e-3, device=device)
            return cls(groups, betas=(0.9, 0.95), weight_decay=0.1, **extra)

        return build

    ours, _, optimizer = run(make(AdamW, backend=backend), torch.float32, device, 4, schedule=lambda k: 0.5**k)
    exact, _, _ = run(make(torch.optim.AdamW, foreach=False), torch.float64, device, 4, schedule=lambda k: 0.5**k)
    assert_close(ours, exact)
    assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lr", [0.0, 0, torch.tensor(0.0)])
def test_zero_lr_moves_moments_only(backend, lr, device):
    p = torch.randn(300, device=device).requires_grad_()
    before = p.detach().clone()
    optimizer = AdamW([p], lr=lr, backend=backend)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(p.detach(), before)
    torch.testing.assert_close(optimizer.state[p]["exp_avg"], torch.full_like(p, 0.1).detach())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [0.01, 1e4])
def test_clipping_equals_clip_grad_norm(backend, limit, device):
    ours, norms, _ = run(lambda p: AdamW(p, lr=1e-3, max_grad_norm=limit, backend=backend), torch.float32, device, 3)
    make = partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    exact, exact_norms, _ = run(make, torch.float64, device, 3, clip=limit)
    assert_close(ours, exact)
    for norm, exact_norm in zip(norms, exact_norms, strict=True):  # each step's own tensor, not one that moves
        assert norm.dtype == torch.float32 and norm.shape == ()
        torch.testing.assert_close(norm.double(), exact_norm.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_only_read(backend, device, generator):
    params = make_params(generator)
    set_grads(params, generator)
    grads = [p.grad for p in params]
    before = [g.clone() for g in grads]
    AdamW(params, max_grad_norm=1e-3, backend=backend).step()
    assert all(p.grad is g and torch.equal(g, b) for p, g, b in zip(params, grads, before, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(backend, dtype, device, generator):
    params = make_params(generator, dtype, shapes=[(5,), (4099,)])
    masters = [p.detach().float().requires_grad_() for p in params]
    ours = AdamW(params, lr=1e-4, master_weights=True, max_grad_norm=1.0, backend=backend)
    theirs = torch.optim.AdamW(masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(4):
        set_grads(params, generator)
        for p, master in zip(params, masters, strict=True):
            master.grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        ours.step()
        theirs.step()
    for p, master in zip(params, masters, strict=True):
        assert ours.state[p]["master"].dtype == torch.float32 and ours.state[p]["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(ours.state[p]["master"], master.detach(), rtol=0, atol=1e-6)
        assert_rounded(p, ours.state[p]["master"], backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_parameters_and_moments(backend, device, generator):
    params = make_params(generator, torch.bfloat16, shapes=[(5,), (4099,)])
    exact = [p.detach().double().requires_grad_() for p in params]
    ours = AdamW(params, lr=1e-2, state_dtype=torch.bfloat16, backend=backend)
    theirs = torch.optim.AdamW(exact, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        set_grads(params, generator)
        for p, e in zip(params, exact, strict=True):
            e.grad = p.grad.double()
        ours.step()
        theirs.step()
    for p, e in zip(params, exact, strict=True):
        assert ours.state[p]["exp_avg"].dtype == ours.state[p]["exp_avg_sq"].dtype == torch.bfloat16
        assert "master" not in ours.state[p]
        # Three roundings of p < 1 by half of 2^-8 (a whole one where they truncate), and moments that are off by 2^-8.
        rounding = 2**-8 if truncates(backend, device) else 2**-9
        torch.testing.assert_close(p.detach().double(), e.detach(), rtol=0, atol=3 * rounding + 1e-3)


@pytest.mark.parametrize(("backend", "steps"), [("triton", 40), ("reference", 1000)])
def test_decay_of_bf16_weights_is_not_lost(backend, steps, device):
    w = torch.ones(3, dtype=torch.bfloat16, device=device).requires_grad_()
    optimizer = AdamW([w], lr=1e-3, weight_decay=0.1, master_weights=True, backend=backend)
    w.grad = torch.zeros_like(w)
    for _ in range(steps):
        optimizer.step()
    expected = (1 - 1e-4) ** steps  # 0.9048 after 1000
    exact = torch.full((3,), expected, dtype=torch.float64)
    torch.testing.assert_close(optimizer.state[w]["master"].double().cpu(), exact, rtol=2e-6, atol=0)
    assert_rounded(w, exact.to(device), backend)


def _everything(optimizer) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [p.detach() for p in params] + [t for p in params for _, t in sorted(optimizer.state[p].items())]
    return [t.clone() for t in tensors]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("value", "limit"), [(math.nan, None), (math.inf, 1.0), (-math.inf, None), (3e38, 1.0)])
def test_a_norm_that_is_not_finite_changes_nothing(backend, value, limit, device, generator):
    params = make_params(generator, torch.bfloat16, shapes=[(3,), (300,)])
    optimizer = AdamW(
        [{"params": params[:1]}, {"params": params[1:]}], max_grad_norm=limit, master_weights=True, backend=backend
    )
    set_grads(params, generator)
    optimizer.step()
    before = _everything(optimizer)
    good = params[1].grad[77].clone()
    params[1].grad[77] = value
    for k in (1, 2):
        optimizer.step()
        assert int(optimizer.skipped_steps) == k and not bool(optimizer.grad_norm.isfinite())
    after = _everything(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    params[1].grad[77] = good
    optimizer.step()
    assert int(optimizer.skipped_steps) == 2 and float(optimizer.state[params[0]]["step"]) == 2
    assert not torch.equal(before[0], _everything(optimizer)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_that_get_gradients_later(backend, device):
    a, b, frozen = (torch.ones(5, device=device).requires_grad_() for _ in range(3))
    x, y = (torch.ones(5, device=device, dtype=torch.float64).requires_grad_() for _ in range(2))
    ours = AdamW([a, b, frozen], lr=0.1, backend=backend)
    theirs = torch.optim.AdamW([x, y], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(4):
        for p, q, first in ((a, x, 0), (b, y, 2)):
            if step >= first and not (p is a and step == 3):
                p.grad = torch.arange(5.0, device=device) + step
                q.grad = p.grad.double()
            else:
                p.grad = q.grad = None
        ours.step()
        theirs.step()
    assert_close([a, b], [x, y])
    assert [float(ours.state[p]["step"]) for p in (a, b)] == [3.0, 2.0]
    assert frozen not in ours.state and torch.equal(frozen.detach(), torch.ones(5, device=device))


def test_no_gradients_at_all(device):
    p = torch.ones(3, device=device).requires_grad_()
    optimizer = AdamW([p])
    optimizer.step()
    assert float(optimizer.grad_norm) == 0 and int(optimizer.skipped_steps) == 0 and not optimizer.state


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_strides(backend, device):
    x = torch.linspace(-0.5, 0.5, 120, device=device).reshape(8, 15)
    gaps = torch.full((8, 30), math.nan, device=device)
    gaps[:, ::2] = x
    layouts = [x.clone(), x.t().contiguous().t(), gaps[:, ::2]]
    grads = [
        torch.linspace(0, 1, 8, device=device)[:, None].expand(8, 15),
        torch.linspace(-1, 1, 120, device=device).reshape(15, 8).t(),
        torch.linspace(-1, 1, 240, device=device).reshape(8, 30)[:, 1::2],
    ]
    for weight, grad in itertools.product(layouts, grads):
        p = weight.detach().requires_grad_()
        start = p.detach().clone()
        q = x.double().clone().requires_grad_()
        p.grad, q.grad = grad, grad.double()
        ours = AdamW([p], lr=1e-2, backend=backend)
        theirs = torch.optim.AdamW([q], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        ours.step()
        theirs.step()
        assert_close([p], [q])
        with torch.no_grad():
            p.copy_(start)
    assert bool(gaps[:, 1::2].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_written_past_a_tail(dtype, device):
    buffers = [torch.full((9000,), math.nan, dtype=dtype, device=device) for _ in range(4)]
    regions = [(1, 4), (8, 8 + 4096), (4200, 4200 + 4097), (8301, 8302), (8400, 8440)]
    params = []
    optimizer_state = []
    for begin, end in regions:
        p, g, m, v = (b[begin:end] for b in buffers)
        for t, value in ((p, 0.5), (g, 1.0), (m, 0.0), (v, 0.0)):
            t.fill_(value)
        params.append(p.requires_grad_())
        params[-1].grad = g
        optimizer_state.append({"step": torch.zeros((), device=device), "exp_avg": m, "exp_avg_sq": v})
    optimizer = AdamW(params, lr=0.1, weight_decay=0.0, state_dtype=dtype if dtype == torch.bfloat16 else None)
    for p, state in zip(params, optimizer_state, strict=True):
        optimizer.state[p].update(state)
    optimizer.step()
    inside = torch.zeros(9000, dtype=torch.bool, device=device)
    for begin, end in regions:
        inside[begin:end] = True
    for buffer in buffers:
        assert torch.equal(buffer.isnan(), ~inside)
    torch.testing.assert_close(params[2].detach().float(), torch.full((4097,), 0.4, device=device), rtol=0, atol=2e-3)


def test_offsets_beyond_int32(monkeypatch, device):
    """One parameter of more than 2^31 elements. Untouched pages of torch.empty cost nothing, so only the last chunks
    run."""
    numel = 2**31 + 100 * 4096 + 13
    tail = 4000

    def last_chunks(self, launches, rows, launch):
        self.partials.zero_()
        norm = len(rows) == 3
        add(self, launches, [r[-2:] if norm else r[:16] for r in rows], launch)  # updates begin with the last

    add = adamw_tables.Plan._add
    monkeypatch.setattr(adamw_tables.Plan, "_add", last_chunks)
    p, g, m, v = (torch.empty(numel, dtype=torch.bfloat16, device=device) for _ in range(4))
    for t, value in ((p, 0.5), (g, 0.25), (m, 0.0), (v, 0.0)):
        t[:100] = 0.0
        t[-2 * 65536 :] = 0.0
        t[-tail:] = value
    p.requires_grad_().grad = g
    optimizer = AdamW([p], lr=0.125, weight_decay=0.0, state_dtype=torch.bfloat16, backend="triton")
    optimizer.state[p].update(step=torch.zeros((), device=device), exp_avg=m, exp_avg_sq=v)
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(0.25 * math.sqrt(tail), rel=1e-6)
    last = p.detach()[-tail:].float()
    torch.testing.assert_close(last, torch.full_like(last, 0.375), rtol=0, atol=2e-3)
    assert not bool(p.detach()[-6000:-tail].any()) and not bool(p.detach()[:100].any())


def test_same_bits_every_run(device):
    make = partial(AdamW, lr=1e-3, max_grad_norm=0.1)
    first, second = (run(make, torch.float32, device, 2) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_training_step_is_compiled_once_for_every_learning_rate(backend, device):
    torch.compiler.reset()
    runs = []
    for compiled in (True, False):
        linear = torch.nn.Linear(3, 2, device=device)
        with torch.no_grad():
            for p in linear.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel(), device=device).reshape(p.shape))
        optimizer = AdamW(linear.parameters(), max_grad_norm=1.0, backend=backend)

        def train(linear=linear, optimizer=optimizer):
            linear(torch.ones(4, 3, device=device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        counter = CompileCounter()
        step = torch.compile(train, backend=counter) if compiled else train
        counts = []
        for k in range(20):
            optimizer.param_groups[0]["lr"] = 1e-3 * (k + 1)
            step()
            counts.append(counter.frame_count)
        assert len(set(counts[2:])) == 1 and (0 < counts[-1] <= 2) == compiled, "a learning rate compiled anew"
        runs.append(list(linear.parameters()))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_tables_are_rebuilt_only_when_sizes_change(device, generator):
    params = make_params(generator, shapes=[(3,), (40,)])
    optimizer = AdamW(params, backend="triton")
    set_grads(params, generator)
    optimizer.step()
    plan: Any = optimizer._triton.plan
    sent = plan._sent
    optimizer.step()
    assert optimizer._triton.plan is plan and plan._sent is sent
    old = [p.grad for p in params]  # kept, so that the new ones lie elsewhere
    set_grads(params, generator)
    before = params[1].detach().clone()
    optimizer.step()
    assert optimizer._triton.plan is plan and plan._sent is not sent and len(old) == 3
    assert not torch.equal(before, params[1].detach())
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    optimizer.step()
    params[0].grad = None
    optimizer.step()
    assert optimizer._triton.plan is not plan


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1e-3}, r"lr=-0\.001"),
        ({"lr": math.nan}, r"lr=nan"),
        ({"lr": torch.tensor(-1.0)}, r"lr=-1\.0"),
        ({"lr": torch.ones(2)}, r"lr has shape \(2,\)"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]=1\.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]=-0\.1"),
        ({"betas": 0.9}, r"betas=0\.9"),
        ({"eps": -1.0}, r"eps=-1\.0"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1"),
        ({"max_grad_norm": 0.0}, r"max_grad_norm=0\.0"),
        ({"max_grad_norm": math.nan}, r"max_grad_norm=nan"),
        ({"state_dtype": torch.float16}, r"state_dtype=torch\.float16"),
        ({"backend": "cuda"}, r"backend='cuda'"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW([torch.ones(2).requires_grad_()], **options)


def test_bad_parameters_are_refused(device):
    p = torch.ones(2, device=device).requires_grad_()
    optimizer = AdamW([p])
    with pytest.raises(ValueError, match=r"lr=-1"):
        optimizer.add_param_group({"params": [torch.ones(2, device=device).requires_grad_()], "lr": -1})
    with pytest.raises(ValueError, match="device"):
        optimizer.add_param_group({"params": [torch.ones(2, device="meta").requires_grad_()]})
    with pytest.raises(TypeError, match="complex64"):
        AdamW([torch.ones(2, dtype=torch.complex64).requires_grad_()])
    with pytest.raises(ValueError, match="twice"), pytest.warns(UserWarning):
        AdamW([p, p])
    assert len(optimizer.param_groups) == 1
    optimizer.state[p].update(exp_avg=torch.zeros(3, device=device))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        optimizer.step()
    p.grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,)).to(device)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
