"""Metrics: MFU against a hand count, what is written, and what a resumed run keeps."""

from __future__ import annotations

import json
import math
import resource
import signal
import sys
from typing import Any

import pytest
import torch

from fuselm.model.config import LlamaConfig
from fuselm.train.config import LoggingConfig
from fuselm.train.metrics import Reporter, Speedometer, StepMetrics, centered_mean, plot_losses, read_metrics
from fuselm.train.validation import ValidationResult


def metrics(step: int, loss: float = 2.0) -> StepMetrics:
    return StepMetrics(step, loss, 1.0, 1e-3, step * 100, 1000.0, 0.5, None, 0.1, step - 1)


def test_mfu_by_hand():
    model = LlamaConfig(
        vocab_size=100, dim=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=16, tie_embeddings=False
    )
    # A block: qkv 8 x (8 + 4 + 4), output 8 x 8, gate and up 2 x 8 x 16, down 16 x 8, two norms of 8.
    block = 8 * 16 + 8 * 8 + 2 * 8 * 16 + 16 * 8 + 2 * 8
    without_embedding = 2 * block + 8 + 100 * 8
    flops = 6 * without_embedding + 12 * 2 * 8 * 32
    speed = Speedometer.of(model, 32, torch.device("cpu"), devices=4)
    assert speed.flops_per_token == flops
    assert speed.peak_flops is None
    assert speed.read(tokens=1000, seconds=0.5) == (2000.0, pytest.approx(2000 * flops / 4 / 1e12), None)
    known = Speedometer(flops, peak_flops=4e6, devices=4)
    assert known.read(1000, 0.5)[2] == pytest.approx(2000 * flops / 4 / 4e6)


def test_tied_embeddings_count_the_head_once():
    shape: dict[str, Any] = {
        "vocab_size": 100,
        "dim": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "ffn_dim": 16,
    }
    tied = Speedometer.of(LlamaConfig(**shape, tie_embeddings=True), 16, torch.device("cpu"), 1)
    untied = Speedometer.of(LlamaConfig(**shape, tie_embeddings=False), 16, torch.device("cpu"), 1)
    assert tied.flops_per_token == untied.flops_per_token


@pytest.mark.parametrize("done", [2, 4])
def test_a_resumed_run_drops_later_lines_and_writes_each_step_once(tmp_path, done):
    """Also where there is nothing to drop but the line that a crash cut off."""
    first = Reporter(tmp_path, LoggingConfig(tensorboard=False), total_steps=5, start_step=0)
    for step in range(1, done + 1):
        first.step(metrics(step))
    if done == 4:
        first.validation(4, ValidationResult(1.5, 10))
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 2.')  # cut off by a crash
    second = Reporter(tmp_path, LoggingConfig(tensorboard=False), total_steps=5, start_step=2)
    for step in range(3, 6):
        second.step(metrics(step, loss=3.0))
    second.close()
    entries = read_metrics(tmp_path / "metrics.jsonl")
    assert [(e["step"], e["loss"]) for e in entries] == [(1, 2.0), (2, 2.0), (3, 3.0), (4, 3.0), (5, 3.0)]


def test_every_line_is_json_also_where_a_number_is_not_finite(tmp_path):
    reporter = Reporter(tmp_path, LoggingConfig(tensorboard=False), total_steps=2, start_step=0)
    reporter.step(metrics(1, loss=math.nan))
    reporter.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None


def test_printed_lines_name_all_numbers(tmp_path, capsys):
    reporter = Reporter(tmp_path, LoggingConfig(tensorboard=False, every=2), total_steps=5, start_step=0)
    speed = Speedometer(6e6, None, 1)
    reporter.explain(speed, torch.device("cpu"), 128)
    for step in range(1, 6):
        reporter.step(metrics(step))
    reporter.close()
    formula, *lines = capsys.readouterr().out.splitlines()
    assert "6·(N - N_embedding) + 12·L·H·D·S" in formula
    assert [line.split("  ")[0] for line in lines] == ["step 2/5", "step 4/5", "step 5/5"]
    assert lines[0].endswith(
        "loss 2.0000  grad_norm 1.000  lr 1.00e-03  tok/s 1,000  TFLOP/s 0.5  MFU n/a  memory 0.10 GiB"
    )


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    reporter = Reporter(None, LoggingConfig(), total_steps=2, start_step=0)
    reporter.step(metrics(1))
    reporter.validation(1, ValidationResult(2.0, 3))
    reporter.plot()
    reporter.close()
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_tensorboard_and_plot(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reporter = Reporter(tmp_path, LoggingConfig(progress="bar"), total_steps=60, start_step=0)
    for step in range(1, 61):
        reporter.step(metrics(step, loss=60 / step))
    reporter.validation(60, ValidationResult(1.25, 10, 0.75))
    reporter.plot()
    reporter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx([60 / s for s in range(1, 61)])
    assert [e.step for e in events.Scalars("validation/loss")] == [60]
    assert [e.value for e in events.Scalars("validation/bits_per_byte")] == [0.75]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_nothing_is_still_a_plot(tmp_path):
    plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").exists()


def test_the_smoothed_curve_does_not_lag():
    """A straight line stays itself, ends included; a spike spreads evenly to both sides."""
    line = [5.0 - 0.1 * i for i in range(60)]
    assert centered_mean(line, 10) == pytest.approx(line)
    spike = centered_mean([0.0] * 7 + [3.0] + [0.0] * 7, 1)
    assert spike == pytest.approx([0.0] * 6 + [1.0] * 3 + [0.0] * 6)


def test_words_that_cannot_be_printed_end_nothing(tmp_path, monkeypatch):
    reporter = Reporter(tmp_path, LoggingConfig(tensorboard=False, plot=False), total_steps=1, start_step=0)
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    reporter.step(metrics(1))
    reporter.say("more")
    reporter.close()
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        full.close()  # what was said is lost
    assert [e["step"] for e in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_a_full_disk_costs_no_line_and_does_not_end_the_run(tmp_path, capsys):
    """The limit on a file's size stands for the disk: a write gets as far as there is room."""
    reporter = Reporter(tmp_path, LoggingConfig(tensorboard=False, plot=False), total_steps=9, start_step=0)
    path, limit = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for step in range(1, 10):
            room = limit[0] if step not in (3, 4, 7) else path.stat().st_size + (40 if step != 4 else 0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
            reporter.step(metrics(step))
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    reporter.close()
    assert [e["step"] for e in read_metrics(path)] == list(range(1, 10))
    said = capsys.readouterr().err
    assert said.count("warning: ") == 2 and str(path) in said, "once for each time it is full"
