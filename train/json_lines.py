"""Files of JSON lines that grow while a run lives, and may have been cut off or damaged when it died."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

METRIC: Mapping[str, type] = {"step": int}
EVENT: Mapping[str, type] = {"time": str, "kind": str, "message": str}


def entries_of(lines: Iterable[bytes], fields: Mapping[str, type]) -> list[dict[str, Any]]:
    """The entries among lines; what else a crash or a full disk left there is passed over.

    Args:
        lines: of a file, without their ends.
        fields: what each entry has at least, and of which type.
    """
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and all(type(entry.get(name)) is kind for name, kind in fields.items()):
            entries.append(entry)
    return entries


def read_entries(path: Path, fields: Mapping[str, type]) -> list[dict[str, Any]]:
    """The entries of a file, the oldest first; none where it does not exist. See `entries_of`."""
    return entries_of(path.read_bytes().split(b"\n"), fields) if path.exists() else []


def append_line(path: Path, line: bytes) -> None:
    """Appends a line; one before it that was cut off stays one by itself.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line + b"\n")
