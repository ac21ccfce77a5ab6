"""Rows of a comparison of whole steps: one form for our runs and the peers', and what sets each apart from ours."""

from __future__ import annotations

from typing import Any

import torch
from step_processes import OutOfBudget, RunError
from timing import Timing, describe

from fuselm.model.flops import MFU_FORMULA, device_peak_flops, flops_per_token
from fuselm.train.config import TrainConfig

SETTLED_STEP = 10
COMPARED_STEP = 50
SAME_LOSS = 0.02  # relative; rounding and the order of sums alone stay well below in so few steps
CAUSAL_FORMULA = "causal MFU counts 6·L·H·D·S instead of 12·L·H·D·S"
FORMULAS = f"{MFU_FORMULA}; {CAUSAL_FORMULA}"


def measured_row(
    about: dict[str, Any], config: TrainConfig, losses: list[float], step_ms: list[float | None], memory_gib: float
) -> dict[str, Any]:
    """The row of a run that ended well.

    Args:
        about: provider, ours, again, gpus.
        config: of the run, resolved.
        losses: of each step.
        step_ms: of each step; None where it was not timed.
        memory_gib: the peak of rank 0.
    """
    settled = [ms for ms in step_ms[SETTLED_STEP:] if ms is not None]
    if not settled:
        reason = f"{len(step_ms)} steps, and only those after step {SETTLED_STEP} are timed"
        return about | {"status": "failed", "reason": reason}
    timing = Timing.of(settled)
    training = config.training
    rate = training.global_batch_size * training.seq_len / (timing.median_ms / 1e3)
    peak = device_peak_flops(torch.device("cuda", 0)) if torch.cuda.is_available() else None

    def mfu(causal: bool) -> float | None:
        flops = rate * flops_per_token(config.model, training.seq_len, causal=causal) / about["gpus"]
        return None if peak is None else flops / peak

    return about | {
        "status": "ok",
        "step_ms": {"median": timing.median_ms, "low": timing.low_ms, "high": timing.high_ms, "steps": len(settled)},
        "tokens_per_second": rate,
        "mfu": mfu(causal=False),
        "mfu_causal": mfu(causal=True),
        "memory_gib": memory_gib,
        "compared_step": min(COMPARED_STEP, len(losses)),
        "losses": losses,
    }


def failed_row(about: dict[str, Any], error: Exception) -> dict[str, Any]:
    """The row of a run that did not end well, or was never begun."""
    status = "not run" if isinstance(error, OutOfBudget) else "failed"
    return about | {"status": status, "reason": error.reason if isinstance(error, RunError) else describe(error)}


def ours_of(rows: list[dict[str, Any]], gpus: int) -> list[dict[str, Any]]:
    """Our run and its repetition, those of them that ended well; first the one that the others are compared with."""
    ours = [row for row in rows if row["gpus"] == gpus and row["ours"]]
    name = ours[0]["provider"] if ours else ""
    return [row for row in ours if row["provider"] == name and row["status"] == "ok"]


def relate(rows: list[dict[str, Any]]) -> None:
    """Add to each row how its losses and its time stand to ours, in place.

    loss_difference: (loss - ours) / ours at the compared step. largest_loss_difference: the largest after step 10,
    without its sign. same_loss: whether the first, which must hold for a speed to count, is below SAME_LOSS.
    time_to_ours: median milliseconds over the mean of our runs' medians, above 1 where ours is faster.
    """
    for row in rows:
        ours = ours_of(rows, row["gpus"])
        if row["status"] != "ok" or not ours:
            continue
        at = row["compared_step"] - 1
        theirs, own = row["losses"], ours[0]["losses"]
        row["loss_difference"] = (theirs[at] - own[at]) / own[at]
        pairs = list(zip(theirs, own, strict=False))  # a run of ours that went back has more
        row["largest_loss_difference"] = max(abs(a - b) / b for a, b in pairs[SETTLED_STEP:])
        row["same_loss"] = abs(row["loss_difference"]) <= SAME_LOSS  # also False where a loss is not a number
        medians = [run["step_ms"]["median"] for run in ours]
        row["time_to_ours"] = row["step_ms"]["median"] / (sum(medians) / len(medians))


def row_in_words(preset: str, row: dict[str, Any]) -> str:
    """A row in one line, to be printed as soon as it is known."""
    name = f"{preset} {row['provider']}{', again' if row['again'] else ''} on {row['gpus']}"
    if row["status"] != "ok":
        return f"{name}: {row['status']}: {row['reason']}"
    timing = row["step_ms"]
    words = f"{name}: {timing['median']:.1f} ms ({timing['low']:.1f} to {timing['high']:.1f})"
    words += f", {row['tokens_per_second']:,.0f} tok/s, MFU {percent(row['mfu'])}, causal {percent(row['mfu_causal'])}"
    words += f", {row['memory_gib']:.1f} GiB, loss {loss_of(row):.4f} at step {row['compared_step']}"
    if "loss_difference" in row:
        words += f" ({row['loss_difference']:+.3%} from ours), {row['time_to_ours']:.3f} times our time"
    return words


def loss_of(row: dict[str, Any]) -> float:
    """The loss at the compared step."""
    return row["losses"][row["compared_step"] - 1]


def percent(share: float | None) -> str:
    """A share in percent, n/a where it is not known."""
    return "n/a" if share is None else f"{share:.1%}"
