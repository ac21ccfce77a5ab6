"""Eager calls that go around the dispatcher: the same bits, and the op wherever something has to see it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fuselm
from fuselm.kernels.direct import RepeatedLaunch, may_skip_dispatcher, needs_grad


class SeenOps(TorchDispatchMode):
    """Records the names of the ops that pass through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _leaves(device, generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(3, 32, device=device, generator=generator, requires_grad=True)
    return x, torch.randn(32, device=device, generator=generator, requires_grad=True)


def test_modes_see_the_ops_and_get_the_same_bits(device, generator):
    x, w = _leaves(device, generator)
    y = fuselm.rms_norm(x, w, backend="triton")
    grads = torch.autograd.grad(y.sin().sum(), (x, w))
    with SeenOps() as seen:
        again = fuselm.rms_norm(x, w, backend="triton")
        more = torch.autograd.grad(again.sin().sum(), (x, w))
    assert [n for n in seen.names if n.startswith("fuselm")] == [
        "fuselm.rms_norm_forward.default",
        "fuselm.rms_norm_backward.default",
    ]
    assert torch.equal(y, again) and all(torch.equal(a, b) for a, b in zip(grads, more, strict=True))


@pytest.mark.parametrize(
    ("options", "backward"), [({}, "backward_unless_one"), ({"reduction": "none"}, "backward"), ({"inplace": True}, "")]
)
def test_modes_see_cross_entropy_and_get_the_same_bits(options, backward, device, generator):
    logits = torch.randn(3, 37, device=device, generator=generator, requires_grad=True)
    targets = torch.tensor([0, -100, 36], device=device)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        loss = fuselm.cross_entropy(logits * 1.0, targets, backend="triton", **options)
        return loss.detach(), torch.autograd.grad(loss, logits, torch.full_like(loss, 0.5))[0]

    plain = run()
    with SeenOps() as seen:
        watched = run()
    names = [n for n in seen.names if n.startswith("fuselm")]
    assert names[0] == "fuselm.cross_entropy_forward.default" and len(names) == 2
    assert names[1] == f"fuselm.cross_entropy_{backward or 'backward_inplace'}.default"
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_selective_checkpointing_finds_the_op_by_name(device, generator):
    x, w = _leaves(device, generator)
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(op)
        kept = op is torch.ops.fuselm.rms_norm_forward.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x):
        return fuselm.rms_norm(x, w, backend="triton").sin()

    y = checkpoint(block, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    grads = torch.autograd.grad(y.sum(), (x, w))
    want = torch.autograd.grad(block(x).sum(), (x, w))
    assert torch.ops.fuselm.rms_norm_forward.default in seen
    assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


def test_a_second_derivative_is_refused_not_left_out(device, generator):
    x, w = _leaves(device, generator)
    (dx,) = torch.autograd.grad(fuselm.rms_norm(x, w, backend="triton").sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        dx.square().sum().backward()


def test_what_must_see_the_op(device):
    x = torch.ones(2, device=device)
    assert may_skip_dispatcher(x, None, torch.nn.Parameter(x))

    class Subclass(torch.Tensor):
        pass

    assert not may_skip_dispatcher(x, x.as_subclass(Subclass))
    with SeenOps():
        assert not may_skip_dispatcher(x)
    seen = []
    torch.func.vmap(lambda t: (seen.append(may_skip_dispatcher(t)), t)[1])(x)
    assert seen == [False]


def test_gradients_are_needed_only_where_they_are_recorded(device):
    x = torch.ones(2, device=device, requires_grad=True)
    assert needs_grad(None, x) and not needs_grad(None, x.detach())
    with torch.no_grad():
        assert not needs_grad(x)


def test_a_repeated_launch_passes_the_jit_once():
    """The compiled kernel takes all parameters, constexprs last; where nothing runs on a device, the JIT stays."""
    calls = []

    class Kernel:
        def __init__(self, name, gives):
            self.name, self.gives = name, gives

        def __getitem__(self, grid):
            return lambda *args, **kwargs: (calls.append((self.name, grid, args[1:], kwargs)), self.gives)[1]

    compiled = Kernel("compiled", None)
    for tensor in (SimpleNamespace(is_cuda=True), SimpleNamespace(is_cuda=False)):
        calls.clear()
        launch = RepeatedLaunch(Kernel("jit", compiled), 2, FIRST=True, BLOCK=64)
        for n in (7, 5):
            launch(n, tensor, n)
        by_jit = [("jit", (n,), (n,), {"FIRST": True, "BLOCK": 64, "num_warps": 2}) for n in (7, 5)]
        assert calls == ([by_jit[0], ("compiled", (5, 1, 1), (5, True, 64), {})] if tensor.is_cuda else by_jit)
