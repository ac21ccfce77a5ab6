"""How often a training run compiles: once for each kind of block, whatever the learning rate and the data do."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from fuselm.train.config import resolve
from fuselm.train.metrics import read_metrics
from fuselm.train.trainer import StopSignal, Trainer


@pytest.mark.parametrize("document_mask", [False, True])
def test_twenty_steps_compile_twice(make_config, world, tmp_path, monkeypatch, document_mask):
    """The first block has no residual yet, so there are two graphs; a third would be a learning rate, a step number or
    a count of documents that a guard took for a constant."""
    counter = CompileCounter()  # traces and counts; what Inductor makes of the graphs is tested elsewhere
    torch.compiler.reset()
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend=counter))
    config = make_config(
        tmp_path,
        training__steps=20,
        training__micro_batch_size=4,
        parallel__compile=True,
        data__document_mask=document_mask,
        evaluation__batches=0,
        checkpoint__save=False,
    )
    Trainer(resolve(config, 1), world, StopSignal()).train()
    entries = read_metrics(config.run_folder / "metrics.jsonl")
    assert len({entry["lr"] for entry in entries}) >= 19  # the peak comes twice
    assert 0 < counter.frame_count <= 2
