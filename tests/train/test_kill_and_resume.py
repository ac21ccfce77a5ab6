"""kill -9 at random times: what the run did in the end is what the unbroken one did, to the last bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from fuselm.model.llama import Llama
from fuselm.train.checkpointing import checkpoints_of, load_model, read_manifest, verify
from fuselm.train.config import to_json
from fuselm.train.guard_config import GuardConfig

from ..forked import Program

HERE = Path(__file__).parent
KILLS = int(os.environ.get("FUSELM_TEST_KILLS", "4"))  # of each run


def entries_of(run: Path, names: tuple[str, ...]) -> list[tuple]:
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [tuple(e.get(name) for name in names) for e in entries if names[1] in e]


@pytest.mark.parametrize("faults", [{}, {"spikes": [14, 16], "nan_losses": [30]}], ids=["plain", "faults"])
def test_killed_at_random_times(make_config, tmp_path, server, faults):
    config = make_config(
        tmp_path,
        training__steps=60,
        checkpoint__every=3,
        evaluation__every=9,
        guard=GuardConfig(window=16, min_history=4, rollback_after=2, rollback_within=6, pass_over_before=1),
    )
    (tmp_path / "config.json").write_text(to_json(config))
    command = [str(HERE / "kill_loop.py"), str(tmp_path / "config.json"), json.dumps(faults), str(KILLS), "5"]
    program = Program(server, command)
    code, (out, err) = program.wait(500), program.communicate()
    assert code == 0, err
    assert json.loads(out)["killed"] >= 2, "it was over before it was killed twice"

    killed, unbroken = tmp_path / "tiny", tmp_path / "unbroken"
    for names in (
        ("step", "loss", "grad_norm", "lr", "batch", "skipped", "tokens"),
        ("step", "validation_loss", "validation_tokens"),
    ):
        assert entries_of(killed, names) == entries_of(unbroken, names)
    assert [step for step, *_ in entries_of(killed, ("step", "loss"))] == list(range(1, 61))
    mine, other = (read_manifest(checkpoints_of(run)[0]) for run in (killed, unbroken))
    assert mine["progress"] == other["progress"] and mine["step"] == 60
    assert bool(mine["progress"]["passed_over"]) == bool(faults)
    models = []
    for run in (killed, unbroken):
        newest = checkpoints_of(run)[0]
        verify(newest)
        models.append(Llama(config.model))
        load_model(newest, models[-1])
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert not list(killed.rglob("*.tmp")) and not (killed / "tmp").exists(), "something temporary was left"
