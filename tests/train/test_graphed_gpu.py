"""A step replayed as a CUDA graph is the step itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fuselm.train import distributed
from fuselm.train.compute_copies import ComputeCopies
from fuselm.train.config import resolve
from fuselm.train.graphed import WARM_UP, graphed_of
from fuselm.train.metrics import read_metrics
from fuselm.train.trainer import StopSignal, Trainer


@pytest.fixture(scope="module")
def gpu_world():
    world = distributed.start("cuda")
    yield world
    distributed.stop(world)


@pytest.fixture
def train(make_config, gpu_world, tmp_path):
    """train(name, **overrides): (losses and norms by step, the trainer)."""

    def run(name: str, **overrides) -> tuple[dict[int, tuple[float, float]], Trainer]:
        torch._dynamo.reset()  # each run compiles its blocks anew: as many runs in one process meet dynamo's limit
        options = {"training__steps": 3 * WARM_UP, "optimizer__lr": 1e-3, "checkpoint__every": 0}
        options |= {"parallel__sharding": "auto"} | overrides
        config = make_config(tmp_path, parallel__device="cuda", **options)
        parallel = dataclasses.replace(config.parallel, param_dtype="bfloat16")
        model = dataclasses.replace(config.model, kernels="triton", vocab_size=320, dim=128, ffn_dim=256)
        trainer = Trainer(
            resolve(dataclasses.replace(config, name=name, model=model, parallel=parallel), 1), gpu_world, StopSignal()
        )
        trainer.train()
        metrics = read_metrics(tmp_path / name / "metrics.jsonl")
        return {e["step"]: (e["loss"], e["grad_norm"]) for e in metrics if e.get("loss") is not None}, trainer

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batch_size", [8, 2])
def test_replayed_steps_have_the_losses_of_eager_ones(train, micro_batch_size):
    options = {"training__micro_batch_size": micro_batch_size}
    eager, trainer = train("eager", parallel__cuda_graph=False, **options)
    assert graphed_of(trainer.model) is None
    graphed, trainer = train("graphed", parallel__cuda_graph=True, **options)
    replayed = graphed_of(trainer.model)
    assert replayed is not None and replayed.captured, "nothing was captured"
    assert graphed == eager, "the same kernels on the same numbers"
    sharded, _ = train("sharded", parallel__sharding="fsdp", **options)
    assert {s: v[0] for s, v in graphed.items()} == pytest.approx({s: v[0] for s, v in sharded.items()}, rel=1e-4)


@pytest.mark.gpu
def test_a_resumed_run_replays_with_the_loaded_weights(train, tmp_path):
    unbroken, _ = train("unbroken", checkpoint__every=5)
    resumed, _ = train("resumed", checkpoint__resume=str(tmp_path / "unbroken" / "checkpoints" / "step_00000005"))
    assert resumed == {step: unbroken[step] for step in resumed} and len(resumed) == 3 * WARM_UP - 5


@pytest.mark.gpu
def test_document_masks_run_without_a_graph(train):
    losses, trainer = train("documents", data__document_mask=True)
    replayed = graphed_of(trainer.model)
    assert replayed is not None and not replayed.captured
    assert all(torch.isfinite(torch.tensor(v)).all() for v in losses.values())


@pytest.mark.gpu
def test_a_capture_that_cuda_breaks_off_leaves_an_eager_run(train, monkeypatch):
    options = {"training__micro_batch_size": 2}
    eager, _ = train("eager", parallel__cuda_graph=False, **options)
    enter, tried = ComputeCopies.enter, []

    def wait_for_the_device(copies: ComputeCopies) -> None:
        enter(copies)
        if torch.cuda.is_current_stream_capturing():
            tried.append(copies)
            torch.cuda.synchronize()  # which no capture survives

    monkeypatch.setattr(ComputeCopies, "enter", wait_for_the_device)
    with pytest.warns(UserWarning, match="steps run without a CUDA graph, whose capture failed"):
        losses, trainer = train("broken", parallel__cuda_graph=True, **options)
    replayed = graphed_of(trainer.model)
    assert replayed is not None and not replayed.captured and len(tried) == 1
    assert losses == eager
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.rand(8, device="cuda")  # neither the allocator nor the generator believes in a capture
    torch.cuda.empty_cache()
