"""Text in every format: the same documents, from any record on, and each way a file can be wrong is one line."""

from __future__ import annotations

import errno
import gzip
import hashlib
import importlib
import importlib.util
import json
import lzma
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuselm.train import documents, sources
from fuselm.train.errors import UserError
from fuselm.train.shards import Unfinished
from fuselm.train.sources import FileSource, Source, many_documents, open_source

TEXTS = ["first", "line\nbreak\u2028 and \ttab\r\n", "", "\ufeffthird \N{GRINNING FACE}", "x" * 700]


def read(source: Source, part: int = 0, after: int = 0) -> list[str]:
    """The texts; checks each document's size and hash."""
    texts = []
    for document in source.documents(part, after):
        text = "".join(document.pieces)
        data = text.encode()
        assert document.size == len(data)
        assert document.digest == hashlib.blake2b(data, digest_size=16).digest()
        texts.append(text)
    return texts


def lines(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({key: text, "other": 1}) + "\n" for text in texts).encode()


def write_zst(path: Path) -> None:
    zstandard = importlib.import_module("zstandard")
    data = lines(TEXTS)
    # Two frames, as a program that appends writes them; and the border lies within a line.
    path.write_bytes(zstandard.compress(data[:20]) + zstandard.compress(data[20:]))


def write_parquet(path: Path) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    parquet.write_table(arrow.table({"id": range(len(TEXTS)), "text": TEXTS}), path, row_group_size=2)


WRITERS: dict[str, tuple[str | None, Callable[[Path], object]]] = {
    "a.jsonl": (None, lambda path: path.write_bytes(lines(TEXTS))),
    "a.jsonl.gz": (None, lambda path: path.write_bytes(gzip.compress(lines(TEXTS)))),
    "a.jsonl.xz": (None, lambda path: path.write_bytes(lzma.compress(lines(TEXTS)))),
    "a.jsonl.zst": ("zstandard", write_zst),
    "a.parquet": ("pyarrow", write_parquet),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_documents_from_any_record_on(name: str, tmp_path: Path) -> None:
    package, write = WRITERS[name]
    if package is not None and importlib.util.find_spec(package) is None:
        (tmp_path / name).write_bytes(b"some content")
        with pytest.raises(UserError, match=rf"reading .*{name} needs the package {package}, .*fuselm\[data\]"):
            FileSource(tmp_path)
        return
    write(tmp_path / name)
    source = FileSource(tmp_path)
    assert read(source) == TEXTS
    assert source.bytes_read == source.total_bytes == (tmp_path / name).stat().st_size
    for after in range(len(TEXTS) + 1):
        assert read(source, after=after) == TEXTS[after:]
    assert [d.record for d in source.documents(0, 2)] == [3, 4, 5]


@pytest.mark.parametrize("name", [n for n in WRITERS if n != "a.jsonl"])
def test_a_file_that_was_cut_off_or_damaged_is_an_error(name: str, tmp_path: Path) -> None:
    package, write = WRITERS[name]
    if package is not None and importlib.util.find_spec(package) is None:
        name, write = "a.jsonl.gz", WRITERS["a.jsonl.gz"][1]
    path = tmp_path / name
    write(path)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) * 2 // 3], whole[: len(whole) // 2] + b"damage" + whole[len(whole) // 2 + 6 :]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{name}"):
            read(FileSource(path))


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow.parquet"), ("a.jsonl.zst", "zstandard")])
def test_a_missing_package_is_named_before_anything_is_read(name, package, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    (tmp_path / "a.jsonl").write_bytes(lines(TEXTS))
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(UserError, match=rf"needs the package {package.split('.')[0]}, which is not installed: pip"):
        FileSource(tmp_path)


def test_parquet_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        (tmp_path / "a.parquet").write_bytes(b"PAR1")
        with pytest.raises(UserError, match="needs the package pyarrow"):
            FileSource(tmp_path)
        return
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r'a\.parquet has no column "content"; it has id, text'):
        read(FileSource(tmp_path, text_key="content"))
    with pytest.raises(UserError, match=r'a\.parquet:1 has no string under the key "id"'):
        read(FileSource(tmp_path, text_key="id"))


def test_names_in_capitals_are_text_too(tmp_path: Path) -> None:
    (tmp_path / "A.TXT").write_text("one\n")
    (tmp_path / "b.Jsonl").write_text('{"text": "two"}\n')
    (tmp_path / "C.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    source = FileSource(tmp_path)
    texts = ["".join(document.pieces) for part in range(source.parts) for document in source.documents(part)]
    assert [text.strip() for text in texts] == ["one", "three", "two"]


def test_txt_files_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "READ_BYTES", 7)
    monkeypatch.setattr(documents, "PIECE_CHARS", 20)
    text = "\N{GRINNING FACE} and é\r\n" * 30
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"")
    source = FileSource(tmp_path)
    assert read(source, 0) == [text] and read(source, 1) == [""] and read(source, 0, after=1) == []
    assert max(len(piece) for document in source.documents(0) for piece in document.pieces) <= 20
    assert source.share(0) == 1 and source.share(1) == 0


