"""What happened to a run besides its steps: a line of events.jsonl for each skip, rollback, save, stop and so on.

The file is only ever appended to. A run that was killed and did some steps again may so have an event twice; which
batches count in the end is in the newest checkpoint and in metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from fuselm.train.errors import in_words, warn
from fuselm.train.json_lines import EVENT, append_line, read_entries

EVENTS = "events.jsonl"
ALERTS = ("nonfinite", "spike", "rollback", "stall", "save_failed", "stop", "end")
_QUIET_SECONDS = 60.0  # between two alerts of one kind
_PATIENCE_SECONDS = 10.0


class EventLog:
    """Appends events on rank 0; does nothing elsewhere. A disk that refuses is a warning, not the end of the run.

    Args:
        run: the run folder, which exists; None on every rank but 0.
        alert_command: shell command that hears of the kinds in ALERTS; None for none. Training does not wait for it.
    """

    def __init__(self, run: Path | None, alert_command: str | None = None) -> None:
        self.run, self.alert_command = run, alert_command
        self._alerts: list[subprocess.Popen[bytes]] = []
        self._last: dict[str, float] = {}

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
            append_line(self.run / EVENTS, json.dumps(entry).encode())
        except OSError as error:
            warn(f"the event '{message}' could not be written: {in_words(error)}")
        self._alert(kind, step, message)

    def _alert(self, kind: str, step: int, message: str) -> None:
        now = time.monotonic()
        if not self.alert_command or kind not in ALERTS or now - self._last.get(kind, -math.inf) < _QUIET_SECONDS:
            return
        self._last[kind] = now
        self._alerts = [alert for alert in self._alerts if alert.poll() is None]
        facts = {"EVENT": kind, "STEP": str(step), "MESSAGE": message, "RUN": str(self.run)}
        environment = os.environ | {f"FUSELM_{name}": value for name, value in facts.items()}
        try:
            self._alerts.append(
                subprocess.Popen(
                    self.alert_command,
                    shell=True,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is the run's
                )
            )
        except OSError as error:
            warn(f"logging.alert_command could not be run: {in_words(error)}")

    def close(self) -> None:
        """Give commands that still run a few seconds, so that the last alert gets out."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for alert in self._alerts:
            with contextlib.suppress(subprocess.TimeoutExpired):
                alert.wait(max(deadline - time.monotonic(), 0))
        self._alerts = []


def read_events(run: Path) -> list[dict[str, Any]]:
    """The events of a run, the oldest first; lines that were cut off or damaged are left out."""
    return read_entries(run / EVENTS, EVENT)
