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


def test_the_rate_of_products_under_load_is_said_where_it_was_measured():
    rows = [
        _row("loss", f"{n}x9", {"fuselm": _measured(1.0)}, product_tflops=rate) for n, rate in ((8, 651.0), (9, 640.4))
    ]
    other = _row("norm", "9x9", {"fuselm": _measured(1.0)})
    assert "700 TFLOP/s; right after the load of long calls, in their rounds, 640 to 651." in tables.full_tables(
        tables.merged([_facts(*rows, other)])
    )
    assert "matmul of 8192³ 700 TFLOP/s." in tables.full_tables(tables.merged([_facts(other)]))


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


def _report(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, words)])
    return report.main()


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A README, a performance page and a folder of published results in the place of the repository's."""
    text = "# Speed\n\n<!-- steps -->\nold\n<!-- /steps -->\n<!-- kernels -->\nold\n<!-- /kernels -->\nafter\n"
    for name in ("README", "PERFORMANCE"):
        monkeypatch.setattr(report, name, tmp_path / f"{name}.md")
        (tmp_path / f"{name}.md").write_text(text)
    monkeypatch.setattr(report, "PUBLISHED", tmp_path / "published")
    return tmp_path


def test_results_stay_beside_their_file(pages, monkeypatch, capsys):
    """The last one's folder, also where that is the folder of published results; the pages as they were."""
    before = (pages / "README.md").read_text()
    files = [pages / "one" / "a.json", pages / "published" / "b.json"]
    for path in files:
        path.parent.mkdir()
        path.write_text(json.dumps(FACTS))
    assert _report(monkeypatch, *files) == 0
    assert [path.name for path in files[0].parent.iterdir()] == ["a.json"]
    assert (pages / "published" / "kernels.md").read_text() == tables.summary_table(tables.merged([FACTS]))
    for name in ("kernels", "kernels_roofline", "kernels_time"):
        assert (pages / "published" / f"{name}.png").stat().st_size > 10_000
        assert "<svg" in (pages / "published" / f"{name}.svg").read_text()[:1000]
    assert {(pages / name).read_text() for name in ("README.md", "PERFORMANCE.md")} == {before}
    printed = capsys.readouterr().out
    assert "| norm | 2 | 1.00x |" in printed and "### norm" not in printed and "kernels_full.md" in printed


def test_publishing_writes_the_pages(pages, monkeypatch):
    for draw in ("relative_times", "roofline_shares", "times_by_size"):
        monkeypatch.setattr(report, draw, lambda results, folder: [])
    results = pages / "kernels.json"
    results.write_text(json.dumps(FACTS))
    start = (pages / "README.md").read_text().partition("<!-- kernels -->")[0]
    assert _report(monkeypatch, results, "--publish") == 0
    summary, full = ((pages / "published" / f"{name}.md").read_text() for name in ("kernels", "kernels_full"))
    assert (pages / "README.md").read_text() == f"{start}<!-- kernels -->\n{summary}<!-- /kernels -->\nafter\n"
    assert (pages / "PERFORMANCE.md").read_text() == f"{start}<!-- kernels -->\n{full}<!-- /kernels -->\nafter\n"
    assert not (pages / "kernels.md").exists()
    (pages / "README.md").write_text("# Speed")
    (pages / "published" / "kernels.md").write_text("as it was")
    with pytest.raises(SystemExit, match=r"README\.md: the page has no <!-- kernels -->"):
        _report(monkeypatch, results, "--publish")
    assert (pages / "published" / "kernels.md").read_text() == "as it was"
    with pytest.raises(SystemExit, match="leave --output out"):
        _report(monkeypatch, results, "--publish", "--output", pages)


