"""Documents in pieces: where a long text may be cut without changing its tokens, and which split it goes to.

Documents come in pieces of at most `PIECE_CHARS` characters, so that a huge one needs no more memory than a small one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation"]

PIECE_CHARS = 1 << 18


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        origin: where it stands, to name in errors.
        record: its number in its file, from 1.
        size: its length in UTF-8 bytes.
        digest: the 16 bytes of `blake2b(text in UTF-8, digest_size=16)`.
        pieces: can be read once and join to the whole text.
    """

    origin: str
    record: int
    size: int
    digest: bytes
    pieces: Iterator[str]


@dataclass(frozen=True)
class Piece:
    """A run of text of one document in one split; `starts` and `ends` say if its part of that split does so here.

    `source` is the number of the source that it comes from.
    """

    split: Split
    text: str
    starts: bool
    ends: bool
    origin: str
    source: int = 0


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


def split_document(document: Document, *, fraction: float, whole: bool, source: int = 0) -> Iterator[Piece]:
    """Sends a document to training or validation.

    Args:
        document: one that is not empty.
        fraction: the share of the text that validation gets, in [0, 1).
        whole: True sends the whole document, by a hash of its text, so that no text lies in both splits; False keeps
            the last `fraction` of its bytes for validation, cut at a line or word near there.
        source: number of its source, for the pieces.
    """
    runs = _whole(document, fraction) if whole else _head_and_tail(document, fraction)
    held: tuple[Split, str, bool] | None = None
    for split, text in runs:
        if held is not None:
            yield Piece(*held, ends=split != held[0], origin=document.origin, source=source)
        held = (split, text, held is None or split != held[0])
    if held is not None:
        yield Piece(*held, ends=True, origin=document.origin, source=source)


def _whole(document: Document, fraction: float) -> Iterator[tuple[Split, str]]:
    split: Split = "validation" if int.from_bytes(document.digest[:8], "little") < fraction * 2**64 else "train"
    for text in document.pieces:
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
