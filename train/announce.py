"""What a run says of itself at its start and its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from fuselm.train import checkpointing
from fuselm.train.config import TrainConfig
from fuselm.train.distributed import World


def introduce(
    config: TrainConfig,
    world: World,
    *,
    parameters: int,
    tokens: int,
    step: int,
    checkpoint: Path | None,
    moved: Path | None,
    say: Callable[[str], None],
) -> None:
    """The size of the run, and where it starts.

    Args:
        config, world: of the run.
        parameters: of the model.
        tokens: of the training split.
        step: steps done.
        checkpoint: that it starts from.
        moved: where an earlier run of the name lies now.
        say: prints a line.
    """
    training = config.training
    if moved:
        say(f"the earlier run of this name is now {moved}")
    accumulation = training.global_batch_size // (training.micro_batch_size * world.size)
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    say(
        f"{config.run_folder}: {parameters / 1e6:,.2f} M parameters on {world.size} x {device}, "
        f"{config.parallel.param_dtype} compute; {training.global_batch_size} sequences x {training.seq_len} "
        f"tokens a step ({world.size} ranks x {training.micro_batch_size} x {accumulation} micro-batches); "
        f"{tokens:,} training tokens"
    )
    if checkpoint is not None and step < training.steps:
        say(f"resuming from {checkpoint} at step {step}")
    elif checkpoint is not None:
        say(
            f"already at step {step} of {training.steps} ({checkpoint}), nothing to train: --training.steps N goes on "
            "to step N, --checkpoint.resume never starts again"
        )


def conclude(run: Path, step: int, total: int, say: Callable[[str], None]) -> None:
    """What lies in the run folder, and how to go on. For rank 0."""
    state = f"done at step {step}" if step >= total else f"stopped at step {step} of {total}"
    say(f"{state}. In {run}:")
    newest = checkpointing.step_folder(run, step)
    for name, what in (
        ("config.json", "the resolved configuration"),
        ("metrics.jsonl", "every step's numbers"),
        ("events.jsonl", "what happened besides"),
        ("loss.png", "the loss curves"),
        ("tensorboard", f"tensorboard --logdir {run / 'tensorboard'}"),
        (str(newest.relative_to(run)), "model and optimizer"),
        ("tokenizer.json", "the data's tokenizer"),
    ):
        if (run / name).exists():
            say(f"  {name:<28} {what}")
    if step < total:
        say("the same command goes on from here")
