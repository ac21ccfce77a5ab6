"""A run as it is seen from beside it: its numbers and events, read from the run folder as they are written."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuselm.train.config import TrainConfig, config_from_json
from fuselm.train.event_log import EVENTS
from fuselm.train.json_lines import EVENT, METRIC, Fields, entries_of

RECENT = 20  # steps that a mean is taken over


class LineFollower:
    """Reads a file of JSON lines piece by piece; from the start again when it was cut, as after a rollback.

    Args:
        path: the file; it may come, go and come back.
        fields: what each entry has at least; lines without it are passed over.
    """

    def __init__(self, path: Path, fields: Fields) -> None:
        self.path, self.fields = path, fields
        self.entries: list[dict[str, Any]] = []
        self._offset, self._identity, self._rest = 0, None, b""

    def read(self) -> None:
        """Take in what was written since the last call."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._identity or status.st_size < self._offset:
                    self.entries, self._offset, self._rest, self._identity = [], 0, b"", status.st_ino
                file.seek(self._offset)
                block = file.read()
        except OSError:  # not there yet, or out of reach for a moment
            return
        self._offset += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        self.entries += entries_of(lines, self.fields)


@dataclass
class RunView:
    """What is known of a run. Make it with `open`, then call `refresh`.

    Attributes:
        run: the run folder.
        config: its configuration.
        metrics, events: what was read.
    """

    run: Path
    config: TrainConfig
    metrics: LineFollower
    events: LineFollower

    @classmethod
    def open(cls, run: Path) -> RunView:
        """The view of a run folder.

        Raises:
            UserError: it is no run folder.
        """
        metrics, events = LineFollower(run / "metrics.jsonl", METRIC), LineFollower(run / EVENTS, EVENT)
        view = cls(run, config_from_json(run), metrics, events)
        view.refresh()
        return view

    def refresh(self) -> None:
        """Read what is new."""
        self.metrics.read()
        self.events.read()

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The entries of steps."""
        return [entry for entry in self.metrics.entries if "loss" in entry]

    @property
    def validations(self) -> list[tuple[int, float]]:
        """(step, loss) of each validation that is a number."""
        entries = self.metrics.entries
        return [(e["step"], e["validation_loss"]) for e in entries if e.get("validation_loss") is not None]

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return self.config.training.steps

    def mean(self, name: str) -> float | None:
        """Mean of a number over the last steps; None where there is none."""
        values = [e[name] for e in self.steps[-RECENT:] if e.get(name) is not None]
        return sum(values) / len(values) if values else None

    def seconds_left(self) -> float | None:
        """Time to the last step at the pace of the last ones; None before the first."""
        rate, steps = self.mean("tokens_per_second"), self.steps
        if not rate or not steps:
            return None
        tokens = self.config.training.global_batch_size * self.config.training.seq_len
        return max(self.total - steps[-1]["step"], 0) * tokens / rate  # the number of steps may have been lowered

    def state(self) -> str:
        """done, stopped, running, or for how long nothing was written: then it may hang, or was killed."""
        steps = self.steps
        if steps and steps[-1]["step"] >= self.total:
            return "done"
        kinds = [e["kind"] for e in self.events.entries if e["kind"] in ("start", "end", "stop")]
        if kinds and kinds[-1] != "start":
            return "stopped"
        silent = time.time() - max(_written(self.metrics.path), _written(self.events.path))
        pace = self.mean("tokens_per_second")
        tokens = self.config.training.global_batch_size * self.config.training.seq_len
        usual = tokens / pace if pace else 60.0
        return "running" if silent < max(30.0, 10 * usual) else f"silent for {in_words(silent)}"


def _written(path: Path) -> float:
    """When a file was last written, in seconds since 1970; 0 where it is not there."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def in_words(seconds: float) -> str:
    """A duration, such as 3 d 4 h or 12 s."""
    whole = round(seconds)
    for unit, size, smaller, small in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {smaller}"
    return f"{whole} s"
