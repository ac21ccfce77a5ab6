"""Reading text: a folder of .txt and .jsonl files as a stream of documents in constant memory, and the split of each.

A .txt file is one document, a line of a .jsonl file (also .jsonl.gz and .jsonl.xz) is one: `{"text": "..."}`. Nothing
is normalised: newlines, tabs, carriage returns and a byte-order mark reach the tokenizer as they stand in the file.
Documents come in pieces of at most `PIECE_CHARS` characters, so that a huge file needs no more memory than a small one.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal

from fuselm.train.errors import UserError

Split = Literal["train", "validation"]

PIECE_CHARS = 1 << 18
READ_BYTES = 1 << 20
# From this many documents on a hash sends whole documents to validation; with fewer each gives its last part, because a
# split of a handful of whole documents would compare different books rather than measure learning.
MANY_DOCUMENTS = 1000
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.xz")


@dataclass(frozen=True)
class Document:
    """One text. `size` is its length in UTF-8 bytes; `pieces` can be read once and join to the whole text."""

    origin: str
    size: int
    pieces: Iterator[str]


@dataclass(frozen=True)
class Piece:
    """A run of text of one document in one split; `starts` and `ends` say if its part of that split does so here."""

    split: Split
    text: str
    starts: bool
    ends: bool
    origin: str


class TextSource:
    """The text files below a folder (or one file), in the order of their names.

    Args:
        path: a folder, searched through all its subfolders, or one file with a name that ends in one of `SUFFIXES`.
        text_key: the key of the text in a JSON line.

    Raises:
        UserError: the path is missing, or holds no text file.
    """

    def __init__(self, path: Path, *, text_key: str = "text") -> None:
        if not path.exists():
            raise UserError(f"source {path} does not exist")
        if path.is_dir():
            self.files = sorted(f for f in path.rglob("*") if f.name.endswith(SUFFIXES) and f.is_file())
            names = [f.relative_to(path).as_posix() for f in self.files]
        else:
            self.files = [path] if path.name.endswith(SUFFIXES) else []
            names = [path.name]
        if not self.files:
            raise UserError(f"source {path} holds no text: expected files ending in {', '.join(SUFFIXES)}")
        self.path = path
        self.text_key = text_key
        sizes = [f.stat().st_size for f in self.files]
        self.total_bytes = sum(sizes)
        #: Bytes of text, roughly where files are compressed.
        self.text_bytes = sum(
            n if f.suffix in (".txt", ".jsonl") else 4 * n for f, n in zip(self.files, sizes, strict=True)
        )
        #: Bytes on disk that the pass in progress has read.
        self.bytes_read = 0
        listing = "".join(f"{name}\0{size}\n" for name, size in zip(names, sizes, strict=True))
        #: Changes when a file is added, removed, renamed or grows.
        self.fingerprint = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()

    def documents(self) -> Iterator[Document]:
        """One pass over all documents, empty ones included. Exhaust the pieces of one before asking for the next."""
        self.bytes_read = 0
        done = 0
        for file in self.files:
            try:
                with file.open("rb") as raw:
                    yield from (
                        self._text_file(file, raw, done) if file.suffix == ".txt" else self._lines(file, raw, done)
                    )
            except (OSError, EOFError, lzma.LZMAError) as error:
                raise UserError(f"cannot read {file}: {error}") from error
            done += file.stat().st_size
            self.bytes_read = done

    def has_many_documents(self) -> bool:
        """Whether there are at least `MANY_DOCUMENTS` that are not empty; reads no further than needed to know."""
        filled = (document for document in self.documents() if document.size > 0)
        return sum(1 for _ in islice(filled, MANY_DOCUMENTS)) == MANY_DOCUMENTS

    def _text_file(self, file: Path, raw: BinaryIO, done: int) -> Iterator[Document]:
        yield Document(str(file), file.stat().st_size, cut_pieces(self._decode(file, raw, done)))

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

    def _lines(self, file: Path, raw: BinaryIO, done: int) -> Iterator[Document]:
        if file.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as lines:
                yield from self._records(file, raw, lines, done)
        elif file.suffix == ".xz":
            with lzma.LZMAFile(raw) as lines:
                yield from self._records(file, raw, lines, done)
        else:
            yield from self._records(file, raw, raw, done)

    def _records(self, file: Path, raw: BinaryIO, lines: Iterable[bytes], done: int) -> Iterator[Document]:
        for number, line in enumerate(lines, start=1):
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
            text = record.get(self.text_key) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise UserError(f'{origin} has no string under the key "{self.text_key}"')
            try:
                size = len(text.encode())
            except UnicodeEncodeError as error:
                raise UserError(f"{origin} holds half of a surrogate pair at character {error.start}") from error
            yield Document(origin, size, cut_pieces([text]))


def cut_pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Cuts running text into pieces of at most `PIECE_CHARS`, where the tokens of byte-level tokenizers end anyway.

    Such a place is after a newline between two characters that are no white space: words do not reach over it.
    """
    buffer = ""
    for block in blocks:
        buffer += block
        start = 0
        while len(buffer) - start > PIECE_CHARS:
            end = _cut_before(buffer, start, start + PIECE_CHARS)
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _cut_before(text: str, start: int, end: int) -> int:
    """The best place in (start, end] to cut: a lone newline, else any newline, else before a space, else `end`."""
    newline = last_newline = text.rfind("\n", start, end)
    while newline > start:
        if not text[newline - 1].isspace() and not text[newline + 1 : newline + 2].isspace():
            return newline + 1
        newline = text.rfind("\n", start, newline)
    if last_newline >= 0:
        return last_newline + 1
    space = text.rfind(" ", start + 1, end)
    return space if space > 0 else end


