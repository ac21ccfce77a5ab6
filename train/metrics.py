"""What a run shows and writes: a line a step, metrics.jsonl, TensorBoard events, W&B, loss.png. Rank 0 only."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fuselm.model.config import LlamaConfig
from fuselm.model.flops import MFU_FORMULA, device_peak_flops, flops_per_token
from fuselm.train.checkpointing import write_atomically
from fuselm.train.config import LoggingConfig
from fuselm.train.errors import in_words, warn
from fuselm.train.json_lines import METRIC, read_entries
from fuselm.train.wandb_log import WandbLog

if TYPE_CHECKING:
    from fuselm.train.validation import ValidationResult


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step.

    Attributes:
        step: steps done, this one included.
        loss: mean over all valid tokens of the step, in nats.
        grad_norm: global norm before clipping.
        lr: learning rate used.
        tokens: tokens seen since the start of the run.
        tokens_per_second: over all ranks.
        tflops: TFLOP/s a device, by the formula of `fuselm.model.flops`.
        mfu: share of the device's bf16 peak; None where the peak is not known.
        memory_gib: peak memory of rank 0: allocated on the GPU, or resident on a CPU.
        batch: number of its batch in the data stream; the step's own, from 0, unless batches were passed over.
        skipped: why the step changed nothing ("nonfinite" or "spike"); None where it did.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    tflops: float
    mfu: float | None
    memory_gib: float
    batch: int
    skipped: str | None = None

    def line(self, total: int) -> str:
        """As printed."""
        mfu = "n/a" if self.mfu is None else f"{self.mfu:.1%}"
        return (
            f"step {self.step:>{len(str(total))}}/{total}  loss {self.loss:.4f}  grad_norm {self.grad_norm:.3f}  "
            f"lr {self.lr:.2e}  tok/s {self.tokens_per_second:,.0f}  TFLOP/s {self.tflops:.3g}  MFU {mfu}  "
            f"memory {self.memory_gib:.2f} GiB{f'  skipped: {self.skipped}' if self.skipped else ''}"
        )


@dataclass(frozen=True)
class Speedometer:
    """Turns tokens and seconds into tok/s, TFLOP/s a device, and MFU.

    Attributes:
        flops_per_token: of forward and backward; recomputation is not counted (that would be HFU).
        peak_flops: of one device, FLOP/s; None when not known.
        devices: how many share the tokens.
    """

    flops_per_token: float
    peak_flops: float | None
    devices: int

    @classmethod
    def of(cls, model: LlamaConfig, seq_len: int, device: torch.device, devices: int) -> Speedometer:
        return cls(flops_per_token(model, seq_len), device_peak_flops(device), devices)

    def read(self, tokens: int, seconds: float) -> tuple[float, float, float | None]:
        """(tokens a second over all devices, TFLOP/s a device, MFU or None)."""
        rate = tokens / max(seconds, 1e-9)
        flops = rate * self.flops_per_token / self.devices
        return rate, flops / 1e12, None if self.peak_flops is None else flops / self.peak_flops


def memory_gib(device: torch.device) -> float:
    """Peak memory so far in GiB: allocated on a GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Reporter:
    """Prints and writes on rank 0; does nothing elsewhere.

    Args:
        run: the run folder, which exists; None on every rank but 0.
        config: what to write.
        total_steps: of the run.
        start_step: steps that a resumed run has done; later lines of metrics.jsonl are dropped.
    """

    def __init__(self, run: Path | None, config: LoggingConfig, *, total_steps: int, start_step: int) -> None:
        self.run, self.config, self.total_steps = run, config, total_steps
        self.progress: Progress | None = None
        self.writer: Any = None
        self.wandb: WandbLog | None = None
        if run is None:
            return
        if config.wandb is not None:  # first, for it may refuse
            self.wandb = WandbLog(run, config.wandb, resumed=start_step > 0)
        console = Console(highlight=False, soft_wrap=True)
        if config.progress == "bar" or (config.progress == "auto" and console.is_terminal):
            self.progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("loss {task.fields[loss]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self.task = self.progress.add_task("training", total=total_steps, completed=start_step, loss="-")
            self.progress.start()
        self.path = run / "metrics.jsonl"
        self._open(run, start_step)

    def _open(self, run: Path, step: int) -> None:
        self.unwritten: deque[bytes] = deque()
        drop_after(self.path, step)
        self.file = self.path.open("ab", buffering=0)
        if self.config.tensorboard:
            from torch.utils.tensorboard.writer import SummaryWriter

            self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)

    def rewind(self, step: int) -> None:
        """Take back what was written of the steps after `step`, which are done once more."""
        if self.run is None:
            return
        self.file.close()
        if self.writer is not None:
            self.writer.close()
        self._open(self.run, step)

    def say(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self.run is None:
            return
        if self.progress is not None:
            self.progress.console.print(text, markup=False)
            return
        # A run does not end because nobody reads along any more, or because the disk that its words go to is full.
        with contextlib.suppress(OSError):
            print(text, flush=True)

    def explain(self, speed: Speedometer, device: torch.device, seq_len: int) -> None:
        """Name the formula behind TFLOP/s and MFU, once."""
        peak = (
            "not known here, so MFU is n/a" if speed.peak_flops is None else f"{speed.peak_flops / 1e12:,.0f} TFLOP/s"
        )
        self.say(
            f"{MFU_FORMULA}; here {speed.flops_per_token:.4g} FLOPs a token at S = {seq_len}; peak of "
            f"{torch.cuda.get_device_name(device) if device.type == 'cuda' else 'this CPU'}: {peak}. "
            "TFLOP/s is a device's."
        )

    def step(self, metrics: StepMetrics) -> None:
        """One optimizer step is done."""
        if self.run is None:
            return
        self._write(asdict(metrics))
        if self.progress is not None:
            self.progress.update(self.task, completed=metrics.step, loss=f"{metrics.loss:.4f}")
        if metrics.step % self.config.every == 0 or metrics.step == self.total_steps:
            self.say(metrics.line(self.total_steps))
        names = ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tflops", "mfu", "memory_gib")
        self._add_scalars({f"train/{name}": getattr(metrics, name) for name in names}, metrics.step)

    def validation(self, step: int, found: ValidationResult) -> None:
        """A validation is done after `step` steps."""
        if self.run is None:
            return
        entry: dict[str, Any] = {"step": step, "validation_loss": found.loss, "validation_tokens": found.tokens}
        scalars = {"validation/loss": found.loss}
        bits = ""
        if found.bits_per_byte is not None:
            entry["validation_bits_per_byte"] = scalars["validation/bits_per_byte"] = found.bits_per_byte
            bits = f"  bits/byte {found.bits_per_byte:.4f}"
        if found.sources:
            entry["validation_sources"] = {
                s.name: {"loss": s.loss, "bits_per_byte": s.bits_per_byte, "tokens": s.tokens} for s in found.sources
            }
        prefix = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}  validation loss"
        self._write(entry)
        self.say(f"{prefix} {found.loss:.4f}{bits}")
        for s in found.sources:
            self.say(f"{prefix} {s.loss:.4f}  bits/byte {s.bits_per_byte:.4f}  of {s.name}, {s.documents:,} documents")
            scalars |= {f"validation/{s.name}/loss": s.loss, f"validation/{s.name}/bits_per_byte": s.bits_per_byte}
        self._add_scalars(dict(scalars), step)

    def _add_scalars(self, values: dict[str, float | None], step: int) -> None:
        if self.wandb is not None:
            self.wandb.log(values, step)
        if self.writer is None:
            return
        try:
            for name, value in values.items():
                if value is not None:
                    self.writer.add_scalar(name, value, step)
        except OSError as error:  # its own thread met it
            warn(f"TensorBoard events cannot be written any more ({in_words(error)})")
            self.writer = None

    def plot(self) -> None:
        """Draw loss.png from metrics.jsonl."""
        if self.run is not None and self.config.plot:
            try:
                plot_losses(self.path, self.run / "loss.png")
            except OSError as error:
                warn(f"{self.run / 'loss.png'} cannot be written ({in_words(error)})")

    def close(self) -> None:
        """Write out what is buffered and stop the progress bar; safe to call twice."""
        if self.run is None:
            return
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
        for file in (self.file, self.writer):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self.writer = None
        if self.wandb is not None:
            self.wandb.close()

    def _write(self, entry: dict[str, Any]) -> None:
        # JSON has no NaN: null says that the number is not one.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}
        self.unwritten.append(json.dumps(clean).encode() + b"\n")
        while self.unwritten:
            try:
                written = self.file.write(self.unwritten[0])
                if written < len(self.unwritten[0]):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                # A full disk does not end the run. An empty line will end the part of this one that was written.
                if len(self.unwritten) == 1:
                    warn(f"{self.path} cannot be written ({in_words(error)}); its lines are kept until it can")
                if not self.unwritten[0].startswith(b"\n"):
                    self.unwritten[0] = b"\n" + self.unwritten[0]
                return
            self.unwritten.popleft()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics.jsonl; lines that were cut off or damaged are left out."""
    return read_entries(path, METRIC)


def drop_after(path: Path, step: int) -> None:
    """Drop the entries of metrics.jsonl after `step`, which a resumed run will write again, and what a crash cut off,
    for the next line would join it."""
    if path.exists():
        kept = "".join(json.dumps(entry) + "\n" for entry in read_metrics(path) if 0 < step >= entry["step"]).encode()
        if kept != path.read_bytes():
            write_atomically(path, kept)


def centered_mean(values: Sequence[float], reach: int) -> list[float]:
    """Each value averaged with up to `reach` neighbours on either side, as many on the left as on the right: no lag."""
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        window = values[i - near : i + near + 1]
        means.append(sum(window) / len(window))
    return means


def plot_losses(metrics: Path, image: Path) -> None:
    """Draw training and validation loss over steps.

    Args:
        metrics: a metrics.jsonl.
        image: the .png to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    entries = read_metrics(metrics)
    training = [(e["step"], e["loss"]) for e in entries if e.get("loss") is not None]
    validation = [(e["step"], e["validation_loss"]) for e in entries if e.get("validation_loss") is not None]
    figure, axes = plt.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    if training:
        axes.plot(*zip(*training, strict=True), color="#9db8d9", linewidth=1, label="training")
        if len(training) >= 50:  # single steps are noisy
            steps, losses = zip(*training, strict=True)
            axes.plot(
                steps, centered_mean(losses, 10), color="#1f4e8c", linewidth=1.5, label="training, mean of 21 steps"
            )
    if validation:
        label = f"validation (last {validation[-1][1]:.3f})"
        axes.plot(*zip(*validation, strict=True), color="#c0392b", marker="o", markersize=4, label=label)
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(image.parent.name)
    axes.grid(alpha=0.3)
    if training or validation:
        axes.legend()
    figure.savefig(image)
    plt.close(figure)
