"""Worker: one process of a run with faults in its data, its processes and its disk.

Arguments: config.json; as JSON: the ranks and batches of faults.py, kill and term as [batch, rank, restarts], and the
steps in which the disk is full.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

sys.path.insert(0, str(Path(__file__).parent))
from faults import Faults

from fuselm.train import trainer
from fuselm.train.config import config_from_json


def main() -> int:
    torch.set_num_threads(1)
    given = json.loads(sys.argv[2])
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    train = trainer.Trainer.train

    def stormy(run: trainer.Trainer) -> None:
        with Faults(run, **given["data"]):
            micro_batches, write_data = run.training.micro_batches, FileSystemWriter.write_data

            def announced(batch: int) -> Any:
                if given.get("kill") == [batch, run.world.rank, restarts]:
                    os.kill(os.getpid(), signal.SIGKILL)
                if given.get("term") == [batch, run.world.rank, restarts]:
                    os.kill(os.getpid(), signal.SIGTERM)
                return micro_batches(batch)

            def write(writer: FileSystemWriter, *args: Any) -> Any:
                if run.saved_step in given.get("full", []):
                    raise OSError(28, "No space left on device")
                return write_data(writer, *args)

            object.__setattr__(run.training, "micro_batches", announced)
            FileSystemWriter.write_data = write  # type: ignore[method-assign]
            train(run)

    trainer.Trainer.train = stormy  # type: ignore[method-assign]
    return trainer.run(config_from_json(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
