"""Numbers of a run sent to Weights & Biases, if the user asks for it; the package is needed only then.

Steps that were done again after a rollback or a resume would be refused under W&B's own step counter, so `step` is sent
as a number like the others and is the x-axis of all of them. Nothing that W&B does ends a run: without a network it
catches up later or not at all, and metrics.jsonl has everything.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import threading
import uuid
from pathlib import Path
from typing import Any

from fuselm.train.errors import UserError, warn

_ID = "wandb_id.txt"
_PATIENCE_SECONDS = 60.0  # for what was not sent yet, at the end


def require_wandb() -> None:
    """Refuse logging.wandb where the package is not installed.

    Raises:
        UserError: says what to install.
    """
    # W&B leaves folders called wandb behind; without an origin such a one is what was found.
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:
        raise UserError("logging.wandb needs a package that is not installed: pip install wandb")


class WandbLog:
    """One run at W&B; the same one again after a resume, by the id that its folder keeps.

    Args:
        run: the run folder, which exists; W&B's own files go to its folder wandb/.
        project: at W&B.
        resumed: the run was begun before: then W&B may be missing, with a warning, where it otherwise is an error.

    Raises:
        UserError: the package is not installed, or refuses to start.
    """

    def __init__(self, run: Path, project: str, *, resumed: bool) -> None:
        require_wandb()
        self.run, self._at_wandb = run, None
        try:
            wandb: Any = importlib.import_module("wandb")
            config = json.loads((run / "config.json").read_text()) if (run / "config.json").is_file() else {}
            started = wandb.init(
                project=project,
                name=run.name,
                id=self._id(),
                resume="allow",
                dir=str(run),
                config=config,
                settings=wandb.Settings(console="off", silent=True),
            )
            started.define_metric("step")
            started.define_metric("*", step_metric="step")
            self._at_wandb = started
        except Exception as error:  # whatever W&B raises, it is not the run's
            message = f"logging.wandb is {project!r}, but W&B could not start ({_in_a_line(error)})"
            if not resumed:
                raise UserError(f"{message}: log in with `wandb login`, or set WANDB_MODE=offline") from error
            warn(f"{message}; the run goes on without it")

    def _id(self) -> str:
        path = self.run / _ID
        if not path.is_file() or not path.read_text().strip():
            path.write_text(uuid.uuid4().hex[:12] + "\n")
        return path.read_text().strip()

    def log(self, values: dict[str, float | None], step: int) -> None:
        """Send the numbers of a step; None is left out. After the first refusal nothing is sent any more."""
        if self._at_wandb is None:
            return
        try:
            self._at_wandb.log({"step": step} | {name: value for name, value in values.items() if value is not None})
        except Exception as error:  # training is not W&B's to end
            warn(f"W&B takes no more numbers ({_in_a_line(error)}); metrics.jsonl has them")
            self._at_wandb = None

    def close(self) -> None:
        """Let W&B send the rest, for a minute at most; safe to call twice."""
        ending, self._at_wandb = self._at_wandb, None
        if ending is None:
            return
        errors: list[BaseException] = []

        def finish() -> None:
            try:
                ending.finish()
            except BaseException as error:  # for the thread that waits
                errors.append(error)

        thread = threading.Thread(target=finish, name="wandb", daemon=True)
        thread.start()
        thread.join(_PATIENCE_SECONDS)
        if thread.is_alive() or errors:
            why = _in_a_line(errors[0]) if errors else f"it has not ended after {_PATIENCE_SECONDS:.0f} s"
            warn(f"W&B did not get everything ({why}): wandb sync {self.run / 'wandb' / 'latest-run'}")


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
