"""The order of the data: exact, complete, the same for any number of ranks, and damage found before training."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import time
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fuselm.train.data_stream import Batch, DataError, DataStream, TokenDataset, permuted
from fuselm.train.shards import SplitWriter, write_index

VOCAB = 5000


def write_dataset(folder: Path, documents: list[list[int]], *, shard_tokens: int = 64, vocab: int = VOCAB) -> Path:
    """Token shards with these documents as the training split and an empty validation split."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    splits = {}
    for split in ("train", "validation"):
        writer = SplitWriter(folder, split, vocab_size=vocab, shard_tokens=shard_tokens)
        for ids in documents if split == "train" else []:
            writer.append(np.asarray(ids), text_bytes=3 * len(ids))
            writer.end_document()
        splits[split] = writer.close()
    digest = hashlib.sha256(b"{}").hexdigest()
    content = {"dtype": writer.dtype.name, "vocab_size": vocab, "eos_id": 0, "tokenizer_sha256": digest}
    write_index(folder, content, splits)
    return folder


@pytest.fixture
def counting(tmp_path: Path) -> TokenDataset:
    """Token t of the split is t, so tokens say where they come from: 1,003 of them in 16 shards."""
    return TokenDataset.open(write_dataset(tmp_path / "data", [list(range(1003))]), "train")


def rows(batch: Batch, seq_len: int) -> list[int]:
    """Which sequences a batch of the counting data holds; checks that each is whole and its targets follow."""
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens.is_contiguous() and batch.targets.is_contiguous()
    assert batch.tokens.shape == batch.targets.shape and batch.tokens.shape[1] == seq_len
    first = batch.tokens[:, :1]
    assert torch.equal(batch.tokens, first + torch.arange(seq_len)) and torch.equal(batch.targets, batch.tokens + 1)
    assert (first % seq_len == 0).all()
    return (first[:, 0] // seq_len).tolist()


def step_of(stream: DataStream, step: int, world_size: int = 1, accumulation: int = 1) -> list[int]:
    places = [(m, r) for m in range(accumulation) for r in range(world_size)]
    batches = (
        stream.batch(step, rank=r, world_size=world_size, micro_step=m, accumulation=accumulation) for m, r in places
    )
    return [i for batch in batches for i in rows(batch, stream.seq_len)]


def test_order_is_pinned() -> None:
    """A change of this order would make a run that is resumed after an upgrade see some data twice."""
    assert permuted(np.arange(12), 12, seed=0, epoch=0).tolist() == [10, 6, 1, 8, 5, 3, 0, 11, 9, 7, 2, 4]
    assert permuted(np.arange(12), 12, seed=0, epoch=1).tolist() == [4, 0, 5, 10, 11, 6, 3, 2, 8, 9, 1, 7]
    assert permuted(np.arange(12), 12, seed=-1, epoch=0).tolist() == [7, 4, 10, 0, 3, 6, 1, 11, 5, 9, 8, 2]
    assert permuted(np.asarray([0, 1, 10**12 - 1]), 10**12, seed=3, epoch=2).tolist() == [
        401531071336,
        631984838858,
        103772422196,
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 1000, 4095, 4097, 65_536, 100_003])
def test_permutation_is_one(n: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (123_456_789_012, 7)):
        assert np.array_equal(np.sort(permuted(np.arange(n), n, seed=seed, epoch=epoch)), np.arange(n))


