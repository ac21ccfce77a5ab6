"""benchmarks/sanitize.py without a GPU: what it makes of the words of compute-sanitizer, and of its silence."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselm.kernels.specs.registry import SPECS

# Scripts of benchmarks/, which pytest's configuration puts on sys.path and a type checker does not know.
sanitize: Any = importlib.import_module("sanitize")
sanitize_cases: Any = importlib.import_module("sanitize_cases")

BANNER = "========= COMPUTE-SANITIZER"
INVALID = [
    "========= Invalid __global__ read of size 4 bytes",
    "=========     at _norm_kernel+0x120",
    "=========     by thread (3,0,0) in block (0,0,0)",
]
RACE = [
    "========= Error: Race reported between Write access at _loss_kernel+0x80 and Read access at _loss_kernel+0x90",
    "========= Warning: Race reported between Read access at _loss_kernel+0x10 and Write access at _loss_kernel+0x20",
]
REFUSAL = "========= Error: Device not supported. Please refer to the documentation"


def _case(name: str, *inside: str, end: str | None = "done") -> list[str]:
    return [f"case {name}", *inside, *([] if end is None else [f"{end} {name}" if end == "done" else end])]


def _check(*processes: tuple[list[str], str], cases: tuple[str, ...] = ("norm", "loss", "last")) -> Any:
    """Entries of the table, and which cases each process was given."""
    given: list[list[str]] = []
    outputs = iter(processes)

    def run(left: Any, seconds: float) -> tuple[list[str], str]:
        assert seconds > 0
        given.append(list(left))
        lines, ended = next(outputs)
        return [line + "\n" for line in lines], ended

    return sanitize.check(run, cases, time.monotonic() + 60), given


def test_every_kernel_has_a_case():
    names = [case.name for case in sanitize_cases.CASES]
    assert len(set(names)) == len(names) and names[-1] == sanitize_cases.CONTROL
    for op in [spec.name for spec in SPECS] + ["adamw", "attention portable", "attention Hopper"]:
        assert any(name.startswith(op) for name in names), op


@pytest.mark.parametrize("name", ["rms_norm", "rope_qkv", "adamw bf16, master weights", "decode_attention"])
def test_cases_run(name):
    """On a CPU in the interpreter; the others take longer."""
    (case,) = [case for case in sanitize_cases.CASES if case.name == name]
    case.run(torch.device("cpu"))


def test_a_case_for_another_card_says_why():
    for case in sanitize_cases.CASES:
        if "Hopper" in case.name:
            with pytest.raises(sanitize_cases.NotHereError, match=r"Hopper|Gluon"):
                case.run(torch.device("cpu"))


def test_clean_cases_of_one_process():
    lines = [BANNER, *_case("norm"), *_case("loss"), *_case("last"), "========= ERROR SUMMARY: 0 errors"]
    results, given = _check((lines, ""))
    assert results == dict.fromkeys(("norm", "loss", "last"), "clean") and given == [["norm", "loss", "last"]]
    assert sanitize.status({("memcheck", case): result for case, result in results.items()}) == 0


def test_errors_belong_to_the_case_that_was_running_and_the_next_process_goes_on_behind_it():
    """An access out of bounds ends the CUDA context, so that the process stops; a race does not."""
    first = [BANNER, *_case("norm", *INVALID, end="raised norm: RuntimeError: launch failure")]
    second = [BANNER, *_case("loss", *RACE), *_case("last"), "========= RACECHECK SUMMARY: 2 hazards displayed"]
    results, given = _check((first, ""), (second, ""))
    assert results["norm"] == "error: Invalid __global__ read of size 4 bytes at _norm_kernel+0x120"
    assert results["loss"].startswith("2 errors: Error: Race reported between Write access at _loss_kernel+0x80")
    assert results["last"] == "clean" and given == [["norm", "loss", "last"], ["loss", "last"]]
    assert sanitize.status({("racecheck", case): result for case, result in results.items()}) == 1


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([BANNER, REFUSAL, *_case("norm"), *_case("loss"), *_case("last")], "Device not supported"),
        ([BANNER, "========= Error: Target terminated before its first call", "========= Hint: try x"], "Target term"),
        ([BANNER, "Traceback", "ImportError: no module"], "ImportError"),
        ([*_case("norm"), *_case("loss"), *_case("last")], "printed nothing of its own"),
        (["bash: compute-sanitizer: permission denied"], "permission denied"),
    ],
)
def test_a_tool_that_does_not_check_is_never_clean(lines, words):
    """A refusal is in the tool's words, also where the program goes on to run unchecked."""
    results, given = _check((lines, ""))
    assert len(given) == 1 and len(results) == 3
    assert all(result.startswith("refused: ") and words in result for result in results.values()), results
    assert sanitize.status({("memcheck", case): result for case, result in results.items()}) == 2