def test_fingerprint_and_state(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    first = FileSource(tmp_path)
    (tmp_path / "a.txt").write_text("two")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    second = FileSource(tmp_path)
    assert second.fingerprint == first.fingerprint and second.state != first.state
    (tmp_path / "b.txt").write_text("")
    assert FileSource(tmp_path).fingerprint != first.fingerprint


def test_many_documents_reads_no_further_than_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MANY_DOCUMENTS", 3)
    (tmp_path / "a.jsonl").write_bytes(lines(["a", "", "b"]))
    assert not many_documents(FileSource(tmp_path))
    (tmp_path / "b.jsonl").write_bytes(lines(["c"]) + b"never read")
    assert many_documents(FileSource(tmp_path))


class _Rows:
    """What `load_dataset(..., streaming=True)` gives, as far as it is used."""

    def __init__(self, rows: list[dict[str, Any]], fail_at: int | None = None) -> None:
        self.rows, self.fail_at = rows, fail_at

    def skip(self, count: int) -> _Rows:
        return _Rows(self.rows[count:], None if self.fail_at is None else self.fail_at - count)

    def __iter__(self):
        for number, row in enumerate(self.rows):
            if number == self.fail_at:
                raise ConnectionError("no route to host")
            yield row


def test_a_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> _Rows:
        asked.append((name, config, split, streaming))
        if name == "nobody/nothing":
            raise FileNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub\nmore")
        return _Rows([{"body": text} for text in TEXTS], fail_at=3 if split == "flaky" else None)

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = open_source("hf:owner/name", text_key="body", config="en")
    assert asked == [("owner/name", "en", "train", True)]
    assert (source.total_bytes, source.text_bytes, source.parts) == (None, None, 1)
    assert read(source) == TEXTS and read(source, after=3) == TEXTS[3:]
    with pytest.raises(UserError, match=r"dataset hf:nobody/nothing cannot be opened: Dataset .* on the Hub$"):
        open_source("hf:nobody/nothing")
    with pytest.raises(Unfinished, match="hf:owner/name cannot be read after row 3: no route to host"):
        read(open_source("hf:owner/name", text_key="body", split="flaky"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="streaming hf:owner/name needs the package datasets"):
        open_source("hf:owner/name")


def test_a_real_dataset_or_the_way_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(lines(TEXTS))
    if importlib.util.find_spec("datasets") is None:
        with pytest.raises(UserError, match=r"fuselm\[data\]"):
            open_source(f"hf:{tmp_path}")
        return
    source = open_source(f"hf:{tmp_path}")
    assert read(source) == TEXTS and read(source, after=4) == TEXTS[4:]


def test_config_and_split_are_for_datasets(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for name in ("config", "split"):
        with pytest.raises(UserError, match=rf"{name} 'en' belongs to a dataset \(hf:NAME\)"):
            open_source(tmp_path, **{name: "en"})


def test_links_to_folders_are_followed_and_each_folder_is_read_once(tmp_path: Path) -> None:
    texts, other = tmp_path / "texts", tmp_path / "other"
    (texts / "b").mkdir(parents=True)
    other.mkdir()
    (texts / "b" / "1.txt").write_text("one")
    (other / "2.txt").write_text("two")
    for link, target in (("a", other), ("c", other), ("b/up", texts), ("b/self", texts / "b" / "self")):
        (texts / link).symlink_to(target)
    source = FileSource(texts)
    assert [f.relative_to(texts).as_posix() for f in source.files] == ["a/2.txt", "b/1.txt"]
    assert [read(source, part) for part in range(source.parts)] == [["two"], ["one"]]


@pytest.mark.parametrize("kind", ["link to nowhere", "link to itself", "pipe", "pipe itself", "closed folder"])
def test_text_that_cannot_be_read_is_not_left_out(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    odd = tmp_path / "sub" / "b.txt"
    odd.parent.mkdir()
    if kind == "closed folder":  # a superuser's tests may read all, so that taking away permissions is not enough
        scandir = os.scandir

        def refuse(place: str) -> Any:
            if Path(place) == odd.parent:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
            return scandir(place)

        monkeypatch.setattr(os, "scandir", refuse)
    elif "pipe" in kind:
        os.mkfifo(odd)
    else:
        odd.symlink_to(odd if "itself" in kind else "nowhere.txt")
    place = odd if kind == "pipe itself" else tmp_path
    with pytest.raises(UserError, match=f"source .*({odd}|{odd.parent})") as error:
        FileSource(place)
    reasons = {"nowhere": errno.ENOENT, "itself": errno.ELOOP, "folder": errno.EACCES}
    reason = next((os.strerror(code) for word, code in reasons.items() if kind.endswith(word)), "not a regular file")
    assert ("not a regular file" if "pipe" in kind else reason) in str(error.value)
