"""Everything at once: what a run goes through in months, in some hundred steps. It must end as the quiet one did."""

from __future__ import annotations

import dataclasses

import pytest

from fuselm.train.checkpointing import step_of

from . import storm


@pytest.mark.slow
def test_a_storm_ends_as_a_quiet_run(make_config, tmp_path):
    steps = 300
    config = make_config(
        tmp_path,
        training__steps=steps,
        training__micro_batch_size=2,
        optimizer__lr=3e-3,  # at 1e-2 rounding alone drives runs on other numbers of ranks apart by 1e-4
        evaluation__every=50,
        checkpoint__every=5,
        guard=storm.GUARD,
    )
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, keep=3, keep_best=False))
    run, quiet = tmp_path / "storm", tmp_path / "quiet"
    storm.start(config, "quiet", 1, {"data": storm.DATA_FAULTS})

    data = storm.DATA_FAULTS | {"ranks": [2]}
    said = storm.start(config, "storm", 4, {"data": data, "kill": [33, 1, 0], "term": [52, 3, 1]})
    assert "asked to stop: saving first" in said and "it came from rank 2" in said
    newest, _, third = storm.damage_newest(run)
    assert step_of(newest) < 60

    said = storm.start(config, "storm", 2, {"data": {}, "full": [60, 65, 295]})
    assert said.count("looking for an older one") == 2 and f"resuming from {third}" in said
    assert said.count("No space left on device") == 3
    storm.check_ended_as(run, quiet, steps=steps, starts=3, failed_saves=3)
