"""Whole training steps: the same run with fused kernels and without, on one and two GPUs, or beside other libraries.

    python benchmarks/bench_step.py --presets 124m llama3_1b --steps 200 --output benchmarks/results
    python benchmarks/bench_step.py --presets 124m --kernels triton --peers hf hf+compile hf+liger torchtitan --steps 50

Runs `train/pretrain.py` once for each preset, each value of --kernels and each number of --gpus, on the same data with
the same seed and global batch, and writes OUTPUT/step_PRESET.json: the environment, each run's medians and losses, the
largest relative difference of the losses after the tenth step between the first run and the others, and how often
torch.compile compiled again after the second step. `report.py` makes the table and the picture from it.

With --peers, `step_compare.py` adds the rows of step_peers.py's runs, one process after another; the first of
--kernels runs before them and once more after them, so that a drift of the card shows.
"""

from __future__ import annotations

import json
import re
import shlex
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from step_compare import SETTLED_STEP, failed_row, measured_row, relate, row_in_words
from step_peers import PEERS, missing_packages
from step_processes import Budget, Process
from timing import ROOT, environment

from fuselm.env import package_version
from fuselm.train.config import TrainConfig, parse_command_line, resolve
from fuselm.train.errors import UserError
from fuselm.train.presets import PRESETS


@dataclass(frozen=True)
class Arguments:
    """Compare whole training runs that should give the same losses."""

    presets: tuple[str, ...] = ("debug",)
    """Presets of train/pretrain.py."""

    steps: int = 200
    """Optimizer steps a run."""

    gpus: tuple[int, ...] = (1,)
    """Processes of a run, by torchrun when more than one; each number is a run of its own."""

    kernels: tuple[str, ...] = ("triton", "eager")
    """Values of model.kernels to compare; "eager+cudnn" is eager with that attention_backend: a control, whose losses
    differ from eager's by rounding alone."""

    peers: tuple[Literal["hf", "hf+compile", "hf+liger", "torchtitan"], ...] = ()
    """Other libraries' Llamas to train on the same, one after another; see step_peers.py."""

    budget_s: float | None = None
    """Seconds for all runs together; what does not fit is stopped, and listed as such. None for no limit."""

    limit_s: float | None = None
    """Seconds for one run; None for no limit."""

    output: Path = Path("benchmarks/results")
    """Folder for the result files."""

    runs: Path = Path("runs/bench_step")
    """Folder for the runs."""

    side_by_side: bool = False
    """Run one-GPU runs at the same time, spread over the GPUs; speeds of runs that share one say nothing."""

    label: str = ""
    """Appended to the result file's name."""

    note: str = ""
    """A sentence for the report: what is different about these runs."""

    extra: str = ""
    """More options for pretrain.py, separated by spaces."""


def launcher(gpus: int) -> list[str]:
    """What starts a script on so many GPUs."""
    if gpus == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]


def training_options(arguments: Arguments, preset: str, kernels: str | None, name: str) -> list[str]:
    """Options of train/pretrain.py; `kernels` is None for a peer, which has kernels of its own."""
    options = ["--preset", preset, "--name", name, "--runs", str(arguments.runs)]
    options += ["--training.steps", str(arguments.steps)]
    if kernels is not None:
        mode, _, attention = kernels.partition("+")
        options += ["--model.kernels", mode]
        options += ["--model.attention-backend", attention] if attention else []
    return [*options, "--checkpoint.resume", "never", "--logging.progress", "plain", *arguments.extra.split()]


def run_training(
    arguments: Arguments,
    preset: str,
    kernels: str,
    gpus: int,
    device: int | None = None,
    *,
    budget: Budget | None = None,
    suffix: str = "",
) -> dict[str, Any]:
    """Runs one training to its end and gives its summary.

    Raises:
        RunError: the run failed or was stopped; its output is shown.
    """
    name = f"{preset}-{kernels}-{gpus}{suffix}"
    options = training_options(arguments, preset, kernels, name)
    variables = {"TORCH_LOGS": "recompiles"} | ({} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)})
    command = [*launcher(gpus), str(ROOT / "train" / "pretrain.py"), *options]
    budget = budget or Budget(arguments.budget_s, arguments.limit_s)
    text = Process(command, arguments.runs / f"{name}.log", variables).finish(budget)
    lines = (arguments.runs / name / "metrics.jsonl").read_text().splitlines()
    summary = summarise([json.loads(line) for line in lines])
    return {"kernels": kernels, "gpus": gpus, **summary, "recompilations_after_step_2": recompilations_after(text, 2)}


