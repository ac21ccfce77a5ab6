"""The report: its numbers are those of the result files, and the README shows what it made of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def _module(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        sys.modules[name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module


@pytest.fixture(scope="module")
def report():
    return _module("report")


@pytest.fixture(scope="module")
def bench_step():
    return _module("bench_step")


def test_the_readme_shows_the_committed_results(report):
    table = (RESULTS / "steps.md").read_text()
    page = (ROOT / "README.md").read_text()
    assert table.strip() and report.replace_table(page, table) == page
    for line in table.splitlines():
        if line.startswith("| ") and line.split("|")[1].strip() not in ("model", ""):
            model, gpus, kernels, speed = (cell.strip() for cell in line.split("|")[1:5])
            runs = [
                run
                for path in RESULTS.glob(f"step_{model}*.json")
                for run in json.loads(path.read_text())["runs"]
                if (str(run["gpus"]), run["kernels"]) == (gpus, kernels)
            ]
            assert speed in {f"{run['tokens_per_second']:,.0f}" for run in runs}, line


def test_a_page_without_markers_is_refused(report):
    with pytest.raises(ValueError, match="has no <!-- steps -->"):
        report.replace_table("# A page", "| table |")


def test_differences_are_against_the_first_run_after_the_tenth_step(bench_step):
    first = {"losses": [9.0] * 10 + [4.0, 2.0]}
    second = {"losses": [1.0] * 10 + [4.0, 2.1]}
    third = {"losses": [9.0] * 10 + [3.0, 2.0]}
    assert bench_step.largest_difference([first, second]) == pytest.approx(0.05)
    assert bench_step.largest_difference([first, second, third]) == pytest.approx(0.25)
    assert bench_step.largest_difference([first]) is None


def test_recompilations_count_after_the_step_only(bench_step):
    log = "Recompiling function f\nstep   1/200  loss 1\nRecompiling function f\nstep   2/200  loss 1\n"
    assert bench_step.recompilations_after(log, 2) == 0
    assert bench_step.recompilations_after(log + "Recompiling function g\n", 2) == 1
    with pytest.raises(ValueError, match="no line for step 2"):
        bench_step.recompilations_after("step 20/200  loss 1", 2)


def test_a_control_is_compared_with_the_run_it_controls_and_with_nothing_else(bench_step, report):
    def run(kernels: str, loss: float) -> dict:
        return {
            "kernels": kernels,
            "gpus": 1,
            "losses": [9.0] * 10 + [loss, 4.0],
            "tokens_per_second": 1.0,
            "mfu": None,
            "memory_gib": 1.0,
            "recompilations_after_step_2": 0,
        }

    runs = [run("triton", 4.0), run("eager", 5.0), run("eager+cudnn", 5.5)]
    assert bench_step.control_differences(runs) == {"eager+cudnn": pytest.approx(0.1)}
    facts = {"card": "card", "torch": "2", "triton": "3", "commit": "c"}
    result = {
        "preset": "p",
        "steps": 12,
        "note": "",
        "environment": facts,
        "largest_loss_difference_after_step_10": 0.25,
        "control_loss_differences": bench_step.control_differences(runs),
        "runs": runs,
    }
    rows = {row.split("|")[3].strip(): row for row in report.markdown([result]).splitlines() if row.startswith("| p")}
    assert "25.00%" in rows["eager"] and "10.00% from eager (control)" in rows["eager+cudnn"]
