"""The trainer in one process: the loss and its gradient against plain PyTorch, and runs from the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuselm.model.llama import Llama
from fuselm.train import distributed, evaluation, pretrain
from fuselm.train.checkpointing import checkpoints_of, latest_checkpoint
from fuselm.train.config import config_from_json, resolve
from fuselm.train.data_stream import Batch
from fuselm.train.evaluation import Feed, evaluate, forward_backward, loss_sum
from fuselm.train.metrics import read_metrics
from fuselm.train.parallelize import materialize
from fuselm.train.prepare_data import prepare
from fuselm.train.shards import hold
from fuselm.train.trainer import StopSignal, Trainer, build

IGNORE = evaluation.IGNORE_INDEX


def batch_with(valid: list[int], seq_len: int = 8, vocab_size: int = 261, seed: int = 0) -> Batch:
    """One row a count, with that many targets that are not ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab_size, (len(valid), seq_len + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row, count in enumerate(valid):
        targets[row, count:] = IGNORE
    return Batch(tokens[:, :-1].contiguous(), targets)


def rows(batch: Batch, size: int) -> list[Batch]:
    return [Batch(t, y) for t, y in zip(batch.tokens.split(size), batch.targets.split(size), strict=True)]


def whole_gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


@pytest.fixture
def plain_loss(make_config, tmp_path):
    """plain_loss(batch): loss and gradients of the initial weights, by F.cross_entropy over one big batch."""

    def compute(batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
        model = Llama(make_config(tmp_path).model)
        materialize(model, torch.device("cpu"), seed=0)
        loss = F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)
        loss.backward()
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return compute


@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_mean_of_means(make_config, world, tmp_path, plain_loss, size):
    batch = batch_with([1, 6, 0, 8])
    expected, gradients = plain_loss(batch)
    model, _ = build(make_config(tmp_path), world)
    loss, count, stops = forward_backward(model, rows(batch, size), world)
    assert (float(count), float(stops)) == (15, 0)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    for name, gradient in whole_gradients(model).items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-6)
    means = [F.cross_entropy(torch.zeros(8, 261), r.targets[0], ignore_index=IGNORE) for r in rows(batch, 1)]
    assert any(torch.isnan(mean) for mean in means), "the naive mean of this batch is not even a number"


def test_nothing_to_learn_is_zero_not_nan(make_config, world, tmp_path):
    model, optimizer = build(make_config(tmp_path), world)
    loss, count, _ = forward_backward(model, rows(batch_with([0, 0]), 1), world)
    assert float(loss) == 0.0 and float(count) == 0
    assert all(torch.count_nonzero(g) == 0 for g in whole_gradients(model).values())
    optimizer.step()
    assert float(optimizer.grad_norm) == 0.0


def test_gradients_cross_ranks_once_a_step(make_config, world, tmp_path, monkeypatch):
    model, _ = build(make_config(tmp_path), world)
    shards = list(model.parameters())
    reduced = []

    def spy(model, batch):
        reduced.append(sum(p.grad is not None for p in shards))
        return loss_sum(model, batch)

    monkeypatch.setattr(evaluation, "loss_sum", spy)
    forward_backward(model, rows(batch_with([8] * 4), 1), world)
    assert reduced == [0, 0, 0, 0], "a shard has a gradient only once it was reduced over ranks"
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in shards)


def test_compute_dtype_and_master_dtype(make_config, world, tmp_path):
    seen = {}
    model, _ = build(make_config(tmp_path, parallel__param_dtype="bfloat16"), world)
    block: Any = model.blocks[0]
    block.attention.qkv.register_forward_hook(lambda m, a, out: seen.update(out=out.dtype))
    block.register_forward_pre_hook(lambda m, args: seen.update(cos=args[2].dtype))
    forward_backward(model, [batch_with([8])], world)
    assert seen == {"out": torch.bfloat16, "cos": torch.float32}, "rope tables must not be rounded to bf16"
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_initial_weights_do_not_depend_on_wrapping_or_kernels(make_config, world, tmp_path):
    plain = Llama(make_config(tmp_path).model)
    materialize(plain, torch.device("cpu"), seed=3)
    config = make_config(tmp_path, parallel__activation_checkpointing="full", training__seed=3)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, kernels="auto"))
    model, _ = build(config, world)
    parameters: Any = zip(model.parameters(), plain.parameters(), strict=True)
    for mine, expected in parameters:
        assert torch.equal(mine.full_tensor(), expected)
    assert torch.equal(plain.embedding.weight, plain.head_weight)


