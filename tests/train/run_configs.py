"""Worker: trains each run whose config.json is named on the command line, one after the other in one process group."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fuselm.train import distributed
from fuselm.train.config import config_from_json, resolve
from fuselm.train.trainer import StopSignal, Trainer

torch.set_num_threads(1)
configs = [config_from_json(Path(path)) for path in sys.argv[1:]]
world = distributed.start(configs[0].parallel.device)
for config in configs:
    with StopSignal() as stop:
        Trainer(resolve(config, world.size), world, stop).train()
distributed.stop(world)
