"""Where a CUDA graph of a micro-batch meets the rest of a step, without a GPU: what autograd leaves behind, where
gradients are added up, and what happens when a capture fails. test_graphed_gpu.py has the graph itself."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

from fuselm.train import evaluation, graphed
from fuselm.train.compute_copies import ComputeCopies, copies_of
from fuselm.train.data_stream import Batch
from fuselm.train.evaluation import forward_backward, loss_sum
from fuselm.train.graphed import WARM_UP, graph_backward, graphed_of
from fuselm.train.trainer import build

STEPS = 4


def batches(count: int, seed: int = 0) -> list[Batch]:
    tokens = torch.randint(0, 261, (count, 9), generator=torch.Generator().manual_seed(seed))
    return [Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens.split(1)]


@pytest.fixture
def make(make_config, world, tmp_path):
    """make(**overrides): a model with bf16 copies of its parameters, and its optimizer."""

    def run(kernels: str = "eager", **overrides) -> Any:
        options = {"parallel__param_dtype": "bfloat16", "parallel__sharding": "none"} | overrides
        config = make_config(tmp_path, **options)
        return build(dataclasses.replace(config, model=dataclasses.replace(config.model, kernels=kernels)), world)

    return run


def accumulators(parameters: Any) -> list[Any]:
    """Autograd's nodes that add gradients up: those that a living graph leads to, else new ones."""
    return [p.expand_as(p).grad_fn.next_functions[0][0] for p in parameters]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("recompute", "kernels"),
    [*((recompute, "eager") for recompute in ("none", "swiglu", "selective", "full")), ("full", "triton")],
)
def test_no_graph_of_autograd_outlives_its_micro_batch(make, world, monkeypatch, recompute, kernels, count):
    """Else the nodes that accumulate gradients live on, and a CUDA graph finds a stream in them that is not its own."""
    model, _ = make(kernels, parallel__activation_checkpointing=recompute)
    copies: Any = copies_of(model)
    ran = []

    def alive() -> int:
        return sum("marked" in node.metadata for node in accumulators(copies.of.values()))

    def spy(model: Any, batch: Batch) -> torch.Tensor:
        assert alive() == 0, f"of {len(copies.of)} parameters, before micro-batch {len(ran) + 1}"
        loss = loss_sum(model, batch)
        for node in accumulators(copies.of.values()):
            node.metadata["marked"] = True
        assert alive() == len(copies.of), "the graph of this loss leads to every parameter"
        ran.append(batch)
        return loss

    def no_replay(batch: Batch, count: torch.Tensor) -> None:
        assert alive() == 0, "where a micro-batch would be captured"

    monkeypatch.setattr(evaluation, "loss_sum", spy)
    model.graphed_backward = no_replay
    results = forward_backward(model, batches(count), world)
    assert len(ran) == count and alive() == 0
    assert not any(result.requires_grad for result in results)


class Recorded:
    """In place of a captured pass: writes, like a CUDA graph, to the memory that gradients had when it was made."""

    made = 0

    def __init__(self, model: Any, copies: ComputeCopies, batch: Batch, count: torch.Tensor) -> None:
        self.model, self.copies, self.replays = model, copies, 0
        if copies.summing:
            copies.fix_sums()
        self.sums = {p: p.grad for p in copies.of if p.grad is not None}
        Recorded.made += 1

    def replay(self, batch: Batch, count: torch.Tensor) -> torch.Tensor:
        assert all(p.grad is total for p, total in self.sums.items())
        loss = loss_sum(self.model, batch)
        (loss / count).backward()
        self.replays += 1
        return loss.detach()


def train(built: Any, world: Any, count: int) -> list[list[torch.Tensor]]:
    """Losses and weights of a few steps, and between them one that is left out, and one of another count."""
    model, optimizer = built
    values = []
    for step in range(STEPS):
        if step == 3 and count > 1:  # gradients from elsewhere, to which the step adds its own
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.01)
        losses = [forward_backward(model, batches(count, step), world)[0]]
        if step == 1:
            optimizer.zero_grad()
            losses.append(forward_backward(model, batches(count, step), world)[0])
        if step == 2:  # a second batch whose gradients come on top
            losses.append(forward_backward(model, batches(count, step + 100), world)[0])
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        values.append(losses + [p.detach().clone() for p in model.parameters()])
    return values


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_replayed_micro_batches_add_up_as_those_of_no_graph(make, world, monkeypatch, count):
    monkeypatch.setattr(graphed, "_Captured", Recorded)
    want = train(make(), world, count)
    model, optimizer = make()
    graph_backward(model, copies_of(model))  # pyright: ignore[reportArgumentType]
    got = train((model, optimizer), world, count)
    for one, other in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    replayed: Any = graphed_of(model)
    (graph,) = replayed._graphs.values()
    on_top = 1 if count == 1 else 0  # added in bf16 to what is there, which a graph cannot
    assert graph.replays == (STEPS + 2) * count - WARM_UP - on_top


def test_other_shapes_and_documents_run_without_the_graph(make, world, monkeypatch):
    monkeypatch.setattr(graphed, "_Captured", Recorded)
    model, _ = make()
    graph_backward(model, copies_of(model))  # pyright: ignore[reportArgumentType]
    forward_backward(model, batches(WARM_UP + 1), world)
    replayed: Any = graphed_of(model)
    (graph,) = replayed._graphs.values()
    (whole,) = batches(1)
    short = Batch(whole.tokens[:, :5], whole.targets[:, :5])
    borders = torch.tensor([0, 3, 8], dtype=torch.int32)
    documents = dataclasses.replace(whole, cu_seqlens=borders, max_seqlen=5)
    forward_backward(model, [short, documents, whole], world)
    assert graph.replays == 2, "the one that was captured, and the whole one"


@pytest.mark.parametrize("count", [1, 3])
def test_a_capture_that_fails_leaves_steps_without_a_graph(make, world, monkeypatch, count):
    tried = []

    def fail(model: Any, copies: ComputeCopies, batch: Batch, count: torch.Tensor) -> None:
        tried.append(batch)
        if copies.summing:
            copies.fix_sums()
        for copy in copies.of.values():
            copy.grad = torch.full_like(copy, torch.nan)  # of kernels that were recorded and never ran
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(graphed, "_Captured", fail)
    want = train(make(), world, count)
    model, optimizer = make()
    graph_backward(model, copies_of(model))  # pyright: ignore[reportArgumentType]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = train((model, optimizer), world, count)
    for one, other in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    told = [str(w.message) for w in caught if "CUDA graph" in str(w.message)]
    assert len(tried) == 1 and len(told) == 1
    assert "failed (CUDA out of memory. Tried to allocate)" in told[0] and "parallel.cuda_graph=False" in told[0]
