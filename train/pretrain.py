"""Train a LLaMA-style model from scratch.

    torchrun --nproc-per-node 8 train/pretrain.py --preset llama3_1b --optimizer.lr 3e-4
    python train/pretrain.py --preset demo

Start from a preset and override any field as --section.field value. Everything is written to runs/NAME.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("fuselm") is None:  # run as a script in a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

from fuselm.train.config import parse_command_line
from fuselm.train.presets import PRESETS


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and train; returns the exit code."""
    try:
        config = parse_command_line(list(sys.argv[1:] if arguments is None else arguments), PRESETS, __doc__ or "")
    except UserError as error:
        return report(error)
    end_on_interrupt()
    from fuselm.train.trainer import run  # after parsing, so that --help and mistakes answer at once

    raise_on_interrupt()
    try:
        return run(config)
    except KeyboardInterrupt:  # before the run handles signals itself
        report("interrupted; nothing was written")
        return 130


if __name__ == "__main__":
    sys.exit(main())
