"""Everything at once: what a run goes through in months, in a hundred steps. It must end as the quiet one did."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuselm.train.checkpointing import checkpoints_of, read_manifest, step_of, verify
from fuselm.train.config import to_json
from fuselm.train.event_log import read_events
from fuselm.train.guard_config import GuardConfig
from fuselm.train.metrics import read_metrics

WORKER = Path(__file__).parent / "storm_run.py"
DATA_FAULTS = {"nan_losses": [9], "spikes": [20, 22]}


@pytest.fixture
def start(make_config, tmp_path):
    """start(name, ranks, faults, **options): one call of torchrun; its exit code is 0."""

    def run(name: str, ranks: int, faults: dict) -> str:
        config = make_config(
            tmp_path,
            training__steps=100,
            training__micro_batch_size=2,
            evaluation__every=50,
            checkpoint__every=5,
            guard=GuardConfig(window=16, min_history=4, rollback_after=2, rollback_within=6, pass_over_before=1),
        )
        checkpoint = dataclasses.replace(config.checkpoint, keep=3, keep_best=False)
        path = tmp_path / f"{name}.json"
        path.write_text(to_json(dataclasses.replace(config, name=name, checkpoint=checkpoint)))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        torchrun += ["--max-restarts", "2", "--monitor-interval", "0.1", str(WORKER), str(path), json.dumps(faults)]
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.slow
def test_a_storm_ends_as_a_quiet_run(start, tmp_path):
    run, quiet = tmp_path / "storm", tmp_path / "quiet"
    start("quiet", 1, {"data": DATA_FAULTS})

    data = DATA_FAULTS | {"ranks": [2]}
    said = start("storm", 4, {"data": data, "kill": [33, 1, 0], "term": [52, 3, 1]})
    assert "asked to stop: saving first" in said and "it came from rank 2" in said
    newest, second, third = checkpoints_of(run)
    assert step_of(newest) < 60 and step_of(newest) > step_of(second) > step_of(third)
    shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    shard = next(second.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-7])

    said = start("storm", 2, {"data": {}, "full": [60, 65, 95]})
    assert said.count("looking for an older one") == 2 and f"resuming from {third}" in said
    assert said.count("No space left on device") == 3

    names = ("step", "batch", "skipped", "loss", "grad_norm")
    mine, other = (
        [[e[name] for name in names] for e in read_metrics(folder / "metrics.jsonl") if "loss" in e]
        for folder in (run, quiet)
    )
    assert [e[:3] for e in mine] == [e[:3] for e in other], "the same batches in the same order, the same ones skipped"
    assert [e[0] for e in mine] == list(range(1, 101))
    kept = [e for e in mine if e[2] is None]
    assert [e[3] for e in kept] == pytest.approx([e[3] for e in other if e[2] is None], rel=1e-4)
    losses = [
        [e["validation_loss"] for e in read_metrics(f / "metrics.jsonl") if "validation_loss" in e]
        for f in (run, quiet)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0] - 1

    passed = [e["batch"] for e in read_events(run) if e["kind"] == "passed_over"]
    assert passed == [19, 20, 21, 22] == read_manifest(checkpoints_of(run)[0])["progress"]["passed_over"]
    assert sorted([e[1] for e in mine] + passed) == list(range(104)), "each batch once, or it is listed"
    kinds = [e["kind"] for e in read_events(run)]
    assert [kinds.count(kind) for kind in ("start", "rollback", "save_failed", "stop")] == [3, 1, 3, 0]
    for folder in checkpoints_of(run)[:2]:
        verify(folder)
    assert not list(run.rglob("*.tmp")) and not (run / "tmp").exists()
