"""Which texts came already: a hash table on the disk, so that memory does not grow with the number of documents.

Each entry is the 16-byte digest of a text and the place where it was first seen, in 24 bytes. Entries are also appended
to a log, from which the table is built anew when a killed job goes on: the log can be cut back to any length.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import BinaryIO

from fuselm.train.sources import DIGEST_BYTES

_ENTRY = DIGEST_BYTES + 8
_EMPTY = bytes(8)
_FIRST_SLOTS = 1 << 14
_MOST_FILLED = 0.6
_LOG, _TABLE = "seen.log", "seen.table"


class SeenTexts:
    """Remembers the first place of each text.

    Args:
        folder: an existing folder, for two files.
        count: how many of the texts that an earlier object remembered there to keep.
    """

    def __init__(self, folder: Path, count: int = 0) -> None:
        self._folder = folder
        self._log: BinaryIO = (folder / _LOG).open("r+b" if count else "w+b", buffering=1 << 16)
        self._log.truncate(count * _ENTRY)
        self._count = 0
        self._make_table(_FIRST_SLOTS)
        for _ in range(count):
            self._insert(self._log.read(_ENTRY))

    def __len__(self) -> int:
        return self._count

    def first(self, digest: bytes, place: int) -> int:
        """Where a text was seen first; `place` itself if that is now.

        Args:
            digest: of the text, 16 bytes.
            place: where it stands, in [0, 2^64 - 1).
        """
        slot = self._slot(digest)
        known = self._table[slot + DIGEST_BYTES : slot + _ENTRY]
        if known != _EMPTY:
            return int.from_bytes(known, "little") - 1
        entry = digest + (place + 1).to_bytes(8, "little")
        self._log.write(entry)
        self._insert(entry)
        return place

    def sync(self) -> int:
        """Brings the log to the disk; returns the number of texts in it."""
        self._log.flush()
        os.fsync(self._log.fileno())
        return self._count

    def close(self) -> None:
        """Closes the files."""
        self._log.close()
        self._table.close()

    def _make_table(self, slots: int) -> None:
        path = self._folder / _TABLE
        path.unlink(missing_ok=True)
        with path.open("w+b") as file:
            file.truncate(slots * _ENTRY)  # zeros, which take no room until they are written
            self._table = mmap.mmap(file.fileno(), slots * _ENTRY)
        self._slots = slots

    def _slot(self, digest: bytes) -> int:
        """Offset of the entry of a digest, or of the free one that it would take."""
        at = int.from_bytes(digest[-8:], "little") % self._slots
        while True:
            offset = at * _ENTRY
            entry = self._table[offset : offset + _ENTRY]
            if entry[:DIGEST_BYTES] == digest or entry[DIGEST_BYTES:] == _EMPTY:
                return offset
            at = (at + 1) % self._slots

    def _insert(self, entry: bytes) -> None:
        if self._count >= _MOST_FILLED * self._slots:
            old = self._table
            self._make_table(2 * self._slots)
            for offset in range(0, len(old), _ENTRY):
                kept = old[offset : offset + _ENTRY]
                if kept[DIGEST_BYTES:] != _EMPTY:
                    slot = self._slot(kept[:DIGEST_BYTES])
                    self._table[slot : slot + _ENTRY] = kept
            old.close()
        slot = self._slot(entry[:DIGEST_BYTES])
        self._table[slot : slot + _ENTRY] = entry
        self._count += 1
