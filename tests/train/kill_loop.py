"""Worker: trains a run unbroken, and one that is killed at random times and started again until it is done.

Every life is a fork of this process, which has PyTorch loaded and has never used it: so a life takes a fraction of a
second. Arguments: config.json, faults as JSON, number of kills, seed. Prints how many lives were killed in what phase.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from faults import Faults

from fuselm.train import distributed
from fuselm.train.config import TrainConfig, config_from_json, resolve
from fuselm.train.trainer import StopSignal, Trainer


def live(config: TrainConfig, faults: dict[str, Any]) -> None:
    """One process of a run, from its start or its newest checkpoint to the end."""
    world = distributed.start("cpu")
    with StopSignal() as stop:
        run = Trainer(resolve(config, 1), world, stop)
        with Faults(run, **faults):
            run.train()


def start(config: TrainConfig, faults: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(config.runs / f"{config.name}.log", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            live(config, faults)
        code = 0
    finally:
        os._exit(code)


def main(path: str, faults: dict[str, Any], kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    config = config_from_json(Path(path))
    began = time.perf_counter()
    _, status = os.waitpid(start(dataclasses.replace(config, name="unbroken"), faults), 0)
    assert status == 0, "the unbroken run failed"
    whole = time.perf_counter() - began
    killed, lives, short = 0, 0, 0.02
    metrics = config.run_folder / "metrics.jsonl"
    while True:
        pid, lives = start(config, faults), lives + 1
        if killed < kills:
            # Count from when this life has begun to train; how long it takes until then depends on the machine.
            before, deadline = metrics.stat().st_mtime_ns if metrics.exists() else 0, time.perf_counter() + 60
            while chance.random() < 0.9 and time.perf_counter() < deadline:
                if metrics.exists() and metrics.stat().st_mtime_ns != before:
                    break
                time.sleep(0.005)
            time.sleep(chance.random() * max(whole / kills, short))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            continue
        assert status == 0, (config.runs / f"{config.name}.log").read_text()[-3000:]
        print(json.dumps({"killed": killed, "lives": lives}), flush=True)
        return


main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