def run_all(arguments: Arguments, preset: str, budget: Budget) -> list[dict[str, Any]]:
    """All runs of one preset, one after the other or, where asked for, those of one GPU side by side."""
    runs = []
    for gpus in arguments.gpus:
        if gpus == 1 and arguments.side_by_side:
            devices = max(torch.cuda.device_count(), 1)
            with ThreadPoolExecutor() as pool:
                jobs = [
                    pool.submit(run_training, arguments, preset, kernels, 1, i % devices, budget=budget)
                    for i, kernels in enumerate(arguments.kernels)
                ]
                runs += [job.result() for job in jobs]
        else:
            runs += [run_training(arguments, preset, kernels, gpus, budget=budget) for kernels in arguments.kernels]
    return runs


class PeerRun:
    """A peer's run: started, and waiting for its turn with everything imported.

    Args:
        peer: of step_peers.PEERS, installed.
    """

    def __init__(self, arguments: Arguments, preset: str, peer: str, gpus: int) -> None:
        name = f"{preset}-{peer}-{gpus}"
        self.output, self.turn = arguments.runs / f"{name}.json", arguments.runs / f"{name}.turn"
        for stale in (self.output, self.turn):
            stale.unlink(missing_ok=True)
        own = ["--peer", peer, "--output", str(self.output), "--wait-for", str(self.turn)]
        options = training_options(arguments, preset, None, name)
        command = [*launcher(gpus), str(ROOT / "benchmarks" / "step_peers.py"), *own, *options]
        self.process = Process(command, arguments.runs / f"{name}.log", {})

    def finish(self, budget: Budget) -> dict[str, Any]:
        """Give it its turn; what it wrote.

        Raises:
            RunError: it failed or was stopped.
        """
        self.turn.touch()
        try:
            self.process.finish(budget)
        finally:
            self.turn.unlink(missing_ok=True)
        return json.loads(self.output.read_text())


def compare(arguments: Arguments, preset: str, budget: Budget, facts: dict[str, str]) -> dict[str, Any]:
    """Ours, the peers, ours again, for each number of GPUs; the result file is written after each run.

    Returns:
        The result, whose "comparison" has a row a run.

    Raises:
        SystemExit: the options are not pretrain.py's.
    """
    distributions = {d for peer in arguments.peers for d in PEERS[peer].distributions}
    result = result_of(arguments, preset, [], facts | {d: package_version(d) for d in sorted(distributions)})
    rows, runs = result.setdefault("comparison", []), result["runs"]

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        result["largest_loss_difference_after_step_10"] = largest_difference([r for r in runs if not is_control(r)])
        result["control_loss_differences"] = control_differences(runs)
        relate(rows)
        print(row_in_words(preset, row), flush=True)
        write(arguments, result)

    def train_ours(kernels: str, config: TrainConfig, gpus: int, again: bool) -> None:
        about = {"provider": f"fuselm ({kernels})", "ours": True, "again": again, "gpus": gpus}
        try:
            run = run_training(arguments, preset, kernels, gpus, budget=budget, suffix="-again" if again else "")
        except (RuntimeError, ValueError, OSError) as error:
            add(failed_row(about, error))
            return
        if not again:
            runs.append(run)
        step_tokens = config.training.global_batch_size * config.training.seq_len
        step_ms = [None if rate is None else step_tokens / rate * 1e3 for rate in run["rates"]]
        add(measured_row(about, config, run["losses"], step_ms, run["memory_gib"]))

    def train_peer(peer: str, started: PeerRun | None, config: TrainConfig, gpus: int) -> None:
        about = {"provider": peer, "ours": False, "again": False, "gpus": gpus}
        if started is None:
            add(about | {"status": "not installed", "reason": ", ".join(missing_packages(peer))})
            return
        try:
            found = started.finish(budget)
        except (RuntimeError, ValueError, OSError) as error:
            add(failed_row(about, error))
            return
        row = measured_row(about, config, found["losses"], found["step_ms"], found["memory_gib"])
        add(row | {"graph_breaks": found["graph_breaks"]})

    for gpus in arguments.gpus:
        try:
            options = training_options(arguments, preset, None, preset)
            config = resolve(parse_command_line(options, PRESETS, ""), gpus)
        except UserError as error:
            raise SystemExit(f"error: {error}") from error
        waiting = {
            peer: None if missing_packages(peer) else PeerRun(arguments, preset, peer, gpus) for peer in arguments.peers
        }
        try:
            for kernels in arguments.kernels:
                train_ours(kernels, config, gpus, again=False)
            for peer, started in waiting.items():
                train_peer(peer, started, config, gpus)
            train_ours(arguments.kernels[0], config, gpus, again=True)
        finally:
            for started in waiting.values():
                if started is not None:
                    started.process.stop()
    return result


def recompilations_after(log: str, step: int) -> int:
    """How many recompilations torch reported after the line of `step` in a run's log."""
    line = re.search(rf"^step +{step}/\d+  loss", log, re.MULTILINE)
    if line is None:
        raise ValueError(f"the log has no line for step {step}: run with --logging.every 1")
    return log[line.end() :].count("Recompiling function")


