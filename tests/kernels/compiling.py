"""Compiling in a process of its own, for tests that run where Triton interprets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any


def compile_in_a_process(program: str) -> list[Any]:
    """What `program` prints as JSON, run where Triton compiles."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
