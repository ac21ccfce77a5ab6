"""Multiple choice in the manner of HellaSwag: `python train/multiple_choice.py RUN FILE.jsonl`.

Each line of the published file is an item: `{"ctx": ..., "endings": [four texts], "label": 2, ...}` (Zellers et al.,
"HellaSwag: Can a Machine Really Finish Your Sentence?", arXiv:1905.07830; the labels of its test split are not
published). The model chooses the ending with the highest log-probability given the context. That is counted thrice: by
the sum over the ending, by the mean over its tokens (as llm.c has it), and by the sum over the ending's bytes (as
lm-evaluation-harness has it), because a sum prefers short endings.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

import torch
import tyro
from torch import nn

from fuselm.train.command_line import parse_arguments
from fuselm.train.evaluation import IGNORE_INDEX
from fuselm.train.sample import load_run
from fuselm.train.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Item:
    """A context, its possible endings, and which of them is right."""

    context: str
    endings: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class Score:
    """How many of `items` were answered right, by each way to compare endings of different lengths."""

    items: int
    by_sum: int
    by_token: int
    by_byte: int

    def summary(self) -> str:
        """One line for people."""
        shares = [f"{n / self.items:.2%}" for n in (self.by_sum, self.by_token, self.by_byte)]
        return (
            f"{self.items:,} items: accuracy {shares[0]} by the sum of log-probabilities, {shares[1]} by their mean "
            f"over tokens, {shares[2]} over bytes"
        )


def read_items(path: Path) -> list[Item]:
    """Reads a .jsonl file of items; raises UserError that names the line where one is not an item."""
    try:
        # Only newlines end a line: text may hold the other characters that str.splitlines takes for ends.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    items = [_item(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not items:
        raise UserError(f"{path} holds no items")
    return items


def _item(line: str, origin: str) -> Item:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin} is not a JSON line: {error}") from error
    if not isinstance(entry, dict):
        raise UserError(f"{origin} is not an item: it must be an object with ctx, endings and label")
    context, endings, label = entry.get("ctx"), entry.get("endings"), entry.get("label")
    if not isinstance(context, str) or not context:
        raise UserError(f'{origin} has no text under the key "ctx"')
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) and e for e in endings):
        raise UserError(f'{origin} must have two texts or more under the key "endings"')
    # The file has it as a number, some copies as a string.
    number = int(label) if isinstance(label, int) or (isinstance(label, str) and label.isdecimal()) else -1
    if not 0 <= number < len(endings):
        raise UserError(f"{origin}: label is {label!r}; it must be 0 to {len(endings) - 1} (test splits have none)")
    return Item(context, tuple(endings), number)


def encode_item(item: Item, tokenizer: TextTokenizer, longest: int) -> tuple[list[list[int]], list[int]]:
    """The ids of each ending's row, and how many of them are of the ending (with the space before it).

    Args:
        item: the item.
        tokenizer: of the model.
        longest: tokens that a row may have; of a longer one the beginning is dropped, but one token of context stays.

    Raises:
        UserError: an ending alone is longer than that.
    """
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    context = [*start, *tokenizer.encode(item.context)]
    rows, lengths = [], []
    for ending in item.endings:
        ids = tokenizer.encode(" " + ending)
        if len(ids) >= longest:
            raise UserError(
                f"an ending has {len(ids)} tokens; the model takes {longest} with context: {ending[:60]!r}..."
            )
        rows.append([*context, *ids][-longest:])
        lengths.append(len(ids))
    return rows, lengths


@torch.no_grad()
def ending_losses(model: nn.Module, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> torch.Tensor:
    """Negative log-probabilities of endings.

    Args:
        model: as `Llama`: model(tokens, targets, reduction="none") gives the loss of each target.
        rows: ids of context and ending.
        lengths: how many of the last ids of each row are the ending.

    Returns:
        (rows,) fp64 on the CPU, the sum over each ending in nats.
    """
    device = next(model.parameters()).device
    width = max(len(row) for row in rows) - 1
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)  # what follows a row is not seen by it
    targets = torch.full((len(rows), width), IGNORE_INDEX, dtype=torch.int64)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        tokens[i, : len(row) - 1] = torch.tensor(row[:-1])
        targets[i, len(row) - 1 - length : len(row) - 1] = torch.tensor(row[-length:])
    losses = model(tokens.to(device), targets.to(device), reduction="none")
    return losses.view(len(rows), width).sum(1, dtype=torch.float64).cpu()


def evaluate_items(
    model: nn.Module, tokenizer: TextTokenizer, items: Sequence[Item], *, longest: int, batch_size: int = 8
) -> Iterator[tuple[Item, list[float], list[int]]]:
    """Computes the losses of all endings.

    Args:
        model, tokenizer: they belong together.
        items: the items.
        longest: tokens that the model takes.
        batch_size: items at a time.

    Yields:
        (item, the negative log-probability of each ending in nats, the number of tokens of each).
    """
    for first in range(0, len(items), batch_size):
        some = items[first : first + batch_size]
        encoded = [encode_item(item, tokenizer, longest) for item in some]
        rows = [row for item_rows, _ in encoded for row in item_rows]
        lengths = [length for _, item_lengths in encoded for length in item_lengths]
        losses = iter(ending_losses(model, rows, lengths).tolist())
        for item, (item_rows, item_lengths) in zip(some, encoded, strict=True):
            yield item, [next(losses) for _ in item_rows], item_lengths


def score(
    model: nn.Module, tokenizer: TextTokenizer, items: Sequence[Item], *, longest: int, batch_size: int = 8
) -> Score:
    """Counts right answers; where endings tie, the first is the answer. Arguments as for `evaluate_items`."""
    right = [0, 0, 0]
    for item, losses, lengths in evaluate_items(model, tokenizer, items, longest=longest, batch_size=batch_size):
        bytes_each = [len(ending.encode()) for ending in item.endings]
        for way, sizes in enumerate(([1] * len(losses), lengths, bytes_each)):
            means = [loss / size for loss, size in zip(losses, sizes, strict=True)]
            right[way] += means.index(min(means)) == item.label
    return Score(len(items), *right)


@dataclass
class Arguments:
    """Multiple choice with a trained run."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/124m."""
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """Items, one a line, as HellaSwag publishes them (hellaswag_val.jsonl)."""
    limit: int = 0
    """Only so many of the first items; 0 for all."""
    batch_size: int = 8
    """Items at a time."""
    step: int | None = None
    """Step of the checkpoint; by default the newest complete one."""
    device: str | None = None
    """cpu, cuda, cuda:1, ...; by default a GPU where there is one."""
    eos_token: str | None = None
    """End-of-text token of the tokenizer; by default the first usual name that it has."""
    bos_token: str | None = None
    """Token that begins each document, if the data was prepared with one."""


@command
def main(args: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 after an error of the user's, 130 when interrupted."""
    try:
        raise_on_interrupt()
        arguments = parse_arguments(Arguments, args, "multiple_choice.py")
        for name, least in (("limit", 0), ("batch_size", 1)):
            if getattr(arguments, name) < least:
                raise UserError(f"{name} is {getattr(arguments, name)}; it must be at least {least}")
        items = read_items(arguments.file)
        model, tokenizer = load_run(
            arguments.run,
            step=arguments.step,
            device=arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"),
            eos_token=arguments.eos_token,
            bos_token=arguments.bos_token,
        )
        items = items[: arguments.limit or None]
        result = score(model, tokenizer, items, longest=model.config.max_seq_len, batch_size=arguments.batch_size)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        report("interrupted")
        return 130
    print(result.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
