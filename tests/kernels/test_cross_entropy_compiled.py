"""cross_entropy inside torch.compile: the backward graph takes the gradient that the forward launch has written."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch

from fuselm.kernels.cross_entropy import cross_entropy


def _inputs(device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn((12, 264), device=device, generator=generator)
    targets = torch.randint(0, 264, (12,), device=device, generator=generator)
    targets[::4] = -100
    return logits.requires_grad_(), targets


def _results(function: Any, logits: torch.Tensor, targets: torch.Tensor, upstream: float) -> list[torch.Tensor]:
    """Loss, and the gradient of loss · upstream."""
    leaf = logits.detach().clone().requires_grad_()
    loss = function(leaf, targets)
    return [loss.detach(), *torch.autograd.grad(loss * upstream, leaf)]


def _eager(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, targets, backend="triton")


def _backward_graph(function: Any) -> str:
    """What Inductor runs in the backward pass of compiled `function`(), without its comments."""
    utils: Any = importlib.import_module("torch._inductor.utils")
    config: Any = importlib.import_module("torch._inductor.config")
    with config.patch(force_disable_caches=True):
        _, codes = utils.run_fw_bw_and_get_code(function)
    body = codes[-1][codes[-1].index("def call(") :]
    return re.sub("#.*", "", body[: body.index("def get_args")])


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_backward_graph_takes_the_gradient_of_the_forward_launch_without_a_copy(dynamic, device, generator):
    """One look at the upstream gradient, and no kernel or tensor beside."""
    logits, targets = _inputs(device, generator)
    torch.compiler.reset()
    loss_of = torch.compile(_eager, fullgraph=True, dynamic=dynamic)
    body = _backward_graph(lambda: loss_of(logits, targets))
    assert body.count("cross_entropy_backward_take") == 1
    assert not re.findall(r"empty_strided|copy_|clone|_fused_|of_saved\.default\(", body), body
    for upstream in (1.0, -2.0, 1.0):
        got, want = (_results(function, logits, targets, upstream) for function in (loss_of, _eager))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_the_returned_gradient_is_the_saved_tensor_where_nobody_needs_it_again(device, generator, monkeypatch):
    module: Any = importlib.import_module("fuselm.kernels.cross_entropy")
    logits, targets = _inputs(device, generator)
    torch.compiler.reset()
    loss_of = torch.compile(_eager, fullgraph=True)
    seen: list[tuple[int, int]] = []
    taken = module.taken
    monkeypatch.setattr(
        module, "taken", lambda saved: (seen.append((saved.data_ptr(), taken(saved).data_ptr())), taken(saved))[1]
    )
    config: Any = importlib.import_module("torch._inductor.config")
    with config.patch(force_disable_caches=True):
        (gradient,) = torch.autograd.grad(loss_of(logits, targets), logits)
    assert len(seen) == 1 and seen[0][0] == seen[0][1] == gradient.data_ptr()


def test_a_graph_that_is_kept_runs_again(device, generator):
    """retain_graph, where the compiled graph comes out of a cache and was compiled without it."""
    logits, targets = _inputs(device, generator)
    config: Any = importlib.import_module("torch._functorch.config")
    torch.compiler.reset()
    _results(torch.compile(_eager, fullgraph=True), logits, targets, 1.0)
    torch.compiler.reset()
    with config.patch(donated_buffer=False):
        loss = torch.compile(_eager, fullgraph=True)(logits, targets)
        results = [
            torch.autograd.grad(loss, logits, torch.tensor(upstream, device=device), retain_graph=True)[0]
            for upstream in (3.0, 1.0, 1.0)
        ]
        results += torch.autograd.grad(loss, logits, torch.tensor(1.0, device=device))
    want = _results(_eager, logits, targets, 1.0)[1]
    torch.testing.assert_close(results[0], 3 * want, rtol=1e-6, atol=1e-9)
    assert all(torch.equal(result, want) for result in results[1:])
    assert len({x.data_ptr() for x in results}) == 4


def test_backends_without_a_lowering(device, generator):
    logits, targets = _inputs(device, generator)
    torch.compiler.reset()
    loss_of = torch.compile(_eager, fullgraph=True, backend="aot_eager")
    for upstream in (1.0, -2.0):
        got, want = (_results(function, logits, targets, upstream) for function in (loss_of, _eager))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_the_gradient_goes_on_through_the_graph(device, generator):
    """Products and a second use of the logits behind the loss: nothing takes the gradient's memory too early."""
    hidden = torch.randn((12, 264), device=device, generator=generator)
    weight = torch.randn((264, 264), device=device, generator=generator)
    _, targets = _inputs(device, generator)

    def total(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.gelu(x) @ w
        return 3 * cross_entropy(logits * 1.5, targets, backend="triton") + 0.1 * logits.square().mean()

    torch.compiler.reset()
    results = []
    for function in (torch.compile(total, fullgraph=True), total):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        results.append(torch.autograd.grad(function(*leaves), leaves))
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()
