"""How fast prepare_data is beside the tokenizer library's own batch encoding, on the same cores, in turn.

    python benchmarks/bench_prepare_data.py --megabytes 40 --rounds 3 --output results.json
    python benchmarks/bench_prepare_data.py --megabytes 2000 --only-prepare

The text is made by this script: documents of words drawn by Zipf's law from a made-up vocabulary, with numbers,
code-like lines and characters of several bytes among them. Both sides encode the same documents with the same trained
tokenizer; the library's side only encodes (`encode_batch_fast`, all cores), ours also reads, checks every document,
drops copies and writes. Both are compared by the clock and by the processor's seconds, which other programs on the
machine disturb less. The peak memory is that of all processes of ours together, by the system's count of resident
pages.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import accumulate
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from timing import environment

LINES_KEPT = 20_000


def make_corpus(path: Path, megabytes: float, seed: int = 0) -> int:
    """Writes lines of JSON; returns the bytes of text."""
    draw = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    words = ["".join(draw.choices(letters, range(26, 0, -1), k=draw.randint(1, 12))) for _ in range(60_000)]
    words[500:900] = [word + "éüñ中文"[draw.randrange(5)] for word in words[500:900]]
    shares = list(accumulate(1 / (rank + 3) for rank in range(len(words))))
    lines = []
    for _ in range(LINES_KEPT):
        chosen = draw.choices(words, cum_weights=shares, k=draw.randint(4, 16))
        kind = draw.random()
        if kind < 0.06:
            lines.append(f"    {chosen[0]}_{chosen[1]}({chosen[2]}={draw.randrange(10**6)}, [{chosen[3]!r}])\n")
        else:
            end = ".\n" if kind < 0.3 else ". "
            lines.append(" ".join(chosen).capitalize() + (f" {draw.randrange(3000)}" if kind > 0.9 else "") + end)
    written, number = 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            text = f"{number} " + "".join(draw.choices(lines, k=draw.randint(3, 90)))
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            written += len(text.encode())
            number += 1
    return written


def _resident(process: int) -> int:
    """Resident bytes of a process and all below it."""
    total, todo = 0, [process]
    while todo:
        number = todo.pop()
        try:
            status = Path(f"/proc/{number}/status").read_text()
            for task in Path(f"/proc/{number}/task").iterdir():
                todo += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it has ended
            continue
        for line in status.splitlines():
            if line.startswith("VmRSS"):
                total += int(line.split()[1]) * 1024
    return total


def run_prepare(source: Path, output: Path, options: list[str]) -> dict[str, float]:
    """Runs the program; returns seconds, its own MB/s, and its peak memory in bytes."""
    script = Path(__file__).resolve().parents[1] / "train" / "prepare_data.py"
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, str(script), str(source), str(output), *options], stdout=subprocess.PIPE, text=True
    )
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            peak[0] = max(peak[0], _resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    printed, _ = process.communicate()
    ended.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"prepare_data ended with {process.returncode}")
    print(printed, end="", flush=True)
    rate = float(printed.split(" MB at ")[1].split(" MB/s")[0])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - began, "mb_per_s": rate, "cpu_seconds": cpu, "peak_memory": peak[0]}


def run_library(source: Path, tokenizer: Path) -> tuple[float, float]:
    """(MB/s, processor seconds) of `encode_batch_fast` over the documents, in batches of a megabyte, on all cores."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(tokenizer))
    backend.encode_special_tokens = True
    spent, cpu, size = 0.0, 0.0, 0
    batch: list[str] = []
    held = 0
    with source.open(encoding="utf-8") as file:
        for line in [*file, ""]:
            if line:
                batch.append(json.loads(line)["text"])
                held += len(batch[-1].encode())
            if batch and (held >= 1 << 20 or not line):
                began, before = time.perf_counter(), time.process_time()
                backend.encode_batch_fast(batch, add_special_tokens=False)
                spent += time.perf_counter() - began
                cpu += time.process_time() - before
                size += held
                batch, held = [], 0
    return size / spent / 1e6, cpu


def without_output(given: list[str]) -> list[str]:
    """The options but for --output, which says nothing about the measurement."""
    at = given.index("--output") if "--output" in given else len(given)
    return given[:at] + given[at + 2 :]


def main() -> None:
    given = sys.argv[1:]
    parser = argparse.ArgumentParser(description="prepare_data beside encode_batch")
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--only-prepare", action="store_true", help="one run that trains its tokenizer, for the memory")
    parser.add_argument("--output", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.perf_counter()
        size = make_corpus(folder / "text.jsonl", arguments.megabytes)
        print(f"made {size / 1e6:.1f} MB of text in {time.perf_counter() - began:.1f} s", flush=True)
        train = ["--vocab-size", str(arguments.vocab_size)]
        result: dict[str, object] = {
            "environment": environment(torch.device("cpu")),
            "command": shlex.join(["python", "benchmarks/bench_prepare_data.py", *without_output(given)]),
            "bytes": size,
            "cores": len(os.sched_getaffinity(0)),
            "load_before": os.getloadavg()[0],
        }
        if arguments.only_prepare:
            result["prepare"] = run_prepare(folder / "text.jsonl", folder / "out", train)
        else:
            make_corpus(folder / "small.jsonl", min(arguments.megabytes, 10))
            run_prepare(folder / "small.jsonl", folder / "small", train)
            tokenizer = folder / "small" / "tokenizer.json"
            ours, library, memory = [], [], 0.0
            cpu: list[tuple[float, float]] = []
            workers = ["--workers", str(len(os.sched_getaffinity(0)))]
            for number in range(arguments.rounds):
                rate, seconds = run_library(folder / "text.jsonl", tokenizer)
                library.append(rate)
                options = ["--tokenizer", str(tokenizer), *workers]
                done = run_prepare(folder / "text.jsonl", folder / f"out{number}", options)
                cpu.append((seconds, done["cpu_seconds"]))
                ours.append(done["mb_per_s"])
                memory = max(memory, done["peak_memory"])
                print(f"round {number + 1}: encode_batch {library[-1]:.2f} MB/s, prepare_data {ours[-1]:.2f} MB/s")
            ratio = statistics.median(a / b for a, b in zip(ours, library, strict=True))
            result |= {"library_mb_per_s": library, "prepare_mb_per_s": ours, "median_ratio": ratio}
            result |= {"peak_memory": memory, "cpu_seconds_library_and_prepare": cpu}
        print(json.dumps(result))
        if arguments.output:
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
