"""A Hugging Face Llama as it is, with Liger's patch and with fuselm's: training and decoding, measured on one GPU.

    python benchmarks/bench_patch.py --output results/patch.json
    python benchmarks/bench_patch.py --tiny        # seconds on a CPU: that it works

Each variant runs in a process of its own, for Liger's patch changes transformers' classes for good. Training is
forward, backward and AdamW in bf16 on the same random tokens from the same weights: losses must agree. Decoding
continues random prompts greedily, with transformers' generate and with fuselm's on the same weights; the first way to
decode is the one whose tokens the others are compared with. Static caches and compiled steps compile for a minute or
two a batch size first: --decoding leaves them out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fuselm
from fuselm.env import package_version, versions
from fuselm.model.config import LlamaConfig
from fuselm.model.generate import generate
from fuselm.model.hf import load_hf
from fuselm.model.hf_config import config_to_hf

TRAINING = ("transformers", "liger", "fuselm")
DECODING = ("transformers", "transformers static", "transformers + fuselm.patch", "fuselm", "fuselm compiled")
BATCHES = (1, 16)


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


def train(provider: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second, peak memory and losses of one variant."""
    device, dtype, config = arguments.device, arguments.dtype, shape_of(arguments)
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
    losses, seconds = [], []
    for step in range(arguments.steps + arguments.warmup):
        if step == arguments.warmup and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronize(device)
        began = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        losses.append(float(loss))
        if step >= arguments.warmup:
            seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    median = statistics.median(seconds)
    return {"tokens_per_second": tokens.numel() / median, "step_ms": median * 1e3, "peak_gib": peak, "losses": losses}


def decode(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second of each way to generate, on the same weights."""
    device, dtype, config = arguments.device, arguments.dtype, shape_of(arguments)
    theirs = make_hf(config, device, dtype).eval()
    theirs.generation_config.pad_token_id = 0
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load_hf(folder, dtype=dtype, device=device).eval()
    g = torch.Generator().manual_seed(2)
    rows = []
    for batch in BATCHES:
        prompt = torch.randint(0, config.vocab_size, (batch, arguments.prompt), generator=g).to(device)
        new = arguments.new_tokens
        hf: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "min_new_tokens": new}
        runs: dict[str, Callable[[], torch.Tensor]] = {
            "transformers": lambda p=prompt, o=hf: theirs.generate(p, **o),
            "transformers static": lambda p=prompt, o=hf: theirs.generate(p, cache_implementation="static", **o),
            "transformers + fuselm.patch": lambda p=prompt, o=hf: theirs.generate(p, **o),
            "fuselm": lambda p=prompt, n=new: generate(ours, p, max_new_tokens=n, temperature=0),
            "fuselm compiled": lambda p=prompt, n=new: generate(ours, p, max_new_tokens=n, temperature=0, compile=True),
        }
        first: torch.Tensor | None = None
        for name in arguments.decoding.split(","):
            (fuselm.patch if "patch" in name else fuselm.unpatch)(theirs)
            seconds = []
            text = runs[name]()  # compiles and warms up
            for _ in range(arguments.repeats):
                synchronize(device)
                began = time.perf_counter()
                text = runs[name]()
                synchronize(device)
                seconds.append(time.perf_counter() - began)
            first = text if first is None else first
            # Greedy texts part at the first tie that rounding decides otherwise, and stay apart from there on.
            same = (text == first)[:, arguments.prompt :].float().cumprod(1).mean().item()
            median = statistics.median(seconds)
            rows.append(
                {
                    "variant": name,
                    "batch": batch,
                    "tokens_per_second": batch * new / median,
                    "ms_a_token": median / new * 1e3,
                    "same_as_transformers": same,
                }
            )
        fuselm.unpatch(theirs)
    return rows


def run_alone(part: str, given: list[str]) -> Any:
    """One part in a process of its own; None where it fails, with its last line shown."""
    done = subprocess.run([sys.executable, __file__, *given, "--part", part], capture_output=True, text=True)
    if done.returncode:
        print(f"{part}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


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
        rate = f"{row['tokens_per_second']:,.0f} | {row['ms_a_token']:.2f} | {row['same_as_transformers']:.0%}"
        lines.append(f"| {row['variant']} | {row['batch']} | {rate} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    """Runs all parts and prints the tables; the exit code says whether every part that is installed ran."""
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
        print(json.dumps(decode(arguments) if arguments.part == "decode" else train(arguments.part, arguments)))
        return 0
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
    training = {p: None if p in missing else run_alone(p, given) for p in TRAINING if p in wanted}
    decoding = run_alone("decode", given) if "decode" in wanted else []
    facts = {k: str(v) for k, v in vars(arguments).items() if k not in ("part", "output")}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    results = {"device": device, "versions": versions(), "arguments": facts, "training": training, "decoding": decoding}
    print(report(results))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(decoding is None or any(row is None for p, row in training.items() if p not in missing))


if __name__ == "__main__":
    sys.exit(main())