def test_weight_decay_on_matrices_only(make_config, world, tmp_path):
    _, optimizer = build(make_config(tmp_path, optimizer__weight_decay=0.3), world)
    decayed, plain = optimizer.param_groups
    assert decayed["weight_decay"] == 0.3 and all(p.ndim == 2 for p in decayed["params"])
    assert plain["weight_decay"] == 0.0 and all(p.ndim == 1 for p in plain["params"])


def test_validation_on_the_training_batch_is_the_training_loss(make_config, world, tmp_path):
    config = resolve(make_config(tmp_path, optimizer__lr=0.0, training__micro_batch_size=2), 1)
    run = Trainer(config, world, StopSignal())
    feed = Feed(run.training.stream, world, 4)  # another split than the training's
    validation, count = evaluate(run.model, feed, batches=1)
    run.train()
    (first, *_) = [e for e in read_metrics(tmp_path / "tiny" / "metrics.jsonl") if e["step"] == 1]
    assert validation == pytest.approx(first["loss"], rel=1e-6)
    assert count == config.training.global_batch_size * config.training.seq_len


def test_validation_takes_no_more_than_an_epoch(make_config, world, tmp_path):
    run = Trainer(resolve(make_config(tmp_path), 1), world, StopSignal())
    assert run.validation is not None
    feed = run.validation.feed
    available = feed.stream.sequences_per_epoch // 8
    _, count = evaluate(run.model, feed, batches=10**6)
    assert count == max(available, 1) * 8 * 32
    run.reporter.close()


def test_document_masks_change_the_loss_and_train(make_config, world, tmp_path):
    losses = []
    for mask in (False, True):
        config = resolve(make_config(tmp_path / str(mask), data__document_mask=mask, training__steps=2), 1)
        run = Trainer(config, world, StopSignal())
        run.train()
        losses.append([e["loss"] for e in read_metrics(config.run_folder / "metrics.jsonl") if "loss" in e])
    assert all(math.isfinite(loss) for run_losses in losses for loss in run_losses)


# --- Whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pretrain_main(tiny_data, tmp_path, capsys):
    """pretrain_main(option=value, ...): (exit code, stdout, stderr) of a small run in this process."""

    def main(*arguments: str) -> tuple[int, str, str]:
        common = {
            "--preset": "debug",
            "--name": "run",
            "--runs": tmp_path / "runs",
            "--data.path": tiny_data,
            "--parallel.device": "cpu",
            "--parallel.param_dtype": "float32",
            "--model.kernels": "eager",
            "--training.steps": 4,
            "--training.seq_len": 32,
            "--evaluation.every": 2,
            "--logging.tensorboard": False,
            "--logging.plot": False,
        }
        given = set(arguments[::2])
        options = [str(part) for pair in common.items() if pair[0] not in given for part in pair]
        capsys.readouterr()
        code = pretrain.main([*options, *arguments])
        return code, *capsys.readouterr()

    return main


def test_a_run_leaves_everything_in_its_folder(pretrain_main, tiny_data, tmp_path):
    code, out, err = pretrain_main("--logging.tensorboard", "True", "--logging.plot", "True")
    run = tmp_path / "runs" / "run"
    assert (code, err) == (0, "")
    names = {"config.json", "metrics.jsonl", "loss.png", "tensorboard", "checkpoints", "tokenizer.json", "events.jsonl"}
    assert {path.name for path in run.iterdir()} == names
    assert (run / "tokenizer.json").read_bytes() == (tiny_data / "tokenizer.json").read_bytes()
    config = config_from_json(run)
    assert (config.name, config.training.steps, config.data.path) == ("run", 4, tiny_data)
    entries = read_metrics(run / "metrics.jsonl")
    assert [e["step"] for e in entries if "loss" in e] == [1, 2, 3, 4]
    assert [e["step"] for e in entries if "validation_loss" in e] == [0, 2, 4]
    for name in names - {"checkpoints", "events.jsonl"}:
        assert f"  {name} " in out
    assert "checkpoints/step_00000004" in out and "MFU = " in out


