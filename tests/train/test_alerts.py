"""The user's command hears of what a real run goes through."""

from __future__ import annotations

import pytest

from fuselm.train.config import resolve
from fuselm.train.distributed import AgreedError
from fuselm.train.errors import UserError
from fuselm.train.event_log import read_events
from fuselm.train.trainer import StopSignal, Trainer

from . import storm
from .faults import Faults


@pytest.fixture
def trainer(make_config, world, tmp_path):
    """trainer(**overrides): a run whose alerts go to the file `heard`, a line each."""

    def make(**overrides) -> Trainer:
        command = f'echo "$FUSELM_EVENT $FUSELM_STEP $FUSELM_RUN" >> {tmp_path / "heard"}'
        options = {"training__steps": 30, "checkpoint__every": 5, "evaluation__batches": 0, "guard": storm.GUARD}
        config = make_config(tmp_path, **options | {"logging__alert_command": command} | overrides)
        return Trainer(resolve(config, 1), world, StopSignal())

    return make


def heard(folder) -> list[list[str]]:
    return sorted(line.split() for line in (folder / "heard").read_text().splitlines())


def test_nan_spike_rollback_failed_save_and_end(trainer, tmp_path, monkeypatch):
    run = trainer()
    finish = run.writer._finish

    def refuse(temporary, folder, files, progress):
        if progress["step"] == 25:
            raise UserError("No space left on device")
        finish(temporary, folder, files, progress)

    monkeypatch.setattr(run.writer, "_finish", refuse)
    with Faults(run, nan_losses=[9], spikes=[20, 22]):
        run.train()
    folder = str(tmp_path / "tiny")
    # Of a kind the first is told; the second spike comes within the minute.
    told = {kind: (int(step), run_folder) for kind, step, run_folder in heard(tmp_path)}
    late = told.pop("save_failed")  # when training hears of it, from the background
    assert late[0] in range(25, 31) and late[1] == folder and len(heard(tmp_path)) == 5
    assert told == {"end": (30, folder), "nonfinite": (10, folder), "rollback": (15, folder), "spike": (21, folder)}
    assert {e["kind"] for e in read_events(run.run)} >= {"start", "save", "spike", "nonfinite", "rollback", "end"}


def test_a_run_that_gives_up(trainer, tmp_path):
    run = trainer(training__max_nonfinite_steps=2)
    with Faults(run, nan_losses=range(8, 99)), pytest.raises(AgreedError, match="2 steps in a row"):
        run.train()
    assert [line[:2] for line in heard(tmp_path)] == [["nonfinite", "9"], ["stop", "10"]]


def test_a_quiet_run_tells_its_end_alone(trainer, tmp_path):
    trainer(training__steps=2).train()
    assert heard(tmp_path) == [["end", "2", str(tmp_path / "tiny")]]
