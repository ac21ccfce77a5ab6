"""Worker: pretrain.py with a fault of the process itself, in one step of one rank.

Arguments: the fault (sleep, stop, kill, exit), its rank and step, then pretrain.py's. A kill happens in the first life
only, as torchrun counts them.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from fuselm.train import pretrain
from fuselm.train.evaluation import Feed


def main() -> int:
    fault, rank, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    micro_batches = Feed.micro_batches
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def faulty(self: Feed, step: int):
        if self.stream.dataset.split == "train" and step == at and self.world.rank == rank:  # type: ignore[attr-defined]
            if fault == "sleep":
                time.sleep(600)
            elif fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif first_life:
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGTERM)
        return micro_batches(self, step)

    Feed.micro_batches = faulty  # type: ignore[method-assign]
    return pretrain.main(sys.argv[4:])


if __name__ == "__main__":
    sys.exit(main())
