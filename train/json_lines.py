"""Files of JSON lines that grow while a run lives, and may have been cut off or damaged when it died."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fields:
    """What makes a line an entry.

    Attributes:
        required: the fields that it has at least, and of which type.
        numbers: fields that hold a number or null where it has them.
    """

    required: Mapping[str, type]
    numbers: frozenset[str] = frozenset()


METRIC = Fields(
    {"step": int},
    frozenset(
        ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tflops", "mfu", "memory_gib", "validation_loss")
    ),
)
EVENT = Fields({"time": str, "kind": str, "message": str})


def entries_of(lines: Iterable[bytes], fields: Fields) -> list[dict[str, Any]]:
    """The entries among lines; what else a crash or a full disk left there is passed over.

    Args:
        lines: of a file, without their ends.
        fields: what makes a line one.
    """
    entries = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(entry, dict):
            continue
        complete = all(type(entry.get(name)) is kind for name, kind in fields.required.items())
        if complete and all(type(entry.get(name)) in (int, float, type(None)) for name in fields.numbers):
            entries.append(entry)
    return entries


def read_entries(path: Path, fields: Fields) -> list[dict[str, Any]]:
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
