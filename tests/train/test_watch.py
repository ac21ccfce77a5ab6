"""Watching a run: what is shown of a real one, of one that is being written, and the report."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fuselm.train import watch
from fuselm.train.config import resolve, to_json
from fuselm.train.event_log import EventLog, read_events
from fuselm.train.json_lines import METRIC
from fuselm.train.metrics import drop_after, read_metrics
from fuselm.train.trainer import StopSignal, Trainer
from fuselm.train.watch_data import LineFollower, RunView, in_words

from ..forked import Program
from .faults import Faults

SCRIPT = Path(__file__).resolve().parents[2] / "train" / "watch.py"


@pytest.fixture
def run(make_config, world, tmp_path) -> Path:
    """A run of 60 steps, of which one was a spike."""
    config = make_config(tmp_path, training__steps=60, evaluation__every=20, checkpoint__every=30)
    trainer = Trainer(resolve(config, 1), world, StopSignal())
    with Faults(trainer, spikes=[50]):
        trainer.train()
    return tmp_path / "tiny"


def test_once_shows_the_numbers_of_the_run(run, capsys, monkeypatch, server):
    monkeypatch.setenv("COLUMNS", "140")
    assert watch.main([str(run), "--once"]) == 0
    out = capsys.readouterr().out
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [e for e in steps if "loss" in e][-1]
    losses = [e["validation_loss"] for e in steps if "validation_loss" in e]
    assert f"{last['loss']:.4f}" in out and f"{last['grad_norm']:.3f}" in out and "60 of 60" in out
    assert "done" in out and f"{losses[-1]:.4f} at step 60; best {min(losses):.4f}" in out
    assert re.search(r"skipped steps +1, the last one 51", out) and re.search(r"spike +step 51 is a spike", out)
    assert "time left" in out and "0 s" in out and "GiB" in out and "█" in out
    program = Program(server, [str(SCRIPT), str(run), "--once"])
    assert program.wait(120) == 0 and "60 of 60" in program.communicate()[0]


def test_the_report_is_one_file_with_plots_and_events(run, tmp_path, capsys):
    (run / "events.jsonl").open("a").write(
        json.dumps({"time": "t", "kind": "stop", "step": 1, "message": "<b>&"}) + "\n"
    )
    target = tmp_path / "report.html"
    assert watch.main([str(run), "--html", str(target)]) == 0
    assert capsys.readouterr().out == f"wrote {target}\n"
    text = target.read_text()
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert tags.count("svg") == 1 and "path" in tags and tags.count("table") == 2
    assert "60 of 60" in text and "step 51 is a spike" in text and "&lt;b&gt;&amp;" in text and "<b>&" not in text
    assert not re.search(r"(src|href)=\"(?!#)", text), "it needs nothing from elsewhere"


def test_a_run_before_its_first_step(make_config, tmp_path, capsys):
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "config.json").write_text(to_json(make_config(tmp_path)))
    assert watch.main([str(run), "--once"]) == 0 and "0 of 6" in capsys.readouterr().out
    assert watch.main([str(run), "--html", str(tmp_path / "r.html")]) == 0
    assert "No step was done yet" in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["nowhere", "--once"], ["nowhere", "does not exist"]),
        (["EMPTY", "--once"], ["config.json"]),
        (["EMPTY", "--interval", "0"], ["--interval is 0.0"]),
        ([], ["RUN is missing"]),
        (["EMPTY", "--onec"], ["--onec", "did you mean --once?"]),
    ],
)
def test_mistakes_are_one_line(arguments, parts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    assert watch.main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and all(part in err for part in parts), err


def test_a_file_is_followed_over_half_lines_and_rollbacks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    follower = LineFollower(path, METRIC)
    follower.read()
    assert follower.entries == []
    path.write_text('{"step": 1}\n{"st')
    follower.read()
    with path.open("a") as file:
        file.write(
            'ep": 2, "loss": null}\nbroken\n{"step": 7, "loss": "x"}\n{"step": 8, "mfu": [1]}\n{"step": 3, "lr": 1}\n'
        )
    follower.read()
    assert [e["step"] for e in follower.entries] == [1, 2, 3]
    shorter = path.with_suffix(".tmp")
    shorter.write_text('{"step": 1}\n')
    os.replace(shorter, path)
    follower.read()
    assert [e["step"] for e in follower.entries] == [1]
    path.write_text("")
    follower.read()
    assert follower.entries == []


DAMAGE = [b"", b"5", b"null", b'"loss"', b"[1]", b'{"step": 1, "lo', b"\0\0\0\0", b"\xff\xfe{}", b"[" * 100_000]
DAMAGE += [b"{}", b'{"step": null, "loss": 1.0}', b'{"step": "x", "loss": 1.0}', b'{"kind": "end"}', b'{"step": 1} {']


def test_damaged_lines_are_passed_over_wherever_they_are_read(make_config, tmp_path, capsys):
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "config.json").write_text(to_json(make_config(tmp_path)))
    whole = [{"step": s, "loss": 2.5 - s} for s in (1, 2)]
    lines = [*DAMAGE, json.dumps(whole[0]).encode(), *DAMAGE, json.dumps(whole[1]).encode(), *DAMAGE]
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines))
    (run / "events.jsonl").write_bytes(b"\n".join(DAMAGE))
    log = EventLog(run)
    log.add("start", 0, "started anew")
    assert [e["message"] for e in read_events(run)] == ["started anew"]
    assert watch.main([str(run), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 6" in shown and "started anew" in shown and "0.5000" in shown
    assert watch.main([str(run), "--html", str(tmp_path / "r.html")]) == 0
    assert "started anew" in (tmp_path / "r.html").read_text()
    assert read_metrics(run / "metrics.jsonl") == whole
    drop_after(run / "metrics.jsonl", 1)
    assert (run / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.5}\n'


def test_an_event_after_one_that_was_cut_off_is_kept(tmp_path):
    log = EventLog(tmp_path)
    log.add("start", 0, "one")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"time": "2026')
    log.add("start", 0, "two")
    log.add("end", 0, "three")
    assert [e["message"] for e in read_events(tmp_path)] == ["one", "two", "three"]


def test_state_and_time_left(make_config, tmp_path):
    run = tmp_path / "tiny"
    run.mkdir()
    (run / "config.json").write_text(to_json(make_config(tmp_path, training__steps=100)))
    entries = [{"step": s, "loss": 2.0, "tokens_per_second": 8 * 32 / 3.0} for s in range(1, 41)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
    view = RunView.open(run)
    assert view.seconds_left() == pytest.approx(60 * 3.0) and view.state() == "running"
    long_ago = time.time() - 7300
    os.utime(run / "metrics.jsonl", (long_ago, long_ago))
    assert view.state() == "silent for 2 h 1 min"
    log = EventLog(run)
    for kind, state in (("start", "running"), ("end", "stopped"), ("start", "running"), ("stop", "stopped")):
        log.add(kind, 1, kind)
        view.refresh()
        assert view.state() == state
    (run / "config.json").write_text(to_json(make_config(tmp_path, training__steps=30)))
    lowered = RunView.open(run)
    assert lowered.seconds_left() == 0 and lowered.state() == "done"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (60, "1 min 0 s"), (7265, "2 h 1 min"), (200000, "2 d 7 h")]
)
def test_durations(seconds, text):
    assert in_words(seconds) == text


def test_sparklines():
    assert watch.sparkline([], 5) == "" and watch.sparkline([1.0, 1.0], 5) == "▁▁"
    assert watch.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert watch.sparkline([0, 0, 7, 7], 2) == "▁█" and len(watch.sparkline(range(1000), 37)) == 37


def test_live_until_ctrl_c(run, monkeypatch, capsys):
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    assert watch.main([str(run), "--interval", "0.5"]) == 0
    assert looks == [0.5] * 3 and "60 of 60" in capsys.readouterr().out
    assert threading.active_count() < 10
