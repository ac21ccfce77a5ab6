"""Several sources of text as one run of documents: in turn, or mixed by weight; each text once; from any place on.

A mix is a .toml file, in which weights are shares of the text's bytes:

    [[source]]
    path = "texts/web"      # relative to the file; or "hf:OWNER/NAME" with config and split
    weight = 0.8

    [[source]]
    path = "texts/code"
    name = "code"
    weight = 0.2
    passes = 3              # may be read up to three times
    text_key = "content"

The next document always comes from the source that is furthest behind its share, so every part of the data is mixed
alike. The mix ends where the next document is due from a source that has no more.
"""

from __future__ import annotations

import hashlib
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuselm.train.documents import Document, Piece, split_document
from fuselm.train.errors import UserError
from fuselm.train.seen_texts import SeenTexts
from fuselm.train.sources import HUB_PREFIX, Source, many_documents, open_source

MAX_SOURCES = 255  # a byte a document says which
_KEYS = {"path": str, "name": str, "weight": (int, float), "passes": int, "text_key": str, "config": str, "split": str}


@dataclass(frozen=True)
class Mixture:
    """Sources, by number.

    Attributes:
        sources: where the texts are.
        names: of the sources, pairwise different.
        weights: shares of the bytes, not normalised; empty to read one source after the other.
        passes: how often each may be read.
    """

    sources: list[Source]
    names: list[str]
    weights: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=lambda: [1])

    @classmethod
    def open(cls, place: str | Path, *, text_key: str = "text") -> Mixture:
        """Opens a folder, a file, a dataset (hf:NAME), or a mix of these in a .toml file.

        Raises:
            UserError: something is missing, or the mix contradicts itself.
        """
        if str(place).endswith(".toml") and not str(place).startswith(HUB_PREFIX):
            return _read_mix(Path(place), text_key)
        return cls([open_source(place, text_key=text_key)], [Path(str(place)).name or str(place)])

    @property
    def fingerprint(self) -> str:
        """Changes when a file is added, removed, renamed or grows."""
        prints = [source.fingerprint for source in self.sources]
        return prints[0] if len(prints) == 1 else hashlib.sha256("".join(prints).encode()).hexdigest()

    def describe(self) -> list[dict[str, Any]]:
        """What decides the text that it gives, except for the sources' own content."""
        weights = self.weights or [None] * len(self.sources)
        return [
            {"name": name, "weight": weight, "passes": passes, "fingerprint": source.fingerprint}
            for name, weight, passes, source in zip(self.names, weights, self.passes, self.sources, strict=True)
        ]

    @property
    def total_bytes(self) -> int | None:
        """Bytes to read on disk; None where that is not known."""
        return _sum([s.total_bytes for s in self.sources], self.passes)

    @property
    def text_bytes(self) -> int | None:
        """Bytes of text, roughly and at most; None where that is not known."""
        return _sum([s.text_bytes for s in self.sources], self.passes)


