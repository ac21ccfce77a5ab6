"""Worker: one run with the faults of faults.py, given as JSON; prints where it ended."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from faults import Faults

from fuselm.train import distributed
from fuselm.train.config import config_from_json, resolve
from fuselm.train.trainer import StopSignal, Trainer


def main() -> distributed.World:
    torch.set_num_threads(1)
    world = distributed.start("cpu")
    with StopSignal() as stop:
        run = Trainer(resolve(config_from_json(Path(sys.argv[1])), world.size), world, stop)
        with Faults(run, **json.loads(sys.argv[2])):
            run.train()
    digest = hashlib.sha256()
    for parameter in run.model.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())  # type: ignore[attr-defined]
    print(json.dumps({**run.progress.to_dict(), "weights": digest.hexdigest()}), flush=True)
    return world


distributed.stop(main())
