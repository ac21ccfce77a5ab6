"""Loss and bits a byte of each source of a data set: `python train/source_loss.py RUN [--data FOLDER]`.

Unlike the validation loss that a run prints, which is of the concatenated split, each document is read on its own, from
its beginning and all of it, in windows of the model's context. Bits a byte do not depend on the tokenizer, so runs with
different ones can be compared.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import nn

from fuselm.train.command_line import parse_arguments
from fuselm.train.config import config_from_json
from fuselm.train.data_stream import TokenDataset
from fuselm.train.evaluation import IGNORE_INDEX
from fuselm.train.sample import load_run
from fuselm.train.shards import SOURCES_MAGIC, map_entries, read_index
from fuselm.train.tokenizer import TextTokenizer


@dataclass
class SourceLoss:
    """Sums over the documents of a source.

    Attributes:
        name: of the source.
        documents: how many.
        tokens: predicted, end of text included.
        text_bytes: UTF-8 bytes of their text.
        nats: negative log-probability of all of it.
    """

    name: str
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    nats: float = 0.0

    @property
    def loss(self) -> float:
        """Mean over tokens, in nats."""
        return self.nats / max(self.tokens, 1)

    @property
    def bits_per_byte(self) -> float:
        """Of the text; the ends of documents count as bits too."""
        return self.nats / math.log(2) / max(self.text_bytes, 1)


def document_sources(data: TokenDataset) -> tuple[list[str], NDArray[np.integer]]:
    """The names of a data set's sources, and for each document of the split which it comes from."""
    index = read_index(data.path)
    names = [str(source["name"]) for source in index.get("settings", {}).get("sources", [])] or ["all"]
    file = index["splits"][data.split].get("sources")
    if not file:
        return names[:1], np.zeros(data.num_documents, np.uint8)
    return names, map_entries(data.path / file, SOURCES_MAGIC, np.dtype("u1"), data.num_documents)


def source_losses(
    model: nn.Module,
    data: TokenDataset,
    tokenizer: TextTokenizer,
    *,
    seq_len: int,
    batch_size: int = 8,
    max_documents: int = 0,
) -> list[SourceLoss]:
    """The loss of each source.

    Args:
        model: as `Llama`, on any device.
        data: the split.
        tokenizer: of the data and the model.
        seq_len: tokens a window; what comes before it in the document is not seen.
        batch_size: windows at a time.
        max_documents: of each source, the first so many; 0 for all.

    Returns:
        One entry a source, in the order of the mix.
    """
    names, sources = document_sources(data)
    results = [SourceLoss(name) for name in names]
    windows = _windows(data, tokenizer, sources, results, seq_len, max_documents)
    device = next(model.parameters()).device
    batch: list[tuple[int, NDArray[np.int64]]] = []
    for window in windows:
        batch.append(window)
        if len(batch) == batch_size:
            _add(model, batch, results, device)
            batch = []
    if batch:
        _add(model, batch, results, device)
    return results


def document_windows(
    data: TokenDataset, tokenizer: TextTokenizer, seq_len: int, max_documents: int
) -> tuple[list[SourceLoss], list[tuple[int, NDArray[np.int64]]]]:
    """What is to be predicted of the first `max_documents` documents of each source.

    Returns:
        The sources, with their documents and bytes counted but no losses yet, and (source, ids) of each window: up to
        seq_len + 1 ids, of which all but the first are predicted.
    """
    names, sources = document_sources(data)
    results = [SourceLoss(name) for name in names]
    return results, list(_windows(data, tokenizer, sources, results, seq_len, max_documents))


