"""Curves of several runs: what is read from both formats, what the table says, and the notebook that shows them."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path

import pytest

from fuselm.train.compare import Curves, draw, load_curves, main, table, with_names_apart
from fuselm.train.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "curves.ipynb"


def write_run(folder: Path, *, steps: int = 60, offset: float = 0.0) -> Path:
    """A run whose loss falls from 5 + offset by 0.01 a step."""
    folder.mkdir(parents=True)
    entries = []
    for step in range(1, steps + 1):
        speed = 1000.0 + step
        loss = None if step == 7 else 5 + offset - 0.01 * step
        entries.append(
            {"step": step, "loss": loss, "grad_norm": 2.0, "lr": 1e-3, "tokens": 512 * step, "tokens_per_second": speed}
        )
        if step % 20 == 0:
            entries.append({"step": step, "validation_loss": 5.5 - step / 100 + 0.3 * (step == 60)})
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (folder / "metrics.jsonl").write_text(text + '{"step": 61, "lo')  # a crash cut the last line off
    return folder


def write_log(folder: Path) -> Path:
    """As llm.c writes it."""
    folder.mkdir(parents=True)
    lines = ["s:0 eval:0.2467", "s:0 tel:10.9901"]
    lines += [
        f"s:{step} trl:{9 - step / 50:.4f} lr:{step * 1e-5:.6f} norm:{20 / (step + 1):.2f}" for step in range(100)
    ]
    lines += ["s:100 tel:6.9000", "s:100 eval:0.2601", "", "s:101 trl:nan lr:0.001 norm:inf", "s:102 trl:"]
    (folder / "main.log").write_text("\n".join(lines) + "\n")
    return folder


def points(line) -> list[list[float]]:
    return line.get_xydata().tolist()


def test_metrics_are_read(tmp_path: Path) -> None:
    curves = load_curves(write_run(tmp_path / "one"))
    assert curves.name == "one"
    assert curves.steps["loss"] == [s for s in range(1, 61) if s != 7] and curves.values["loss"][0] == 4.99
    assert curves.steps["validation_loss"] == [20, 40, 60] and curves.values["validation_loss"] == [5.3, 5.1, 5.2]
    assert curves.values["tokens_per_second"][-1] == 1060.0 and curves.values["tokens"][-1] == 512 * 60
    assert load_curves(tmp_path / "one" / "metrics.jsonl").values == curves.values


def test_llm_c_logs_are_read(tmp_path: Path) -> None:
    curves = load_curves(write_log(tmp_path / "log124M"))
    assert curves.name == "log124M"
    assert curves.steps["loss"] == list(range(100)) and curves.values["loss"][50] == 8.0
    assert (curves.steps["validation_loss"], curves.values["validation_loss"]) == ([0, 100], [10.9901, 6.9])
    assert curves.values["grad_norm"][:2] == [20.0, 10.0] and "tokens_per_second" not in curves.values
    assert curves.steps["lr"][-1] == 101 and load_curves(tmp_path / "log124M" / "main.log").values == curves.values


def test_table_says_what_the_curves_say(tmp_path: Path) -> None:
    runs = [load_curves(write_run(tmp_path / "one")), load_curves(write_log(tmp_path / "log124M"))]
    lines = [line.split() for line in table(runs).splitlines()]
    mean = sum(5 - 0.01 * step for step in range(41, 61)) / 20
    assert lines[1] == ["one", "60", "30,720", f"{mean:.4f}", "5.2000", "5.1000", "40", "2.000", "1,030"]
    assert lines[2][:7] == ["log124M", "101", "-", f"{9 - 89.5 / 50:.4f}", "6.9000", "6.9000", "100"]
    assert lines[2][-1] == "-"


def test_every_run_is_in_every_panel_that_it_has_numbers_for(tmp_path: Path) -> None:
    runs = [load_curves(write_run(tmp_path / "one")), load_curves(write_log(tmp_path / "log124M"))]
    panels = {axes.get_title().split(" (")[0]: axes for axes in draw(runs).axes}
    assert list(panels) == ["training loss", "validation loss", "gradient norm", "tokens a second"]
    legends = {}
    for title, axes in panels.items():
        legend = axes.get_legend()
        legends[title] = [] if legend is None else [text.get_text() for text in legend.get_texts()]
    assert legends["tokens a second"] == ["one"]
    assert all(names == ["one", "log124M"] for title, names in legends.items() if title != "tokens a second")
    line = panels["validation loss"].get_lines()[0]
    assert points(line) == [[20, 5.3], [40, 5.1], [60, 5.2]]
    by_tokens = draw(runs[:1], by_tokens=True).axes[1].get_lines()[0]
    assert [x for x, _ in points(by_tokens)] == [20 * 512, 40 * 512, 60 * 512]
    with pytest.raises(UserError, match="run log124M does not say how many tokens"):
        draw(runs, by_tokens=True)


def test_names_that_occur_twice_get_numbers() -> None:
    assert [run.name for run in with_names_apart([Curves("a"), Curves("b"), Curves("a")])] == ["a (1)", "b", "a (2)"]


def test_what_is_not_finite_is_left_out() -> None:
    curves = Curves("a")
    for step, value in enumerate((1.0, math.nan, math.inf, 2.0)):
        curves.add("loss", step, value)
    assert (curves.steps["loss"], curves.values["loss"]) == ([0, 3], [1.0, 2.0])


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run", offset=0.5)
    picture = tmp_path / "out.png"
    assert main([str(one), str(two), "--output", str(picture)]) == 0
    output = capsys.readouterr().out
    assert "run (1)" in output and "run (2)" in output and output.endswith(f"wrote {picture}\n")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text("[1]\n")
    for arguments, message in (
        ([], "RUN"),
        ([str(tmp_path / "none")], "none does not exist"),
        ([str(tmp_path / "empty")], "has neither metrics.jsonl nor main.log"),
        ([str(tmp_path / "bare")], "holds no steps"),
        ([str(one), "--output", str(tmp_path / "no" / "x.png")], "cannot write output"),
        ([str(one), "--output", str(tmp_path / "x.doc")], "cannot write output"),
        ([str(one), "--outptu", "x.png"], "unknown option --outptu (did you mean --output?)"),
    ):
        assert main(arguments) == 2
        errors = capsys.readouterr().err
        assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    write_run(tmp_path / "runs" / "one")
    write_run(tmp_path / "runs" / "two", offset=0.25)
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names: dict = {}
    pictures: list[bytes] = []
    for cell in cells:
        *body, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
        shown = None
        if isinstance(last, ast.Expr):  # what a notebook shows below the cell
            shown = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
        else:
            exec(compile(ast.Module([last], []), str(NOTEBOOK), "exec"), names)
        pictures += [] if shown is None else [shown._repr_png_()]
    assert len(pictures) == 2 and all(picture[:4] == b"\x89PNG" for picture in pictures)
    assert capsys.readouterr().out.splitlines()[1].startswith("one ")
    assert len(names["figure"].axes) == 4
    line = names["apart"].axes[0].get_lines()[0]
    assert len(line.get_ydata()) == 59 and list(line.get_ydata()) == pytest.approx([0.25] * 59)
