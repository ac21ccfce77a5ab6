"""prepare_data stopped in the middle: nothing half-written in the output's place, and the same bytes in the end."""

from __future__ import annotations

import gzip
import json
import random
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fuselm.train import prepare_data
from fuselm.train.errors import UserError
from fuselm.train.prepare_data import prepare
from fuselm.train.shards import SplitWriter, Unfinished
from fuselm.train.tokenizer import TextTokenizer


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"a text of {name}\n" * 20)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "data"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_in_mid_write_leaves_no_output(error, source: Path, out: Path, monkeypatch) -> None:
    calls = []

    def failing(self, ids, **kwargs) -> None:
        calls.append(list(out.parent.iterdir()))
        raise error

    monkeypatch.setattr(SplitWriter, "append", failing)
    user = isinstance(error, OSError)
    with pytest.raises(UserError if user else KeyboardInterrupt, match="No space left on device" if user else None):
        prepare(source, out, vocab_size=300)
    assert len(calls[0]) == 1  # there was something to clean
    if user:
        assert list(out.parent.iterdir()) == []
    else:  # what was done so far waits for the same call
        assert [p.name[:14] for p in out.parent.iterdir()] == [".data.partial-"]


def start_and_wait_in_mid_write(source: Path, out: Path) -> subprocess.Popen:
    code = f"""
import sys, time
from fuselm.train import prepare_data
def append(self, ids, **kwargs):
    print("writing", flush=True)
    time.sleep(60)
prepare_data.SplitWriter.append = append
sys.exit(prepare_data.main([{str(source)!r}, {str(out)!r}, "--vocab-size", "300"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A parent that ignores SIGINT (a shell's background job) would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.readline() == "writing\n"
    return process


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_stopped_in_mid_write(sent, source: Path, out: Path) -> None:
    process = start_and_wait_in_mid_write(source, out)
    prepare(source, out.with_name("meanwhile"), vocab_size=300)
    process.send_signal(sent)
    output, errors = process.communicate(timeout=30)
    if sent == signal.SIGKILL:
        assert (process.returncode, output, errors) == (-9, "", "")
    else:
        message = "error: interrupted; there is no output yet, and the same command goes on where this one stopped\n"
        assert (process.returncode, output, errors) == (130, "", message)
    assert not out.exists() and len([p for p in out.parent.iterdir() if p.name.startswith(".data.partial-")]) == 1
    prepare(source, out, vocab_size=300)
    assert sorted(p.name for p in out.parent.iterdir()) == ["data", "meanwhile"]
    assert contents(out) == contents(out.with_name("meanwhile"))


def test_what_another_job_left_is_removed(source: Path, out: Path) -> None:
    process = start_and_wait_in_mid_write(source, out)
    process.kill()
    process.communicate()
    prepare(source, out, vocab_size=301)
    assert [p.name for p in out.parent.iterdir()] == ["data"]
    assert json.loads((out / "index.json").read_text())["settings"]["trained_vocab_size"] == 301


KILLED_AGAIN_AND_AGAIN = """
import os, random, sys
from pathlib import Path
from fuselm.train import documents, prepare_data
documents.PIECE_CHARS = prepare_data.PIECE_CHARS = 150
prepare_data.BATCH_CHARS, prepare_data.SAVE_SECONDS = 300, 0
prepare_data.DataStatistics.draw = lambda self, image: image.write_bytes(b"a picture")
source, out, seed, events, workers = *map(Path, sys.argv[1:3]), *map(int, sys.argv[3:])
draw = random.Random(seed)

def attempt(limit):
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    left = limit

    def hook(frame, event, arg):  # at each call of a function, Python's or C's
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), 9)

    globals()["left"] = limit
    sys.setprofile(hook)
    prepare_data.prepare(source, out, vocab_size=300, validation_fraction=0.1, shard_tokens=97, workers=workers)
    print("calls", limit - globals()["left"], flush=True)
    os._exit(0)

kills = 0
while attempt(draw.randrange(1, events) if kills < 60 else -1):
    kills += 1
