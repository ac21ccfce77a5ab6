"""One rank without FSDP2: the same losses as with it, and a model that shows its fp32 parameters outside of a step."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch

from fuselm.kernels.adamw import AdamW
from fuselm.train.checkpointing import step_folder
from fuselm.train.compute_copies import copies_of
from fuselm.train.config import resolve
from fuselm.train.data_stream import Batch
from fuselm.train.diagnosis import first_nonfinite, largest_gradient
from fuselm.train.distributed import World
from fuselm.train.errors import UserError
from fuselm.train.evaluation import forward_backward
from fuselm.train.metrics import read_metrics
from fuselm.train.parallelize import is_sharded
from fuselm.train.trainer import StopSignal, Trainer, build


@pytest.fixture
def losses(make_config, world, tmp_path):
    """losses(name, **overrides): the losses of a run by step."""

    def run(name: str, **overrides) -> dict[int, float]:
        config = resolve(dataclasses.replace(make_config(tmp_path, **overrides), name=name), 1)
        Trainer(config, world, StopSignal()).train()
        metrics = read_metrics(tmp_path / name / "metrics.jsonl")
        return {e["step"]: e["loss"] for e in metrics if e.get("loss") is not None}

    return run


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("micro_batch_size", [8, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_losses_are_those_of_fsdp(losses, dtype, micro_batch_size, recompute):
    options = {
        "training__micro_batch_size": micro_batch_size,
        "parallel__param_dtype": dtype,
        "parallel__activation_checkpointing": recompute,
    }
    sharded = losses("sharded", parallel__sharding="fsdp", **options)
    alone = losses("alone", parallel__sharding="none", **options)
    assert alone == pytest.approx(sharded, rel=1e-6)
    assert alone[6] < 0.98 * alone[1]


@pytest.mark.parametrize(("first", "second"), [("none", "fsdp"), ("fsdp", "none"), ("none", "none")])
def test_a_checkpoint_goes_on_with_or_without_sharding(losses, tmp_path, first, second):
    options = {"parallel__param_dtype": "bfloat16", "training__micro_batch_size": 4}
    unbroken = losses("unbroken", parallel__sharding=first, **options)
    start = str(step_folder(tmp_path / "unbroken", 3))
    resumed = losses("resumed", parallel__sharding=second, checkpoint__resume=start, **options)
    assert resumed == pytest.approx({step: unbroken[step] for step in (4, 5, 6)}, rel=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_heads_tied_or_not_with_documents_apart(losses, make_config, tmp_path, tied):
    """Sharded, alone, and gone on with from the other's checkpoint: the same losses."""
    model = dataclasses.replace(make_config(tmp_path).model, tie_embeddings=tied)
    options = {"model": model, "parallel__param_dtype": "bfloat16", "data__document_mask": True}
    sharded = losses("sharded", parallel__sharding="fsdp", **options)
    assert losses("alone", parallel__sharding="none", **options) == pytest.approx(sharded, rel=1e-6)
    start = str(step_folder(tmp_path / "sharded", 3))
    resumed = losses("resumed", parallel__sharding="none", checkpoint__resume=start, **options)
    assert resumed == pytest.approx({step: sharded[step] for step in (4, 5, 6)}, rel=1e-6)


@pytest.fixture
def bf16(make_config, world, tmp_path) -> Any:
    config = make_config(tmp_path, parallel__param_dtype="bfloat16", parallel__sharding="none")
    return build(config, world)


def batches(count: int) -> list[Batch]:
    tokens = torch.randint(0, 261, (count, 9), generator=torch.Generator().manual_seed(0))
    return [Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens.split(1)]


def test_the_copies_are_in_the_model_from_forward_to_step_only(bf16, world):
    model, optimizer = bf16
    names = dict(model.named_parameters())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert {p.dtype for p in names.values()} == {torch.float32}
    forward_backward(model, batches(1), world)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    optimizer.step()
    assert all(p is names[name] for name, p in model.named_parameters())
    copies: Any = copies_of(model)
    for name, parameter in names.items():
        assert not torch.equal(parameter, state[name]), name
        assert torch.equal(copies.of[parameter], parameter.bfloat16()) and copies.of[parameter].grad is None


def test_gradients_of_micro_batches_add_up_in_fp32(bf16, world):
    model, optimizer = bf16
    forward_backward(model, batches(3), world)
    copies: Any = copies_of(model)
    assert all(p.grad.dtype == torch.float32 and copies.of[p].grad is None for p in copies.of)
    fine = [p for p in copies.of if not torch.equal(p.grad, p.grad.bfloat16().float())]
    assert fine, "a sum of bf16 gradients in fp32 has digits that bf16 has not"
    optimizer.step()
    optimizer.zero_grad()
    forward_backward(model, batches(1), world)
    assert all(p.grad is None for p in copies.of), "the next step sums only if it has several micro-batches"


def test_parameters_written_from_outside_reach_the_copies(bf16, world):
    model, _ = bf16
    parameter = model.blocks[0].mlp.down.weight
    with torch.no_grad():
        parameter.fill_(0.25)
    forward_backward(model, batches(1), world)
    assert torch.equal(model.blocks[0].mlp.down.weight, torch.full_like(parameter, 0.25, dtype=torch.bfloat16))


def test_tied_weights_share_their_copy(bf16, world):
    model, _ = bf16
    copies: Any = copies_of(model)
    assert len(copies.of) == len(list(model.parameters()))
    forward_backward(model, batches(1), world)
    assert model.head_weight is model.embedding.weight


def test_no_sharding_is_for_one_rank(make_config, tmp_path, world):
    class TwoRanks:
        device_type = "cpu"

        def size(self) -> int:
            return 2

    config = make_config(tmp_path, parallel__sharding="none")
    with pytest.raises(UserError, match=r"parallel\.sharding is none, but there are 2 ranks"):
        is_sharded(config.parallel, cast(Any, TwoRanks()))
    assert isinstance(world, World)


@pytest.mark.parametrize("count", [1, 3])
def test_a_diagnosis_sees_the_gradients_and_leaves_none(bf16, world, count):
    model, _ = bf16
    name, share = largest_gradient(model, batches(count), world)
    assert name in dict(model.named_parameters()) and 0 < share <= 1
    assert first_nonfinite(model, batches(count), world) is None
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[0, 0] = float("inf")
    found = first_nonfinite(model, batches(count), world)
    assert found is not None and found.where == "blocks.1.mlp.down.weight"
    copies: Any = copies_of(model)
    assert all(p.grad is None and copies.of[p].grad is None for p in copies.of) and not copies.summing


def test_the_optimizer_refuses_copies_that_do_not_fit():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    for copies, message in [
        ({torch.zeros(2): torch.zeros(2)}, "is not one of params"),
        ({weight: torch.zeros(4, 3, dtype=torch.bfloat16)}, "does not fit its parameter of shape"),
        ({weight: torch.zeros(4, 2)}, "expected bf16 or fp16 copies of fp32 parameters"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            AdamW([weight], copies=copies)


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_is_left_out_adds_nothing_to_the_next(bf16, world, count):
    model, optimizer = bf16
    forward_backward(model, batches(count), world)
    optimizer.zero_grad()
    copies: Any = copies_of(model)
    assert all(p.grad is None and copies.of[p].grad is None for p in copies.of)
