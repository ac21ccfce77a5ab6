"""Where a training step's GPU time goes, by kind of kernel, and how long the GPU waits for the host.

    python benchmarks/profile_step.py --preset llama3_1b --output benchmarks/results "--extra=--data.vocab-size 16384"
    torchrun --nproc-per-node 2 benchmarks/profile_step.py --preset llama3_8b

Runs `train/pretrain.py`'s training in this process, records a few settled steps with torch.profiler, prints a table of
milliseconds a step, and writes OUTPUT/profile_PRESET.json. Of several ranks the first one is shown. Kernels of several
streams run side by side: "alone" is the time in which nothing but kernels of one kind runs, so that of communication is
what the step waits for it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from timing import ROOT, environment
from torch.optim.optimizer import register_optimizer_step_post_hook

# The first pattern that a kernel's name matches, case ignored, names its kind.
KINDS = (
    ("communication", r"nccl"),
    ("attention", r"attention|flash|fmha|cudnn.*sdpa|hopper_(forward|backward)|_tile_table|_decode_(split|merge)"),
    (
        "cross-entropy",
        r"cross_entropy|log_softmax|nll|_multiply_kernel|weighted_sum|row_(weight|losses)|block_(sums|gradient)_kernel",
    ),
    ("norm", r"rms_norm|sum_partials|layer_norm"),
    ("rope", r"rope|rotary|sum_weight_gradients"),
    ("swiglu", r"swiglu|silu"),
    ("optimizer", r"adamw|multi_tensor|_squared_norm|_clip|^_?(squares|class_sums|norm|finish|finalize)_kernel"),
    ("matrix multiplication", r"gemm|nvjet|cutlass|xmma|matmul|splitk"),
    ("embedding", r"embedding|index_select|indexing_backward|gather"),
    ("copies and casts", r"memcpy|copy_kernel|chunk_cat|split_with_sizes|cat_array|catarray|direct_copy|convert"),
    ("fills", r"memset|fillfunctor|fill_"),
    ("compiled elementwise", r"^triton_"),
)


@dataclass(frozen=True)
class Arguments:
    """Profile the settled steps of a training run."""

    preset: str = "124m"
    """Preset of train/pretrain.py."""

    warmup: int = 8
    """Steps before the recording."""

    steps: int = 4
    """Steps recorded."""

    kernels: str = "triton"
    """model.kernels."""

    output: Path = Path("benchmarks/results")
    """Folder for the result file."""

    runs: Path = Path("runs/profile_step")
    """Folder for the run, which is removed afterwards."""

    label: str = ""
    """Appended to the result file's name."""

    extra: str = ""
    """More options for pretrain.py, separated by spaces."""


@dataclass(frozen=True)
class Kernel:
    """One kernel as it ran: name, begin and end in microseconds."""

    name: str
    begin: float
    end: float


def kind_of(name: str) -> str:
    """The kind of a kernel by its name; "other" for one that no pattern knows."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def busy(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which at least one kernel runs."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.begin):
        total += max(kernel.end - max(kernel.begin, until), 0.0)
        until = max(until, kernel.end)
    return total


def alone(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Microseconds in which kernels of one kind run and none of another, by kind."""
    changes = sorted((at, change, kind_of(k.name)) for k in kernels for at, change in ((k.begin, 1), (k.end, -1)))
    running: dict[str, int] = defaultdict(int)
    total: dict[str, float] = defaultdict(float)
    since = 0.0
    for at, change, kind in changes:
        kinds = [name for name, count in running.items() if count]
        if len(kinds) == 1:
            total[kinds[0]] += at - since
        running[kind] += change
        since = at
    return dict(total)


def summarise(kernels: list[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds a step by kind, the dearest kernels, and the time in which the GPU ran nothing.

    Raises:
        ValueError: no kernel was recorded.
    """
    if not kernels:
        raise ValueError("no kernel was recorded: this needs a GPU whose profiler may be used")
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for kernel in kernels:
        by_kind[kind_of(kernel.name)] += kernel.end - kernel.begin
        by_name[kernel.name][0] += kernel.end - kernel.begin
        by_name[kernel.name][1] += 1
    span = max(k.end for k in kernels) - min(k.begin for k in kernels)
    scale = 1e-3 / steps
    dearest = sorted(by_name.items(), key=lambda item: -item[1][0])[:40]
    return {
        "milliseconds_a_step": span * scale,
        "idle_milliseconds_a_step": (span - busy(kernels)) * scale,
        "kernels_a_step": len(kernels) / steps,
        "by_kind": {kind: us * scale for kind, us in sorted(by_kind.items(), key=lambda item: -item[1])},
        "alone": {kind: us * scale for kind, us in sorted(alone(kernels).items(), key=lambda item: -item[1])},
        "dearest": [
            {"name": name[:160], "kind": kind_of(name), "milliseconds": us * scale, "calls": calls / steps}
            for name, (us, calls) in dearest
        ],
    }


def table(summary: dict[str, Any]) -> str:
    """The summary as a Markdown table."""
    whole = summary["milliseconds_a_step"]
    lines = ["| where | ms a step | share | alone |", "|---|---|---|---|"]
    rows = [*summary["by_kind"].items(), ("GPU idle", summary["idle_milliseconds_a_step"]), ("step", whole)]
    for name, value in rows:
        by_itself = f"{summary['alone'].get(name, 0.0):.2f}" if name in summary["by_kind"] else ""
        lines.append(f"| {name} | {value:.2f} | {value / whole:.1%} | {by_itself} |")
    return "\n".join(lines)


def is_first() -> bool:
    """Whether this is the first rank."""
    return os.environ.get("RANK", "0") == "0"


def record(arguments: Arguments) -> list[Kernel]:
    """Trains and gives the kernels of the recorded steps."""
    sys.path.insert(0, str(ROOT / "src"))
    from fuselm.train import pretrain

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    done = 0

    def after_step(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == arguments.warmup:
            torch.cuda.synchronize()
            profiler.start()
        elif done == arguments.warmup + arguments.steps:
            torch.cuda.synchronize()
            profiler.stop()

    hook = register_optimizer_step_post_hook(after_step)
    total = arguments.warmup + arguments.steps + 2
    options = ["--preset", arguments.preset, "--name", arguments.preset, "--runs", str(arguments.runs)]
    options += ["--training.steps", str(total), "--model.kernels", arguments.kernels, "--checkpoint.resume", "never"]
    options += ["--checkpoint.save", "False", "--evaluation.batches", "0", "--logging.progress", "plain"]
    try:
        code = pretrain.main([*options, *arguments.extra.split()])
    finally:
        hook.remove()
    if code:
        sys.exit(code)
    if is_first():
        shutil.rmtree(arguments.runs)
    events = profiler.events() or []
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name == "CUDA" and event.time_range.end > event.time_range.start
    ]


def main() -> None:
    """Profiles, prints the table, writes the file."""
    arguments = tyro.cli(Arguments)
    if not torch.cuda.is_available():
        sys.exit("error: a profile of GPU kernels needs a GPU")
    kernels = record(arguments)
    if not is_first():
        return
    summary = summarise(kernels, arguments.steps)
    device = torch.device("cuda")
    result = {
        "environment": environment(device),
        "preset": arguments.preset,
        "kernels": arguments.kernels,
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        **summary,
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"profile_{arguments.preset}{arguments.label}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(table(summary))
    for kernel in summary["dearest"][:25]:
        print(f"{kernel['milliseconds']:8.3f} ms  {kernel['calls']:6.1f} x  {kernel['kind']:22} {kernel['name'][:100]}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
