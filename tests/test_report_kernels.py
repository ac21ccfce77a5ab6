"""The report of the kernel comparison: losses and failures are in it, and the gate closes for what got worse."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from typing import Any

import pytest

# Scripts of benchmarks/, which pytest's configuration puts on sys.path and a type checker does not know.
report: Any = importlib.import_module("report")
compare_kernels: Any = importlib.import_module("compare_kernels")
measure: Any = importlib.import_module("measure")
tables: Any = importlib.import_module("report_kernels")


def _measured(ms: float | None, status: str = "ok", **more: Any) -> dict[str, Any]:
    facts = {"status": status, "ms": ms, "low_ms": ms and ms * 0.99, "high_ms": ms and ms * 1.01, "graph_ms": None}
    facts |= {"graph_note": "", "gb_s": ms and 100 / ms, "tflops": None, "share": ms and 0.5 / ms, "extra_gib": 0.5}
    return facts | more


def _row(op: str, label: str, providers: dict[str, Any], **more: Any) -> dict[str, Any]:
    row = {"op": op, "label": label, "direction": "forward", "dtype": "bfloat16", "bytes": 10**8, "flops": 0}
    return row | {"goal_ms": None, "near": "", "odd": False, "rounds": 5, "providers": providers} | more


def _facts(*rows: Any, **more: Any) -> dict[str, Any]:
    facts = {"environment": {"card": "A card", "driver": "1.2", "commit": "abc"}, "peers": {"liger-kernel": "0.8.5"}}
    facts |= {"missing": {"apex": "ModuleNotFoundError"}, "shows_gpu": True, "left_out": [], "rows": list(rows)}
    return facts | {"ceilings": {"copy_gb_s": 4280.0, "matmul_tflops": 700.0}} | more


FACTS = _facts(
    _row("norm", "64x64", {"fuselm": _measured(1.0), "eager": _measured(4.0), "Liger": _measured(2.0)}, goal_ms=1.5),
    _row(
        "norm",
        "128x64",
        {
            "fuselm": _measured(2.0),
            "Liger": _measured(1.0, "wrong: output 0"),
            "QuACK": _measured(None, "failed: RuntimeError: \x1b[91m\x1b[1ma\x1b[0m | b\x1b[9"),
            "eager": _measured(1.0),
            "fuselm, in place": _measured(0.5),
        },
        goal_ms=1.5,
    ),
    _row("norm", "65x64", {"fuselm": _measured(1.2), "eager": _measured(4.0)}, odd=True, near="64x64"),
    _row("loss", "8x8", {"fuselm": _measured(None, "failed: output 0: error 1"), "eager": _measured(1.0)}),
    left_out=["norm 64x64", "loss 9x9"],
)


def test_the_file_has_errors_without_their_colours():
    measured = measure.Measurement("failed: \x1b[91m\x1b[1merror[X]:\x1b[0m no", graph_note="\x1b[92mwhy\x1b[0m")
    result = measure.Result("norm", "8x8", "forward", "bfloat16", 1, 0, None, "", False, providers={"QuACK": measured})
    row = compare_kernels._record(result)
    assert row["label"] == "8x8" and row["providers"]["QuACK"]["status"] == "failed: error[X]: no"
    assert row["providers"]["QuACK"]["graph_note"] == "why"


def test_the_summary_counts_losses_and_failures():
    lines = tables.summary_table(tables.merged([FACTS])).splitlines()
    # 2.0 and 0.5 against the best peer that was right: the wrong one and ours in place do not count.
    assert "| norm | 2 | 1.00x | 0.50x, 128x64 forward, eager | 1 |" in lines
    assert "| loss | 1 | no peer | | 1 failed |" in lines
    assert lines[-1] == "A card, driver 1.2, commit abc; liger-kernel 0.8.5."


def test_the_full_table_has_every_provider_and_what_went_wrong():
    text = tables.full_tables(tables.merged([FACTS]))
    first, second, failed = (
        next(line for line in text.splitlines() if line.startswith(f"| {label} "))
        for label in ("64x64", "128x64", "8x8")
    )
    assert "| Liger 2.000 | 0.50 GiB | 2.00x | 1.5 met | eager 4.000 |" in first
    assert "| eager 1.000 | 0.50 GiB | 0.50x | 1.5 missed |" in second
    assert "Liger 1.000 (wrong: output 0); QuACK (failed: RuntimeError: a / b); fuselm, in place 0.5000 |" in second
    assert failed.startswith("| 8x8 | forward | failed: output 0: error 1 |")
    assert all(line.count("|") == 13 for line in text.splitlines() if line.startswith(("| 64x64", "| 128x64", "| 8x8")))
    assert "| norm 65x64 forward | 1.20 |" in text
    assert "Not compared: apex (ModuleNotFoundError)." in text
    assert "Left out, no time: loss 9x9." in text  # the other one is there
    assert "4,280 GB/s" in text


def test_a_copy_of_as_many_bytes_is_a_column_where_it_was_timed():
    row = _row("norm", "64x64", {"fuselm": _measured(1.0), "Liger": _measured(2.0)}, copy_ms=0.9)
    failed = _row("norm", "8x8", {"fuselm": _measured(None, "failed: x"), "Liger": _measured(2.0)})
    other = _row("loss", "9x9", {"fuselm": _measured(1.0), "Liger": _measured(2.0)})
    text = tables.full_tables(tables.merged([_facts(row, failed, other)]))
    assert "| 50% | 0.9000 | 0.50 GiB | Liger 2.000 |" in text  # of the norm
    assert "| failed: x |  |  |  |  |  | Liger 2.000 |" in text
    assert "| 50% | 0.50 GiB | Liger 2.000 |" in text  # of the loss
    assert {line.count("|") for line in text.splitlines() if "64x64 |" in line or "8x8 |" in line} == {14}


def test_a_goal_is_a_ratio_too():
    """To the peer that was best then, whoever is best now; without it, or where it was wrong, milliseconds alone."""
    times = {"fuselm": _measured(1.02), "Liger": _measured(1.1), "QuACK": _measured(1.05)}
    goal = {"goal_ms": 1.0, "goal_peer": ["Liger", 1.0625]}
    assert tables.goal_of(_row("norm", "8x8", times, **goal)) == "1 missed; 0.927 of Liger (asked 0.941) met"
    slower = times | {"fuselm": _measured(1.05)}
    assert tables.goal_of(_row("norm", "8x8", slower, **goal)) == "1 missed; 0.955 of Liger (asked 0.941) missed"
    for other in (_measured(1.1, "wrong: output 0"), _measured(None, "failed: x")):
        assert tables.goal_of(_row("norm", "8x8", times | {"Liger": other}, **goal)) == "1 missed"
    for ms, said in ((0.96, "; 1.062 of Liger (asked 0.941) missed"), (0.955, ""), (1.17, "")):  # a tenth off or more
        assert tables.goal_of(_row("norm", "8x8", times | {"Liger": _measured(ms)}, **goal)) == f"1 missed{said}"
    assert tables.goal_of(_row("norm", "8x8", times, goal_ms=1.02)) == "1.02 met"
    assert tables.goal_of(_row("norm", "8x8", {"fuselm": _measured(None, "failed: x")}, **goal)) == "1 missed"
    assert tables.goal_of(_row("norm", "8x8", times)) == ""


def test_every_goal_has_its_peer():
    rows: Any = importlib.import_module("rows")
    goals = {row.name: set(row.goal_ms) for row in rows.ROWS if row.goal_ms}
    assert goals.pop("adamw 1.236e9, bf16, fp32 master and moments") == {rows.STEP}  # torch has no such optimizer
    assert {name: set(peers) for name, peers in rows.GOAL_PEERS.items()} == goals
    ratios = [row.goal_ms[d] / rows.GOAL_PEERS[row.name][d][1] for row in rows.ROWS for d in goals.get(row.name, ())]
    assert len(ratios) == 38 and all(0.4 < ratio <= 1.01 for ratio in ratios)


def test_variants_of_ours_have_tables_of_their_own():
    providers = {
        "fuselm": _measured(1.0, graph_ms=0.8),
        "fuselm, compiled": _measured(1.5, graph_ms=0.82),
        "fuselm, Liger's chunk": _measured(1.6, extra_gib=0.25),
        "Liger": _measured(2.0),
    }
    text = tables.full_tables(tables.merged([_facts(_row("loss", "9x9", providers))]))
    assert "| loss 9x9 forward | 0.8000 | 0.8200 | 1.02 |" in text
    assert "| loss 9x9 forward | 1.600 | 0.25 GiB | 2.000 | 0.50 GiB | 1.25x |" in text


def test_a_later_file_replaces_rows_and_both_sources_are_named():
    later = _facts(
        _row("norm", "64x64", {"fuselm": _measured(4.0), "Liger": _measured(2.0)}),
        environment={"card": "Another card", "commit": "def"},
        shows_gpu=False,
    )
    text = tables.summary_table(tables.merged([FACTS, later]))
    assert "| norm | 2 | 0.50x | 0.50x" in text and "| 2 |" in text
    assert "A card, driver 1.2, commit abc" in text and "Another card, commit def" in text
    assert "show nothing about GPUs" in text


def _changed(provider: str, factor: float, **more: Any) -> dict[str, Any]:
    facts = copy.deepcopy(FACTS)
    measured = facts["rows"][0]["providers"][provider]
    for part in ("ms", "low_ms", "high_ms"):
        measured[part] *= factor
    measured |= more
    return facts


@pytest.mark.parametrize(
    ("facts", "code", "line"),
    [
        (FACTS, 0, "0 worse, 0 faster"),
        (_changed("fuselm", 1.2), 1, "norm 64x64 forward: slower: 1.000 -> 1.200 ms"),
        (_changed("fuselm", 0.8), 0, "norm 64x64 forward: faster: 1.000 -> 0.8000 ms"),
        (_changed("fuselm", 1.04), 0, "0 worse, 0 faster"),
        (_changed("fuselm", 1.2, low_ms=1.0), 0, "0 worse, 0 faster"),
        (_changed("fuselm", 1.0, extra_gib=0.6), 1, "more memory: 0.500 -> 0.600 GiB"),
        (_changed("fuselm", 1.0, status="failed: output 0"), 1, "norm 64x64 forward: failed: output 0"),
        (_facts(*FACTS["rows"][1:]), 1, "norm 64x64 forward: not measured"),
    ],
)
def test_the_gate(facts, code, line, tmp_path, monkeypatch, capsys):
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, content in zip(paths, (FACTS, facts), strict=True):
        path.write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["report.py", "--compare", *map(str, paths)])
    assert report.main() == code
    assert line in capsys.readouterr().out


def test_the_gate_takes_out_what_the_card_did_to_everyone():
    slower = copy.deepcopy(FACTS)
    for row in slower["rows"]:
        for measured in row["providers"].values():
            for part in ("ms", "low_ms", "high_ms"):
                measured[part] = measured[part] and measured[part] * 1.3
    old = tables.merged([FACTS])
    assert tables.changes(old, tables.merged([slower]), 0.05) == []
    assert tables.changes(old, tables.merged([_changed("Liger", 0.7)]), 0.05) == []  # one peer is no drift
    slower["rows"][0]["providers"]["fuselm"] = _measured(1.6)
    (change,) = tables.changes(old, tables.merged([slower]), 0.05)
    assert change.worse and "1.000 -> 1.231 ms (measured 1.600, peers x1.300)" in change.text


def test_the_pages_and_pictures_are_written(tmp_path, monkeypatch, capsys):
    results = tmp_path / "kernels.json"
    results.write_text(json.dumps(FACTS))
    page = tmp_path / "page.md"
    page.write_text("# Speed\n\n<!-- kernels -->\nold\n<!-- /kernels -->\nafter\n")
    other = tmp_path / "other.md"
    other.write_text(page.read_text())
    command = ["report.py", str(results), "--output", str(tmp_path), "--readme", str(page), "--performance", str(other)]
    monkeypatch.setattr(sys, "argv", command)
    assert report.main() == 0
    summary = (tmp_path / "kernels.md").read_text()
    assert page.read_text() == f"# Speed\n\n<!-- kernels -->\n{summary}<!-- /kernels -->\nafter\n"
    assert "### Sizes off the block borders" in other.read_text()
    for name in ("kernels", "kernels_roofline", "kernels_time"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()[:1000]
    page.write_text("# Speed")
    with pytest.raises(SystemExit, match=r"page\.md: the page has no <!-- kernels -->"):
        report.main()
    monkeypatch.setattr(sys, "argv", ["report.py"])
    with pytest.raises(SystemExit, match="no result files"):
        report.main()


@pytest.mark.parametrize(("ms", "text"), [(0.03456, "0.0346"), (0.5, "0.5000"), (1.2345, "1.234"), (39.84, "39.84")])
def test_times_have_four_digits(ms, text):
    assert tables.milliseconds(ms) == text


def test_the_committed_pages_show_the_committed_results():
    """Whatever kernels*.json lies in benchmarks/results is what kernels.md and the pages say."""
    results = report.Path(report.__file__).parent / "results"
    files = sorted(results.glob("kernels*.json"))
    facts = [json.loads(path.read_text()) for path in files]
    page = (results.parents[1] / "README.md").read_text()
    if facts:
        summary = tables.summary_table(tables.merged(facts))
        assert (results / "kernels.md").read_text() == summary
        assert report.replace_table(page, summary, report.KERNEL_MARKERS) == page
    else:
        assert "geometric mean" not in page  # no figures without a result file


def test_the_cost_of_the_same_bits_is_in_the_report_and_in_the_line_of_the_row():
    providers = {"fuselm": _measured(2.0), "fuselm, deterministic": _measured(2.5), "FA4": _measured(4.0)}
    refused = providers | {"fuselm, deterministic": _measured(None, "not timed: no Hopper card")}
    rows = [_row("attention", f"{n}x{n}", given, direction="backward") for n, given in ((1, providers), (2, refused))]
    forward = _row("attention", "1x1", providers)
    text = tables.full_tables(tables.merged([_facts(*rows, forward)]))
    assert "| attention 1x1 backward | 2.000 | 2.500 | 1.25x |" in text
    assert "| attention 2x2 backward | 2.000 | not timed: no Hopper card |  |" in text
    assert "| attention 1x1 forward | 2.000 | 2.500" not in text
    lines = [compare_kernels.summary(row) for row in (*rows, forward)]
    assert ["deterministic 2.500 ms, 1.25x the time" in line for line in lines] == [True, False, False]
    assert tables.best_peer(rows[0]) == "FA4"
