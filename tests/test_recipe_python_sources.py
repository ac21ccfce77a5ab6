"""recipes/train_on_python_sources.py: what counts as text, and all of it on a small scale, cut and gone on with."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fuselm.train.config import parse_command_line, resolve, to_json
from fuselm.train.presets import PRESETS

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
sys.path.insert(0, str(RECIPES))
texts: Any = importlib.import_module("python_sources_text")
reports: Any = importlib.import_module("python_sources_report")
recipe: Any = importlib.import_module("train_on_python_sources")


def module(number: int, lines: int = 40) -> str:
    return "".join(f"def function_{number}_{i}(argument):\n    return argument * {i * number}\n" for i in range(lines))


def write_sources(folder: Path, count: int) -> None:
    for number in range(count):
        path = folder / f"package_{number % 3}" / f"module_{number:03d}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module(number))
    page = "\n\n".join(f"Section {i}\n=========\n\nIt explains what module {i} is for." for i in range(40))
    (folder / "guide.rst").write_text(page)


def test_collect_takes_each_text_once_and_as_it_is(tmp_path: Path) -> None:
    source = tmp_path / "installed"
    source.mkdir()
    windows = module(1).replace("\n", "\r\n").encode() + "# Größe — 大\n".encode()
    (source / "a.py").write_bytes(windows)
    (source / "b.py").write_bytes(windows)
    (source / "c.py").write_text(module(1) + "another_line_that_is_new = 1\n")  # another release of a.py
    (source / "d.py").write_text(module(2))
    (source / "short.py").write_text("x = 1\n")
    (source / "table.txt").write_text("0123456789" * 100)  # one line of 1,000 characters
    (source / "binary.txt").write_bytes(b"line\n\0" * 100)
    (source / "latin.txt").write_bytes(b"caf\xe9 au lait\n" * 50)
    (source / "library.so").write_text(module(3))
    (source / "README.md").write_text("".join(f"Step number {i} of many.\n" for i in range(30)))
    found = texts.collect([source], tmp_path / "text", megabytes=1)
    code = [p.read_bytes() for p in sorted((tmp_path / "text" / "code").iterdir())]
    assert code == [windows, module(2).encode()]
    assert len(list((tmp_path / "text" / "documentation").iterdir())) == 1
    assert (found.files, found.copies, found.near_copies, found.unsuitable) == (3, 1, 1, 4)
    assert found.code_bytes == sum(map(len, code)) and found.bytes > found.code_bytes and not found.full


def test_collect_ends_with_the_file_that_fills_it(tmp_path: Path) -> None:
    write_sources(tmp_path / "installed", 9)
    size = len(module(5).encode())
    found = texts.collect([tmp_path / "installed"], tmp_path / "text", megabytes=2.5 * size / 1e6)
    assert found.full and found.files == 3 and 2.5 * size <= found.bytes < 4 * size


def test_roots_inside_others_are_searched_once(tmp_path: Path) -> None:
    inner = tmp_path / "lib" / "site-packages"
    inner.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "lib")
    roots = texts.distinct_roots([inner, tmp_path / "link", tmp_path / "lib", tmp_path / "missing"])
    assert roots == [(tmp_path / "lib").resolve()]
    assert texts.installed_roots() and all(root.is_dir() for root in texts.installed_roots())


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    write_sources(tmp_path / "installed", 60)
    small = (
        "--model.kernels eager --parallel.device cpu --training.seq_len 64 --evaluation.batches 1 --logging.plot False"
    )
    return [
        *("--output", str(tmp_path / "results"), "--work", str(tmp_path / "work"), "--preset", "debug"),
        *("--only-roots", "--roots", str(tmp_path / "installed"), "--vocab-size", "400", "--steps", "12"),
        *("--extra", small, "--sample-tokens", "5", "--documents", "3"),
    ]


def test_all_of_it_in_two_calls(tmp_path: Path, options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert recipe.main([*options, "--prepare-only"]) == 0
    assert not (tmp_path / "results").exists()
    assert recipe.main(options) == 0
    facts = json.loads((tmp_path / "results" / "report.json").read_text())
    training, splits = facts["training"], facts["splits"]
    assert training["finished"] and training["steps"] == 12 and training["calls"] == 2
    assert training["tokens"] == 12 * training["global_batch_size"] * 64
    assert training["epochs"] == pytest.approx(training["tokens"] / splits["train"]["tokens"])
    assert training["seconds_of_steps"] > 0 and training["skipped_steps"] == 0
    validation = facts["validation"]
    assert [v["step"] for v in validation] == list(range(13))
    assert validation[0]["loss"] == pytest.approx(math.log(1024), rel=0.02)  # untrained, it knows nothing
    assert validation[-1]["loss"] < validation[0]["loss"]
    held_out = splits["validation"]
    for v in validation:
        bits = v["loss"] / math.log(2) * held_out["tokens"] / held_out["text_bytes"]
        assert v["bits_per_byte"] == pytest.approx(bits)
    assert [s["name"] for s in facts["sources"]] == ["code", "documentation", "all together"]
    assert facts["sources"][0]["documents"] == 3  # --documents
    assert len(facts["samples"]) == 2 * len(recipe.PROMPTS)
    kept = [json.loads(line) for line in (tmp_path / "results" / "metrics.jsonl").read_text().splitlines()]
    assert len(kept) == 12 + 13
    with Image.open(tmp_path / "results" / "curves.png") as image:
        assert image.width > 1000
    assert facts["samples"][0]["text"] in (tmp_path / "results" / "samples.txt").read_text()

    page = tmp_path / "pages" / "page.md"
    assert recipe.main(["--report", str(tmp_path / "results"), "--page", str(page)]) == 0
    text = page.read_text()
    assert "](../results/curves.png)" in text and "| training | 12 steps of" in text
    assert f"{validation[-1]['loss']:.3f} after the last" in text and facts["environment"]["torch"] in text

    assert recipe.main([*options, "--seed", "1"]) == 2
    assert "was begun with" in capfd.readouterr().err


def test_a_call_whose_time_is_over_is_gone_on_with(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is asked to stop in time for a checkpoint; the stages before it are not done again."""
    given: list[tuple[list[str], float]] = []
    in_time = iter([True, False, True])

    def call(command: list[str], seconds: float) -> bool:
        given.append((command, seconds))
        run = tmp_path / "work" / command[command.index("--name") + 1]
        run.mkdir(exist_ok=True)
        entries = [{"step": i + 1, "loss": 2.0, "tokens": 256 * (i + 1)} for i in range(120)]
        entries = [e | {"tokens_per_second": 512.0, "memory_gib": 1.0} for e in entries]
        entries.append({"step": 120, "validation_loss": 2.5})
        (run / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))
        (run / "config.json").write_text(to_json(resolve(parse_command_line(command[2:], PRESETS, ""), 1)))
        return next(in_time)

    def measured(work: Any) -> None:
        work.keep(sources=[], samples=[], parameters=1)

    monkeypatch.setattr(recipe, "call", call)
    monkeypatch.setattr(recipe, "latest_checkpoint", lambda run: run)
    monkeypatch.setattr(recipe, "STAGES", (*recipe.STAGES[:-1], ("samples", measured)))
    at = options.index("--steps")
    options[at : at + 2] = ["--minutes", "2", "--budget-s", "100"]
    assert recipe.main(options) == recipe.UNFINISHED
    assert not (tmp_path / "results").exists()
    assert recipe.main(options) == 0
    names = [command[command.index("--name") + 1] for command, _ in given]
    assert names == ["speed", "run", "run"]
    steps = [command[command.index("--training.steps") + 1] for command, _ in given]
    assert steps == ["120", "240", "240"]  # 2 minutes at 512 tokens a second, 256 a step
    for _, seconds in given[1:]:
        assert 20 < seconds <= 100 - recipe.SAVING_SECONDS
    facts = json.loads((tmp_path / "results" / "report.json").read_text())
    assert facts["training"]["calls"] == 2 and not facts["training"]["finished"]
    assert facts["training"]["probed_tokens_per_second"] == 512 and facts["training"]["seconds_of_steps"] == 60
    assert facts["validation"][0]["tokens"] == 120 * 256