def test_resume_goes_on_and_a_finished_run_says_so(pretrain_main, tmp_path):
    assert pretrain_main("--training.steps", "6", "--schedule.kind", "constant", "--name", "unbroken")[0] == 0
    assert pretrain_main("--training.steps", "3", "--schedule.kind", "constant")[0] == 0
    for steps in ("5", "6"):  # the second resume must not drift either
        code, out, _ = pretrain_main("--training.steps", steps, "--schedule.kind", "constant")
        assert code == 0 and "resuming from" in out
    runs = tmp_path / "runs"
    names = ("step", "loss", "lr", "grad_norm")
    mine, unbroken = (
        [tuple(e[name] for name in names) for e in read_metrics(runs / run / "metrics.jsonl") if "loss" in e]
        for run in ("run", "unbroken")
    )
    assert mine == unbroken
    code, out, _ = pretrain_main("--training.steps", "6", "--schedule.kind", "constant")
    assert code == 0 and "done at step 6" in out and "step 6/6  loss" not in out and "resuming" not in out
    assert (
        "already at step 6 of 6 (" in out and "--training.steps N goes on to step N, --checkpoint.resume never" in out
    )


def test_starting_over_moves_the_earlier_run_aside(pretrain_main, tmp_path):
    assert pretrain_main()[0] == 0
    code, out, _ = pretrain_main("--checkpoint.resume", "never", "--training.steps", "2")
    assert code == 0 and "runs/run.1" in out.replace(str(tmp_path) + "/", "")
    assert len(read_metrics(tmp_path / "runs" / "run.1" / "metrics.jsonl")) > len(
        read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")
    )


def test_a_damaged_newest_checkpoint_falls_back_and_an_explicit_one_is_an_error(pretrain_main, tmp_path):
    assert pretrain_main("--checkpoint.every", "2")[0] == 0
    newest = tmp_path / "runs" / "run" / "checkpoints" / "step_00000004"
    path = newest / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))
    code, _, err = pretrain_main("--name", "other", "--checkpoint.resume", str(newest))
    assert code == 2 and err.startswith("error: ") and "is damaged" in err and err.count("\n") == 1
    assert not (tmp_path / "runs" / "other").exists()
    code, out, err = pretrain_main()
    assert code == 0 and "warning: " in err and "step_00000002 at step 2" in out


def test_loss_that_explodes_stops_the_run_and_is_not_saved(pretrain_main, tmp_path):
    code, out, err = pretrain_main(
        *("--optimizer.lr", "1e38", "--schedule.warmup_steps", "0", "--optimizer.max_grad_norm", "None"),
        *("--training.steps", "50", "--training.max_nonfinite_steps", "3"),
    )
    assert code == 2 and err.count("\n") == 1 and "in 3 steps in a row" in err
    assert latest_checkpoint(tmp_path / "runs" / "run") is None
    assert "Traceback" not in out + err


BAD_INPUT = {
    "unknown preset": (["--preset", "debgu"], ["debgu", "did you mean debug?"]),
    "unknown field": (["--optimiser.lr", "1"], ["--optimiser.lr", "did you mean --optimizer.lr?"]),
    "missing data": (["--data.path", "/nowhere/at/all"], ["/nowhere/at/all"]),
    "sequence too long": (["--training.seq_len", "4096"], ["4096", "256", "model.max_seq_len"]),
    "batch and ranks": (["--training.global_batch_size", "6"], ["6", "1 ranks", "4"]),
    "vocabulary": (["--model.vocab_size", "100"], ["261", "100", "--model.vocab_size 261"]),
    "no such checkpoint": (["--checkpoint.resume", "yes"], ["yes", "auto"]),
    "heads": (["--model.num_heads", "5"], ["5"]),
    "data shorter than a sequence": (["--training.seq_len", "200", "--data.path", "SHORT"], ["200"]),
    "kernels": (["--model.kernels", "triton"], ["model.kernels is triton"]),
    "no gpu": (["--parallel.device", "cuda"], ["no GPU"]),
    "space": ([], ["needs", "MiB"]),
    "runs is a file": (["--runs", "FILE"], ["FILE"]),
    "run is a file": (["--name", "FILE"], ["FILE", "cannot be written"]),
    "cudnn on a CPU": (["--model.attention_backend", "cudnn", "--parallel.device", "cpu"], ["model.attention_backend"]),
    "no flash-attn": (["--model.attention_backend", "flash_attn"], ["flash-attn"]),
    "mask and sdpa": (["--model.attention_backend", "sdpa", "--data.document_mask", "True"], ["data.document_mask"]),
    "memory": (["--model.vocab_size", "2000000000", "--model.dim", "65536"], ["131,0", "billion", "GiB"]),
    "NaN": (["--optimizer.lr", "nan"], ["optimizer.lr is nan"]),
    "no place to resume": (["--checkpoint.resume", ""], ["checkpoint.resume is empty"]),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_line_and_leaves_nothing(pretrain_main, tiny_data, tmp_path, monkeypatch, name):
    arguments, parts = BAD_INPUT[name]
    arguments = list(arguments)
    if name == "data shorter than a sequence":
        source, output = tmp_path / "short.jsonl", tmp_path / "short"
        source.write_text(json.dumps({"text": "a few words " * 40}) + "\n")
        prepare(source, output, tokenizer=tiny_data / "tokenizer.json", validation_fraction=0.2)
        arguments[-1] = str(output)
    if name == "kernels":
        monkeypatch.setattr("fuselm.kernels._triton.INTERPRET", False)
    if name == "no gpu":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if name == "space":
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 1 << 20}))
    if name == "runs is a file":
        (tmp_path / "FILE").write_text("")
        arguments[-1] = str(tmp_path / "FILE")
    if name == "run is a file":
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "FILE").write_text("")
    code, out, err = pretrain_main(*arguments)
    assert code == 2
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in out + err
    for part in parts:
        assert part in err
    assert not (tmp_path / "runs" / "run").exists()


