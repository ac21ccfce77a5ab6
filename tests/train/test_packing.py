"""Best-fit packing: nothing lost, nothing twice, nothing across a border, and as tight as best fit is."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuselm.model.config import LlamaConfig
from fuselm.model.llama import Llama
from fuselm.train.data_stream import Batch, DataError, TokenDataset
from fuselm.train.distributed import World
from fuselm.train.evaluation import Feed
from fuselm.train.packing import PackedStream, Packing, PrefetchingFeed, best_fit
from fuselm.train.shards import SplitWriter, write_index


def dataset(folder: Path, lengths: list[int], *, shard_tokens: int = 10**6, vocab: int = 50_000) -> TokenDataset:
    """Documents of these lengths whose tokens count on from 1 through the split, and end with 0."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    writer = SplitWriter(folder, "train", vocab_size=vocab, shard_tokens=shard_tokens)
    number = 1
    for length in lengths:
        ids = np.arange(number, number + length) % vocab
        ids[-1] = 0
        number += length
        writer.append(ids)
        writer.end_document()
    content = {
        "dtype": "uint16",
        "vocab_size": vocab,
        "eos_id": 0,
        "tokenizer_sha256": hashlib.sha256(b"{}").hexdigest(),
    }
    write_index(folder, content, {"train": writer.close()})
    return TokenDataset.open(folder, "train")


def simple_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """One item at a time, by the definition: into the row with the least room that is enough. Returns all rooms."""
    rooms: list[int] = []
    taken: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            taken.append([])
            fitting = [len(rooms) - 1]
        best = min(fitting, key=lambda i: rooms[i])
        rooms[best] -= length
        taken[best].append(length)
    return sorted(rooms)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 30).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))))
def test_best_fit_is_that_of_the_definition(case: tuple[int, list[int]]) -> None:
    capacity, lengths = case
    rows, count = best_fit(np.asarray(lengths, np.int64), capacity)
    filled = np.bincount(rows, weights=lengths, minlength=count) if lengths else np.zeros(count)
    assert count == 0 or (filled > 0).all()
    assert sorted((capacity - filled).astype(int).tolist()) == simple_best_fit(lengths, capacity)


