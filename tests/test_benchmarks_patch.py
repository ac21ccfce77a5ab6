"""bench_patch on a CPU: variants run, compute the same losses and draw the same tokens."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

bench: Any = importlib.import_module("bench_patch")
main = bench.main
SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "bench_patch.py"


@pytest.mark.slow
def test_tiny_run(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    output = tmp_path / "results" / "patch.json"
    parts = ["--parts", "transformers,fuselm,decode", "--decoding", "transformers,fuselm"]
    command = [sys.executable, str(SCRIPT), "--tiny", *parts, "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    plain, ours = (results["training"][name] for name in ("transformers", "fuselm"))
    assert len(ours["losses"]) == 3 and ours["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert plain["losses"][-1] < plain["losses"][0]
    assert {row["batch"] for row in results["decoding"]} == {1, 16} and len(results["decoding"]) == 4
    assert all(row["same_as_first"] == 1.0 for row in results["decoding"])
    assert "| fuselm |" in done.stdout and "| fuselm | 16 |" in done.stdout


def test_unknown_parts_are_named(capsys):
    assert main(["--tiny", "--parts", "fuselm,unsloth"]) == 2
    assert "error: --parts unsloth: expected transformers, liger, fuselm, decode" in capsys.readouterr().err
    assert main(["--tiny", "--decoding", "fuselm,vllm"]) == 2
    assert (
        "error: --decoding 'vllm': expected transformers, fuselm, transformers + fuselm.patch"
        in capsys.readouterr().err
    )


def tiny(**changes: Any) -> argparse.Namespace:
    options = {"tiny": True, "batch": 2, "seq_len": 32, "steps": 20, "warmup": 1, "recompute": False, "prompt": 4}
    options |= {"new_tokens": 4, "repeats": 50, "decoding": "transformers,fuselm"}
    options |= {"device": torch.device("cpu"), "dtype": torch.float32}
    return argparse.Namespace(**options | changes)


def test_what_the_time_does_not_allow_is_left_out() -> None:
    row = bench.train("transformers", tiny(), 0.0)
    assert row["timed_steps"] == bench.LEAST_STEPS and len(row["losses"]) == bench.LEAST_STEPS + 1
    rows = list(bench.decode(tiny(), 0.0))
    assert [(r["variant"], r["batch"]) for r in rows] == [(v, b) for v in ("transformers", "fuselm") for b in (1, 16)]
    assert rows[0]["repeats"] == 1 and rows[0]["same_as_first"] == 1.0  # there is always one to compare with
    assert all("tokens_per_second" not in r for r in rows[1:])
    table = bench.report({"training": {"liger": None, "fuselm": row}, "decoding": rows})
    assert "| liger | not run |" in table and "| fuselm | 16 | not run |" in table


def fake_part(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> Any:
    """A part whose process runs `body` once it is its turn."""
    script = folder / "part.py"
    script.write_text(
        "import json, sys, time\nprint('a warning')\nprint('ready', flush=True)\n"
        f"seconds = float(sys.stdin.readline())\n{body}\n"
    )
    monkeypatch.setattr(bench, "__file__", str(script))
    part = bench.Part("fuselm", [])
    part.wait_ready()
    return part


def test_parts_that_fail_or_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = "print('row ' + json.dumps({'seconds': seconds}), flush=True)"
    part = fake_part(monkeypatch, tmp_path, row)
    assert part.measure(7.5, float("inf")) == [{"seconds": 7.5}]
    part = fake_part(monkeypatch, tmp_path, f"{row}\ntime.sleep(60)")
    assert part.measure(0.5, 0.5) == [{"seconds": 0.5}]
    assert "the budget is used up" in capsys.readouterr().err
    part = fake_part(monkeypatch, tmp_path, "raise ValueError('no such kernel')")
    assert part.measure(1.0, 60.0) is None
    assert "fuselm: ValueError: no such kernel" in capsys.readouterr().err
    part.close()