def test_no_validation_needs_no_validation_split(pretrain_main, tiny_data, tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("a few words\n" * 400)
    prepare(source, tmp_path / "tokens", tokenizer=tiny_data / "tokenizer.json", validation_fraction=0.0)
    code, _, err = pretrain_main("--data.path", str(tmp_path / "tokens"))
    assert code == 2 and "the validation split" in err and "is empty" in err
    code, out, err = pretrain_main("--data.path", str(tmp_path / "tokens"), "--evaluation.batches", "0")
    assert (code, err) == (0, "") and "validation loss" not in out


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (OSError(28, "No space left on device", "runs/x"), ["No space left on device", "runs/x"]),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore."), ["out of memory", "2 GiB"]),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), ["out of memory", "micro_batch_size"]),
    ],
)
def test_what_the_machine_refuses_in_mid_run_is_one_line(pretrain_main, monkeypatch, capsys, error, parts):
    def fails(*args, **kwargs):
        raise error

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(Trainer, "_train_step", fails)
    monkeypatch.setattr("os._exit", leave)
    try:
        with pytest.raises(SystemExit) as done:
            pretrain_main()
    finally:
        distributed.stop(distributed.World(0, 0, 1, torch.device("cpu")))
    err = capsys.readouterr().err
    assert done.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert all(part in err for part in parts)


def test_our_own_bugs_keep_their_traceback(pretrain_main, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Trainer, "_train_step", fails)
    try:
        with pytest.raises(RuntimeError, match="shapes differ"):
            pretrain_main()
    finally:
        distributed.stop(distributed.World(0, 0, 1, torch.device("cpu")))


def test_another_data_order_or_model_is_refused_on_resume(pretrain_main, tmp_path):
    assert pretrain_main()[0] == 0
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    for option, value in (("--training.seed", "1"), ("--training.seq_len", "16"), ("--model.ffn_dim", "96")):
        code, _, err = pretrain_main(option, value, "--training.steps", "6")
        assert code == 2 and option[2:] in err and value in err
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes() == before


def test_two_runs_at_once_in_one_folder_are_refused(pretrain_main, tmp_path):
    assert pretrain_main()[0] == 0
    run = tmp_path / "runs" / "run"
    handle = hold(run)
    assert handle is not None
    before = (run / "metrics.jsonl").read_bytes()
    for resume in ("auto", "never"):
        code, _, err = pretrain_main("--training.steps", "6", "--checkpoint.resume", resume)
        assert code == 2 and "another process is training in" in err and err.count("\n") == 1
    assert (run / "metrics.jsonl").read_bytes() == before and not (tmp_path / "runs" / "run.1").exists()
    os.close(handle)
    assert pretrain_main("--training.steps", "6")[0] == 0


def test_branching_off_needs_another_name(pretrain_main, tmp_path):
    assert pretrain_main("--checkpoint.every", "2")[0] == 0
    earlier = str(tmp_path / "runs" / "run" / "checkpoints" / "step_00000002")
    code, _, err = pretrain_main("--checkpoint.resume", earlier)
    assert code == 2 and "--name" in err
    code, out, _ = pretrain_main("--checkpoint.resume", earlier, "--name", "branch")
    assert code == 0 and "step_00000002 at step 2" in out
    assert len(checkpoints_of(tmp_path / "runs" / "run")) == 2