def _windows(
    data: TokenDataset,
    tokenizer: TextTokenizer,
    sources: NDArray[np.integer],
    results: list[SourceLoss],
    seq_len: int,
    max_documents: int,
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(source, up to seq_len + 1 ids): the first of them is given, the others are predicted."""
    begins_itself = tokenizer.bos_id is not None
    borders = data.borders
    for number, source in enumerate(sources.tolist()):
        result = results[source]
        if max_documents and result.documents >= max_documents:
            if all(r.documents >= max_documents for r in results):
                return
            continue
        ids = data.read(int(borders[number]), int(borders[number + 1] - borders[number])).astype(np.int64)
        text = ids[1:-1] if begins_itself else ids[:-1]
        result.documents += 1
        result.text_bytes += _text_bytes(tokenizer, text)
        # In training a document follows the end of another.
        whole = ids if begins_itself else np.concatenate(([data.eos_id], ids))
        for start in range(0, len(whole) - 1, seq_len):
            yield source, whole[start : start + seq_len + 1]


def _text_bytes(tokenizer: TextTokenizer, ids: NDArray[np.int64]) -> int:
    if tokenizer.token_bytes is not None:
        return sum(len(tokenizer.token_bytes[i]) for i in ids.tolist())
    return len(tokenizer.decode(ids.tolist()).encode())


@torch.no_grad()
def _add(
    model: nn.Module, batch: list[tuple[int, NDArray[np.int64]]], results: list[SourceLoss], device: torch.device
) -> None:
    width = max(len(ids) for _, ids in batch) - 1
    tokens = torch.zeros(len(batch), width, dtype=torch.int64)
    targets = torch.full((len(batch), width), IGNORE_INDEX, dtype=torch.int64)
    for row, (_, ids) in enumerate(batch):
        tokens[row, : len(ids) - 1] = torch.from_numpy(ids[:-1])
        targets[row, : len(ids) - 1] = torch.from_numpy(ids[1:])
    losses = model(tokens.to(device), targets.to(device), reduction="none").view(len(batch), width)
    for (source, ids), nats in zip(batch, losses.sum(1, dtype=torch.float64).tolist(), strict=True):
        results[source].tokens += len(ids) - 1
        results[source].nats += nats


def table(results: Sequence[SourceLoss]) -> str:
    """Lines for people, with a last one for all sources together."""
    lines = [f"{'source':<24} {'documents':>10} {'tokens':>14} {'bytes':>14} {'loss':>8} {'bits/byte':>10}"]
    rows = list(results)
    if len(rows) > 1:
        rows.append(
            SourceLoss(
                "all together",
                sum(r.documents for r in results),
                sum(r.tokens for r in results),
                sum(r.text_bytes for r in results),
                sum(r.nats for r in results),
            )
        )
    for r in rows:
        numbers = f"{r.loss:>8.4f} {r.bits_per_byte:>10.4f}" if r.tokens else f"{'-':>8} {'-':>10}"
        lines.append(f"{r.name[:24]:<24} {r.documents:>10,} {r.tokens:>14,} {r.text_bytes:>14,} {numbers}")
    return "\n".join(lines)


@dataclass
class Arguments:
    """Loss and bits a byte of each source of the data."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Run folder, such as runs/124m."""
    data: Path | None = None
    """Folder written by prepare_data.py, with the run's tokenizer; by default the one that the run was trained on."""
    split: str = "validation"
    """validation or train."""
    max_documents: int = 0
    """Of each source, only so many of the first documents; 0 for all."""
    batch_size: int = 8
    """Windows at a time."""
    step: int | None = None
    """Step of the checkpoint; by default the newest complete one."""
    device: str | None = None
    """cpu, cuda, cuda:1, ...; by default a GPU where there is one."""


@command
def main(args: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 after an error of the user's, 130 when interrupted."""
    try:
        raise_on_interrupt()
        arguments = parse_arguments(Arguments, args, "source_loss.py")
        if arguments.split not in ("train", "validation"):
            raise UserError(f"split is {arguments.split!r}; it must be train or validation")
        for name, least in (("max_documents", 0), ("batch_size", 1)):
            if getattr(arguments, name) < least:
                raise UserError(f"{name} is {getattr(arguments, name)}; it must be at least {least}")
        config = config_from_json(arguments.run)
        bundled = config.runs / "data" / f"plays_{config.data.vocab_size}"
        folder = arguments.data or config.data.path or bundled
        data = TokenDataset.open(folder, "train" if arguments.split == "train" else "validation")
        index = read_index(folder)
        tokenizer = load_tokenizer(data, index)
        device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        model, own = load_run(arguments.run, step=arguments.step, device=device, eos_token=tokenizer.eos_token)
        if own.to_json() != tokenizer.to_json():
            raise UserError(
                f"the tokenizer of {folder} is not the one of {arguments.run}: prepare the text with that one"
            )
        results = source_losses(
            model,
            data,
            tokenizer,
            seq_len=config.training.seq_len,
            batch_size=arguments.batch_size,
            max_documents=arguments.max_documents,
        )
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        report("interrupted")
        return 130
    print(table(results))
    return 0


def load_tokenizer(data: TokenDataset, index: dict[str, Any]) -> TextTokenizer:
    """The tokenizer of a data set, with the special tokens that `index` says it was written with."""
    backend = Tokenizer.from_file(str(data.tokenizer_path))
    bos = index.get("bos_id")
    return TextTokenizer.load(
        data.tokenizer_path,
        eos_token=backend.id_to_token(data.eos_id),
        bos_token=None if bos is None else backend.id_to_token(bos),
    )


if __name__ == "__main__":
    sys.exit(main())