def test_permutation_looks_random() -> None:
    n = 10_000
    orders = [permuted(np.arange(n), n, seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for i, a in enumerate(orders):
        assert abs(np.corrcoef(np.arange(n), a)[0, 1]) < 0.05  # no trend: five standard deviations
        assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.05  # neighbours are strangers
        assert (np.abs(np.diff(a)) == 1).sum() < 15  # 2 are expected
        # Each of 100 stretches draws from all of the data alike: chi-square with 9,801 degrees of freedom.
        table = np.histogram2d(np.arange(n), a, bins=(100, 100))[0]
        assert abs(((table - 1) ** 2).sum() - 9801) < 5 * (2 * 9801) ** 0.5
        for b in orders[:i]:
            assert (a == b).sum() < 10  # 1 is expected


def test_tiny_domains_reach_every_order() -> None:
    seen = Counter(tuple(permuted(np.arange(3), 3, seed=s, epoch=0).tolist()) for s in range(600))
    assert len(seen) == 6 and min(seen.values()) > 60


def test_each_epoch_has_each_sequence_once(counting: TokenDataset) -> None:
    stream = DataStream(counting, seq_len=10, global_batch_size=4, seed=5)
    assert stream.sequences_per_epoch == 100
    order = [i for step in range(75) for i in step_of(stream, step)]
    epochs = [order[i : i + 100] for i in (0, 100, 200)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert order == stream.sequence_ids(0, 300) and order[150:250] == stream.sequence_ids(150, 100)
    assert order != DataStream(counting, seq_len=10, global_batch_size=4, seed=6).sequence_ids(0, 300)


def test_epoch_ends_in_the_middle_of_a_batch(counting: TokenDataset) -> None:
    stream = DataStream(counting, seq_len=100, global_batch_size=24, seed=1)  # ten sequences an epoch
    counts = Counter(i for step in range(5) for i in step_of(stream, step))
    assert counts == dict.fromkeys(range(10), 12)


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1), (2, 2), (4, 1), (1, 8), (4, 2), (8, 1)])
def test_a_step_has_the_same_sequences_for_any_split(
    counting: TokenDataset, world_size: int, accumulation: int
) -> None:
    stream = DataStream(counting, seq_len=7, global_batch_size=8, seed=2)
    for step in (0, 1, 17, 40):
        assert step_of(stream, step, world_size, accumulation) == step_of(stream, step)


def test_resume_goes_on_as_if_unbroken(counting: TokenDataset) -> None:
    def stream() -> DataStream:
        return DataStream(counting, seq_len=9, global_batch_size=4, seed=11)

    one = stream()
    unbroken = [step_of(one, step) for step in range(90)]
    # Stopped twice, each time with another number of ranks.
    resumed = [step_of(stream(), step, 2, 1) for step in range(20)]
    resumed += [step_of(stream(), step, 4, 1) for step in range(20, 33)]
    resumed += [step_of(stream(), step, 1, 2) for step in range(33, 90)]
    assert resumed == unbroken
    assert [step_of(one, step) for step in (89, 3, 50)] == [unbroken[i] for i in (89, 3, 50)]  # and backwards


