"""A Hugging Face Llama as it is, with Liger's patch and with fuselm's: training and decoding, measured on one GPU.

    python benchmarks/bench_patch.py --output results/patch.json
    python benchmarks/bench_patch.py --budget-s 90 --output results/patch.json
    python benchmarks/bench_patch.py --tiny        # seconds on a CPU: that it works

Each variant runs in a process of its own, for Liger's patch changes transformers' classes for good; all import at the
same time and then measure in turn. Training is forward, backward and AdamW in bf16 on the same random tokens from the
same weights: losses must agree. Decoding continues random prompts greedily, with transformers' generate and with
fuselm's on the same weights; the first way to decode is the one whose tokens the others are compared with. Static
caches and compiled steps compile for a minute or two a batch size first, so they come last; --decoding leaves them
out. What a budget leaves no time for is listed as not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timing import environment

import fuselm
from fuselm.env import package_version
from fuselm.model.config import LlamaConfig
from fuselm.model.generate import generate
from fuselm.model.hf import load_hf
from fuselm.model.hf_config import config_to_hf
from fuselm.model.llama import Llama

TRAINING = ("transformers", "liger", "fuselm")
DECODING = ("transformers", "fuselm", "transformers + fuselm.patch", "fuselm compiled", "transformers static")
COMPILED = ("fuselm compiled", "transformers static")
BATCHES = (1, 16)
READY = "ready\n"
ROW = "row "  # begins the lines of a part's output that count
LEAST_STEPS = 3  # that are timed, whatever the budget
SHARES = {"decode": 2.0}  # of a budget; a training variant has 1


def shape_of(arguments: argparse.Namespace) -> LlamaConfig:
    """The preset, or a model of seconds."""
    if arguments.tiny:
        return LlamaConfig.from_preset("debug", max_seq_len=128)
    return LlamaConfig.from_preset(arguments.preset, max_seq_len=max(arguments.seq_len, 4096))


def make_hf(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Any:
    """A LlamaForCausalLM of that shape with the same random weights each time."""
    import transformers

    torch.manual_seed(0)
    theirs = transformers.LlamaConfig(**config_to_hf(config, dtype, None, None))
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(theirs)
    return model.to(dtype)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def train(provider: str, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Tokens a second, peak memory and losses of one variant; ends early where `seconds` are over."""
    device, dtype, config = arguments.device, arguments.dtype, shape_of(arguments)
    ends = time.perf_counter() + seconds
    model = make_hf(config, device, dtype)
    if provider == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama  # type: ignore[import-not-found]

        apply_liger_kernel_to_llama(model=model)
    elif provider == "fuselm":
        fuselm.patch(model)
    if arguments.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (arguments.batch, arguments.seq_len), generator=g).to(device)
    losses, times = [], []
    for step in range(arguments.steps + arguments.warmup):
        if step == arguments.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if len(times) >= LEAST_STEPS and time.perf_counter() > ends:
            break
        synchronize(device)
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        losses.append(float(loss.detach()))
        if step >= arguments.warmup:
            times.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    median = statistics.median(times)
    return {
        "tokens_per_second": tokens.numel() / median,
        "step_ms": median * 1e3,
        "timed_steps": len(times),
        "peak_gib": peak,
        "losses": losses,
    }


