"""docs/benchmarks.md: what its commands for a GPU name exists. tests/test_docs.py runs the others."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import tyro

from fuselm.train.config import TrainConfig

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("python ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_for_a_gpu_are_parsed_by_their_program(command):
    _, script, *words = shlex.split(command)
    assert (ROOT / script).is_file()
    module: Any = importlib.import_module(Path(script).stem)
    arguments = tyro.cli(module.Arguments, args=words)  # ends the process on an option that does not exist
    assert arguments != module.Arguments()


def test_options_in_the_text_exist():
    scripts = ("compare_kernels", "quick", "report", "bench_step", "sanitize")
    modules = [importlib.import_module(script) for script in scripts]
    known: set[str] = {
        name.replace("_", "-") for module in modules for name in vars(module)["Arguments"].__annotations__
    }
    known |= {field.name for field in dataclasses.fields(TrainConfig)}  # --section.field, for pretrain.py
    for option in re.findall(r"--([a-z-]+)", PAGE):
        assert option in known, f"--{option}"


def test_ops_in_the_text_have_targets_and_rows():
    tune: Any = importlib.import_module("tune")
    rows: Any = importlib.import_module("rows")
    (tuned,) = re.findall(r"tune\.py ([a-z_ ]+) --", PAGE)
    assert set(tuned.split()) <= set(tune.known_ops()) & {row.op for row in rows.ROWS}
