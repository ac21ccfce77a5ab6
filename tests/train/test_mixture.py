"""Mixes by weight, copies left out, and the table that remembers texts."""

from __future__ import annotations

import hashlib
import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from fuselm.train import seen_texts
from fuselm.train.data_stream import TokenDataset
from fuselm.train.errors import UserError
from fuselm.train.mixture import Mixture, PieceReader, sample_pieces
from fuselm.train.prepare_data import prepare
from fuselm.train.seen_texts import SeenTexts
from fuselm.train.shards import SOURCES_MAGIC, map_entries


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_mix(folder: Path, *entries: dict) -> Path:
    lines = ["[[source]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in entry.items()) for entry in entries]
    (folder / "mix.toml").write_text("".join(lines))
    return folder / "mix.toml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents of 100 bytes in web, of 30 in code, and 10 of 50 in notes; all different."""
    for name, count, size in (("web", 300, 100), ("code", 700, 30), ("notes", 10, 50)):
        write_lines(tmp_path / f"{name}.jsonl", [f"{name} {i} ".ljust(size, "x") for i in range(count)])
    return tmp_path


def texts_of(reader: PieceReader) -> list[tuple[int, str]]:
    return [(piece.source, piece.text) for piece in reader]


def test_weights_are_shares_of_bytes_at_every_point(folder: Path) -> None:
    path = write_mix(folder, {"path": "web.jsonl", "weight": 3}, {"path": "code.jsonl", "weight": 1})
    mixture = Mixture.open(path)
    reader = PieceReader(mixture, None, fraction=0, whole=[True, True])
    taken = [0, 0]
    for number, (source, text) in enumerate(texts_of(reader)):
        taken[source] += len(text)
        assert abs(taken[0] - 3 * taken[1]) <= 3 * 100, number  # within a document of its share
    assert taken[0] == 30_000 and reader.ended_by == "web.jsonl"
    assert [place.taken for place in reader.places] == taken


def test_sources_without_weights_are_read_one_after_the_other(folder: Path) -> None:
    path = write_mix(folder, {"path": "code.jsonl"}, {"path": "web.jsonl"}, {"path": "notes.jsonl", "name": "n"})
    mixture = Mixture.open(path)
    got = texts_of(PieceReader(mixture, None, fraction=0, whole=[True] * 3))
    assert [source for source, _ in got] == [0] * 700 + [1] * 300 + [2] * 10
    assert mixture.names == ["code.jsonl", "web.jsonl", "n"]


def test_passes_repeat_the_training_text_and_not_what_is_held_out(folder: Path, tmp_path: Path) -> None:
    path = write_mix(folder, {"path": "web.jsonl", "weight": 1}, {"path": "notes.jsonl", "weight": 1, "passes": 4})
    seen = SeenTexts(tmp_path)
    reader = PieceReader(Mixture.open(path), seen, fraction=0.3, whole=[True, True])
    pieces = [piece for piece in reader if piece.source == 1]
    train = [piece.text for piece in pieces if piece.split == "train"]
    held_out = [piece.text for piece in pieces if piece.split == "validation"]
    assert len(held_out) == len(set(held_out)) > 0 and len(set(train)) == 10 - len(held_out)
    assert train == train[: len(set(train))] * 4
    assert reader.duplicates == 0 and reader.ended_by == "notes.jsonl"
    seen.close()


def test_copies_are_dropped_within_and_between_sources(folder: Path, tmp_path: Path) -> None:
    notes = [json.loads(line)["text"] for line in (folder / "notes.jsonl").read_text().splitlines()]
    write_lines(folder / "copies.jsonl", [*notes[:4], "new", "", "new", notes[0] + " "])
    path = write_mix(folder, {"path": "notes.jsonl"}, {"path": "copies.jsonl"})
    out = tmp_path / "out"
    made = prepare(path, out, vocab_size=300, validation_fraction=0)
    assert (made.duplicate_documents, made.empty_documents) == (5, 1)
    assert made.splits["train"].documents == 12
    assert made.splits["train"].text_bytes == sum(map(len, notes)) + 3 + 51
    kept = prepare(path, tmp_path / "all", vocab_size=300, validation_fraction=0, keep_duplicates=True)
    assert (kept.duplicate_documents, kept.splits["train"].documents) == (0, 17)


def test_prepared_mix_says_where_each_document_comes_from(folder: Path, tmp_path: Path) -> None:
    path = write_mix(folder, {"path": "web.jsonl", "weight": 1}, {"path": "code.jsonl", "name": "code", "weight": 1})
    out = tmp_path / "out"
    prepare(path, out, vocab_size=300, validation_fraction=0.1)
    index = json.loads((out / "index.json").read_text())
    data = TokenDataset.open(out, "train")
    coder_text = {0: "web ", 1: "code"}
    from fuselm.train.tokenizer import TextTokenizer

    coder = TextTokenizer.load(out / "tokenizer.json")
    assert index["splits"]["train"]["sources"] == "train.sources"
    numbers = map_entries(out / "train.sources", SOURCES_MAGIC, np.dtype("u1"), data.num_documents)
    counted = [0, 0]
    for source, (start, end) in zip(numbers.tolist(), pairwise(data.borders.tolist()), strict=True):
        assert coder.decode(data.read(start, end - start).tolist()).startswith(coder_text[source])
        counted[source] += end - start
    rows = index["statistics"]["train"]
    assert counted == [rows["web.jsonl"]["tokens"], rows["code"]["tokens"]] and sum(counted) == data.num_tokens
    assert sum(rows["code"]["lengths"]) == rows["code"]["documents"] == (numbers == 1).sum()
    assert rows["web.jsonl"]["text_bytes"] + rows["code"]["text_bytes"] == index["splits"]["train"]["text_bytes"]
    assert (out / "lengths.png").read_bytes()[:4] == b"\x89PNG"


def test_a_sample_comes_from_every_file(folder: Path) -> None:
    mixture = Mixture.open(folder)
    pieces = list(sample_pieces(mixture, [True], 0.0, 5000))
    by_file = {name: sum(len(p.text) for p in pieces if name in p.origin) for name in ("web", "code", "notes")}
    total = sum(by_file.values())
    sizes = {name: (folder / f"{name}.jsonl").stat().st_size for name in by_file}
    assert 4800 < total < 5400
    for name, size in sizes.items():
        assert by_file[name] == pytest.approx(5000 * size / sum(sizes.values()), abs=100)


def test_a_sample_of_many_small_files_is_no_larger(tmp_path: Path) -> None:
    for i in range(200):
        (tmp_path / f"{i:03}.txt").write_text(f"{i:03} ".ljust(100, "x"))
    pieces = list(sample_pieces(Mixture.open(tmp_path), [True], 0.0, 1000))
    numbers = [int(piece.text[:3]) for piece in pieces]
    assert 9 <= len(pieces) <= 11 and max(b - a for a, b in pairwise(numbers)) <= 21 and numbers[-1] >= 180


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[source", r"mix .* is not TOML"),
        ("", r"must hold \[\[source\]\] tables and nothing else"),
        ("seed = 1\n[[source]]\npath = 'web.jsonl'", r"tables and nothing else"),
        ("[[source]]\nweight = 1", r"source 1 of .* has no path"),
        ("[[source]]\npath = 'web.jsonl'\nwieght = 1", r"unknown key 'wieght'; there are path, name, weight"),
        ("[[source]]\npath = 3", r"source 1 of .*: path is 3"),
        ("[[source]]\npath = 'web.jsonl'\nweight = true", r"weight is True"),
        ("[[source]]\npath = 'web.jsonl'\nweight = 0", r"weight must be above 0"),
        ("[[source]]\npath = 'web.jsonl'\nweight = nan", r"weight must be above 0 and finite"),
        ("[[source]]\npath = 'web.jsonl'\nweight = inf", r"weight must be above 0 and finite"),
        (f"[[source]]\npath = 'web.jsonl'\nweight = 1{'0' * 400}", r"weight must be above 0 and finite"),
        ("[[source]]\npath = 'web.jsonl'\npasses = 0", r"passes at least 1"),
        (
            "[[source]]\npath = 'web.jsonl'\n[[source]]\npath = 'web.jsonl'",
            r"source 2 .* called 'web.jsonl' as an",
        ),
        ("[[source]]\npath = 'web.jsonl'\nweight = 1\n[[source]]\npath = 'code.jsonl'", r"1 of 2 sources .* a weight"),
        ("[[source]]\npath = 'none.jsonl'", r"source .*none\.jsonl does not exist"),
    ],
)
def test_a_wrong_mix_is_one_line(content: str, message: str, folder: Path) -> None:
    (folder / "mix.toml").write_text(content)
    with pytest.raises(UserError, match=message):
        Mixture.open(folder / "mix.toml")


def test_a_missing_mix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mix .*mix\.toml cannot be read: No such file"):
        Mixture.open(tmp_path / "mix.toml")


def test_seen_texts_is_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_texts, "_FIRST_SLOTS", 4)  # it has to grow eight times
    draw = random.Random(5)
    digests = [hashlib.blake2b(str(draw.randrange(600)).encode(), digest_size=16).digest() for _ in range(1500)]
    digests += [bytes(16), bytes(16), bytes(8) + b"\1" * 8, bytes(16)]
    seen, expected, lengths = SeenTexts(tmp_path), {}, []
    for place, digest in enumerate(digests):
        assert seen.first(digest, place) == expected.setdefault(digest, place)
        lengths.append(len(seen))
    assert len(seen) == len(expected) > 500
    assert seen.sync() == len(seen)
    seen.close()
    # Cut back to what it was after 700 texts: it knows those, and none of the later ones.
    again = SeenTexts(tmp_path, lengths[699])
    known = set(digests[:700])
    assert all(again.first(digest, 10**6) == expected[digest] for digest in known)
    assert len(again) == len(known)
    later = next(digest for digest in digests if digest not in known)
    assert again.first(later, 2**63) == 2**63 and again.first(later, 5) == 2**63
    again.close()
