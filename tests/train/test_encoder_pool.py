"""Encoding in processes: the ids of one process, in order; errors and deaths of workers heard; none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers

from fuselm.train import encoder_pool, prepare_data
from fuselm.train.encoder_pool import EncoderPool, encode_checked, worker_count
from fuselm.train.errors import UserError
from fuselm.train.prepare_data import prepare
from fuselm.train.shards import Unfinished
from fuselm.train.tokenizer import TextTokenizer

TEXTS = [f"Text {i} has {i * i} words,\n\tor é more. " * (i % 7 + 1) for i in range(90)]


@pytest.fixture(scope="module")
def coder() -> TextTokenizer:
    return TextTokenizer.train(TEXTS, 400)


def batches(texts: list[str], size: int) -> list[tuple[int, list[str], list[str]]]:
    parts = [texts[i : i + size] for i in range(0, len(texts), size)]
    return [(number, part, [f"text {number}"] * len(part)) for number, part in enumerate(parts)]


@pytest.mark.parametrize("workers", [1, 3])
def test_ids_in_order(coder: TextTokenizer, workers: int) -> None:
    with EncoderPool(coder, workers) as pool:
        results = list(pool.map(batches(TEXTS, 8)))
        processes = [process.pid for process in pool._processes]
    assert [number for number, _ in results] == list(range(12))
    got = [run for _, runs in results for run in runs]
    expected = encode_checked(coder, TEXTS, TEXTS)
    assert len(got) == len(expected) == 90
    assert all(np.array_equal(a, b) and a.dtype == b.dtype == np.uint16 for a, b in zip(got, expected, strict=True))
    assert len(processes) == (0 if workers == 1 else 3)
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]


def test_a_text_that_does_not_come_back_is_named(coder: TextTokenizer) -> None:
    lossy = TextTokenizer.from_json(coder.to_json())
    lossy._backend.normalizer = normalizers.Replace("\t", " ")
    with EncoderPool(lossy, 2) as pool, pytest.raises(UserError, match=r"text of text 3 back.*character 20"):
        fine = [text.replace("\t", "") for text in TEXTS]
        list(pool.map(batches([*fine[:24], TEXTS[0] * 2, *fine[25:]], 8)))


def test_a_worker_that_is_killed_stops_the_job_and_keeps_its_work(tmp_path: Path, monkeypatch) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / f"{number:02}.txt").write_text(text)
    monkeypatch.setattr(prepare_data, "BATCH_CHARS", 200)
    monkeypatch.setattr(prepare_data, "SAVE_SECONDS", 0)
    prepare(tmp_path / "source", tmp_path / "unbroken", vocab_size=300)
    written = 0
    write = prepare_data._Job._write

    def counting(self, *args) -> None:
        nonlocal written
        written += 1
        if written == 40:
            for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
                if b"encoder_pool" in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), signal.SIGKILL)
        write(self, *args)

    monkeypatch.setattr(prepare_data._Job, "_write", counting)
    with pytest.raises(Unfinished, match=r"an encoding process ended .*the same command goes on from here"):
        prepare(tmp_path / "source", tmp_path / "out", vocab_size=300, workers=2)
    assert 40 <= written < 150 and not (tmp_path / "out").exists()
    made = prepare(tmp_path / "source", tmp_path / "out", vocab_size=300, workers=2)
    assert 0 < made.encoded_bytes < sum(len(text.encode()) for text in TEXTS) - 30 * 40
    for path in (tmp_path / "unbroken").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(sent: signal.Signals) -> None:
    code = """
import signal, sys, time
from fuselm.train.encoder_pool import EncoderPool
from fuselm.train.tokenizer import TextTokenizer
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    with EncoderPool(TextTokenizer.train(["some text"], 300), 2) as pool:
        print(*[process.pid for process in pool._processes], flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    pass
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(word) for word in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.send_signal(sent)
    assert parent.communicate(timeout=30)[1] == ""
    ended = time.monotonic() + 30
    while any(_lives(pid) for pid in workers):
        assert time.monotonic() < ended, "workers outlive their parent"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_worker_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_pool.os, "sched_getaffinity", lambda pid: set(range(6)))
    assert [worker_count(0, n) for n in (None, 0, 10**6, 50 << 20, 1 << 40)] == [6, 1, 1, 3, 6]
    assert worker_count(9, 10) == 9
