"""Ctrl-C while a command's modules load: it ends at once, without a traceback, and nothing is written."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("pretrain.py", ["--preset", "debug"]),
        ("prepare_data.py", ["nowhere", "out"]),
        ("sample.py", ["nowhere"]),
    ],
)
@pytest.mark.parametrize("seconds", [0.4, 1.0])
def test_interrupted_while_modules_load(script, arguments, seconds, tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train" / script), *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A parent that ignores SIGINT (a shell's background job) would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130, 2)  # 2: the mistake in the arguments was found first
    assert out == "" and "Traceback" not in err and err.count("\n") <= 1
    assert list(tmp_path.iterdir()) == []