def decode(arguments: argparse.Namespace, seconds: float) -> Iterator[dict[str, Any]]:
    """Tokens a second of each way to generate, on the same weights, as they are measured."""
    device, dtype, config = arguments.device, arguments.dtype, shape_of(arguments)
    ends = time.perf_counter() + seconds
    theirs = make_hf(config, device, dtype).eval()
    theirs.generation_config.pad_token_id = 0
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_hf(folder, dtype=dtype, device=device).eval()
    g = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, config.vocab_size, (b, arguments.prompt), generator=g).to(device) for b in BATCHES]
    firsts: dict[int, torch.Tensor] = {}
    for name in arguments.decoding.split(","):
        (fuselm.patch if "patch" in name else fuselm.unpatch)(theirs)
        for prompt in prompts:
            batch, new = len(prompt), arguments.new_tokens
            row: dict[str, Any] = {"variant": name, "batch": batch}
            if firsts and time.perf_counter() > ends:
                yield row
                continue
            run = way_to_decode(name, theirs, ours, prompt)
            # Compiles and warms up. Only transformers' own loop does not depend on how many tokens will come.
            run(8 if name == "transformers" else new)
            times: list[float] = []
            text = prompt
            while len(times) < arguments.repeats and not (times and time.perf_counter() > ends):
                synchronize(device)
                began = time.perf_counter()
                text = run(new)
                synchronize(device)
                times.append(time.perf_counter() - began)
            # Greedy texts part at the first tie that rounding decides otherwise, and stay apart from there on.
            same = (text == firsts.setdefault(batch, text))[:, arguments.prompt :].float().cumprod(1).mean().item()
            median = statistics.median(times)
            yield row | {
                "tokens_per_second": batch * new / median,
                "ms_a_token": median / new * 1e3,
                "repeats": len(times),
                "same_as_first": same,
            }
    fuselm.unpatch(theirs)