print("kills", kills)
"""


def run_killed(source: Path, out: Path, seed: int, events: int, workers: int = 1) -> tuple[int, int]:
    """(calls that the last attempt made, attempts that were killed)."""
    arguments = [str(source), str(out), str(seed), str(events), str(workers)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AGAIN_AND_AGAIN, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    return int(words[1]), int(words[3])


@pytest.fixture
def mix(tmp_path: Path) -> Path:
    """Three sources by weight: a long text, lines with copies and empty ones, and compressed lines read twice."""
    draw = random.Random(3)

    def text() -> str:
        return " ".join(f"word{draw.randrange(90)}" for _ in range(draw.randrange(1, 60)))

    (tmp_path / "book.txt").write_text("".join(f"Line {i} {text()}.\n" for i in range(60)))
    records = [text() if i % 5 else "" for i in range(40)]
    records += records[7:12]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": r}) + "\n\n" for r in records))
    packed = "".join(json.dumps({"body": text()}) + "\n" for i in range(20)).encode()
    (tmp_path / "few.jsonl.gz").write_bytes(gzip.compress(packed))
    (tmp_path / "mix.toml").write_text(
        '[[source]]\npath = "book.txt"\nweight = 2\n[[source]]\npath = "lines.jsonl"\nweight = 1.5\n'
        '[[source]]\npath = "few.jsonl.gz"\nweight = 1\npasses = 2\ntext_key = "body"\n'
    )
    return tmp_path / "mix.toml"


def test_killed_at_random_points_gives_the_same_bytes(mix: Path, tmp_path: Path) -> None:
    calls, kills = run_killed(mix, tmp_path / "unbroken", 0, 1 << 60)
    assert kills == 0
    expected = contents(tmp_path / "unbroken")
    index = json.loads(expected["index.json"])
    assert index["duplicate_documents"] == 4 and index["empty_documents"] == 9 and index["mix_ended_by"] is not None
    assert len(index["splits"]["train"]["shards"]) > 10
    total = 0
    for seed, workers in ((1, 1), (2, 1), (3, 1), (4, 2)):
        out = tmp_path / f"killed {seed}"
        _, kills = run_killed(mix, out, seed, calls, workers)
        total += kills
        assert contents(out) == expected
    assert total >= 8
    assert not list(tmp_path.glob(".*"))


def peak_memory(source: Path, out: Path, tokenizer: Path) -> int:
    """Peak resident bytes of a process that prepares `source`."""
    code = (
        "import re, sys; from pathlib import Path; from fuselm.train.prepare_data import prepare\n"
        "source, out, tokenizer = map(Path, sys.argv[1:])\n"
        "prepare(source, out, tokenizer=tokenizer, shard_tokens=1_000_000, workers=1)\n"
        # (getrusage would count what its parent held when it was forked.)
        "print(int(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]) * 1024)"
    )
    command = [sys.executable, "-c", code, str(source), str(out), str(tokenizer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("kind", ["lines", "one text"])
def test_memory_does_not_grow_with_the_text(kind: str, tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(3000)]
    draw = random.Random(0)
    paragraphs = [" ".join(draw.choices(words, k=60)) + "\n" for _ in range(300)]
    (tmp_path / "t.json").write_bytes(TextTokenizer.train(paragraphs, 3500).to_json())
    peaks = []
    for megabytes in (3, 10):
        path = tmp_path / f"{megabytes}" / ("a.jsonl" if kind == "lines" else "a.txt")
        path.parent.mkdir()
        with path.open("w") as file:
            while file.tell() < megabytes * 1e6:
                text = "".join(draw.choices(paragraphs, k=10))
                file.write(json.dumps({"text": text}) + "\n" if kind == "lines" else text)
        peaks.append(peak_memory(path.parent, tmp_path / f"out{megabytes}", tmp_path / "t.json"))
    # 7 MB more of text with its ids, held anywhere, would be 20 MB and more.
    assert peaks[1] - peaks[0] < 15e6 and peaks[1] < 400e6, peaks


def test_a_dataset_that_becomes_unreachable_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_data, "BATCH_CHARS", 500)
    monkeypatch.setattr(prepare_data, "SAVE_SECONDS", 0)
    rows = [{"text": f"Row {i % 55} with {'some ' * (i % 55 % 9)}words.\n"} for i in range(60)]
    skipped: list[int] = []
    fail_at: list[int] = []

    class Rows:
        def __init__(self, first: int) -> None:
            self.first = first

        def skip(self, count: int) -> Rows:
            skipped.append(count)
            return Rows(self.first + count)

        def __iter__(self):
            for number in range(self.first, len(rows)):
                if number in fail_at:
                    raise ConnectionError("no route to host")
                yield rows[number]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=lambda *a, **k: Rows(0)))
    made = prepare("hf:owner/rows", tmp_path / "unbroken", vocab_size=300, validation_fraction=0.2)
    assert made.duplicate_documents == 5 and made.splits["validation"].documents > 0 and skipped == []
    # The first passes, which train and try the tokenizer, still reach everything.
    train = prepare_data._Job.run

    def run(self, *args):
        fail_at[:] = [40]
        return train(self, *args)

    monkeypatch.setattr(prepare_data._Job, "run", run)
    with pytest.raises(Unfinished, match="hf:owner/rows cannot be read after row 40: no route to host"):
        prepare("hf:owner/rows", tmp_path / "out", vocab_size=300, validation_fraction=0.2, workers=1)
    monkeypatch.setattr(prepare_data._Job, "run", train)
    fail_at.clear()
    prepare("hf:owner/rows", tmp_path / "out", vocab_size=300, validation_fraction=0.2)
    assert len(skipped) == 1 and 20 < skipped[0] < 40
    assert contents(tmp_path / "out") == contents(tmp_path / "unbroken")
