"""Train a preset for some minutes on the Python sources and documentation that this machine has, and report on it.

    python recipes/train_on_python_sources.py --output results/python_sources --minutes 8.5 --budget-s 570
    python recipes/train_on_python_sources.py --report results/python_sources --page recipes/python_sources.md

Collects text, makes tokens of it with a vocabulary of its own, measures how many steps fit into the minutes, trains
so many with `train/pretrain.py` on the first visible GPU (or the CPU), then measures bits a byte on held-out files and
draws samples. A call that reaches --budget-s stops after the step in progress, saves, and exits with 3: the same
command goes on from there. Whatever a call has finished is not done again.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import torch
from python_sources_report import write_page, write_report
from python_sources_text import collect, distinct_roots, installed_roots
from timing import ROOT, environment

from fuselm.train.checkpointing import latest_checkpoint, write_atomically
from fuselm.train.config import config_from_json
from fuselm.train.data_stream import TokenDataset
from fuselm.train.errors import UserError, command, report
from fuselm.train.metrics import read_metrics
from fuselm.train.prepare_data import prepare
from fuselm.train.sample import Meter, load_run, sample
from fuselm.train.shards import read_index
from fuselm.train.source_loss import SourceLoss, source_losses

UNFINISHED = 3  # exit code
PROMPTS = (
    "def quicksort(",
    "import argparse\n\n\ndef main() -> None:\n",
    'class LinearRegression:\n    """',
    "Installation\n============\n\n",
    "    def __init__(self, parent=None):\n",
    "# Changelog\n\n## 2.0.1\n\n",
)
VALIDATION_FRACTION = 0.01
VALIDATIONS = 32  # over the run, each of all held-out text where it has no more than so many batches
VALIDATION_BATCHES = 40
PROBE_STEPS, PROBE_SETTLED = 120, 60  # compiling and capturing the graph are over by then
SAVING_SECONDS = 25.0  # what stopping with a checkpoint takes at most
OVERTIME = 1.3  # a card that became slower may take this much longer than --minutes


class Cut(Exception):
    """The call's time is over; a later one goes on."""


class Work:
    """The folder between calls: `state.json` says which stages are done, and what they found."""

    def __init__(self, path: Path, arguments: argparse.Namespace) -> None:
        self.path, self.arguments, self.began = path, arguments, time.monotonic()
        path.mkdir(parents=True, exist_ok=True)
        self.file = path / "state.json"
        self.state: dict[str, Any] = json.loads(self.file.read_bytes()) if self.file.exists() else {}
        settings = {k: getattr(arguments, k) for k in ("preset", "megabytes", "vocab_size", "seed", "extra")}
        before = self.state.setdefault("settings", settings)
        if before != settings:
            raise UserError(f"{path} was begun with {before}, not with {settings}: give the same, or another --work")
        self.state.setdefault("calls", 0)
        self.keep(calls=self.state["calls"] + 1)

    def keep(self, **found: Any) -> None:
        """Writes down what a stage has found."""
        self.state |= found
        write_atomically(self.file, json.dumps(self.state, indent=1).encode())

    def left(self) -> float:
        """Seconds of this call; infinite without --budget-s."""
        budget = self.arguments.budget_s
        return math.inf if budget is None else budget - (time.monotonic() - self.began)

    @property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @property
    def run(self) -> Path:
        return self.path / "run"


def say(text: str) -> None:
    print(text, flush=True)


def make_text(work: Work) -> None:
    """Stage 1: text/code, text/documentation, and the mix of both."""
    arguments, folder = work.arguments, work.path / "text"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    roots = distinct_roots([*(installed_roots() if not arguments.only_roots else []), *arguments.roots])
    found = collect(roots, folder, megabytes=arguments.megabytes)
    kinds = [kind for kind in ("code", "documentation") if any((folder / kind).iterdir())]
    if not kinds:
        raise UserError(f"no Python sources were found in {', '.join(map(str, roots)) or 'any folder'}: give --roots")
    mix = "".join(f'[[source]]\npath = "{kind}"\n' for kind in kinds)
    (folder / "mix.toml").write_text(mix)
    seconds = time.monotonic() - began
    work.keep(text=found.state() | {"seconds": seconds})
    say(f"text: {found.files:,} files, {found.bytes / 1e6:.1f} MB in {seconds:.1f} s")


