"""benchmarks/sanitize.py without a GPU: what it makes of the words of compute-sanitizer, and of its silence."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
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
    results: dict[str, str] = {}
    outputs = iter(processes)

    def run(left: Any, seconds: float, take: Any) -> str:
        assert seconds > 0
        given.append(list(left))
        lines, ended = next(outputs)
        for line in lines:
            take(line + "\n")
        return ended

    def report(case: str, result: str) -> None:
        assert case not in results
        results[case] = result

    sanitize.check(run, cases, time.monotonic() + 60, report)
    return results, given


def _lines_of(command: list[str], silent_s: float, limit_s: float) -> tuple[list[str], str]:
    lines: list[str] = []
    ended = sanitize.Processes().lines_of(command, os.environ, silent_s, limit_s, lines.append)
    return lines, ended


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


def test_compiling_launches_nothing(monkeypatch, capsys):
    """Each case runs within compile_only, and without the time that a tool needs to print."""
    inside: list[str] = []

    @contextlib.contextmanager
    def compile_only() -> Iterator[None]:
        inside.append("begin")
        yield
        inside.append("end")

    monkeypatch.setattr(sanitize_cases, "compile_only", compile_only)
    monkeypatch.setattr(sanitize_cases, "SETTLE_S", 1000.0)
    case = sanitize_cases.SanitizerCase("norm", lambda device: inside.append("norm"))
    monkeypatch.setattr(sanitize_cases, "CASES", (case,))
    monkeypatch.setattr(sanitize_cases.torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(sanitize_cases.torch, "device", lambda name: "cpu")
    assert sanitize_cases.main([sanitize_cases.COMPILE, "norm"]) == 0 and inside == ["begin", "norm", "end"]
    assert capsys.readouterr().out == "case norm\ndone norm\n"
    monkeypatch.setattr(sanitize_cases, "SETTLE_S", 0.0)
    assert sanitize_cases.main(["norm"]) == 0 and inside[3:] == ["norm"]


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
    late: list[tuple[str, str]] = []
    sanitize.check(None, ["norm"], time.monotonic() - 1, lambda *result: late.append(result))
    assert late == [("norm", "not run: no time left")]
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
    assert _lines_of([*command, "0"], 30, 30) == (["case a\n", "done a\n"], "")
    began = time.monotonic()
    lines, ended = _lines_of([*command, "60"], 0.5, 30)
    assert "without a line" in ended and time.monotonic() - began < 10 and "done a\n" not in lines
    assert _lines_of([*command, "60"], 30, 0.5)[1] == "no time left"


def test_a_case_is_known_when_the_next_one_begins():
    """Unless the tool has not said its name, or has refused: then the process's end shows what its cases are worth."""
    known: list[str] = []
    before_the_end: list[list[str]] = []

    def check(*lines: str) -> list[str]:
        def run(left: Any, seconds: float, take: Any) -> str:
            for line in lines:
                take(line)
            before_the_end.append(list(known))
            return ""

        known.clear()
        sanitize.check(run, ["norm", "loss", "last"], time.monotonic() + 60, lambda *r: known.append(": ".join(r)))
        return before_the_end.pop()

    three = [*_case("norm"), *_case("loss", *RACE), *_case("last")]
    assert [line[:20] for line in check(BANNER, *three)] == ["norm: clean", "loss: 2 errors: Erro"] and len(known) == 3
    assert check(*three) == [] and known[0].startswith("norm: refused: it printed nothing")
    assert check(BANNER, REFUSAL, *three) == [] and known[2].startswith("last: refused: Error: Device not")


@pytest.fixture
def tool(tmp_path) -> Path:
    """A stand-in for compute-sanitizer that runs the command behind its options."""
    path = tmp_path / "tool"
    path.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nprint('{BANNER}', flush=True)\n"
        "at = sys.argv.index('--launch-timeout') + 2\n"
        "subprocess.run(sys.argv[at:])\nprint('========= ERROR SUMMARY: 0 errors')\n"
    )
    path.chmod(0o755)
    return path


# One for sanitize_cases.py; the case "slow" takes forever, but is compiled.
CASES_SCRIPT = """
import os, sys, time
names = sys.argv[1:]
compiling = names[:1] == ["--compile"]
assert compiling or "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ
for name in names[compiling:]:
    print("case", name, flush=True)
    if name == "slow" and not compiling:
        time.sleep(1000)
    print("done", name, flush=True)
"""


def test_a_program_between_runs_the_cases_and_its_output_is_kept(monkeypatch, tmp_path, tool, capsys):
    monkeypatch.setattr(sanitize, "_command", lambda names: [sys.executable, "-c", CASES_SCRIPT, *names])
    arguments = sanitize.Arguments(tools=("memcheck", "racecheck"), log=tmp_path / "log")
    names = ["norm", "a loss", sanitize_cases.CONTROL]
    results = {}

    def report(tool: str, case: str, result: str) -> None:
        results[tool, case] = result

    sanitize.sanitize(arguments, sanitize.find_sanitizer(str(tool)), names, report)
    assert results == {
        ("memcheck", "norm"): "clean",
        ("memcheck", "a loss"): "clean",
        ("memcheck", sanitize_cases.CONTROL): "clean",
        ("racecheck", "norm"): "clean",
        ("racecheck", "a loss"): "clean",
    }
    assert sanitize.status(results) == 2  # the stand-in finds nothing, so its word counts for nothing
    assert "done a loss" in (tmp_path / "log" / "racecheck.txt").read_text()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "compiling 2 cases in 2 processes, for 48 s at most" and printed[2].startswith("compiled 2 of")


def test_a_signal_in_the_middle_leaves_what_was_known(tmp_path, tool):
    """The script itself, with stand-ins for the card and the cases, ended while a case hangs under both tools."""
    script = tmp_path / "run.py"
    script.write_text(
        "import sys, sanitize\nfrom sanitize_cases import CONTROL, SanitizerCase\n"
        f"sanitize._command = lambda names: [sys.executable, '-c', {CASES_SCRIPT!r}, *names]\n"
        "sanitize.CASES = [SanitizerCase(name, None) for name in ('norm', 'slow', 'last', CONTROL)]\n"
        "sanitize.torch.cuda.is_available = lambda: True\nsanitize.torch.cuda.get_device_name = lambda: 'a card'\n"
        "sys.exit(sanitize.main())\n"
    )
    command = [sys.executable, str(script), "--sanitizer", str(tool)]
    env = os.environ | {"PYTHONPATH": str(Path(sanitize.__file__).parent)}
    results: dict[tuple[str, str], str] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        for line in process.stdout:
            words = re.split(" {2,}", line.strip(), maxsplit=2)
            if words[0] in ("memcheck", "racecheck"):
                results[words[0], words[1]] = words[2]
                if len(results) == 2:  # norm, of both: the next case has begun
                    process.terminate()
    assert process.returncode == 143
    memcheck = {
        "norm": "clean",
        "slow": "not run to its end: stopped",
        "last": "not run: stopped by SIGTERM",
        sanitize_cases.CONTROL: "not run: stopped by SIGTERM",
    }
    assert {case: result for (tool, case), result in results.items() if tool == "memcheck"} == memcheck
    assert results["racecheck", "norm"] == "clean" and len(results) == 7


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