def split_document(document: Document, *, fraction: float, whole: bool) -> Iterator[Piece]:
    """Sends a document to training or validation.

    Args:
        document: one that is not empty.
        fraction: the share of the text that validation gets, in [0, 1).
        whole: True sends the whole document, by a hash of its text, so that no text lies in both splits; False keeps
            the last `fraction` of its bytes for validation, cut at a line or word near there.
    """
    runs = _whole(document, fraction) if whole else _head_and_tail(document, fraction)
    held: tuple[Split, str, bool] | None = None
    for split, text in runs:
        if held is not None:
            yield Piece(*held, ends=split != held[0], origin=document.origin)
        held = (split, text, held is None or split != held[0])
    if held is not None:
        yield Piece(*held, ends=True, origin=document.origin)


def _whole(document: Document, fraction: float) -> Iterator[tuple[Split, str]]:
    split: Split | None = None
    for text in document.pieces:
        if split is None:
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            split = "validation" if int.from_bytes(digest, "little") < fraction * 2**64 else "train"
        yield split, text


def _head_and_tail(document: Document, fraction: float) -> Iterator[tuple[Split, str]]:
    tail = int(document.size * fraction)
    if tail == 0:
        for text in document.pieces:
            yield "train", text
        return
    border, done, slack = document.size - tail, 0, tail
    for text in document.pieces:
        size = len(text.encode())
        if done + size <= border:
            yield "train", text
        elif done >= border:
            yield "validation", text
        else:
            cut = _near_line_or_word(text, border - done, slack)
            if cut > 0:
                yield "train", text[:cut]
            yield "validation", text[cut:]
        done += size


def _near_line_or_word(text: str, at_byte: int, slack: int) -> int:
    """The character to cut at: after the last line, else word, that ends within `slack` characters before `at_byte`."""
    end = len(text.encode()[:at_byte].decode(errors="ignore"))
    start = max(end - slack, 0)
    newline = text.rfind("\n", start, end)
    if newline >= 0:
        return newline + 1
    space = text.rfind(" ", start, end)
    return space if space >= 0 else end