def test_a_refusal_of_one_kernel_is_that_kernel_s():
    internal = "========= Internal Sanitizer Error: instrumentation failed, later errors may be missed"
    first = [BANNER, *_case("norm"), *_case("loss", internal), *_case("last")]
    results, given = _check((first, ""), ([BANNER, *_case("last")], ""))
    assert results["norm"] == results["last"] == "clean" and "instrumentation failed" in results["loss"]
    assert given[1] == ["last"]
    twice = [BANNER, *_case("norm", REFUSAL), *_case("loss")]
    results, given = _check((twice, ""), ([BANNER, *_case("loss", REFUSAL)], ""))
    assert len(given) == 2 and all(result.startswith("refused: Error: Device") for result in results.values())


def test_what_hangs_raises_or_is_left_out_says_so():
    first = [BANNER, *_case("norm", end=None)]
    second = [BANNER, *_case("loss", end="raised loss: ValueError: no"), *_case("last", end="left out last: no Hopper")]
    results, _ = _check((first, "ended after 45 s without a line"), (second, ""))
    assert results == {
        "norm": "failed: ended after 45 s without a line",
        "loss": "raised: ValueError: no",
        "last": "not on this card: no Hopper",
    }
    late, given = sanitize.check(None, ["norm"], time.monotonic() - 1), []
    assert late == {"norm": "not run: no time left"} and given == []
    assert sanitize.status({("memcheck", "norm"): "not run: no time left"}) == 2
    assert sanitize.status({("memcheck", "norm"): "not on this card: no Hopper"}) == 0


def test_the_control_must_be_found():
    control = sanitize_cases.CONTROL
    found = sanitize.control("error: Invalid __global__ read of size 4 bytes at _read_beyond_kernel+0x10")
    assert found.startswith("found") and sanitize.status({("memcheck", control): found}) == 0
    assert sanitize.status({("memcheck", control): sanitize.control("clean"), ("memcheck", "norm"): "clean"}) == 2


def test_processes_are_ended_that_are_silent_or_late():
    script = (
        "import sys, time; print('case a', flush=True); time.sleep(float(sys.argv[1])); print('done a', flush=True)"
    )
    command = [sys.executable, "-c", script]
    assert sanitize.lines_of([*command, "0"], os.environ, 30, 30) == (["case a\n", "done a\n"], "")
    began = time.monotonic()
    lines, ended = sanitize.lines_of([*command, "60"], os.environ, 0.5, 30)
    assert "without a line" in ended and time.monotonic() - began < 10 and "done a\n" not in lines
    assert sanitize.lines_of([*command, "60"], os.environ, 30, 0.5)[1] == "no time left"


def test_a_program_between_runs_the_cases_and_its_output_is_kept(monkeypatch, tmp_path):
    """A stand-in for compute-sanitizer that runs the command behind its options, and one for the cases."""
    tool = tmp_path / "tool"
    tool.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nprint('{BANNER}', flush=True)\n"
        "at = sys.argv.index('--launch-timeout') + 2\n"
        "subprocess.run(sys.argv[at:])\nprint('========= ERROR SUMMARY: 0 errors')\n"
    )
    tool.chmod(0o755)
    script = "import os, sys\nassert 'PYTORCH_NO_CUDA_MEMORY_CACHING' in os.environ\n"
    script += "for name in sys.argv[1:]: print('case', name); print('done', name)"
    monkeypatch.setattr(sanitize, "_command", lambda names: [sys.executable, "-c", script, *names])
    arguments = sanitize.Arguments(tools=("memcheck", "racecheck"), log=tmp_path / "log")
    names = ["norm", "a loss", sanitize_cases.CONTROL]
    results = sanitize.sanitize(arguments, sanitize.find_sanitizer(str(tool)), names)
    assert results == {
        ("memcheck", "norm"): "clean",
        ("memcheck", "a loss"): "clean",
        ("memcheck", sanitize_cases.CONTROL): "clean",
        ("racecheck", "norm"): "clean",
        ("racecheck", "a loss"): "clean",
    }
    assert sanitize.status(results) == 2  # the stand-in finds nothing, so its word counts for nothing
    assert "done a loss" in (tmp_path / "log" / "racecheck.txt").read_text()


def test_without_a_gpu_it_says_that_nothing_was_checked(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: False)
    assert sanitize.main() == 2 and "no CUDA device" in capsys.readouterr().out
    monkeypatch.setattr(sanitize.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--sanitizer", str(Path("/nonexistent/tool"))])
    assert sanitize.main() == 2 and "/nonexistent/tool is not there" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--cases", "gelu"])
    with pytest.raises(SystemExit, match="no case has that"):
        sanitize.main()
