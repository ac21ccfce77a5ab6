"""The report: its numbers are those of the result files, and the README shows what it made of them."""

from __future__ import annotations

import importlib.util
import json
import re
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


@pytest.mark.parametrize(("name", "page"), [("steps", "README.md"), ("steps_own", "docs/performance.md")])
def test_the_pages_show_the_committed_results(report, name, page):
    table = (RESULTS / f"{name}.md").read_text()
    page = (ROOT / page).read_text()
    assert table.strip() and report.replace_table(page, table) == page
    for line in table.splitlines():
        if line.startswith("| ") and line.split("|")[1].strip() not in ("model", ""):
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            files = [json.loads(path.read_text()) for path in RESULTS.glob(f"step_{cells[0]}*.json")]
            runs = [run | {"provider": run["kernels"]} for file in files for run in file["runs"]]
            runs += [row for file in files for row in file.get("comparison", ()) if row["status"] == "ok"]
            here = [r for r in runs if (str(r["gpus"]), r["provider"]) == (cells[1], cells[2].removesuffix(", again"))]
            speeds = {f"{run['tokens_per_second']:,.0f}" for run in here}
            assert speeds & set(cells) or re.match("(failed|not run|not installed): ", cells[3]), line


def _row(provider: str, ms: float, loss: float, *, ours: bool = False, again: bool = False) -> dict:
    return {
        "provider": provider, "ours": ours, "again": again, "gpus": 1, "status": "ok", "memory_gib": ms / 10,
        "step_ms": {"median": ms, "low": ms - 1, "high": ms + 1, "steps": 4}, "tokens_per_second": 4096 / ms * 1e3,
        "mfu": 0.5, "mfu_causal": 0.4375, "compared_step": 14, "losses": [9.0] * 10 + [loss] * 4,
    }  # fmt: skip


def _result_with_peers(rows: list[dict]) -> dict:
    _module("step_compare").relate(rows)
    facts = {"card": "a card", "torch": "2", "triton": "3", "transformers": "5", "commit": "c"}
    return {
        "preset": "p", "steps": 14, "note": "", "environment": facts, "runs": [], "comparison": rows,
        "largest_loss_difference_after_step_10": None, "control_loss_differences": {},
    }  # fmt: skip


def test_a_peer_that_wins_is_shown_as_one_that_loses_and_one_that_failed_stays(report, tmp_path):
    """Times 100 and 104 of ours: 2.00, 1.00 and 0.49 of their mean; the fastest trains something else."""
    failed = {"provider": "hf+liger", "ours": False, "again": False, "gpus": 1, "status": "failed"}
    failed["reason"] = "\x1b[1mx\x1b[0m | y"
    rows = [
        _row("fuselm (triton)", 100.0, 4.0, ours=True),
        _row("hf", 204.0, 4.01),
        failed,
        _row("torchtitan", 91.8, 4.0),
        _row("hf+compile", 50.0, 4.2),
        _row("fuselm (triton)", 104.0, 4.0, ours=True, again=True),
    ]
    result = _result_with_peers(rows)
    text = report.markdown([result])
    lines = [line for line in text.splitlines() if line.startswith("| p ")]
    assert [line.split("|")[3].strip() for line in lines] == [
        "fuselm (triton)", "hf", "hf+liger", "torchtitan", "hf+compile", "fuselm (triton), again",
    ]  # fmt: skip
    assert len({line.count("|") - line.count("\\|") for line in lines}) == 1, "every row has all columns"
    assert (
        "204.0 (203.0 to 205.0) | 20,078 | 50.0% | 43.8% | 20.4 GiB | 4.0100 at step 14 | +0.25% | 2.00 |" in lines[1]
    )
    assert "failed: x \\| y" in lines[2] and lines[3].endswith("| +0.00% | 0.90 |")
    assert "+5.00%, **not the same training** | 0.49 |" in lines[4]
    assert "torchtitan, the fastest peer, takes 0.90 times our time" in text
    assert "Our two runs differ by 4.0%" in text and "6·L·H·D·S instead of 12·L·H·D·S" in text
    curves = report.curves_of(result)
    assert [curve.name for curve in curves] == [
        "fuselm", "hf", "torchtitan", "hf+compile", "fuselm, again",
    ]  # fmt: skip
    assert [curve.again for curve in curves] == [False] * 4 + [True], "its losses would lie over the first run's"
    report.picture([result], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("--parallel.activation-checkpointing swiglu'", "Ours ran with `--parallel.activation-checkpointing swiglu`"),
        ("--parallel.activation_checkpointing=full'", "Ours ran with `--parallel.activation-checkpointing full`"),
        ("--parallel.activation-checkpointing none'", ""),
        ("--data.vocab-size 16384'", ""),
    ],
)
def test_recomputation_that_only_ours_has_is_said(report, extra, said):
    rows = [_row("fuselm (triton)", 100.0, 4.0, ours=True), _row("hf", 204.0, 4.0)]
    text = report.markdown(
        [_result_with_peers(rows) | {"command": f"python benchmarks/bench_step.py '--extra={extra}"}]
    )
    (line,) = (line for line in text.splitlines() if line.startswith("- p on 1 GPU"))
    assert ("activation-checkpointing" in line) == bool(said) and said in line


@pytest.mark.parametrize(("gpus", "names"), [((2, 2), ["fuselm", "hf"]), ((1, 2), ["fuselm", "hf, 2 GPUs"])])
def test_curves_name_the_gpus_where_they_differ(report, gpus, names):
    rows = [_row("fuselm (triton)", 100.0, 4.0, ours=True), _row("hf", 204.0, 4.0)]
    for row, count in zip(rows, gpus, strict=True):
        row["gpus"] = count
    assert [curve.name for curve in report.curves_of(_result_with_peers(rows))] == names


def test_the_same_kernels_on_more_gpus_are_told_apart(report):
    rows = [_row("fuselm (triton)", 100.0, 4.0, ours=True), _row("fuselm (triton)", 60.0, 4.0, ours=True)]
    rows[1]["gpus"] = 2
    one, two = report.curves_of(_result_with_peers(rows))
    assert (one.name, two.name) == ("fuselm", "fuselm, 2 GPUs")
    assert one.style != two.style and one.colour != two.colour


def test_without_a_run_of_ours_nothing_is_claimed(report):
    rows = [{"provider": "fuselm (triton)", "ours": True, "again": False, "gpus": 1, "status": "failed", "reason": "r"}]
    text = report.markdown([_result_with_peers([*rows, _row("hf", 204.0, 4.0)])])
    assert "none of our runs ended well" in text and "times our time" not in text


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


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.name)
def test_a_result_says_where_it_was_measured(path):
    facts = json.loads(path.read_text())["environment"]
    assert {"card", "torch", "triton", "commit"} <= facts.keys() and facts["commit"] not in ("", "unknown", "head")
