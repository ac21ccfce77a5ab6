"""What follows from the guard's verdicts: what is said of a skipped step, the way back to a checkpoint, the diagnosis.

All ranks come here together, with the same verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fuselm.train import checkpointing
from fuselm.train.diagnosis import first_nonfinite, largest_gradient
from fuselm.train.distributed import AgreedError
from fuselm.train.evaluation import Feed
from fuselm.train.event_log import EventLog
from fuselm.train.guard import Alarm, Verdict
from fuselm.train.progress import Progress


def describe_skipped(
    feed: Feed, step: int, batch: int, verdict: Verdict, shares: Sequence[float]
) -> tuple[str, dict[str, Any]]:
    """A skipped step in words, and in the fields of an event.

    Args:
        feed: of the training split.
        step: steps done, this one included.
        batch: that it took.
        verdict: on it.
        shares: each rank's share of the loss: where it came from is seen there, if it is a matter of the loss.
    """
    ranks = [rank for rank, share in enumerate(shares) if not math.isfinite(share)]
    if not ranks and verdict.loss_spike:
        ranks = [max(range(len(shares)), key=shares.__getitem__)]
    what = "is not finite" if verdict.nonfinite else "is a spike"
    numbers = f"loss {verdict.loss:.6g}, grad_norm {verdict.grad_norm:.6g}"
    message = f"step {step} {what} ({numbers}) and changed no weight"
    if ranks:
        message += f"; it came from rank {', '.join(map(str, ranks))}"
    return message, {
        "action": "skipped",
        "ranks": ranks,
        "batch": batch,
        "documents": _documents(feed, batch, ranks or range(len(shares))),
        "loss": verdict.loss,
        "grad_norm": verdict.grad_norm,
    }


def _documents(feed: Feed, batch: int, ranks: Sequence[int]) -> dict[str, list[tuple[int, int]]]:
    return {str(rank): feed.documents(batch, rank) for rank in ranks}


def diagnose(model: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed, alarm: Alarm) -> str:
    """Run the last offending batch once more, and say where its numbers go wrong."""
    bad = next((b for b in reversed(alarm.bad_steps) if b.kind == "nonfinite"), alarm.bad_steps[-1])
    optimizer.zero_grad(set_to_none=True)
    batches = feed.micro_batches(bad.batch)
    if bad.kind == "spike":
        name, share = largest_gradient(model, batches, feed.world)
        return f"In batch {bad.batch} {share:.0%} of the squared gradient norm is that of {name}"
    finding = first_nonfinite(model, batches, feed.world)
    if finding is None:
        return (
            f"Batch {bad.batch} was finite when it ran once more: suspect the hardware, or a kernel that does not "
            "repeat its result"
        )
    return f"In batch {bad.batch} {finding}"


def roll_back(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    feed: Feed,
    alarm: Alarm,
    progress: Progress,
    *,
    pass_over_before: int,
    say: Callable[[str], None],
    events: EventLog,
) -> Progress | None:
    """Load the newest checkpoint from before the bad steps, and pass over their batches from there on.

    The checkpoint's manifest remembers that, so that a run that is killed later does the same; newer checkpoints of the
    run, which led to the bad steps, are deleted.

    Args:
        run: the run folder.
        model, optimizer: are overwritten.
        feed: of the training split.
        alarm: what happened.
        progress: now.
        pass_over_before: so many batches before the first bad one are passed over too.
        say: tells the user.
        events: are told too.

    Returns:
        Where the run is now; None, and nothing has changed, without such a checkpoint.
    """
    world, first, last = feed.world, alarm.bad_steps[0], alarm.bad_steps[-1]
    names = world.from_main(lambda: [folder.name for folder in checkpointing.checkpoints_of(run)])
    folders = [run / checkpointing.FOLDER / name for name in names]
    older = [f for f in folders if checkpointing.step_of(f) < first.step]
    # One from before all batches that are to be passed over comes first, if there is any.
    older.sort(key=lambda f: checkpointing.step_of(f) >= first.step - pass_over_before)
    for folder in older:
        try:
            manifest = checkpointing.load_checkpoint(folder, model, optimizer, world=world)
        except AgreedError as error:
            say(f"warning: {error}; going back further")
            continue
        break
    else:
        return None
    back = Progress.from_dict(manifest["progress"])
    back.passed_over, back.alarms = list(progress.passed_over), list(progress.alarms)
    passed = back.pass_over(max(first.batch - pass_over_before, back.batch_of(back.step)), last.batch)
    message = f"{alarm.reason}; back to step {back.step}, passing over batches {passed[0]} to {passed[-1]}"
    say(f"warning: {message}")
    world.from_main(lambda: checkpointing.rewind(run, folder, back.to_dict()))
    for batch in passed:
        text, documents = f"batch {batch} is passed over", _documents(feed, batch, range(world.size))
        events.add("passed_over", back.step, text, action="passed over", batch=batch, documents=documents)
    events.add("rollback", back.step, message, action="rolled back", from_step=progress.step, batches=passed)
    return back
