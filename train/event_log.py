"""What happened to a run besides its steps: a line of events.jsonl for each skip, rollback, save, stop and so on.

The file is only ever appended to. A run that was killed and did some steps again may so have an event twice; which
batches count in the end is in the newest checkpoint and in metrics.jsonl.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from fuselm.train.errors import in_words, warn

EVENTS = "events.jsonl"


class EventLog:
    """Appends events on rank 0; does nothing elsewhere. A disk that refuses is a warning, not the end of the run.

    Args:
        run: the run folder, which exists; None on every rank but 0.
    """

    def __init__(self, run: Path | None) -> None:
        self.run = run

    def add(self, kind: str, step: int, message: str, **details: Any) -> None:
        """Record one event.

        Args:
            kind: one word, such as nonfinite, spike, rollback, save.
            step: optimizer steps done.
            message: a sentence for people.
            details: what else is known; None and NaN become null.
        """
        if self.run is None:
            return
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "kind": kind, "step": step, "message": message}
        entry |= {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in details.items()}
        try:
            with (self.run / EVENTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            warn(f"the event '{message}' could not be written: {in_words(error)}")


def read_events(run: Path) -> list[dict[str, Any]]:
    """The events of a run, the oldest first; a line cut off by a crash or a full disk is left out."""
    path = run / EVENTS
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
