"""bench_patch on a CPU: variants run, compute the same losses and draw the same tokens."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

main = importlib.import_module("bench_patch").main
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
    assert all(row["same_as_transformers"] == 1.0 for row in results["decoding"])
    assert "| fuselm |" in done.stdout and "| fuselm | 16 |" in done.stdout


def test_unknown_parts_are_named(capsys):
    assert main(["--tiny", "--parts", "fuselm,unsloth"]) == 2
    assert "error: --parts unsloth: expected transformers, liger, fuselm, decode" in capsys.readouterr().err
    assert main(["--tiny", "--decoding", "fuselm,vllm"]) == 2
    assert "error: --decoding 'vllm': expected transformers, transformers static" in capsys.readouterr().err
