"""Rows of whole documents: best-fit packing with document borders, beside the concatenation of `data_stream`.

A concatenated row starts and ends in the middle of a document. Here each document lies in one row, or, where it is
longer than a row, in as few as possible; rows are filled by best-fit decreasing (Ding et al., "Fewer Truncations
Improve Language Modeling", arXiv:2404.10830), attention stays within a document and positions restart with each.
Nothing is predicted across a border, and the few places that stay free count for nothing in the loss.

    stream = PackedStream(dataset, seq_len=1024, global_batch_size=512, seed=0)  # instead of DataStream
    feed = PrefetchingFeed(feed)  # batches made ahead, in pinned memory
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from fuselm.train.data_stream import Batch, DataError, DataStream, TokenDataset
from fuselm.train.evaluation import IGNORE_INDEX, Feed


def best_fit(lengths: NDArray[np.integer], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Best-fit decreasing: the longest item first, each into the fullest row that has room for it.

    Items of one length are placed together, so the time grows with the number of different lengths and not with the
    number of items.

    Args:
        lengths: (items,) integers in [1, capacity].
        capacity: of a row.

    Returns:
        (items,) the row of each item, numbered from 0; and the number of rows.
    """
    rows = np.empty(len(lengths), np.int64)
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    values, counts = np.unique(np.asarray(lengths), return_counts=True)
    # free[r]: rows with room for r more, as stacks of arrays; many[r]: how many rows those are.
    free: list[list[NDArray[np.int64]]] = [[] for _ in range(capacity + 1)]
    many = np.zeros(capacity + 1, np.int64)
    opened = done = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            found = np.flatnonzero(many[length:])
            if found.size:
                room = length + int(found[0])
                stack = np.concatenate(free[room])
            else:  # no row has room
                room = capacity
                stack = np.arange(opened, opened + -(-left // (capacity // length)), dtype=np.int64)
                opened += len(stack)
            each = room // length
            # The fullest row stays the fullest while it takes more of these, so rows are filled one after the other.
            used = stack[: -(-left // each)]
            placed = min(left, each * len(used))
            rows[order[done : done + placed]] = np.repeat(used, each)[:placed]
            free[room] = [stack[len(used) :]] if len(used) < len(stack) else []
            many[room] = len(stack) - len(used)
            whole, rest = divmod(placed, each)
            for part, taken in ((used[:whole], each), (used[whole:], rest)):
                if len(part):
                    free[room - taken * length].append(part)
                    many[room - taken * length] += len(part)
            left -= placed
            done += placed
    return rows, opened


@dataclasses.dataclass(frozen=True)
class Packing:
    """Which piece of which document lies in which row.

    Attributes:
        starts: (pieces,) int64, the piece's first token in the split.
        lengths: (pieces,) int32, its inputs; the token after the last is a target only.
        documents: (pieces,) int64, the document it is from.
        rows: (rows + 1,) int64: row r holds pieces [rows[r], rows[r + 1]), in the order of the split.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    documents: NDArray[np.int64]
    rows: NDArray[np.int64]

    @classmethod
    def of(cls, borders: NDArray[np.int64], seq_len: int) -> Packing:
        """Packs documents into rows; takes about 20 bytes of memory a piece.

        Args:
            borders: (documents + 1,) int64, where each begins in the split, and the end.
            seq_len: tokens a row.
        """
        inputs = np.diff(borders) - 1  # the last token of a document is no input
        pieces = -(-inputs // seq_len)  # none for a document of one token, which predicts nothing
        documents = np.repeat(np.arange(len(inputs)), pieces)
        before = np.cumsum(pieces) - pieces
        within = (np.arange(len(documents)) - before[documents]) * seq_len
        starts = np.asarray(borders)[:-1][documents] + within
        lengths = np.minimum(inputs[documents] - within, seq_len)
        row, count = best_fit(lengths, seq_len)
        order = np.argsort(row, kind="stable")
        edges = np.searchsorted(row[order], np.arange(count + 1))
        return cls(starts[order], lengths[order].astype(np.int32), documents[order], edges)

    @property
    def num_rows(self) -> int:
        return len(self.rows) - 1


class PackedStream(DataStream):
    """An endless run of batches of packed rows; what it guarantees is what `DataStream` does.

    Each epoch holds each row once, in an order of its own that is computed on the fly; a step has the same rows for any
    number of ranks and micro-steps.

    Args:
        dataset: the split.
        seq_len: tokens a row.
        global_batch_size: rows a step, over all ranks and micro-steps.
        seed: decides the order of every epoch.
        shuffle: False takes the rows in their order, every epoch.

    Raises:
        DataError: a number is out of range, or the split holds no document of two tokens.
    """

    def __init__(
        self, dataset: TokenDataset, *, seq_len: int, global_batch_size: int, seed: int, shuffle: bool = True
    ) -> None:
        for name, value in (("seq_len", seq_len), ("global_batch_size", global_batch_size)):
            if value < 1:
                raise DataError(f"{name} is {value}; it must be at least 1")
        self.dataset, self.seq_len, self.global_batch_size = dataset, seq_len, global_batch_size
        self.seed, self.shuffle = seed, shuffle
        self.packing = Packing.of(dataset.borders, seq_len)
        #: Rows until the data repeats.
        self.sequences_per_epoch = self.packing.num_rows
        if not self.sequences_per_epoch:
            raise DataError(f"the {dataset.split} split of {dataset.path} has no document of two tokens or more")
        self._block: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    @property
    def fill(self) -> float:
        """Share of all places that hold a token to learn from."""
        return int(self.packing.lengths.sum(dtype=np.int64)) / (self.sequences_per_epoch * self.seq_len)

    def _places(self, step: int, rank: int, world_size: int, micro_step: int, accumulation: int) -> list[int]:
        if world_size < 1 or accumulation < 1 or self.global_batch_size % (world_size * accumulation):
            raise DataError(
                f"global_batch_size {self.global_batch_size} is not divisible by world_size {world_size} "
                f"x accumulation {accumulation}"
            )
        if step < 0 or not 0 <= rank < world_size or not 0 <= micro_step < accumulation:
            raise DataError(
                f"step {step}, rank {rank} of {world_size}, micro_step {micro_step} of {accumulation}: "
                "counting starts at 0"
            )
        local = self.global_batch_size // (world_size * accumulation)
        first = step * self.global_batch_size + (micro_step * world_size + rank) * local
        return self.sequence_ids(first, local)

    def batch(
        self,
        step: int,
        *,
        rank: int,
        world_size: int,
        micro_step: int = 0,
        accumulation: int = 1,
        document_mask: bool = True,
    ) -> Batch:
        """The rows of one rank in one micro-step.

        Args:
            step, rank, world_size, micro_step, accumulation: as for `DataStream.batch`.
            document_mask: has no effect: packed rows always come with the borders of their documents.

        Returns:
            tokens and targets (rows, seq_len): places without a token hold the end of text, targets without a
            prediction hold -100. The free places of a row count as a document of their own in `cu_seqlens`.

        Raises:
            DataError: the global batch is not divisible, a number is out of range, or a token is not in the vocabulary.
        """
        ids = self._places(step, rank, world_size, micro_step, accumulation)
        seq_len, packing = self.seq_len, self.packing
        ranges = [np.arange(packing.rows[number], packing.rows[number + 1]) for number in ids]
        pieces = np.concatenate(ranges)
        row = np.repeat(np.arange(len(ids)), [len(r) for r in ranges])
        lengths = packing.lengths[pieces].astype(np.int64)
        runs = self.dataset.read_many(packing.starts[pieces], lengths + 1)
        if int(runs.max()) >= self.dataset.vocab_size:
            raise DataError(
                f"the {self.dataset.split} split of {self.dataset.path} is damaged: it holds id {int(runs.max())}, the "
                f"vocabulary has {self.dataset.vocab_size}"
            )
        tokens = np.full((len(ids), seq_len), self.dataset.eos_id, np.int64)
        targets = np.full((len(ids), seq_len), IGNORE_INDEX, np.int64)
        used = np.arange(seq_len) < np.bincount(row, weights=lengths, minlength=len(ids))[:, None]
        ends = np.cumsum(lengths + 1)
        keep = np.ones(len(runs), bool)
        keep[ends - 1] = False  # a run's last token is a target only
        tokens[used] = runs[keep]
        targets[used] = runs[1:][keep[:-1]]
        before = np.concatenate(([0], np.cumsum(lengths)))
        first = np.searchsorted(row, np.arange(len(ids)))
        inner = before[1:] - before[first][row] + row * seq_len
        borders = np.union1d(inner, np.arange(len(ids) + 1) * seq_len)
        room = max(len(borders) - 1, 2 * len(ids))
        padded = np.full((1 << (room - 1).bit_length()) + 1, len(ids) * seq_len, np.int32)
        padded[: len(borders)] = borders
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), torch.from_numpy(padded), seq_len)

    def documents(self, step: int, *, rank: int, world_size: int, accumulation: int = 1) -> list[tuple[int, int]]:
        """Which documents a rank's part of a step has tokens of, as `DataStream.documents` gives them."""
        found: set[int] = set()
        for micro_step in range(accumulation):
            for number in self._places(step, rank, world_size, micro_step, accumulation):
                found.update(self.packing.documents[self.packing.rows[number] : self.packing.rows[number + 1]].tolist())
        ranges: list[tuple[int, int]] = []
        for number in sorted(found):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1] = (ranges[-1][0], number)
            else:
                ranges.append((number, number))
        return ranges


BATCHES_THREAD = "batches"  # name of the thread that makes batches ahead


class PrefetchingFeed(Feed):
    """A feed whose next batches are made by a thread while the current ones are in use, in pinned memory on a GPU.

    Args:
        feed: the feed to read ahead of.
        depth: steps to be ahead.
    """

    def __init__(self, feed: Feed, depth: int = 2) -> None:
        if depth < 1:
            raise DataError(f"depth is {depth}; it must be at least 1")
        super().__init__(feed.stream, feed.world, feed.micro_batch_size, feed.document_mask)
        object.__setattr__(self, "_depth", depth)
        object.__setattr__(self, "_ahead", {})
        # One thread, and everything through it: a stream remembers its last block, which two threads would mix up.
        object.__setattr__(self, "_thread", ThreadPoolExecutor(1, thread_name_prefix=BATCHES_THREAD))

    _depth: int
    _ahead: dict[int, Future[list[Batch]]]
    _thread: ThreadPoolExecutor

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, on the CPU; any step may be asked for, the next one is there soonest."""
        for other in [s for s in self._ahead if not step <= s <= step + self._depth]:
            self._ahead.pop(other).cancel()
        for soon in range(step, step + self._depth + 1):
            if soon not in self._ahead:
                self._ahead[soon] = self._thread.submit(self._make, soon)
        return self._ahead.pop(step).result()

    def documents(self, step: int, rank: int) -> list[tuple[int, int]]:
        return self._thread.submit(super().documents, step, rank).result()

    def close(self) -> None:
        """Ends the thread; the feed cannot be used afterwards."""
        self._thread.shutdown(cancel_futures=True)

    def _make(self, step: int) -> list[Batch]:
        batches = super().micro_batches(step)
        return [_pinned(batch) for batch in batches] if self.world.device.type == "cuda" else batches


def _pinned(batch: Batch) -> Batch:
    borders = None if batch.cu_seqlens is None else batch.cu_seqlens.pin_memory()
    return Batch(batch.tokens.pin_memory(), batch.targets.pin_memory(), borders, batch.max_seqlen)
