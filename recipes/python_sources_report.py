"""What train_on_python_sources.py leaves behind: report.json, metrics.jsonl, curves.png, samples.txt; and the page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fuselm.train.metrics import centered_mean

MOST_STEPS_KEPT = 1000
TRAINING_COLOUR, VALIDATION_COLOUR = "#1f4e8c", "#c0392b"
PAGE_SAMPLES = 3


def write_report(folder: Path, facts: dict[str, Any], entries: Sequence[dict[str, Any]]) -> list[Path]:
    """Writes the result folder.

    Args:
        folder: is made; files of earlier reports are replaced.
        facts: what report.json says.
        entries: of the run's metrics.jsonl; all validations are kept, of the steps at most `MOST_STEPS_KEPT`, evenly.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = thinned(entries)
    paths = [folder / name for name in ("report.json", "metrics.jsonl", "curves.png", "samples.txt")]
    paths[0].write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    paths[1].write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    draw(paths[2], facts, entries)
    paths[3].write_text(samples_text(facts), encoding="utf-8")
    return paths


def thinned(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every k-th step, the first and the last, and all validations, in their order."""
    steps = [e["step"] for e in entries if e.get("loss") is not None]
    if not steps:
        return list(entries)
    every = -(-len(steps) // MOST_STEPS_KEPT)
    kept = {steps[0], steps[-1]} | {step for step in steps if step % every == 0}
    return [e for e in entries if "loss" not in e or e["step"] in kept]


def draw(image: Path, facts: dict[str, Any], entries: Sequence[dict[str, Any]]) -> None:
    """Loss of training and validation on the left, bits a byte of the held-out text on the right, over tokens."""
    steps = [e for e in entries if e.get("loss") is not None]
    tokens, losses = [e["tokens"] / 1e6 for e in steps], [e["loss"] for e in steps]
    validation = facts["validation"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), dpi=130, layout="constrained")
    reach = max(len(losses) // 200, 1)
    left.plot(tokens, losses, color=TRAINING_COLOUR, alpha=0.25, linewidth=0.8, label="training, each step")
    mean = centered_mean(losses, reach)
    left.plot(tokens, mean, color=TRAINING_COLOUR, label=f"training, mean of {2 * reach + 1} steps")
    at = [v["tokens"] / 1e6 for v in validation]
    style: dict[str, Any] = {"color": VALIDATION_COLOUR, "marker": "o", "markersize": 3.5}
    left.plot(at, [v["loss"] for v in validation], label="held-out files", **style)
    right.plot(at, [v["bits_per_byte"] for v in validation], label="held-out files", **style)
    left.set_ylabel("loss (nats a token)")
    right.set_ylabel("bits a byte")
    # The first steps are far above all others, and would flatten what is worth seeing.
    early = len(losses) // 50
    settled = sorted(losses[early:])
    left.set_ylim(settled[0] - 0.1 * (settled[-1] - settled[0]) - 0.01, settled[-1] + 0.01)
    near = [v["bits_per_byte"] for v in validation if v["tokens"] / 1e6 >= tokens[early]]
    right.set_ylim(min(near) - 0.08 * (max(near) - min(near)) - 0.01, max(near) * 1.05)
    for axes in (left, right):
        axes.set_xlabel("tokens (millions)")
        axes.grid(alpha=0.3)
        axes.legend()
    last = validation[-1]
    right.set_title(f"last: {last['bits_per_byte']:.3f} bits a byte")
    left.set_title(f"last validation loss: {last['loss']:.3f}")
    figure.suptitle(f"{facts['preset']} on Python sources and documentation, {facts['environment']['card']}")
    figure.savefig(image)
    plt.close(figure)


def samples_text(facts: dict[str, Any]) -> str:
    """All samples, each under a line that says how it was drawn; what follows the mark is the model's."""
    blocks = []
    for drawn in facts["samples"]:
        way = "greedy" if not drawn["temperature"] else f"temperature {drawn['temperature']}, top_p {drawn['top_p']}"
        blocks.append(f"=== {way} ({drawn['speed']}) ===\n{drawn['prompt']}⟦{drawn['text']}⟧\n")
    return "What stands in ⟦ ⟧ was drawn; what stands before is the prompt.\n\n" + "\n".join(blocks)


def write_page(folder: Path, page: Path) -> None:
    """The page about a result folder, with figures from its report.json alone."""
    facts = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    page.parent.mkdir(parents=True, exist_ok=True)
    picture = Path(os.path.relpath(folder / "curves.png", page.parent)).as_posix()
    page.write_text(page_text(facts, picture), encoding="utf-8")


def page_text(facts: dict[str, Any], picture: str) -> str:
    """The page as Markdown.

    Args:
        facts: of report.json.
        picture: where curves.png is, from the page.
    """
    t, env, text = facts["training"], facts["environment"], facts["text"]
    splits, made = facts["splits"], facts["preparation"]
    first, last = facts["validation"][0], facts["validation"][-1]
    train, held_out = splits["train"], splits["validation"]
    low, high = t["tokens_per_second_5th_to_95th_percentile"]
    batch = t["global_batch_size"] * t["seq_len"]
    ended = "to the end" if t["finished"] else f"of {t['planned_steps']:,} planned; the time was over"
    mfu = "" if t["mfu"] is None else f", {t['mfu']:.1%} MFU"
    rows = "\n".join(
        f"| {s['name']} | {s['documents']:,} | {s['text_bytes'] / 1e6:.2f} | {s['loss']:.3f} |"
        f" {s['bits_per_byte']:.3f} |"
        for s in facts["sources"]
    )
    shown = [s for s in facts["samples"] if s["temperature"]][:PAGE_SAMPLES]
    samples = "\n\n".join(f"````text\n{s['prompt']}⟦{s['text']}⟧\n````" for s in shown)
    return f"""# {facts["preset"]} on the Python sources of one machine

`recipes/train_on_python_sources.py` collects the Python sources and documentation that are installed where it runs,
trains a tokenizer and a model on them, and reports. Nothing is downloaded. This page was written from its report:

```sh
{facts["command"]}
```

| | |
|---|---|
| card | {env["card"]} |
| versions | fuselm {env["fuselm"]} ({env["commit"]}), torch {env["torch"]}, triton {env["triton"]}, \
Python {env["python"]} |
| text | {text["files"]:,} files, {text["code_bytes"] / 1e6:.1f} MB of code and \
{text["documentation_bytes"] / 1e6:.1f} MB of documentation, collected in {text["seconds"]:.0f} s |
| left out | {text["copies"]:,} copies, {text["near_copies"]:,} near copies, {text["unsuitable"]:,} unsuitable files |
| tokens | {train["tokens"] / 1e6:.1f} M to train on, {held_out["tokens"] / 1e6:.2f} M in {held_out["documents"]:,} \
held-out files; {facts["tokenizer_vocab_size"]:,} in the vocabulary |
| preparation | {made["seconds"]:.0f} s, of which {made["encoding_seconds"]:.0f} s encoding at \
{made["encoding_mb_per_s"]:.0f} MB/s by {made["workers"]} processes |
| model | {facts["parameters"] / 1e6:.1f} M parameters |
| training | {t["steps"]:,} steps of {batch:,} tokens, {ended}; learning rate {t["lr"]:g}, \
{t["warmup_steps"]} steps of warmup |
| tokens seen | {t["tokens"] / 1e6:.1f} M, {t["epochs"]:.2f} times the training text |
| time | {t["seconds_of_steps"] / 60:.2f} minutes of training steps, in {t["calls"]} call(s) |
| speed | {t["tokens_per_second"]:,.0f} tok/s{mfu}; 90 % of the steps between {low:,.0f} and {high:,.0f} |
| memory | {t["memory_gib"]:.1f} GiB |
| validation loss | {first["loss"]:.3f} before the first step, {last["loss"]:.3f} after the last |
| bits a byte | {first["bits_per_byte"]:.3f} before, {last["bits_per_byte"]:.3f} after |

![Loss and bits a byte over tokens]({picture})

Whole held-out files, each from its beginning:

| text | files | MB | loss | bits a byte |
|---|---|---|---|---|
{rows}

Held-out files are picked by a hash of their text. Copies and files that share four fifths of their lines with earlier
ones were left out beforehand, but the rest still comes from the packages that were trained on, so this says how well
the model knows the style of these packages, not Python at large.

## Samples

Drawn with temperature 0.8 and top-p 0.95, not selected; what stands in ⟦ ⟧ is the model's. All of them, greedy ones
too, are in samples.txt beside the report.

{samples}
"""
