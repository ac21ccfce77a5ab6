"""Whole training steps: the same run with fused kernels and without, or on one and two GPUs: losses, speed, memory.

    python benchmarks/bench_step.py --presets 124m llama3_1b --steps 200 --output benchmarks/results

Runs `train/pretrain.py` once for each preset, each value of --kernels and each number of --gpus, on the same data with
the same seed and global batch, and writes OUTPUT/step_PRESET.json: the environment, each run's medians and losses, the
largest relative difference of the losses after the tenth step between the first run and the others, and how often
torch.compile compiled again after the second step. `report.py` makes the table and the picture from it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from timing import ROOT, environment

SETTLED_STEP = 10


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


def run_training(
    arguments: Arguments, preset: str, kernels: str, gpus: int, device: int | None = None
) -> dict[str, Any]:
    """Runs one training to its end and gives its summary.

    Raises:
        RuntimeError: the run failed; its output is shown.
    """
    name = f"{preset}-{kernels}-{gpus}"
    launcher = [sys.executable]
    if gpus > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    command = [*launcher, str(ROOT / "train" / "pretrain.py"), "--preset", preset, "--name", name]
    mode, _, attention = kernels.partition("+")
    command += ["--runs", str(arguments.runs), "--training.steps", str(arguments.steps), "--model.kernels", mode]
    command += ["--model.attention-backend", attention] if attention else []
    command += ["--checkpoint.resume", "never", "--logging.progress", "plain", *arguments.extra.split()]
    log = arguments.runs / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"TORCH_LOGS": "recompiles"}
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    with open(log, "w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment).returncode
    text = log.read_text()
    if code:
        raise RuntimeError(f"{' '.join(command)} failed with exit code {code}:\n{text[-3000:]}")
    print(f"wrote {log}")
    lines = (arguments.runs / name / "metrics.jsonl").read_text().splitlines()
    summary = summarise([json.loads(line) for line in lines])
    return {"kernels": kernels, "gpus": gpus, **summary, "recompilations_after_step_2": recompilations_after(text, 2)}


def run_all(arguments: Arguments, preset: str) -> list[dict[str, Any]]:
    """All runs of one preset, one after the other or, where asked for, those of one GPU side by side."""
    runs = []
    for gpus in arguments.gpus:
        if gpus == 1 and arguments.side_by_side:
            devices = max(torch.cuda.device_count(), 1)
            with ThreadPoolExecutor() as pool:
                jobs = [
                    pool.submit(run_training, arguments, preset, kernels, 1, i % devices)
                    for i, kernels in enumerate(arguments.kernels)
                ]
                runs += [job.result() for job in jobs]
        else:
            runs += [run_training(arguments, preset, kernels, gpus) for kernels in arguments.kernels]
    return runs


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
        "validation": [(m["step"], m["validation_loss"]) for m in metrics if m.get("validation_loss") is not None],
    }


def is_control(run: dict[str, Any]) -> bool:
    """Whether a run is there to show what rounding alone does."""
    return "+" in run["kernels"]


def largest_difference(runs: list[dict[str, Any]]) -> float | None:
    """Largest relative difference of any run's loss from the first run's, at any step after the tenth."""
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


def main() -> None:
    """Runs the comparison and writes the result files."""
    arguments = tyro.cli(Arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for preset in arguments.presets:
        runs = run_all(arguments, preset)
        result = {
            "environment": environment(device),
            "command": command_line(sys.argv[1:]),
            "note": arguments.note,
            "preset": preset,
            "steps": arguments.steps,
            "largest_loss_difference_after_step_10": largest_difference([r for r in runs if not is_control(r)]),
            "control_loss_differences": control_differences(runs),
            "runs": runs,
        }
        path = arguments.output / f"step_{preset}{arguments.label}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {path}")
        for run in runs:
            mfu = "n/a" if run["mfu"] is None else f"{run['mfu']:.1%}"
            print(
                f"{preset} {run['kernels']} on {run['gpus']}: {run['tokens_per_second']:,.0f} tok/s, MFU {mfu}, "
                f"{run['memory_gib']:.1f} GiB, last loss {run['losses'][-1]:.4f}, "
                f"{run['recompilations_after_step_2']} recompilations after step 2"
            )
        print(f"{preset}: largest loss difference after step 10: {result['largest_loss_difference_after_step_10']}")
        for control, difference in result["control_loss_differences"].items():
            print(f"{preset}: {control}, the control, differs by {difference}")


if __name__ == "__main__":
    main()