def way_to_decode(name: str, theirs: Any, ours: Llama, prompt: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """A function that continues the prompt greedily by so many tokens."""
    if name.startswith("fuselm"):
        compiled = name in COMPILED
        return lambda new: generate(ours, prompt, max_new_tokens=new, temperature=0, compile=compiled)
    options: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    if name in COMPILED:
        options["cache_implementation"] = "static"
    return lambda new: theirs.generate(prompt, max_new_tokens=new, min_new_tokens=new, **options)


class Part:
    """One part in a process of its own, which has imported everything and waits for its turn."""

    def __init__(self, name: str, given: list[str]) -> None:
        self.name = name
        command = [sys.executable, __file__, *given, "--part", name]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(command, text=True, **pipes)
        self._said = ""

    def wait_ready(self) -> None:
        """Returns when it has imported everything, or has ended."""
        for line in self._lines():
            if line == READY:
                return

    def _lines(self) -> Iterator[str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() and not line.startswith(ROW):
                self._said = line.strip()
            yield line

    def measure(self, seconds: float, at_most: float) -> list[dict[str, Any]] | None:
        """Its rows, those before it was stopped after `at_most` seconds among them; None where it failed."""
        assert self._process.stdin is not None
        rows, late = [], threading.Event()
        killer = None
        if not math.isinf(at_most):
            killer = threading.Timer(max(at_most, 1.0), lambda: (late.set(), self._process.kill()))
            killer.start()
        with contextlib.suppress(BrokenPipeError):  # it has failed
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.close()
        for line in self._lines():
            if line.startswith(ROW):
                rows.append(json.loads(line.removeprefix(ROW)))
        code = self._process.wait()
        if killer is not None:
            killer.cancel()
        if late.is_set():
            print(f"{self.name}: stopped, the budget is used up", file=sys.stderr)
        elif code:
            print(f"{self.name}: {self._said or code}", file=sys.stderr)
            return None
        return rows

    def close(self) -> None:
        """Ends it if it still runs."""
        self._process.kill()
        self._process.wait()


def run_part(arguments: argparse.Namespace) -> int:
    """What a part's process does: imports, waits, measures, prints a line a row."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    if arguments.part == "liger":
        importlib.import_module("liger_kernel.transformers")
    print(READY, end="", flush=True)
    seconds = float(sys.stdin.readline() or "inf")
    if arguments.part == "decode":
        rows = decode(arguments, seconds)
    else:
        rows = iter([train(arguments.part, arguments, seconds)])
    for row in rows:
        print(ROW + json.dumps(row), flush=True)
    return 0


def run_parts(names: list[str], given: list[str], budget: float) -> dict[str, list[dict[str, Any]] | None]:
    """The rows of each part; None for one that failed."""
    ends = time.perf_counter() + budget
    parts = [Part(name, given) for name in names]
    try:
        for part in parts:
            part.wait_ready()
        results = {}
        for i, part in enumerate(parts):
            began = time.perf_counter()
            left = ends - began
            shares = [SHARES.get(p.name, 1.0) for p in parts[i:]]
            results[part.name] = part.measure(left * shares[0] / sum(shares), left)
            print(f"{part.name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        return results
    finally:
        for part in parts:
            part.close()


def report(results: dict[str, Any]) -> str:
    """The tables, as Markdown."""
    lines = ["| training | tok/s | ms a step | peak GiB | first loss | last loss |", "|---|---|---|---|---|---|"]
    for name, row in results["training"].items():
        if row is None:
            lines.append(f"| {name} | not run | | | | |")
            continue
        peak = "n/a" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
        losses = f"{row['losses'][0]:.4f} | {row['losses'][-1]:.4f}"
        lines.append(f"| {name} | {row['tokens_per_second']:,.0f} | {row['step_ms']:.1f} | {peak} | {losses} |")
    lines += ["", "| decoding | batch | tok/s | ms a token | same tokens |", "|---|---|---|---|---|"]
    for row in results["decoding"] or []:
        rate = "not run | |"
        if "tokens_per_second" in row:
            rate = f"{row['tokens_per_second']:,.0f} | {row['ms_a_token']:.2f} | {row['same_as_first']:.0%}"
        lines.append(f"| {row['variant']} | {row['batch']} | {rate} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    """Runs all parts and prints the tables; the exit code is 1 where a part that is installed failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3_1b", help="shape of the model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences a training step (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="training steps that are timed (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="training steps before (default: %(default)s)")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing, as transformers has it")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats of decoding (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in fp32, also on a CPU")
    parser.add_argument("--budget-s", type=float, help="seconds for all of it; parts are shortened to fit")
    parser.add_argument("--parts", default="", help="only these, by comma: transformers, liger, fuselm, decode")
    parser.add_argument(
        "--decoding", default=",".join(DECODING), help="only these ways to decode, by comma (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    given = sys.argv[1:] if given is None else given
    arguments = parser.parse_args(given)
    if arguments.tiny:
        arguments.batch, arguments.seq_len, arguments.steps, arguments.warmup = 2, 64, 2, 1
        arguments.prompt, arguments.new_tokens, arguments.repeats = 8, 8, 1
    elif not torch.cuda.is_available():
        print("error: there is no GPU here; --tiny runs on a CPU", file=sys.stderr)
        return 2
    arguments.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arguments.dtype = torch.float32 if arguments.tiny else torch.bfloat16
    if arguments.part:
        return run_part(arguments)
    wanted = arguments.parts.split(",") if arguments.parts else [*TRAINING, "decode"]
    unknown = set(wanted) - {*TRAINING, "decode"}
    if unknown:
        print(f"error: --parts {min(unknown)}: expected {', '.join([*TRAINING, 'decode'])}", file=sys.stderr)
        return 2
    strange = set(arguments.decoding.split(",")) - set(DECODING)
    if strange:
        print(f"error: --decoding {min(strange)!r}: expected {', '.join(DECODING)}", file=sys.stderr)
        return 2
    missing = [] if package_version("liger-kernel") != "not installed" else ["liger"]
    names = [p for p in [*TRAINING, "decode"] if p in wanted and p not in missing]
    measured = run_parts(names, given, math.inf if arguments.budget_s is None else arguments.budget_s)
    training = {p: (measured.get(p) or [None])[0] for p in TRAINING if p in wanted}
    decoding = measured["decode"] if "decode" in wanted else []
    facts = {k: str(v) for k, v in vars(arguments).items() if k not in ("part", "output")}
    where = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    results = {"environment": where, "arguments": facts, "training": training, "decoding": decoding}
    print(report(results))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(rows is None for rows in measured.values()))


if __name__ == "__main__":
    sys.exit(main())