def summarise(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the settled steps of one run."""
    settled = [m for m in metrics if m.get("tokens_per_second") and m["step"] > SETTLED_STEP]

    def median(key: str) -> float | None:
        values = [m[key] for m in settled if m.get(key) is not None]
        return statistics.median(values) if values else None

    return {
        "tokens_per_second": median("tokens_per_second"),
        "tflops": median("tflops"),
        "mfu": median("mfu"),
        "memory_gib": max(m["memory_gib"] for m in settled),
        "losses": [m["loss"] for m in metrics if m.get("loss") is not None],
        "rates": [m.get("tokens_per_second") for m in metrics if m.get("loss") is not None],
        "validation": [(m["step"], m["validation_loss"]) for m in metrics if m.get("validation_loss") is not None],
    }


def is_control(run: dict[str, Any]) -> bool:
    """Whether a run is there to show what rounding alone does."""
    return "+" in run["kernels"]


def largest_difference(runs: list[dict[str, Any]]) -> float | None:
    """Largest relative difference of any run's loss from the first run's, at any step after the tenth."""
    if not runs:
        return None
    first = runs[0]["losses"][SETTLED_STEP:]
    differences = [
        abs(a - b) / abs(b) for run in runs[1:] for a, b in zip(run["losses"][SETTLED_STEP:], first, strict=True)
    ]
    return max(differences) if differences else None


def control_differences(runs: list[dict[str, Any]]) -> dict[str, float | None]:
    """Each control's largest difference from the run that it is a control of, by the control's name."""
    return {
        run["kernels"]: largest_difference([other, run])
        for run in runs
        for other in runs
        if is_control(run) and other["kernels"] == run["kernels"].partition("+")[0] and other["gpus"] == run["gpus"]
    }


def command_line(arguments: list[str]) -> str:
    """The command to repeat a measurement, without the folders of the machine that it ran on."""
    kept, words = [], iter(arguments)
    for word in words:
        if word in ("--output", "--runs"):
            next(words, None)
        elif not word.startswith(("--output=", "--runs=")):
            kept.append(shlex.quote(word))
    return " ".join(["python benchmarks/bench_step.py", *kept])


def result_of(arguments: Arguments, preset: str, runs: list[dict[str, Any]], facts: dict[str, str]) -> dict[str, Any]:
    """What a result file says."""
    return {
        "environment": facts,
        "command": command_line(sys.argv[1:]),
        "note": arguments.note,
        "preset": preset,
        "steps": arguments.steps,
        "largest_loss_difference_after_step_10": largest_difference([r for r in runs if not is_control(r)]),
        "control_loss_differences": control_differences(runs),
        "runs": runs,
    }


def write(arguments: Arguments, result: dict[str, Any]) -> None:
    """Writes the result file of a preset; again whenever a run more is done."""
    path = arguments.output / f"step_{result['preset']}{arguments.label}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}", flush=True)


def show(result: dict[str, Any]) -> None:
    """Prints the runs of a result without peers."""
    preset = result["preset"]
    for run in result["runs"]:
        mfu = "n/a" if run["mfu"] is None else f"{run['mfu']:.1%}"
        print(
            f"{preset} {run['kernels']} on {run['gpus']}: {run['tokens_per_second']:,.0f} tok/s, MFU {mfu}, "
            f"{run['memory_gib']:.1f} GiB, last loss {run['losses'][-1]:.4f}, "
            f"{run['recompilations_after_step_2']} recompilations after step 2"
        )
    print(f"{preset}: largest loss difference after step 10: {result['largest_loss_difference_after_step_10']}")
    for control, difference in result["control_loss_differences"].items():
        print(f"{preset}: {control}, the control, differs by {difference}")


def main() -> None:
    """Runs the comparison and writes the result files."""
    arguments = tyro.cli(Arguments)
    if arguments.peers and arguments.side_by_side:
        raise SystemExit("error: --peers and --side-by-side exclude each other: runs that share a card say nothing")
    if arguments.peers and arguments.steps <= SETTLED_STEP:
        raise SystemExit(
            f"error: --steps is {arguments.steps}: with --peers it must be above {SETTLED_STEP}, the untimed ones"
        )
    facts = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    arguments.output.mkdir(parents=True, exist_ok=True)
    budget = Budget(arguments.budget_s, arguments.limit_s)
    for preset in arguments.presets:
        if arguments.peers:
            compare(arguments, preset, budget, facts)
            continue
        result = result_of(arguments, preset, run_all(arguments, preset, budget), facts)
        write(arguments, result)
        show(result)


if __name__ == "__main__":
    main()