def _sum(sizes: list[int | None], passes: list[int]) -> int | None:
    known = [size * n for size, n in zip(sizes, passes, strict=True) if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _read_mix(path: Path, text_key: str) -> Mixture:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"mix {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # no TOML or no UTF-8
        raise UserError(f"mix {path} is not TOML: {error}") from error
    entries = content.get("source")
    if not isinstance(entries, list) or not entries or set(content) != {"source"}:
        raise UserError(f"mix {path} must hold [[source]] tables and nothing else")
    if len(entries) > MAX_SOURCES:
        raise UserError(f"mix {path} has {len(entries)} sources; at most {MAX_SOURCES} can be mixed")
    sources, names, weights, passes = [], [], [], []
    for number, entry in enumerate(entries, start=1):
        where = f"source {number} of {path}"
        for key, value in entry.items():
            if key not in _KEYS:
                raise UserError(f"{where} has the unknown key {key!r}; there are {', '.join(_KEYS)}")
            if not isinstance(value, _KEYS[key]) or isinstance(value, bool):
                raise UserError(f"{where}: {key} is {value!r}")
        if "path" not in entry:
            raise UserError(f"{where} has no path")
        place = str(entry["path"])
        if not place.startswith(HUB_PREFIX):
            place = str(path.parent / place)
        name = str(entry.get("name", Path(place).name))
        if name in names:
            raise UserError(f"{where} is called {name!r} as an earlier one: give it a name of its own")
        if not 0 < entry.get("weight", 1) <= sys.float_info.max or entry.get("passes", 1) < 1:
            raise UserError(f"{where}: weight must be above 0 and finite, and passes at least 1")
        key = str(entry.get("text_key", text_key))
        sources.append(open_source(place, text_key=key, config=entry.get("config"), split=entry.get("split")))
        names.append(name)
        passes.append(int(entry.get("passes", 1)))
        weights += [float(entry["weight"])] if "weight" in entry else []
    if weights and len(weights) != len(sources):
        raise UserError(f"{len(weights)} of {len(sources)} sources of mix {path} have a weight: give all or none one")
    return Mixture(sources, names, weights, passes)


@dataclass
class Place:
    """How far a source was read: `record` records of `part` in pass `passed`; and the bytes of text taken from it."""

    passed: int = 0
    part: int = 0
    record: int = 0
    taken: int = 0


class PieceReader:
    """The pieces of a mixture's documents in order, empty ones and copies left out.

    Args:
        mixture: the sources.
        seen: remembers the texts; None keeps copies.
        fraction: share for validation, in [0, 1).
        whole: for each source, whether whole documents go to validation; see `split_document`.
        state: what `state()` of an earlier reader gave after a piece: this one goes on with the next. `seen` must hold
            what it held then.
    """

    def __init__(
        self,
        mixture: Mixture,
        seen: SeenTexts | None,
        *,
        fraction: float,
        whole: list[bool],
        state: dict[str, Any] | None = None,
    ) -> None:
        self.mixture, self._seen, self._fraction, self._whole = mixture, seen, fraction, whole
        state = state or {}
        self.places = [Place(**place) for place in state.get("places", [{}] * len(mixture.sources))]
        #: Documents left out: without text, and with the same text as an earlier one.
        self.empty: int = state.get("empty", 0)
        self.duplicates: int = state.get("duplicates", 0)
        self._open: tuple[int, int] | None = state.get("open")
        self._streams: list[Iterator[tuple[int, int, Document]]] = []
        #: The source that ended a weighted mix by running out.
        self.ended_by: str | None = None

    def state(self) -> dict[str, Any]:
        """Where the reader is, after the piece that it gave last."""
        return {
            "places": [vars(place).copy() for place in self.places],
            "empty": self.empty,
            "duplicates": self.duplicates,
            "open": self._open,
            "seen": 0 if self._seen is None else len(self._seen),
        }

    @property
    def bytes_read(self) -> int:
        """Bytes on disk that were read so far, in all passes."""
        sources = zip(self.mixture.sources, self.places, strict=True)
        return sum(source.bytes_read + place.passed * (source.total_bytes or 0) for source, place in sources)

    def __iter__(self) -> Iterator[Piece]:
        resumed = self._open
        if resumed is not None:  # its record is read once more, to go on within it
            self.places[resumed[0]].record -= 1
        self._streams = [self._stream(number) for number in range(len(self.places))]
        left = list(range(len(self.places)))
        while left:
            number = left[0] if resumed is None else resumed[0]
            if self.mixture.weights and resumed is None:
                number = min(left, key=lambda i: self.places[i].taken / self.mixture.weights[i])
            step = next(self._streams[number], None)
            if step is None:
                if self.mixture.weights:
                    self.ended_by = self.mixture.names[number]
                    return
                left.remove(number)
                continue
            place = self.places[number]
            place.passed, place.part, document = step
            place.record = document.record
            if resumed is None and not self._wanted(number, place, document):
                continue
            yield from self._pieces(number, place.passed, document, 0 if resumed is None else resumed[1])
            resumed = None

    def _stream(self, number: int) -> Iterator[tuple[int, int, Document]]:
        source, place = self.mixture.sources[number], self.places[number]
        passed, first, after = place.passed, place.part, place.record
        while passed < self.mixture.passes[number]:
            for part in range(first, source.parts):
                for document in source.documents(part, after):
                    yield passed, part, document
                after = 0
            passed, first = passed + 1, 0

    def _wanted(self, number: int, place: Place, document: Document) -> bool:
        if document.size == 0:
            self.empty += place.passed == 0
            return False
        if self._seen is not None:
            here = number << 56 | place.part << 32 | place.record
            if self._seen.first(document.digest, here) != here:
                self.duplicates += place.passed == 0
                return False
        place.taken += document.size
        return True

    def _pieces(self, number: int, passed: int, document: Document, skip: int) -> Iterator[Piece]:
        pieces = split_document(document, fraction=self._fraction, whole=self._whole[number], source=number)
        for count, piece in enumerate(pieces, start=1):
            self._open = number, count
            # What is held out is held out once, in however many passes its source is read.
            if count > skip and not (passed and piece.split == "validation"):
                yield piece
        self._open = None


def sample_pieces(mixture: Mixture, whole: list[bool], fraction: float, chars: int) -> Iterator[Piece]:
    """Text from all parts of all sources, from each as much as its share of `chars` characters, for a first look."""
    total = mixture.text_bytes
    for number, source in enumerate(mixture.sources):
        share = (source.text_bytes or 0) / total if total else 1 / len(mixture.sources)
        if mixture.weights:
            share = mixture.weights[number] / sum(mixture.weights)
        left = 0.0  # a file may use what the ones before it left, and gives back what it takes too much
        for part in range(source.parts):
            left += chars * share * source.share(part)
            for document in source.documents(part) if left > 0 else ():
                if document.size:
                    for piece in split_document(document, fraction=fraction, whole=whole[number], source=number):
                        yield piece
                        left -= len(piece.text)
                        if left <= 0:
                            break
                if left <= 0:
                    break


def whole_documents(mixture: Mixture) -> list[bool]:
    """For each source, whether it has so many documents that whole ones go to validation."""
    return [source.total_bytes is None or many_documents(source) for source in mixture.sources]
