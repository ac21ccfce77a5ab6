"""Worker: one run that saves, and one that loads that; prints what each rank draws after both."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import torch

from fuselm.train import distributed
from fuselm.train.config import config_from_json, resolve
from fuselm.train.trainer import StopSignal, Trainer


def main() -> distributed.World:
    torch.set_num_threads(1)
    world = distributed.start("cpu")
    first = resolve(config_from_json(Path(sys.argv[1])), world.size)
    torch.manual_seed(100 + world.rank)
    Trainer(first, world, StopSignal()).train()
    before = torch.rand(4).tolist()
    torch.manual_seed(0)
    checkpoint = dataclasses.replace(first.checkpoint, resume=sys.argv[2])
    Trainer(dataclasses.replace(first, name="second", checkpoint=checkpoint), world, StopSignal()).release()
    print(json.dumps([before, torch.rand(4).tolist()]), flush=True)
    return world


distributed.stop(main())
