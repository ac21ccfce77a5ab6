"""Where text comes from: files in several formats and datasets of the Hugging Face hub, in constant memory.

A .txt file is one document; a line of a .jsonl file (also .jsonl.gz, .jsonl.xz, .jsonl.zst) is one,
`{"text": "..."}`; so is a row of a .parquet file and of a dataset. Nothing is normalised: newlines, tabs, carriage
returns and a byte-order mark reach the tokenizer as they stand in the file. Any source can be read from any record on.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import importlib
import json
import lzma
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from fuselm.train.documents import Document, cut_pieces
from fuselm.train.errors import UserError, in_words
from fuselm.train.shards import Unfinished

READ_BYTES = 1 << 20
COMPRESSED_READ_BYTES = 1 << 16  # one block of compressed text may grow a hundredfold
PARQUET_ROWS = 256
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".parquet")
HUB_PREFIX = "hf:"
DIGEST_BYTES = 16
# From this many documents on a hash sends whole documents to validation; with fewer each gives its last part, because a
# split of a handful of whole documents would compare different books rather than measure learning.
MANY_DOCUMENTS = 1000


class Source(Protocol):
    """Text in parts (files), each a run of documents numbered from 1."""

    @property
    def parts(self) -> int: ...

    @property
    def total_bytes(self) -> int | None:
        """Bytes to read, compressed as they are; None where that is not known."""
        ...

    @property
    def text_bytes(self) -> int | None:
        """Bytes of text, roughly where it is compressed; None where that is not known."""
        ...

    @property
    def bytes_read(self) -> int:
        """Of `total_bytes`, how many the pass in progress has read."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when a file is added, removed, renamed or grows."""
        ...

    @property
    def state(self) -> str:
        """Changes when the text may have changed."""
        ...

    def share(self, part: int) -> float:
        """The part's share of all text, in [0, 1]."""
        ...

    def documents(self, part: int, after: int = 0) -> Iterator[Document]:
        """The documents of a part but its first `after`, empty ones included.

        Exhaust the pieces of one before asking for the next.
        """
        ...


def open_source(
    place: str | Path, *, text_key: str = "text", config: str | None = None, split: str | None = None
) -> Source:
    """A source by its name.

    Args:
        place: a folder or file; or hf:OWNER/NAME, a dataset of the Hugging Face hub.
        text_key: the key (column) of the text.
        config: which configuration of the dataset; None for its only one.
        split: which split of the dataset; None for train.

    Raises:
        UserError: there is no such text, or what is needed to read it is not installed.
    """
    if str(place).startswith(HUB_PREFIX):
        return HubSource(str(place)[len(HUB_PREFIX) :], text_key=text_key, config=config, split=split or "train")
    for name, value in (("config", config), ("split", split)):
        if value is not None:
            raise UserError(f"{name} {value!r} belongs to a dataset (hf:NAME), but the source is {place}")
    return FileSource(Path(place), text_key=text_key)


def many_documents(source: Source) -> bool:
    """Whether there are at least `MANY_DOCUMENTS` that are not empty; reads no further than needed to know."""
    filled = (d for part in range(source.parts) for d in source.documents(part) if d.size > 0)
    return sum(1 for _ in islice(filled, MANY_DOCUMENTS)) == MANY_DOCUMENTS