STEPS = {
    "environment": {"card": "CPU (x86_64)", "torch": "2", "triton": "3", "commit": "c"}, "preset": "p", "steps": 1,
    "note": "", "largest_loss_difference_after_step_10": None, "runs": [dict.fromkeys(report.STEP_ENTRIES["runs"], 1)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (_facts(*FACTS["rows"], shows_gpu=False), r"small shapes \(shows_gpu is false\)"),
        (_facts(*FACTS["rows"], environment={"card": "CPU (x86_64)", "commit": "c"}, shows_gpu=False), "without a GPU"),
        (STEPS, r"without a GPU, on a CPU \(x86_64\)"),
    ],
)
def test_figures_that_show_no_gpu_are_not_published(facts, why, pages, monkeypatch):
    before = (pages / "README.md").read_text()
    (pages / "good.json").write_text(json.dumps(FACTS))
    (pages / "other.json").write_text(json.dumps(facts))
    with pytest.raises(SystemExit, match=rf"^error: \S*other\.json: it was measured .*{why}"):
        _report(monkeypatch, pages / "good.json", pages / "other.json", "--publish")
    assert not (pages / "published").exists()
    assert (pages / "README.md").read_text() == before == (pages / "PERFORMANCE.md").read_text()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "No such file or directory"),
        ('{"rows": [', r"not JSON \(Expecting value: line 1 column 11"),
        ("[1]", "it lacks environment, peers, .*rows"),
        (json.dumps({k: v for k, v in FACTS.items() if k not in ("peers", "left_out")}), "it lacks peers, left_out;"),
        (json.dumps(FACTS | {"environment": {"card": "A card"}}), "its environment lacks commit;"),
        (json.dumps(FACTS | {"rows": [FACTS["rows"][0], {"op": "norm"}]}), r"rows\[1\] lacks label, direction"),
        (json.dumps(FACTS | {"rows": []}), "it has no rows;"),
        (json.dumps({"environment": {}, "method": "", "runs": []}), "it lacks preset, steps, note"),
        (json.dumps(STEPS | {"runs": [{"gpus": 1}]}), r"runs\[0\] lacks kernels, losses"),
        (json.dumps(STEPS | {"runs": []}), "it has no runs or comparison;"),
    ],
)
@pytest.mark.parametrize("compare", [False, True])
def test_what_is_no_result_file_is_an_error_of_one_line(compare, text, why, tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        SystemExit, match=rf"^error: \S*x\.json: {why}.*expected a result file of compare_ker"
    ) as caught:
        _report(monkeypatch, *(["--compare", path, path] if compare else [path]))
    assert "\n" not in caught.value.code


def test_whole_steps_are_not_compared_as_kernels(tmp_path, monkeypatch):
    (tmp_path / "x.json").write_text(json.dumps(STEPS))
    with pytest.raises(SystemExit, match=r"x\.json: a result of bench_step\.py; expected one of compare_kernels"):
        _report(monkeypatch, "--compare", tmp_path / "x.json", tmp_path / "x.json")
    with pytest.raises(SystemExit, match="no result files"):
        _report(monkeypatch)


def _odd(times: list[float | None]) -> str:
    """The sentence on rows of other sizes where the peer takes 1.0 and ours these times."""
    rows = [
        _row(
            "norm", f"{n}x1", {"fuselm": _measured(ms, "ok" if ms else "failed: x"), "Liger": _measured(1.0)}, odd=True
        )
        for n, ms in enumerate(times)
    ]
    round_one = _row("norm", "8x8", {"fuselm": _measured(2.0), "Liger": _measured(1.0)})
    return tables.other_sizes(tables.merged([_facts(round_one, *rows)]))


