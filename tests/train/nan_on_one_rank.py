"""Worker: the gradients of rank 1 alone turn NaN in step 3 and from step 5 on; prints what each rank makes of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from fuselm.train import distributed, trainer
from fuselm.train.checkpointing import all_finite
from fuselm.train.config import config_from_json, resolve
from fuselm.train.distributed import AgreedError


def shard_of(tensor: Any) -> torch.Tensor:
    return tensor.detach().to_local()


def main() -> distributed.World:
    torch.set_num_threads(1)
    world = distributed.start("cpu")
    run = trainer.Trainer(resolve(config_from_json(Path(sys.argv[1])), world.size), world, trainer.StopSignal())
    forward_backward = trainer.forward_backward
    snapshots: dict[int, list[torch.Tensor]] = {}

    def poisoned(model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        snapshots[run.step] = [shard_of(p).clone() for p in model.parameters()]
        result = forward_backward(model, *args, **options)
        if world.rank == 1 and (run.step == 2 or run.step >= 4):
            shard_of(next(iter(model.parameters())).grad).fill_(float("nan"))
        return result

    trainer.forward_backward = poisoned
    error = None
    try:
        run.train()
    except AgreedError as caught:
        error = str(caught)
    same = all(torch.equal(a, b) for a, b in zip(snapshots[2], snapshots[3], strict=True))
    moved = any(not torch.equal(a, b) for a, b in zip(snapshots[3], snapshots[4], strict=True))
    result = {
        "error": error,
        "step": run.progress.step,
        "skipped_step_changed_nothing": same,
        "next_step_changed_weights": moved,
        "finite": all_finite(run.model, world),
    }
    print(json.dumps(result), flush=True)
    snapshots.clear()
    trainer.forward_backward = forward_backward
    return world


distributed.stop(main())
