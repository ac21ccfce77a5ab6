"""Batches from token shards, as a function of (seed, step): no state to save, the same data for any number of ranks.

A split is one run of N tokens. Sequence c of it is tokens [c*S, c*S + S + 1): S inputs and, one further, S targets, so
neighbours share one token and (N - 1) // S sequences make an epoch. Training never ends: sequence g of the run, counted
from 0 over all steps and ranks, is number g mod n of epoch g // n, and each epoch has its own permutation of the n
sequences. The permutation is a Feistel network over the next power of four, walked until it falls below n (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002): it needs no memory, and any element of it can be asked for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fuselm.train.documents import Split
from fuselm.train.shards import (
    BORDERS_MAGIC,
    TOKENIZER_FILE,
    TOKENS_MAGIC,
    DataError,
    check_dtype_holds,
    map_entries,
    read_index,
    token_dtype,
)
from fuselm.train.tokenizer import tokenizer_hash

__all__ = ["Batch", "DataError", "DataStream", "TokenDataset", "permuted"]

_ROUNDS = 6
_SAMPLES, _SAMPLE = 256, 64  # places, and tokens at each: few enough to be read at every start
_MASK64 = (1 << 64) - 1
# Positions that are permuted at once and kept: numpy takes about as long for one element as for thousands.
_BLOCK = 4096


@dataclass(frozen=True)
class Batch:
    """What one rank puts through the model in one micro-step.

    Attributes:
        tokens: (batch, seq_len) int64.
        targets: (batch, seq_len) int64, the token after each.
        cu_seqlens: (documents + 1 or more,) int32 borders of the documents in the flattened tokens, or None. The last
            value is repeated up to a power of two, which adds empty documents: so the shape seldom changes.
        max_seqlen: no document has more tokens than this; it is the sequence length, so that it never changes. None
            without borders.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The batch on another device."""
        cu_seqlens = None if self.cu_seqlens is None else self.cu_seqlens.to(device, non_blocking=non_blocking)
        tokens = self.tokens.to(device, non_blocking=non_blocking)
        return Batch(tokens, self.targets.to(device, non_blocking=non_blocking), cu_seqlens, self.max_seqlen)


class TokenDataset:
    """One split of a folder of token shards, memory-mapped. Make it with `TokenDataset.open`.

    Attributes:
        path: the folder.
        split: "train" or "validation".
        num_tokens: tokens of the split, BOS and EOS included.
        num_documents: documents of the split.
        vocab_size: one more than the largest id; the model's must be at least this.
        eos_id: the id that ends a document.
        tokenizer_path: the folder's tokenizer.json.
        tokenizer_hash: SHA-256 of it, in hex.
        bytes_per_token: UTF-8 bytes of text a token, for bits per byte.
        borders: (documents + 1,) int64, where each document begins in the split, and the end.
    """

    def __init__(self, path: Path, split: Split, index: dict[str, Any]) -> None:
        self.path, self.split = path, split
        try:
            entry = index["splits"][split]
            dtype = np.dtype(index["dtype"]).newbyteorder("<")
            self.vocab_size = int(index["vocab_size"])
            self.eos_id = int(index["eos_id"])
            self.tokenizer_hash = str(index["tokenizer_sha256"])
            self.num_tokens = int(entry["tokens"])
            self.num_documents = int(entry["documents"])
            text_bytes = int(entry["text_bytes"])
            sizes = [int(shard["tokens"]) for shard in entry["shards"]]
            files = [path / str(shard["file"]) for shard in entry["shards"]]
            borders = path / str(entry["borders"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the index of {path} is damaged: {type(error).__name__} {error}") from error
        if dtype not in (token_dtype(1), token_dtype(1 << 32)):
            raise DataError(f"the index of {path} says dtype {dtype.name}; shards hold uint16 or uint32")
        check_dtype_holds(dtype, self.vocab_size)
        if sum(sizes) != self.num_tokens:
            raise DataError(f"the index of {path} says {self.num_tokens} tokens, its shards hold {sum(sizes)}")
        if self.num_tokens == 0:
            raise DataError(f"the {split} split of {path} is empty: it needs more text or a larger validation_fraction")
        self.tokenizer_path = path / TOKENIZER_FILE
        if not self.tokenizer_path.is_file():
            raise DataError(f"{self.tokenizer_path} is missing")
        if tokenizer_hash(self.tokenizer_path.read_bytes()) != self.tokenizer_hash:
            raise DataError(f"{self.tokenizer_path} is not the tokenizer that the shards were made with")
        self.bytes_per_token = text_bytes / self.num_tokens
        self._shards = [map_entries(f, TOKENS_MAGIC, dtype, n) for f, n in zip(files, sizes, strict=True)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self._starts_array = np.asarray(self._starts[1:])
        self.borders: NDArray[np.int64] = map_entries(borders, BORDERS_MAGIC, np.dtype("<i8"), self.num_documents + 1)
        if self.borders[0] != 0 or self.borders[-1] != self.num_tokens:
            raise DataError(f"{borders} is damaged: it ends at {self.borders[-1]} instead of {self.num_tokens}")

    @classmethod
    def open(cls, path: Path | str, split: Split) -> TokenDataset:
        """Opens one split of a folder that `prepare` made.

        Args:
            path: the folder.
            split: "train" or "validation".

        Raises:
            DataError: the folder is missing, is something else, is damaged (sizes are checked, every token is not), or
                the split is empty.
        """
        path = Path(path)
        index = read_index(path)
        if split not in index.get("splits", {}):
            raise DataError(f"{path} has no split {split!r}; it has {', '.join(index.get('splits', {})) or 'none'}")
        return cls(path, split, index)

    def sample_digest(self) -> str:
        """A hash of tokens from all over the split: other text, or another order of documents, gives another one."""
        places = np.linspace(0, max(self.num_tokens - _SAMPLE, 0), _SAMPLES).astype(np.int64)
        digest = hashlib.blake2b(digest_size=16)
        for start in places.tolist():
            digest.update(self.read(start, min(_SAMPLE, self.num_tokens)).astype("<u4").tobytes())
        return digest.hexdigest()

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Tokens [start, start + count) of the split.

        Returns:
            (count,) uint16 or uint32; a view of the file where one shard holds them all.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise DataError(f"tokens [{start}, {start + count}) asked of a split of {self.num_tokens}")
        shard = int(np.searchsorted(self._starts_array, start, side="right")) if len(self._shards) > 1 else 0
        parts: list[NDArray[Any]] = []
        while count or not parts:
            offset = start - self._starts[shard]
            parts.append(self._shards[shard][offset : offset + count])
            start, count, shard = start + parts[-1].size, count - parts[-1].size, shard + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_many(self, starts: NDArray[np.int64], counts: NDArray[np.integer[Any]]) -> NDArray[Any]:
        """Tokens [start, start + count) for each pair, one run after the other; quick where runs are short.

        Args:
            starts: (runs,) int64.
            counts: (runs,) integers, at least 1.

        Returns:
            (sum of counts,) uint16 or uint32.
        """
        shards = np.searchsorted(self._starts_array, starts, side="right")
        offsets = starts - np.asarray(self._starts)[shards]
        parts = [
            self._shards[shard][offset : offset + count]
            for shard, offset, count in zip(shards.tolist(), offsets.tolist(), counts.tolist(), strict=True)
        ]
        for i, (part, count) in enumerate(zip(parts, counts.tolist(), strict=True)):
            if part.size < count:  # it goes on in the next shard
                parts[i] = self.read(int(starts[i]), count)
        return np.concatenate(parts)


class DataStream:
    """An endless run of batches over one split.

    Args:
        dataset: the split.
        seq_len: tokens a sequence.
        global_batch_size: sequences a step, over all ranks and micro-steps.
        seed: decides the order of every epoch.
        shuffle: False takes the sequences in the order of the files, every epoch.

    Raises:
        DataError: a number is out of range, or the split has not even one sequence.
    """

    def __init__(
        self, dataset: TokenDataset, *, seq_len: int, global_batch_size: int, seed: int, shuffle: bool = True
    ) -> None:
        for name, value in (("seq_len", seq_len), ("global_batch_size", global_batch_size)):
            if value < 1:
                raise DataError(f"{name} is {value}; it must be at least 1")
        self.dataset, self.seq_len, self.global_batch_size = dataset, seq_len, global_batch_size
        self.seed, self.shuffle = seed, shuffle
        #: Sequences until the data repeats, (tokens - 1) // seq_len.
        self.sequences_per_epoch = (dataset.num_tokens - 1) // seq_len
        if self.sequences_per_epoch < 1:
            raise DataError(
                f"the {dataset.split} split of {dataset.path} has {dataset.num_tokens} tokens; one sequence of seq_len "
                f"{seq_len} and its target need {seq_len + 1}"
            )
        self._block: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def sequence_ids(self, start: int, count: int) -> list[int]:
        """Which sequences of the split the run takes at places [start, start + count), counted from its beginning."""
        n = self.sequences_per_epoch
        if not self.shuffle:
            return [g % n for g in range(start, start + count)]
        return [self._shuffled(*divmod(g, n)) for g in range(start, start + count)]

    def _shuffled(self, epoch: int, place: int) -> int:
        number, within = divmod(place, _BLOCK)
        key = epoch * (self.sequences_per_epoch // _BLOCK + 1) + number
        if self._block[0] != key:
            places = np.arange(number * _BLOCK, min((number + 1) * _BLOCK, self.sequences_per_epoch))
            self._block = (key, permuted(places, self.sequences_per_epoch, seed=self.seed, epoch=epoch))
        return int(self._block[1][within])

    def batch(
        self,
        step: int,
        *,
        rank: int,
        world_size: int,
        micro_step: int = 0,
        accumulation: int = 1,
        document_mask: bool = False,
    ) -> Batch:
        """The sequences of one rank in one micro-step.

        Those of all ranks and micro-steps of a step are the same set for every world_size and accumulation that divide
        the global batch.

        Args:
            step: optimizer step, from 0.
            rank: of the data-parallel ranks, from 0.
            world_size: number of data-parallel ranks.
            micro_step: from 0.
            accumulation: micro-steps a step.
            document_mask: also give the borders of documents.

        Raises:
            DataError: the global batch is not divisible, a number is out of range, or a token is not in the vocabulary.
        """
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
        tokens = torch.empty(local, self.seq_len, dtype=torch.int64)
        targets = torch.empty(local, self.seq_len, dtype=torch.int64)
        into_tokens, into_targets = tokens.numpy(), targets.numpy()
        ids = self.sequence_ids(first, local)
        for row, sequence in enumerate(ids):
            run = self.dataset.read(sequence * self.seq_len, self.seq_len + 1)
            if int(run.max()) >= self.dataset.vocab_size:
                raise DataError(
                    f"the {self.dataset.split} split of {self.dataset.path} is damaged: sequence {sequence} holds id "
                    f"{int(run.max())}, the vocabulary has {self.dataset.vocab_size}"
                )
            into_tokens[row] = run[:-1]
            into_targets[row] = run[1:]
        if not document_mask:
            return Batch(tokens, targets)
        return Batch(tokens, targets, torch.from_numpy(self._document_borders(ids)), self.seq_len)

    def documents(self, step: int, *, rank: int, world_size: int, accumulation: int = 1) -> list[tuple[int, int]]:
        """Which documents of the split a rank's part of a step has tokens of.

        Args:
            step, rank, world_size, accumulation: as for `batch`.

        Returns:
            Their numbers in the split as ranges (first, last), both included, sorted; ranges that touch are joined.
        """
        local = self.global_batch_size // (world_size * accumulation)
        found: set[int] = set()
        for micro_step in range(accumulation):
            first = step * self.global_batch_size + (micro_step * world_size + rank) * local
            for sequence in self.sequence_ids(first, local):
                ends = (sequence * self.seq_len, (sequence + 1) * self.seq_len)
                begin, end = np.searchsorted(self.dataset.borders, ends, side="right")
                found.update(range(int(begin) - 1, min(int(end), self.dataset.num_documents)))
        ranges: list[tuple[int, int]] = []
        for number in sorted(found):
            if ranges and ranges[-1][1] == number - 1:
                ranges[-1] = (ranges[-1][0], number)
            else:
                ranges.append((number, number))
        return ranges

    def _document_borders(self, ids: list[int]) -> NDArray[np.int32]:
        """(power of two + 1,) int32: a border at each row and at each document that begins within one.

        Room for two documents a row at least, so that long documents give one shape throughout.
        """
        borders = self.dataset.borders
        parts: list[NDArray[np.int64]] = []
        for row, sequence in enumerate(ids):
            start = sequence * self.seq_len
            first, last = np.searchsorted(borders, (start, start + self.seq_len), side="left")
            inner = borders[first:last] - start
            inner = inner[inner > 0]
            parts.append(np.concatenate(([0], inner)) + row * self.seq_len)
        end = len(ids) * self.seq_len
        found = np.concatenate([*parts, [end]])
        room = max(found.size - 1, 2 * len(ids))
        padded = np.full((1 << (room - 1).bit_length()) + 1, end, np.int32)
        padded[: found.size] = found
        return padded


def permuted(places: NDArray[np.int64], n: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a pseudo-random permutation of 0..n-1 takes some places.

    Args:
        places: (count,) int64 in [0, n).
        n: size of the domain, at least 1.
        seed: any integer.
        epoch: from 0; each gives another permutation.

    Returns:
        (count,) int64 in [0, n), pairwise different where the places are.
    """
    half = max((n - 1).bit_length() + 1, 2) // 2
    keys = _round_keys(seed, epoch)
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    result = places.astype(np.uint64)
    outside = np.arange(result.size)
    # A permutation of a larger domain, repeated until it lands below n, permutes 0..n-1: every cycle comes back to it.
    while outside.size:
        left, right = result[outside] >> shift, result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        result[outside] = (left << shift) | right
        outside = outside[result[outside] >= np.uint64(n)]
    return result.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): each input bit changes about half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[np.uint64]:
    state = np.asarray([seed & _MASK64], np.uint64)
    state = _mix(_mix(state + np.uint64(0x9E3779B97F4A7C15)) + np.asarray([epoch & _MASK64], np.uint64))
    return [_mix(state + np.uint64(r * 0x9E3779B97F4A7C15 & _MASK64))[0] for r in range(1, _ROUNDS + 1)]