def optional_module(name: str, needed_for: str) -> Any:
    """Imports a module that not everybody needs; raises UserError with the way to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{needed_for} needs the package {name.split('.')[0]}, which is not installed: pip install 'fuselm[data]'"
        ) from error


def is_text(name: str) -> bool:
    """Whether a file of this name is taken for text."""
    return name.lower().endswith(SUFFIXES)


class FileSource:
    """The text files below a folder (or one file), in the order of their names; each file is a part.

    Args:
        path: a folder, searched through all its subfolders, links to folders too, each folder once; or one file. What
            has a name that ends in one of `SUFFIXES`, in capitals or not, is text.
        text_key: the key of the text in a JSON line, or its column in a Parquet file.

    Raises:
        UserError: the path is missing, holds no text file, or something that cannot be read: a folder or file without
            permission, a link to nowhere; or a package to read it is not installed.
    """

    def __init__(self, path: Path, *, text_key: str = "text") -> None:
        try:
            if not path.exists():
                raise UserError(f"source {path} does not exist")
            folder = path.is_dir()
            self.files = sorted(_files_below(path)) if folder else [path] if is_text(path.name) else []
            stats = [f.stat() for f in self.files]
        except OSError as error:
            raise UserError(f"source {path} cannot be read: {in_words(error)}") from error
        names = [f.relative_to(path).as_posix() if folder else f.name for f in self.files]
        for file, status in zip(self.files, stats, strict=True):
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"source {file} is not a regular file, so that it cannot be read more than once")
        if not self.files:
            raise UserError(f"source {path} holds no text: expected files ending in {', '.join(SUFFIXES)}")
        self.path, self.text_key = path, text_key
        for file in self.files:
            if file.suffix.lower() == ".parquet":
                optional_module("pyarrow.parquet", f"reading {file}")
            elif file.suffix.lower() == ".zst":
                _zstd_decoder(file)
        self._sizes = [s.st_size for s in stats]
        self.parts = len(self.files)
        self._before = [0, *accumulate(self._sizes)]
        self.total_bytes = self._before[-1]
        self._text_sizes = [
            n if f.suffix.lower() in (".txt", ".jsonl") else 4 * n for f, n in zip(self.files, self._sizes, strict=True)
        ]
        self.text_bytes = sum(self._text_sizes)
        self.bytes_read = 0
        listing = [f"{name}\0{size}\n" for name, size in zip(names, self._sizes, strict=True)]
        self.fingerprint = _sha256("".join(listing))
        self.state = _sha256("".join(f"{line}{s.st_mtime_ns}" for line, s in zip(listing, stats, strict=True)))

    def share(self, part: int) -> float:
        return self._text_sizes[part] / max(self.text_bytes, 1)

    def documents(self, part: int, after: int = 0) -> Iterator[Document]:
        file = self.files[part]
        done = self.bytes_read = self._before[part]
        try:
            with file.open("rb") as raw:
                if file.suffix.lower() == ".txt":
                    yield from self._text_file(file, raw, done) if after == 0 else ()
                elif file.suffix.lower() == ".parquet":
                    yield from self._rows(file, raw, done, after)
                else:
                    yield from self._records(file, raw, _lines(file, raw), done, after)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise UserError(f"cannot read {file}: {error}") from error
        self.bytes_read = done + self._sizes[part]

    def _text_file(self, file: Path, raw: BinaryIO, done: int) -> Iterator[Document]:
        # Once for the hash, once for the text: what was just read comes from memory the second time.
        digest, size = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
        while block := raw.read(READ_BYTES):
            digest.update(block)
            size += len(block)
        raw.seek(0)
        yield Document(str(file), 1, size, digest.digest(), cut_pieces(self._decode(file, raw, done)))

    def _decode(self, file: Path, raw: BinaryIO, done: int) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("strict")
        while True:
            pending = len(decoder.getstate()[0])
            start = raw.tell() - pending
            block = raw.read(READ_BYTES)
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise UserError(f"{file} is not UTF-8 text: {error.reason} at byte {start + error.start}") from error
            self.bytes_read = done + raw.tell()
            if text:
                yield text
            if not block:
                return

    def _records(self, file: Path, raw: BinaryIO, lines: Iterable[bytes], done: int, after: int) -> Iterator[Document]:
        for number, line in enumerate(lines, start=1):
            if number <= after:
                continue
            self.bytes_read = done + raw.tell()
            if not line.strip():
                continue
            origin = f"{file}:{number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{origin} is not a JSON line: {error.msg} after {error.pos} characters") from error
            except (ValueError, RecursionError) as error:  # no UTF-8, a number of thousands of digits, nested too deep
                raise UserError(f"{origin} is not a JSON line: {error}") from error
            yield text_document(record, self.text_key, origin, number)

    def _rows(self, file: Path, raw: BinaryIO, done: int, after: int) -> Iterator[Document]:
        parquet = optional_module("pyarrow.parquet", f"reading {file}")
        try:
            table = parquet.ParquetFile(raw)
        except Exception as error:  # pyarrow has many kinds
            raise UserError(f"cannot read {file}: {str(error).splitlines()[0]}") from error
        if self.text_key not in table.schema_arrow.names:
            raise UserError(f'{file} has no column "{self.text_key}"; it has {", ".join(table.schema_arrow.names)}')
        number, rows = 0, max(table.metadata.num_rows, 1)
        size = file.stat().st_size
        for group in range(table.metadata.num_row_groups):
            held = table.metadata.row_group(group).num_rows
            if number + held <= after:
                number += held
                continue
            try:
                for batch in table.iter_batches(PARQUET_ROWS, row_groups=[group], columns=[self.text_key]):
                    for text in batch.column(0).to_pylist():
                        number += 1
                        if number > after:
                            self.bytes_read = done + size * number // rows
                            yield text_document({self.text_key: text}, self.text_key, f"{file}:{number}", number)
            except (OSError, ValueError) as error:  # a damaged page
                raise UserError(f"cannot read {file}: {str(error).splitlines()[0]}") from error


class HubSource:
    """A dataset of the Hugging Face hub, streamed.

    Args:
        dataset: OWNER/NAME, or a local folder that `datasets.load_dataset` takes.
        text_key: the column of the text.
        config: which configuration; None for the only one.
        split: which split.

    Raises:
        UserError: `datasets` is not installed, or there is no such dataset, or it cannot be reached.
    """

    parts = 1
    total_bytes: int | None = None
    text_bytes: int | None = None

    def __init__(
        self, dataset: str, *, text_key: str = "text", config: str | None = None, split: str = "train"
    ) -> None:
        datasets = optional_module("datasets", f"streaming {HUB_PREFIX}{dataset}")
        self.path, self.text_key = f"{HUB_PREFIX}{dataset}", text_key
        try:
            self._rows = datasets.load_dataset(dataset, config, split=split, streaming=True)
        except Exception as error:  # of the library, of the network, of the dataset's own
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"dataset {self.path} cannot be opened: {reason}") from error
        self.bytes_read = 0
        self.fingerprint = self.state = _sha256(f"{dataset}\0{config}\0{split}")

    def share(self, part: int) -> float:
        return 1.0

    def documents(self, part: int, after: int = 0) -> Iterator[Document]:
        number = after
        rows = iter(self._rows.skip(after) if after else self._rows)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise Unfinished(f"{self.path} cannot be read after row {number}: {reason}") from error
            if row is None:
                return
            number += 1
            yield text_document(row, self.text_key, f"{self.path}:{number}", number)


def text_document(record: Any, text_key: str, origin: str, number: int) -> Document:
    """The document that a record of a file holds.

    Args:
        record: a dict with the text under `text_key`.
        text_key: the key.
        origin: the file and line, for errors.
        number: of the record, from 1.

    Raises:
        UserError: there is no such string, or it cannot be written as UTF-8.
    """
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{origin} has no string under the key "{text_key}"')
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{origin} holds half of a surrogate pair at character {error.start}") from error
    digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
    return Document(origin, number, len(data), digest, cut_pieces([text]))


def _files_below(folder: Path) -> Iterator[Path]:
    """The text files of a folder and its subfolders; raises OSError rather than leave out what it cannot see."""

    def refuse(error: OSError) -> None:
        raise error

    seen = set()
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:  # a link to a folder above, or a second one to the same
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders.sort()
        yield from (Path(place, name) for name in files if is_text(name))


def _lines(file: Path, raw: BinaryIO) -> Iterator[bytes]:
    if file.suffix.lower() == ".gz":
        with gzip.GzipFile(fileobj=raw) as lines:
            yield from lines
    elif file.suffix.lower() == ".xz":
        with lzma.LZMAFile(raw) as lines:
            yield from lines
    elif file.suffix.lower() == ".zst":
        yield from _split_lines(_zstd_blocks(file, raw))
    else:
        yield from raw


def _zstd_decoder(file: Path) -> Any:
    """An object with decompress, eof and unused_data, for one frame."""
    try:
        return importlib.import_module("compression.zstd").ZstdDecompressor()  # the standard library's, from 3.14 on
    except ImportError:
        return optional_module("zstandard", f"reading {file}").ZstdDecompressor().decompressobj()


def _zstd_blocks(file: Path, raw: BinaryIO) -> Iterator[bytes]:
    decoder = None
    while block := raw.read(COMPRESSED_READ_BYTES):
        while block:
            decoder = decoder or _zstd_decoder(file)
            try:
                yield decoder.decompress(block)
            except Exception as error:  # each of the two libraries has one of its own
                raise UserError(f"cannot read {file}: {error}") from error
            block = decoder.unused_data if decoder.eof else b""
            if decoder.eof:
                decoder = None
    if decoder is not None:
        raise EOFError("it ends before the end of its last frame")


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for block in blocks:
        *whole, last = block.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line, b"\n"])
            rest = []
        rest.append(last)
    if any(rest):
        yield b"".join(rest)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
