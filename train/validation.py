"""Validation in a run: the loss and bits a byte of the split, and of each source of a mix."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fuselm.train.config import EvaluationConfig
from fuselm.train.data_stream import TokenDataset
from fuselm.train.distributed import World
from fuselm.train.evaluation import IGNORE_INDEX, Feed, evaluate
from fuselm.train.parallelize import reshard
from fuselm.train.shards import read_index
from fuselm.train.source_loss import SourceLoss, document_windows, load_tokenizer


@dataclass(frozen=True)
class ValidationResult:
    """What a validation found, over all ranks.

    Attributes:
        loss: mean over tokens, in nats.
        tokens: predicted.
        bits_per_byte: the loss over the split's mean bytes a token; None where those are not known.
        sources: of each source its first documents, where evaluation.source_documents asks for it.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None = None
    sources: list[SourceLoss] = field(default_factory=list)


class Validation:
    """Validates a model whenever it is called; all ranks together.

    Args:
        feed: of the validation split.
        dataset: the split.
        config: how much of it.
        seq_len: tokens a window of a source's document.
    """

    def __init__(self, feed: Feed, dataset: TokenDataset, config: EvaluationConfig, seq_len: int) -> None:
        self.feed, self.dataset, self.config, self.seq_len = feed, dataset, config, seq_len
        self._windows: tuple[list[SourceLoss], list[tuple[int, NDArray[np.int64]]]] | None = None

    def __call__(self, model: nn.Module) -> ValidationResult:
        """Waits for the device."""
        loss, tokens = evaluate(model, self.feed, self.config.batches)
        sources = self._source_losses(model) if self.config.source_documents else []
        return ValidationResult(loss, tokens, loss / math.log(2) / self.dataset.bytes_per_token, sources)

    def _source_losses(self, model: nn.Module) -> list[SourceLoss]:
        """Each source's first documents, whole, their windows dealt out to the ranks.

        Every rank runs as many passes of one shape, the last ones with rows that do not count: under FSDP2 a pass is
        everybody's, and another shape would compile again.
        """
        if self._windows is None:
            tokenizer = load_tokenizer(self.dataset, read_index(self.dataset.path))
            self._windows = document_windows(self.dataset, tokenizer, self.seq_len, self.config.source_documents)
        counted, windows = self._windows
        world, rows = self.feed.world, self.feed.micro_batch_size
        mine = windows[world.rank :: world.size]
        passes = -(-len(windows) // (world.size * rows))
        sums = torch.zeros(2 * len(counted), dtype=torch.float64, device=world.device)  # nats, then tokens
        with torch.no_grad():
            for start in range(0, passes * rows, rows):
                _add(model, mine[start : start + rows], rows, self.seq_len, sums, world)
        reshard(model)
        nats, tokens = world.sum(sums).view(2, -1).tolist()
        return [
            SourceLoss(source.name, source.documents, int(count), source.text_bytes, total)
            for source, total, count in zip(counted, nats, tokens, strict=True)
        ]


def _add(
    model: nn.Module,
    windows: list[tuple[int, NDArray[np.int64]]],
    rows: int,
    seq_len: int,
    sums: torch.Tensor,
    world: World,
) -> None:
    tokens = torch.zeros(rows, seq_len, dtype=torch.int64)
    targets = torch.full((rows, seq_len), IGNORE_INDEX, dtype=torch.int64)
    for row, (_, ids) in enumerate(windows):
        tokens[row, : len(ids) - 1] = torch.from_numpy(ids[:-1])
        targets[row, : len(ids) - 1] = torch.from_numpy(ids[1:])
    losses = model(tokens.to(world.device), targets.to(world.device), reduction="none").view(rows, seq_len)
    places = torch.tensor([source for source, _ in windows], dtype=torch.int64, device=world.device)
    counts = (targets != IGNORE_INDEX).sum(1).to(sums)
    sources = len(sums) // 2
    sums[:sources].index_add_(0, places, losses.sum(1, dtype=torch.float64)[: len(windows)])
    sums[sources:].index_add_(0, places, counts[: len(windows)])
