"""Where a run starts from: no checkpoint, its own newest sound one, or a named one that fits the configuration."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from fuselm.train import checkpointing
from fuselm.train.config import TrainConfig, config_from_json, to_json
from fuselm.train.distributed import AgreedError, World
from fuselm.train.errors import UserError
from fuselm.train.event_log import read_events
from fuselm.train.feeds import DATA_DIGEST

# What a checkpoint's configuration must share with the run that loads it; other fields (kernels, ...) may change.
_SHAPE = [
    "vocab_size",
    "dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "ffn_dim",
    "head_dim",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "tie_embeddings",
    "qk_norm",
]


def find_checkpoint(config: TrainConfig, position: dict[str, Any], world: World) -> Path | None:
    """The checkpoint to start from, its checksums and its configuration compared; all ranks together.

    Args:
        config: resolved.
        position: from `data_position`.
        world: all ranks.

    Raises:
        AgreedError: checkpoint.resume names what is not there, is damaged, or does not fit.
    """
    resume, run = config.checkpoint.resume, config.run_folder
    if resume != "auto" and _is_restart(run):
        # torchrun started all ranks again: whatever the run began with, it now goes on.
        own = checkpointing.resumable(run, world)
        if own is not None:
            resume = "auto"
    if resume == "never":
        return None
    if resume == "auto":
        found = checkpointing.resumable(run, world)
    else:
        found = Path(resume)
        if not world.from_main(found.is_dir):
            raise AgreedError(f"checkpoint.resume: there is no folder {found}; it is auto, never, or a path")
        if not found.name.startswith("step_"):
            other, found = found, checkpointing.resumable(found, world)
            if found is None:
                raise AgreedError(f"checkpoint.resume: {other} holds no complete checkpoint")
        newest = world.from_main(lambda: checkpointing.latest_checkpoint(run))
        if newest is not None and found.resolve().parent == newest.resolve().parent and found.name != newest.name:
            raise AgreedError(
                f"checkpoint.resume: {run} goes on to {newest.name}; to branch off at {found.name}, "
                "give the new run another --name"
            )
        if newest is not None and found.resolve() == newest.resolve():
            found = newest  # by whatever path it was named, the run goes on in its folder
    if found is not None:
        manifest = world.from_main(lambda: checkpointing.read_manifest(found))
        world.together(lambda: _compare(found, manifest, config, position))
    return found


def job_id() -> str | None:
    """What torchrun calls this job, the same in each of its restarts; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def _is_restart(run: Path) -> bool:
    """Whether torchrun started this job again, and it was the one that last started in the run folder."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    starts = [event for event in read_events(run) if event["kind"] == "start"]
    return bool(starts) and starts[-1].get("job") == job_id()


def go_on_with_batch(config: TrainConfig, ranks: int) -> TrainConfig:
    """With training.global_batch_size 0, take that of the run that is to go on: other ranks may be there now.

    The micro-batch is lowered to the largest that divides it.

    Args:
        config: as the user gave it.
        ranks: processes now.
    """
    run = config.run_folder
    training = config.training
    if training.global_batch_size or config.checkpoint.resume == "never" or not checkpointing.checkpoints_of(run):
        return config
    try:
        batch = config_from_json(run).training.global_batch_size
    except UserError:
        return config
    fitting = [m for m in range(training.micro_batch_size, 0, -1) if batch % (m * ranks) == 0]
    micro = fitting[0] if fitting else training.micro_batch_size
    training = dataclasses.replace(training, global_batch_size=batch, micro_batch_size=micro)
    return dataclasses.replace(config, training=training)


def _compare(checkpoint: Path, manifest: dict[str, Any], config: TrainConfig, position: dict[str, Any]) -> None:
    now = json.loads(to_json(config))["model"]
    pairs = [(f"model.{k}", manifest["config"]["model"].get(k), now[k]) for k in _SHAPE]
    written = {DATA_DIGEST: position.get(DATA_DIGEST)} | manifest["position"]  # older versions did not write it
    pairs += [(k, written.get(k), v) for k, v in position.items()]
    for name, before, after in pairs:
        if before != after:
            raise UserError(
                f"{checkpoint} was written with {name} {before}, but it is {after} now; give the same, or start "
                "a run with another --name or --checkpoint.resume never"
            )
