"""The benchmark of data preparation runs, and its text is the same each time."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench_prepare_data import make_corpus

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_prepare_data.py"


def test_text_is_the_same_each_time_and_of_the_size_asked_for(tmp_path: Path) -> None:
    sizes = [make_corpus(tmp_path / name, 0.2) for name in ("a", "b")]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    texts = [json.loads(line)["text"] for line in (tmp_path / "a").read_text(encoding="utf-8").splitlines()]
    assert sum(len(text.encode()) for text in texts) == sizes[0] and 200_000 <= sizes[0] < 210_000
    assert len(set(texts)) == len(texts) and max(ord(letter) for text in texts for letter in text) > 0x4E00


def test_both_sides_run(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--megabytes", "0.2", "--rounds", "1", "--vocab-size", "300", "--output", str(output)]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert 200_000 <= result["bytes"] < 210_000
    assert result["median_ratio"] == result["prepare_mb_per_s"][0] / result["library_mb_per_s"][0] > 0
    assert 30e6 < result["peak_memory"] < 2e9


def test_documents_say_what_was_measured() -> None:
    result = json.loads((SCRIPT.parent / "results" / "prepare_data_2gb.json").read_text())
    page = " ".join((SCRIPT.parents[1] / "docs" / "data.md").read_text().split())
    run = result["prepare"]
    for figure in (
        f"{result['bytes'] / 1e9:.1f} GB of made-up text",
        f"took {run['peak_memory'] / 1e6:.0f} MB of memory at most",
        f"{run['cpu_seconds']:.0f} s of processor time",
        f"{run['seconds']:,.0f} s on two cores",
        f"load {result['load_before']:.1f} before",
        f"{run['mb_per_s']} MB/s",
    ):
        assert figure in page, figure
    assert result["bytes"] >= 2e9 and run["peak_memory"] < 1e9 and result["cores"] == 2
    rate = json.loads((SCRIPT.parent / "results" / "prepare_data_rate.json").read_text())
    assert f"encodes at {rate['median_ratio']:.2f} of the library's own rate" in page
    middle = [statistics.median(rate[f"{name}_mb_per_s"]) for name in ("prepare", "library")]
    assert f"{middle[0]:.1f} and {middle[1]:.1f} MB/s" in page