def test_blocks_of_the_permutation_join(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", [[1] * 20_001], shard_tokens=30_000)
    stream = DataStream(TokenDataset.open(folder, "train"), seq_len=2, global_batch_size=1, seed=0)
    assert stream.sequences_per_epoch == 10_000
    expected = [*permuted(np.arange(10_000), 10_000, seed=0, epoch=0), *permuted(np.arange(9), 10_000, seed=0, epoch=1)]
    assert stream.sequence_ids(0, 10_009) == expected
    assert [stream.sequence_ids(g, 1)[0] for g in (9_999, 4_096, 10_000, 4_095)] == [
        expected[g] for g in (9_999, 4_096, 10_000, 4_095)
    ]


def test_without_shuffle_it_is_the_order_of_the_files(counting: TokenDataset) -> None:
    stream = DataStream(counting, seq_len=100, global_batch_size=4, seed=0, shuffle=False)
    assert [step_of(stream, step) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_smallest_data(tmp_path: Path) -> None:
    data = TokenDataset.open(write_dataset(tmp_path / "data", [list(range(9))]), "train")
    stream = DataStream(data, seq_len=8, global_batch_size=2, seed=0)
    assert stream.sequences_per_epoch == 1 and step_of(stream, 3) == [0, 0]
    with pytest.raises(DataError, match="has 9 tokens; one sequence of seq_len 9 and its target need 10"):
        DataStream(data, seq_len=9, global_batch_size=1, seed=0)
    with pytest.raises(DataError, match=r"the validation split of .* is empty"):
        TokenDataset.open(tmp_path / "data", "validation")


def test_facts_of_a_dataset(counting: TokenDataset) -> None:
    assert (counting.num_tokens, counting.num_documents, counting.vocab_size, counting.eos_id) == (1003, 1, VOCAB, 0)
    assert counting.bytes_per_token == 3.0
    assert counting.tokenizer_path.read_text() == "{}"
    assert counting.tokenizer_hash == hashlib.sha256(b"{}").hexdigest()
    assert counting.borders.tolist() == [0, 1003]


def test_digest_is_of_the_text_and_its_order(tmp_path: Path) -> None:
    texts = [list(range(i, i + 200)) for i in range(0, 4000, 200)]
    swapped = [*texts[:7], texts[8], texts[7], *texts[9:]]

    def digest(name: str, documents: list[list[int]], **more: int) -> str:
        return TokenDataset.open(write_dataset(tmp_path / name, documents, **more), "train").sample_digest()

    usual = digest("usual", texts)
    assert digest("shards", texts, shard_tokens=999) == digest("uint32", texts, vocab=70_000) == usual
    others = [digest("swapped", swapped), digest("shorter", texts[:-1]), digest("three", [[1, 2, 3]])]
    assert len({usual, digest("one", [[1]]), *others}) == 5


def test_document_borders(tmp_path: Path) -> None:
    lengths = [3, 1, 6, 10, 2, 8, 1, 1, 9]
    folder = write_dataset(tmp_path / "data", [[7] * (n - 1) + [0] for n in lengths], shard_tokens=16)
    stream = DataStream(TokenDataset.open(folder, "train"), seq_len=8, global_batch_size=2, seed=0, shuffle=False)
    # Documents begin at 0 3 4 10 20 22 30 31 32; rows are [0, 8) [8, 16) and [16, 24) [24, 32).
    first = stream.batch(0, rank=0, world_size=1, document_mask=True)
    second = stream.batch(1, rank=0, world_size=1, document_mask=True)
    assert first.cu_seqlens is not None and first.cu_seqlens.dtype == torch.int32 and first.max_seqlen == 8
    assert first.cu_seqlens.tolist() == [0, 3, 4, 8, 10, 16, 16, 16, 16]
    assert second.cu_seqlens is not None
    assert second.cu_seqlens.tolist() == [0, 4, 6, 8, 14, 15, 16, 16, 16]
    one = stream.batch(1, rank=1, world_size=2, document_mask=True)
    assert one.cu_seqlens is not None and one.cu_seqlens.tolist() == [0, 6, 7, 8, 8]
    # The borders are right after each end of text, wherever one lies within a row.
    ends = (first.tokens.flatten() == 0).nonzero().flatten() + 1
    assert set(ends.tolist()) <= set(first.cu_seqlens.tolist())
    assert stream.batch(0, rank=0, world_size=1).cu_seqlens is None


def test_document_borders_keep_their_shape(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", [[7] * 99 + [0]] * 50, shard_tokens=10_000)
    stream = DataStream(TokenDataset.open(folder, "train"), seq_len=64, global_batch_size=8, seed=0)
    batches = [stream.batch(step, rank=0, world_size=1, document_mask=True) for step in range(30)]
    assert {tuple(b.cu_seqlens.shape) for b in batches if b.cu_seqlens is not None} == {(17,)}
    for batch in batches:
        assert batch.cu_seqlens is not None
        borders = batch.cu_seqlens.tolist()
        assert borders[0] == 0 and borders[-1] == 8 * 64 and borders == sorted(borders)
        assert set(range(0, 513, 64)) <= set(borders) and max(b - a for a, b in pairwise(borders)) <= 64


def test_batch_to_device(counting: TokenDataset) -> None:
    stream = DataStream(counting, seq_len=8, global_batch_size=2, seed=0)
    moved = stream.batch(0, rank=0, world_size=1, document_mask=True).to("meta")
    assert moved.cu_seqlens is not None and moved.max_seqlen == 8
    assert {t.device.type for t in (moved.tokens, moved.targets, moved.cu_seqlens)} == {"meta"}


def test_wrong_numbers_are_named(counting: TokenDataset) -> None:
    stream = DataStream(counting, seq_len=8, global_batch_size=6, seed=0)
    with pytest.raises(DataError, match="global_batch_size 6 is not divisible by world_size 4 x accumulation 1"):
        stream.batch(0, rank=0, world_size=4)
    with pytest.raises(DataError, match="rank 2 of 2"):
        stream.batch(0, rank=2, world_size=2)
    with pytest.raises(DataError, match="micro_step 3 of 3"):
        stream.batch(0, rank=0, world_size=1, micro_step=3, accumulation=3)
    with pytest.raises(DataError, match="step -1"):
        stream.batch(-1, rank=0, world_size=1)
    with pytest.raises(DataError, match="seq_len is 0"):
        DataStream(counting, seq_len=0, global_batch_size=1, seed=0)


def change_index(folder: Path, **values) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def overwrite(path: Path, at: int, content: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)


DAMAGE = {
    "truncated": (
        lambda d: (d / "train_00001.bin").write_bytes((d / "train_00001.bin").read_bytes()[:-1]),
        r"train_00001\.bin is damaged: 159 bytes instead of 160",
    ),
    "longer": (
        lambda d: (d / "train_00000.bin").write_bytes((d / "train_00000.bin").read_bytes() + b"xx"),
        r"train_00000\.bin is damaged: 162 bytes instead of 160",
    ),
    "empty": (lambda d: (d / "train_00002.bin").write_bytes(b""), r"train_00002\.bin is not a FUSELMTK file"),
    "magic": (lambda d: overwrite(d / "train_00000.bin", 0, b"NUMPY"), r"starts with b'NUMPYMTK'"),
    "never finished": (lambda d: overwrite(d / "train_00000.bin", 0, bytes(32)), r"not a FUSELMTK file"),
    "borders for tokens": (lambda d: shutil.copy(d / "train.idx", d / "train_00000.bin"), r"starts with b'FUSELMIX'"),
    "version": (
        lambda d: overwrite(d / "train_00000.bin", 8, struct.pack("<I", 9)),
        r"has version 9; this program reads",
    ),
    "another run": (lambda d: shutil.copy(d / "train_00002.bin", d / "train_00001.bin"), r"are not from one run"),
    "missing shard": (lambda d: (d / "train_00001.bin").unlink(), r"train_00001\.bin is missing"),
    "missing borders": (lambda d: (d / "train.idx").unlink(), r"train\.idx is missing"),
    "wrong borders": (lambda d: overwrite(d / "train.idx", 40, struct.pack("<q", 149)), r"ends at 149 instead of 150"),
    "no index": (lambda d: (d / "index.json").unlink(), r"is not a folder of token shards: it has no index\.json"),
    "torn index": (lambda d: (d / "index.json").write_text('{"format"'), r"is not readable JSON"),
    "other index": (lambda d: (d / "index.json").write_text('{"weight_map": {}}'), r'"format" is not "fuselm-tokens"'),
    "index version": (lambda d: change_index(d, version=2), r"has version 2"),
    "index without dtype": (lambda d: change_index(d, dtype=None), r"says dtype float64"),
    "index without splits": (lambda d: change_index(d, splits={}), r"has no split 'train'; it has none"),
    "vocabulary": (lambda d: change_index(d, vocab_size=70_000), r"uint16 holds ids up to 65535"),
    "another tokenizer": (lambda d: (d / "tokenizer.json").write_text("{ }"), r"is not the tokenizer that the shards"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_when_opened(kind: str, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", [list(range(150))])
    TokenDataset.open(folder, "train")
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(DataError, match=message):
        TokenDataset.open(folder, "train")


def test_missing_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none does not exist: make it with prepare_data\.py SOURCE"):
        TokenDataset.open(tmp_path / "none", "train")


def test_id_beyond_the_vocabulary_is_found_when_read(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "data", [list(range(150))])
    overwrite(folder / "train_00000.bin", 32 + 2 * 20, struct.pack("<H", VOCAB))
    stream = DataStream(TokenDataset.open(folder, "train"), seq_len=8, global_batch_size=1, seed=0, shuffle=False)
    assert step_of(stream, 0) == [0]
    with pytest.raises(DataError, match=f"sequence 2 holds id {VOCAB}, the vocabulary has {VOCAB}"):
        stream.batch(2, rank=0, world_size=1)


def test_uint32_shards(tmp_path: Path) -> None:
    ids = [0, 65_535, 65_536, 128_000, 62_464, 128_255, 3, 4, 5]
    folder = write_dataset(tmp_path / "data", [ids], shard_tokens=4, vocab=128_256)
    batch = DataStream(TokenDataset.open(folder, "train"), seq_len=8, global_batch_size=1, seed=0).batch(
        0, rank=0, world_size=1
    )
    assert batch.tokens.tolist() == [ids[:-1]] and batch.targets.tolist() == [ids[1:]]


def test_reading_never_holds_up_a_gpu(tmp_path: Path) -> None:
    """20 million tokens a second and more on one core; asked for is a quarter, as tests share theirs."""
    folder = write_dataset(tmp_path / "data", [[7] * 400_000], shard_tokens=150_000)
    stream = DataStream(TokenDataset.open(folder, "train"), seq_len=2048, global_batch_size=8, seed=0)

    def tokens_a_second() -> float:
        began = time.perf_counter()
        for step in range(50):
            stream.batch(step, rank=0, world_size=1, document_mask=True)
        return 50 * 8 * 2048 / (time.perf_counter() - began)

    assert any(speed > 5e6 for speed in islice(iter(tokens_a_second, None), 5))