def test_commands_are_asked_to_stop(tmp_path: Path) -> None:
    stops = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    wait = "open(sys.argv[1], 'w').close(); time.sleep(60)"
    assert recipe.call([sys.executable, "-c", "pass"], math.inf)
    assert not recipe.call([sys.executable, "-c", stops + wait, str(tmp_path / "began")], 2.0)
    assert not recipe.call([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)  # dies of the signal
    with pytest.raises(recipe.UserError, match="ended with 7"):
        recipe.call([sys.executable, "-c", "raise SystemExit(7)"], 60.0)


def test_long_runs_keep_a_thousand_steps() -> None:
    entries = []
    for step in range(1, 4322):
        entries.append({"step": step, "loss": 1.0})
        if step % 100 == 0:
            entries.append({"step": step, "validation_loss": 1.0})
    kept = reports.thinned(entries)
    steps = [e["step"] for e in kept if "loss" in e]
    assert 800 < len(steps) <= reports.MOST_STEPS_KEPT + 2 and steps[0] == 1 and steps[-1] == 4321
    assert sum("validation_loss" in e for e in kept) == 43 and steps == sorted(steps)


def test_pages_say_what_their_reports_say() -> None:
    """A result in benchmarks/results/NAME has its page in recipes/NAME.md, as `--report ... --page ...` writes it."""
    results = RECIPES.parent / "benchmarks" / "results"
    for report in results.glob("*/report.json"):
        facts = json.loads(report.read_text(encoding="utf-8"))
        page = RECIPES / f"{report.parent.name}.md"
        picture = f"../benchmarks/results/{report.parent.name}/curves.png"
        assert page.read_text(encoding="utf-8") == reports.page_text(facts, picture)
        assert (report.parent / "curves.png").exists()
        kept = [json.loads(line) for line in (report.parent / "metrics.jsonl").read_text().splitlines()]
        losses = [(e["step"], e["validation_loss"]) for e in kept if "validation_loss" in e]
        assert losses == [(v["step"], v["loss"]) for v in facts["validation"]]


@pytest.mark.parametrize(
    "options",
    [
        ["--minutes", "nan"],
        ["--minutes", "0"],
        ["--budget-s", "-1"],
        ["--megabytes", "inf"],
        ["--tokenizer-megabytes", "0"],
        ["--steps", "-2"],
        ["--documents", "0"],
        ["--sample-tokens", "0"],
    ],
)
def test_numbers_that_cannot_be_are_named(options, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    places = ["--output", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    assert recipe.main([*places, *options]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: {options[0]} is {options[1]}") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
