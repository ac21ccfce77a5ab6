"""What the storms on CPUs and on GPUs share: calls of torchrun, damage to checkpoints, and how it all must end."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuselm.train.checkpointing import checkpoints_of, read_manifest, step_of, verify
from fuselm.train.config import TrainConfig, to_json
from fuselm.train.event_log import read_events
from fuselm.train.guard_config import GuardConfig
from fuselm.train.metrics import read_metrics

WORKER = Path(__file__).parent / "storm_run.py"
# Batch 9 is NaN on one rank; 20 and 22 are spikes, after which the run goes back and passes over 19 to 22.
DATA_FAULTS: dict[str, Any] = {"nan_losses": [9], "spikes": [20, 22]}
PASSED_OVER = [19, 20, 21, 22]
GUARD = GuardConfig(window=16, min_history=4, rollback_after=2, rollback_within=6, pass_over_before=1)


def start(config: TrainConfig, name: str, ranks: int, faults: dict[str, Any], *, timeout: float = 400) -> str:
    """One call of torchrun, whose exit code is 0; what it said."""
    path = config.runs / f"{name}.json"
    path.write_text(to_json(dataclasses.replace(config, name=name)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1", str(WORKER), str(path), json.dumps(faults)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def damage_newest(run: Path) -> tuple[Path, Path, Path]:
    """Flip a bit of the newest checkpoint and cut off the second; (newest, second, third)."""
    newest, second, third = checkpoints_of(run)
    assert step_of(newest) > step_of(second) > step_of(third)
    shard = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    shard = max(second.glob("*.distcp"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-7])
    return newest, second, third


def steps_of(run: Path) -> list[list[Any]]:
    """[step, batch, skipped, loss, grad_norm] of each step."""
    names = ("step", "batch", "skipped", "loss", "grad_norm")
    return [[e[name] for name in names] for e in read_metrics(run / "metrics.jsonl") if "loss" in e]


def check_ended_as(run: Path, quiet: Path, *, steps: int, starts: int, failed_saves: int) -> None:
    """The storm's end is the quiet run's: losses, validations, documents; what was passed over is listed."""
    mine, other = steps_of(run), steps_of(quiet)
    assert [e[:3] for e in mine] == [e[:3] for e in other], "the same batches in the same order, the same ones skipped"
    assert [e[0] for e in mine] == list(range(1, steps + 1))
    kept = [e for e in mine if e[2] is None]
    assert [e[3] for e in kept] == pytest.approx([e[3] for e in other if e[2] is None], rel=1e-4)
    losses = [
        [e["validation_loss"] for e in read_metrics(f / "metrics.jsonl") if "validation_loss" in e]
        for f in (run, quiet)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0] - 1

    passed = [e["batch"] for e in read_events(run) if e["kind"] == "passed_over"]
    assert passed == PASSED_OVER == read_manifest(checkpoints_of(run)[0])["progress"]["passed_over"]
    assert sorted([e[1] for e in mine] + passed) == list(range(steps + 4)), "each batch once, or it is listed"
    kinds = [e["kind"] for e in read_events(run)]
    found = {kind: kinds.count(kind) for kind in ("start", "rollback", "save_failed", "stop")}
    assert found == {"start": starts, "rollback": 1, "save_failed": failed_saves, "stop": 0}
    for folder in checkpoints_of(run)[:2]:
        verify(folder)
    assert not list(run.rglob("*.tmp")) and not (run / "tmp").exists()