def make_tokens(work: Work) -> None:
    """Stage 2: the tokenizer and the shards."""
    prepared = prepare(
        work.path / "text" / "mix.toml",
        work.tokens,
        vocab_size=work.arguments.vocab_size,
        tokenizer_chars=int(work.arguments.tokenizer_megabytes * 1e6),
        validation_fraction=VALIDATION_FRACTION,
        overwrite=True,
    )
    say(prepared.summary())
    work.keep(
        tokens={
            "seconds": prepared.seconds,
            "encoding_seconds": prepared.encoding_seconds,
            "encoding_mb_per_s": prepared.encoded_bytes / 1e6 / max(prepared.encoding_seconds, 1e-9),
            "workers": prepared.workers,
        }
    )


def pretrain_command(work: Work, name: str, steps: int, **options: Any) -> list[str]:
    """`train/pretrain.py` with the preset as it is, but for the length of the run."""
    arguments = work.arguments
    command = [sys.executable, str(ROOT / "train" / "pretrain.py"), "--preset", arguments.preset]
    chosen: dict[str, Any] = {
        "name": name,
        "runs": work.path,
        "training.steps": steps,
        "training.seed": arguments.seed,
        "data.path": work.tokens,
        "data.packing": "concatenate",
        "parallel.sharding": "auto",
        "parallel.cuda_graph": True,
        "schedule.warmup_steps": min(500, steps // 10),
        "logging.progress": "plain",
        "logging.tensorboard": False,
        **options,
    }
    for option, value in chosen.items():
        command += [f"--{option}", str(value)]
    return [*command, *shlex.split(arguments.extra)]


def call(command: list[str], seconds: float) -> bool:
    """Runs a command; asks it to stop after so many seconds.

    Returns:
        Whether it had the time to end by itself.

    Raises:
        UserError: it failed.
    """
    process = subprocess.Popen(command)
    in_time = True
    try:
        try:
            code = process.wait(None if math.isinf(seconds) else max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            in_time = False
            process.terminate()
            code = process.wait()
    finally:
        if process.poll() is None:  # this process is being stopped itself
            process.terminate()
            process.wait()
    # One that is told to stop before it listens for signals dies of it.
    if code and not (not in_time and code == -signal.SIGTERM):
        raise UserError(f"{shlex.join(command)} ended with {code}")
    return in_time


def measure_speed(work: Work) -> None:
    """Stage 3: how many steps --minutes are; --steps says it instead."""
    if work.arguments.steps:
        work.keep(plan={"steps": work.arguments.steps, "probed_tokens_per_second": None})
        return
    options = {
        "evaluation.batches": 0,
        "checkpoint.save": False,
        "checkpoint.resume": "never",
        "logging.every": PROBE_SETTLED,
    }
    if not call(pretrain_command(work, "speed", PROBE_STEPS, **options), work.left()):
        raise Cut("measuring the speed")
    settled = [e for e in steps_of(work.path / "speed") if e["step"] > PROBE_SETTLED]
    rate = statistics.median(e["tokens_per_second"] for e in settled)
    training = config_from_json(work.path / "speed").training
    steps = max(int(work.arguments.minutes * 60 * rate / (training.global_batch_size * training.seq_len)), 1)
    say(f"speed: {rate:,.0f} tokens a second, so {steps:,} steps")
    work.keep(plan={"steps": steps, "probed_tokens_per_second": rate})


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The steps of a run, without its validations; none where it has not begun."""
    path = run / "metrics.jsonl"
    return [e for e in read_metrics(path) if e.get("loss") is not None] if path.exists() else []


def trained_seconds(work: Work) -> float:
    """What the steps took together."""
    entries = steps_of(work.run)
    before = [0, *(e["tokens"] for e in entries)]
    return sum((e["tokens"] - b) / e["tokens_per_second"] for e, b in zip(entries, before, strict=False))


def train(work: Work) -> None:
    """Stage 4: the run itself, from its last checkpoint on."""
    steps = work.state["plan"]["steps"]
    options = {
        "evaluation.every": max(steps // VALIDATIONS, 1),
        "evaluation.batches": VALIDATION_BATCHES,
        "checkpoint.every": max(steps // 4, 1),
        "checkpoint.keep": 1,
        "checkpoint.keep_best": False,
        "logging.every": max(steps // 200, 1),
    }
    extra = work.arguments.minutes * 60 * OVERTIME - trained_seconds(work)
    allowed = math.inf if work.arguments.steps else extra
    left = work.left() - SAVING_SECONDS
    if left <= 0:
        raise Cut("training")
    finished = call(pretrain_command(work, "run", steps, **options), min(left, allowed))
    if not finished and left < allowed:
        raise Cut("training")
    if latest_checkpoint(work.run) is None:
        raise UserError(f"the run was stopped before it had a checkpoint: give more than --minutes {allowed / 60:.1f}")
    work.keep(trained=True)


def measure(work: Work) -> None:
    """Stage 5: bits a byte of each kind of text, whole documents from their beginning."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_run(work.run, device=device)
    data = TokenDataset.open(work.tokens, "validation")
    results = source_losses(
        model,
        data,
        tokenizer,
        seq_len=config_from_json(work.run).training.seq_len,
        batch_size=32 if device.type == "cuda" else 8,
        max_documents=work.arguments.documents,
    )
    sources = [
        {
            "name": r.name,
            "documents": r.documents,
            "tokens": r.tokens,
            "text_bytes": r.text_bytes,
            "loss": r.loss,
            "bits_per_byte": r.bits_per_byte,
        }
        for r in [*results, _together(results)]
        if r.tokens
    ]
    samples = []
    for prompt in PROMPTS:
        for temperature, top_p in ((0.0, None), (0.8, 0.95)):
            meter = Meter()
            pieces = sample(
                model,
                tokenizer,
                prompt,
                max_tokens=work.arguments.sample_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=work.arguments.seed,
                meter=meter,
            )
            text = "".join(pieces)
            samples.append(
                {"prompt": prompt, "temperature": temperature, "top_p": top_p, "text": text, "speed": str(meter)}
            )
    work.keep(sources=sources, samples=samples, parameters=model.num_parameters())


def _together(results: list[SourceLoss]) -> SourceLoss:
    return SourceLoss(
        "all together",
        sum(r.documents for r in results),
        sum(r.tokens for r in results),
        sum(r.text_bytes for r in results),
        sum(r.nats for r in results),
    )


def without_places(given: list[str]) -> list[str]:
    """The options but for the folders on one machine and the time of one call."""
    kept, passing = [], False
    for part in given:
        if part.startswith("--"):
            passing = part.partition("=")[0] in ("--output", "--work", "--roots", "--budget-s")
        if not passing:
            kept.append(part)
    return ["--output", "results", *kept]


def gather(work: Work) -> dict[str, Any]:
    """All that report.json says."""
    config, entries = config_from_json(work.run), steps_of(work.run)
    index = read_index(work.tokens)
    splits = {s: {k: index["splits"][s][k] for k in ("tokens", "documents", "text_bytes")} for s in index["splits"]}
    held_out = splits["validation"]
    bits_a_nat = held_out["tokens"] / max(held_out["text_bytes"], 1) / math.log(2)
    tokens_at = {0: 0} | {e["step"]: e["tokens"] for e in entries}
    validation = [
        {
            "step": e["step"],
            "tokens": tokens_at[e["step"]],
            "loss": e["validation_loss"],
            "bits_per_byte": e["validation_loss"] * bits_a_nat,
        }
        for e in read_metrics(work.run / "metrics.jsonl")
        if e.get("validation_loss") is not None
    ]
    rates = sorted(e["tokens_per_second"] for e in entries)
    mfu = [e["mfu"] for e in entries if e.get("mfu") is not None]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    steps = work.state["plan"]["steps"]
    return {
        "environment": environment(device),
        "command": shlex.join(["python", "recipes/train_on_python_sources.py", *without_places(work.arguments.given)]),
        "preset": work.arguments.preset,
        "model": {**vars(config.model), "rope_scaling": None},
        "parameters": work.state["parameters"],
        "tokenizer_vocab_size": index["vocab_size"],
        "text": work.state["text"],
        "preparation": work.state["tokens"],
        "splits": splits,
        "training": {
            "steps": entries[-1]["step"],
            "planned_steps": steps,
            "finished": entries[-1]["step"] >= steps,
            "calls": work.state["calls"],
            "seq_len": config.training.seq_len,
            "global_batch_size": config.training.global_batch_size,
            "lr": config.optimizer.lr,
            "warmup_steps": config.schedule.warmup_steps,
            "tokens": entries[-1]["tokens"],
            "epochs": entries[-1]["tokens"] / splits["train"]["tokens"],
            "seconds_of_steps": trained_seconds(work),
            "tokens_per_second": statistics.median(rates),
            "tokens_per_second_5th_to_95th_percentile": [rates[len(rates) // 20], rates[-1 - len(rates) // 20]],
            "mfu": statistics.median(mfu) if mfu else None,
            "memory_gib": max(e["memory_gib"] for e in entries),
            "skipped_steps": sum(e.get("skipped") is not None for e in entries),
            "probed_tokens_per_second": work.state["plan"]["probed_tokens_per_second"],
        },
        "validation": validation,
        "sources": work.state["sources"],
        "samples": work.state["samples"],
    }


# Each with the key that it leaves in the state.
STAGES = (
    ("text", make_text),
    ("tokens", make_tokens),
    ("plan", measure_speed),
    ("trained", train),
    ("samples", measure),
)


def go_on(work: Work) -> None:
    """Does the stages that are not done, and writes the results.

    Raises:
        Cut: the call's time is over.
    """
    for key, stage in STAGES:
        if key == "trained" and work.arguments.prepare_only:
            return
        if key not in work.state:
            if work.left() <= 0:
                raise Cut(stage.__name__)
            stage(work)
        if key == "tokens":
            shutil.rmtree(work.path / "text", ignore_errors=True)
    paths = write_report(work.arguments.output, gather(work), read_metrics(work.run / "metrics.jsonl"))
    say("wrote " + ", ".join(map(str, paths)))


def parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for report.json, metrics.jsonl, curves.png, samples.txt")
    parser.add_argument("--work", type=Path, default=Path("runs/python_sources"), help="tokens and checkpoints")
    parser.add_argument("--minutes", type=float, default=8.5, help="of training steps (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps, in place of --minutes")
    parser.add_argument("--budget-s", type=float, help="seconds after which this call stops, to be continued")
    parser.add_argument("--prepare-only", action="store_true", help="stop before training")
    parser.add_argument("--preset", default="124m", help="of train/pretrain.py (default: %(default)s)")
    parser.add_argument("--extra", default="", help="more options for train/pretrain.py, in one string")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=float, default=600, help="of text at most (default: %(default)s)")
    parser.add_argument("--roots", type=Path, nargs="*", default=[], help="more folders to search for text")
    parser.add_argument("--only-roots", action="store_true", help="search nothing else")
    parser.add_argument("--vocab-size", type=int, default=32_768, help="tokens to train (default: %(default)s)")
    parser.add_argument("--tokenizer-megabytes", type=float, default=48, help="text to train them on (default: 48)")
    parser.add_argument("--documents", type=int, default=1000, help="held-out files of each kind to measure, at most")
    parser.add_argument("--sample-tokens", type=int, default=160, help="tokens a sample (default: %(default)s)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only write --page, from this folder's report")
    parser.add_argument("--page", type=Path, help="the Markdown page to write")
    arguments = parser.parse_args(given)
    arguments.given = given
    return arguments


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def check(arguments: argparse.Namespace) -> None:
    """Refuses numbers that cannot be, before any work is done."""
    for name in ("minutes", "budget_s", "megabytes", "tokenizer_megabytes"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} is {value}: it must be above 0 and finite")
    for name, least in (("steps", 0), ("documents", 1), ("sample_tokens", 1)):
        if getattr(arguments, name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: it must be at least {least}")
    if arguments.output is None:
        raise UserError("--output is missing: the folder for the results")


@command
def main(given: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 after an error of the user's, 3 to be continued, 130 interrupted."""
    arguments = parse(list(sys.argv[1:] if given is None else given))
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        if arguments.report is not None:
            if arguments.page is None:
                raise UserError("--report needs --page, the file to write")
            write_page(arguments.report, arguments.page)
            return 0
        check(arguments)
        work = Work(arguments.work, arguments)
        go_on(work)
    except UserError as error:
        return report(error)
    except Cut as cut:
        say(f"the time of this call is over ({cut}); the same command goes on from here")
        return UNFINISHED
    except KeyboardInterrupt:
        report("interrupted; the same command goes on from here")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