def test_packing_of_many_documents_is_tight_and_quick() -> None:
    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(6, 1, 200_000).astype(np.int64) + 2, 50_000)
    began = time.perf_counter()
    packing = Packing.of(np.concatenate([[0], np.cumsum(lengths)]), 2048)
    assert time.perf_counter() - began < 20  # about a second on a core of its own
    assert packing.lengths.sum() == (lengths - 1).sum()
    assert packing.lengths.sum() / (packing.num_rows * 2048) > 0.995
    # A document is cut only where it is longer than a row.
    assert len(packing.starts) == sum(-(-(length - 1) // 2048) for length in lengths.tolist())


def rows_of(batch: Batch) -> list[list[tuple[list[int], list[int]]]]:
    """For each row its documents as (tokens, targets), cut at the borders."""
    assert batch.cu_seqlens is not None
    borders = [b for i, b in enumerate(batch.cu_seqlens.tolist()) if i == 0 or b != batch.cu_seqlens[i - 1]]
    tokens, targets = batch.tokens.flatten().tolist(), batch.targets.flatten().tolist()
    assert borders[0] == 0 and borders[-1] == len(tokens)
    rows: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(batch.tokens.shape[0])]
    for start, end in pairwise(borders):
        row = start // batch.tokens.shape[1]
        assert (end - 1) // batch.tokens.shape[1] == row
        rows[row].append((tokens[start:end], targets[start:end]))
    return rows


LENGTHS = [5, 1, 30, 8, 2, 17, 16, 18, 9, 3, 3, 50, 7, 12]


def test_every_token_is_learned_once_an_epoch_and_none_across_a_border(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", LENGTHS, shard_tokens=20)
    stream = PackedStream(data, seq_len=16, global_batch_size=1, seed=3)
    expected = []
    for start, end in pairwise(data.borders.tolist()):
        ids = data.read(start, end - start).tolist()
        expected += list(pairwise(ids))
    for epoch in range(2):
        got, free, cut = [], 0, 0
        for step in range(stream.sequences_per_epoch):
            batch = stream.batch(epoch * stream.sequences_per_epoch + step, rank=0, world_size=1)
            for tokens, targets in rows_of(batch)[0]:
                if targets[0] == -100:
                    assert set(targets) == {-100} and set(tokens) == {0}
                    free += len(tokens)
                    continue
                assert 0 not in tokens and -100 not in targets and tokens[1:] == targets[:-1]
                got += list(zip(tokens, targets, strict=True))
                cut += targets[-1] != 0
        assert sorted(got) == sorted(expected)
        assert cut == 1 + 0 + 1 + 3  # in the documents with 29, 16, 17 and 49 inputs
        assert free == stream.sequences_per_epoch * 16 - len(expected)
        assert stream.fill == pytest.approx(len(expected) / (stream.sequences_per_epoch * 16))


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_a_step_has_the_same_rows_for_any_split(tmp_path: Path, world_size: int, accumulation: int) -> None:
    stream = PackedStream(dataset(tmp_path / "data", LENGTHS * 3), seq_len=16, global_batch_size=4, seed=1)
    for step in (0, 3, 11):
        whole = stream.batch(step, rank=0, world_size=1)
        parts = [
            stream.batch(step, rank=r, world_size=world_size, micro_step=m, accumulation=accumulation)
            for m in range(accumulation)
            for r in range(world_size)
        ]
        assert torch.equal(torch.cat([p.tokens for p in parts]), whole.tokens)
        assert torch.equal(torch.cat([p.targets for p in parts]), whole.targets)
        assert [row for p in parts for row in rows_of(p)] == rows_of(whole)
        named = stream.documents(step, rank=0, world_size=1)
        of_parts = {
            n
            for r in range(world_size)
            for first, last in stream.documents(step, rank=r, world_size=world_size, accumulation=accumulation)
            for n in range(first, last + 1)
        }
        assert of_parts == {n for first, last in named for n in range(first, last + 1)}


def test_documents_of_a_step_are_those_whose_tokens_it_has(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", LENGTHS)
    stream = PackedStream(data, seq_len=16, global_batch_size=2, seed=1)
    for step in range(6):
        batch = stream.batch(step, rank=0, world_size=1)
        # Tokens count through the split from 1 on, so they say which document they are of.
        tokens = batch.tokens[batch.targets != -100].numpy()
        expected = set(np.searchsorted(data.borders, tokens - 1, side="right") - 1)
        ranges = stream.documents(step, rank=0, world_size=1)
        assert {n for first, last in ranges for n in range(first, last + 1)} == expected
        assert all(a[1] + 1 < b[0] for a, b in pairwise(ranges))


def test_a_packed_document_is_computed_as_if_it_were_alone(tmp_path: Path) -> None:
    """Positions restart and attention does not cross: logits equal those of the document in a batch of its own."""
    data = dataset(tmp_path / "data", [6, 9, 4, 12], vocab=60)
    stream = PackedStream(data, seq_len=16, global_batch_size=2, seed=0)
    config = LlamaConfig(
        vocab_size=60, dim=32, num_layers=2, num_heads=2, num_kv_heads=1, ffn_dim=48, max_seq_len=16, kernels="eager"
    )
    model = Llama(config)
    model.init_weights(0)
    checked = 0
    batch = stream.batch(0, rank=0, world_size=1)
    with torch.no_grad():
        packed = model(batch.tokens, cu_seqlens=batch.cu_seqlens, max_seqlen=batch.max_seqlen).flatten(0, 1)
        at = 0
        for row in rows_of(batch):
            for tokens, targets in row:
                if targets[0] != -100:
                    alone = model(torch.tensor([tokens]))[0]
                    torch.testing.assert_close(packed[at : at + len(tokens)], alone, rtol=1e-5, atol=1e-6)
                    checked += 1
                at += len(tokens)
    assert checked == 4


def test_bad_input(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", [5, 5])
    for name in ("seq_len", "global_batch_size"):
        numbers = {"seq_len": 8, "global_batch_size": 1} | {name: 0}
        with pytest.raises(DataError, match=f"{name} is 0; it must be at least 1"):
            PackedStream(data, seq_len=numbers["seq_len"], global_batch_size=numbers["global_batch_size"], seed=0)
    stream = PackedStream(data, seq_len=8, global_batch_size=3, seed=0)
    with pytest.raises(DataError, match="global_batch_size 3 is not divisible by world_size 2"):
        stream.batch(0, rank=0, world_size=2)
    with pytest.raises(DataError, match=r"step 0, rank 1 of 1, micro_step 0 of 1: counting starts at 0"):
        stream.batch(0, rank=1, world_size=1)
    with pytest.raises(DataError, match="no document of two tokens or more"):
        PackedStream(dataset(tmp_path / "ones", [1, 1]), seq_len=8, global_batch_size=1, seed=0)


def test_an_id_beyond_the_vocabulary_is_found(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", [9])
    data.vocab_size = 8
    with pytest.raises(DataError, match="is damaged: it holds id 8, the vocabulary has 8"):
        PackedStream(data, seq_len=8, global_batch_size=1, seed=0).batch(0, rank=0, world_size=1)


class Counting(PackedStream):
    """Notes which thread asked for which step."""

    def __init__(self, dataset: TokenDataset) -> None:
        super().__init__(dataset, seq_len=16, global_batch_size=4, seed=0)
        self.asked: list[tuple[int, str]] = []

    def batch(self, step: int, **kwargs) -> Batch:
        self.asked.append((step, threading.current_thread().name))
        if step == 13:
            raise DataError("step 13 is damaged")
        return super().batch(step, **kwargs)


def test_prefetching_gives_the_same_batches_whatever_is_asked_for(tmp_path: Path) -> None:
    stream = Counting(dataset(tmp_path / "data", LENGTHS))
    feed = Feed(stream, World(0, 0, 1, torch.device("cpu")), 2, True)
    ahead = PrefetchingFeed(feed, depth=2)
    assert ahead.accumulation == feed.accumulation == 2
    try:
        for step in (0, 1, 2, 5, 6, 3, 4, 4, 0):  # passed over, rolled back
            for got, expected in zip(ahead.micro_batches(step), feed.micro_batches(step), strict=True):
                assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.targets, expected.targets)
            assert ahead.documents(step, 0) == feed.documents(step, 0)
        stream.asked.clear()
        ahead.micro_batches(9)
        ahead.documents(9, 0)  # waits for the thread, which has made two more steps by then
        assert [step for step, _ in stream.asked] == [9, 9, 10, 10, 11, 11]
        assert {name.split("_")[0] for _, name in stream.asked} == {"batches"}
        stream.asked.clear()
        ahead.micro_batches(10)
        assert 10 not in [step for step, _ in stream.asked]
        for step in (11, 12):
            ahead.micro_batches(step)
        with pytest.raises(DataError, match="step 13 is damaged"):
            ahead.micro_batches(13)
        ahead.micro_batches(14)
    finally:
        ahead.close()
    with pytest.raises(DataError, match="depth is 0"):
        PrefetchingFeed(feed, depth=0)


def test_packing_never_holds_up_a_gpu(tmp_path: Path) -> None:
    """Far more than 50 million tokens a second on a core of its own; asked for is a tenth, as tests share theirs."""
    draw = random.Random(0)
    lengths = [draw.randrange(100, 3000) for _ in range(2000)]
    stream = PackedStream(dataset(tmp_path / "data", lengths), seq_len=2048, global_batch_size=16, seed=0)

    def tokens_a_second() -> float:
        began = time.perf_counter()
        for step in range(20):
            stream.batch(step, rank=0, world_size=1)
        return 20 * 16 * 2048 / (time.perf_counter() - began)

    assert any(speed > 5e6 for speed in islice(iter(tokens_a_second, None), 5))