KIND = "(off block borders, one row)"


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([], "Round sizes only; no other sizes were measured."),
        ([1.0], f"Round sizes only. The one row of another size {KIND} is not behind."),
        ([1.25], f"Round sizes only. The one row of another size {KIND} is behind."),
        ([0.5, 1.0], f"Round sizes only. Of the 2 rows of other sizes {KIND} none is behind."),
        ([0.5, 1.25], f"Round sizes only. Of the 2 rows of other sizes {KIND} 1 is behind: norm 1x1 forward (0.80x)."),
        (
            [1.001, 1.25, None],
            f"Round sizes only. Of the 3 rows of other sizes {KIND} 2 are behind: norm 1x1 forward (0.80x), norm 0x1 "
            "forward (0.9990x); 1 failed: norm 2x1 forward.",
        ),
        (
            [2.0, 2.5, 1.25, 4.0, 5.0, 8.0, 10.0],
            f"Round sizes only. Of the 7 rows of other sizes {KIND} 7 are behind: norm 6x1 forward (0.10x), norm 5x1 "
            "forward (0.12x), norm 4x1 forward (0.20x), norm 3x1 forward (0.25x), norm 1x1 forward (0.40x) and 2 more.",
        ),
    ],
)
def test_what_the_summary_leaves_out_is_said(times, said):
    assert _odd(times) == said


def test_the_line_on_other_sizes_is_between_the_table_and_the_source():
    lines = tables.summary_table(tables.merged([FACTS])).splitlines()
    assert lines[-5].startswith("| loss ") and lines[-4] == lines[-2] == ""
    assert lines[-3] == f"Round sizes only. The one row of another size {KIND} is not behind."


@pytest.mark.parametrize(
    ("status", "short"),
    [
        ("failed: RuntimeError: a | b", "failed: RuntimeError: a / b"),
        (
            "failed: TypeError: epilogue fn depends on <ContextVar name='_L' default=() at 0x7f807538be70> (type x), y",
            "failed: TypeError: epilogue fn depends on ContextVar...",
        ),
        ("failed: <function <lambda> at 0x7f807538be70> raised", "failed: function raised"),
        ("failed: bad <Tensor of shape (3,", "failed: bad Tensor"),  # cut off within it
        ("failed: address 0x7f807538be70 is bad, code 0x2", "failed: address is bad, code 0x2"),
        ("failed: copy<bf16, 16> of a < b", "failed: copy<bf16, 16> of a < b"),
        (
            "failed: DSLRuntimeError: error[INTERNAL]: The compiler could not build valid IR for this code. error: IR",
            "failed: DSLRuntimeError: The compiler could not build...",
        ),
        ("wrong: " + "x" * 53, "wrong: " + "x" * 53),
        ("wrong: " + "x" * 54, "wrong..."),
        ("y" * 61, "y" * 57 + "..."),
    ],
)
def test_a_status_in_a_cell_is_short(status, short):
    assert tables._short(status) == short and len(short) <= 60


def test_what_was_not_timed_in_several_rows_is_said_once_a_table():
    reason = "not timed: the formula holds all scores; torch's own attention is there as SDPA"
    times = {"fuselm": _measured(1.0), "FA4": _measured(2.0)}
    skipped = times | {"eager": _measured(None, reason)}
    rows = [_row("attention", "1x1", skipped | {"cuDNN": _measured(None, "not timed: no windows")})]
    rows += [_row("attention", "2x2", skipped), _row("attention", "3x3", times | {"eager": _measured(8.0)})]
    rows += [_row("loss", f"{n}x{n}", times | {"QuACK": _measured(None, "not timed: w")}) for n in (1, 2)]
    rows += [_row("norm", f"{n}x{n}", times | {"QuACK": _measured(None, "failed: w")}) for n in (1, 2)]
    attention, loss, norm = tables.full_tables(tables.merged([_facts(*rows)])).split("### ")[1:4]
    one, two, three = (line for line in attention.splitlines() if line[:5] in ("| 1x1", "| 2x2", "| 3x3"))
    assert one.endswith("| cuDNN (not timed: no windows) |") and two.endswith("|  |")
    assert three.endswith("| eager 8.000 |")
    notes = [line for line in attention.splitlines() if line.startswith("Not timed")]
    assert notes == [f"Not timed: eager in 2 of the 3 rows ({reason.removeprefix('not timed: ')})."]
    assert "\n\nNot timed: QuACK in all rows (w).\n" in loss and "QuACK (not timed" not in loss
    assert norm.count("QuACK (failed: w) |") == 2 and "Not timed" not in norm


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
