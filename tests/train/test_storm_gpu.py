"""The storm on two GPUs, with NCCL and the fused kernels; it goes on on one, and ends as the quiet run on two did."""

from __future__ import annotations

import dataclasses

import pytest

from fuselm.train.checkpointing import step_of

from . import storm


@pytest.mark.gpu2
def test_a_storm_on_gpus_ends_as_a_quiet_run(make_config, tmp_path):
    steps = 100
    config = make_config(
        tmp_path,
        training__steps=steps,
        training__micro_batch_size=2,
        optimizer__lr=3e-3,  # at 1e-2 rounding alone drives runs on other numbers of ranks apart by 1e-4
        evaluation__every=50,
        checkpoint__every=5,
        parallel__device="cuda",
        parallel__sharding="auto",  # two GPUs run with FSDP2, one without
        parallel__compile=False,
        guard=storm.GUARD,
    )
    model = dataclasses.replace(config.model, kernels="triton", deterministic_attention=True)
    checkpoint = dataclasses.replace(config.checkpoint, keep=3, keep_best=False)
    config = dataclasses.replace(config, model=model, checkpoint=checkpoint)
    run, quiet = tmp_path / "storm", tmp_path / "quiet"
    storm.start(config, "quiet", 2, {"data": storm.DATA_FAULTS | {"ranks": [1]}})

    # NCCL does not notice that a process is gone: the one that waits for it is to leave before torchrun's 30 seconds.
    # (Kernels are compiled and cached by now.)
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, timeout=15.0))
    data = storm.DATA_FAULTS | {"ranks": [1]}
    said = storm.start(config, "storm", 2, {"data": data, "kill": [33, 1, 0], "term": [52, 0, 1]})
    assert "asked to stop: saving first" in said and "it came from rank 1" in said
    newest, _, third = storm.damage_newest(run)
    assert step_of(newest) < 60

    said_later = storm.start(config, "storm", 1, {"data": {}, "full": [60, 65, 95]})
    assert said_later.count("looking for an older one") == 2 and f"resuming from {third}" in said_later
    assert said_later.count("No space left on device") == 3
    storm.check_ended_as(run, quiet, steps=steps, starts=3, failed_saves=3)
    before = step_of(third)
    assert storm.steps_of(run)[:before] == storm.steps_of(quiet)[:before], "on the same number of GPUs, to the last bit"
    assert "rank 1 does not answer any more" in said or "lost contact with another process" in said
