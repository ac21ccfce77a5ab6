"""Real text that every machine has: the Python sources and documentation installed on it, as .txt files.

Nothing is downloaded, and none of it is meant to be passed on: the files keep their authors' licences.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

KINDS = {".py": "code", ".pyi": "code", ".rst": "documentation", ".md": "documentation", ".txt": "documentation"}
# Shorter files say nothing; longer ones, and those with long lines, are mostly tables that a program wrote.
LEAST_BYTES, MOST_BYTES, LONGEST_MEAN_LINE = 256, 1_000_000, 200
# Lines shorter than this ("    return x") recur in files that have nothing else in common.
TELLING_LINE = 16
MOST_SEEN = 0.8


@dataclass
class Collected:
    """What was taken, and what was left out and why; bytes are of UTF-8 text, the rest counts files."""

    code_bytes: int = 0
    documentation_bytes: int = 0
    files: int = 0
    unsuitable: int = 0
    copies: int = 0
    near_copies: int = 0
    full: bool = False

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.code_bytes + self.documentation_bytes

    def state(self) -> dict[str, int | bool]:
        """As JSON has it."""
        return asdict(self) | {"bytes": self.bytes}


def installed_roots() -> list[Path]:
    """Where Python's own library, packages and the system's documentation lie, none inside another."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [place for place in sys.path if place.endswith(("site-packages", "dist-packages"))]
    places += ["/usr/lib/python3", "/usr/share/doc"]
    return distinct_roots(Path(place) for place in places if place)


def distinct_roots(places: Iterable[Path]) -> list[Path]:
    """The folders that exist, each once, without those inside another of them, in the order given."""
    folders = list(dict.fromkeys(place.resolve() for place in places if place.is_dir()))
    return [f for f in folders if not any(other in f.parents for other in folders)]


def source_files(roots: Iterable[Path]) -> Iterator[Path]:
    """Files with a suffix of `KINDS`, in an order that does not depend on the file system."""
    for root in roots:
        for folder, inner, names in os.walk(root):
            inner.sort()
            for name in sorted(names):
                if os.path.splitext(name)[1] in KINDS:
                    yield Path(folder, name)


def suitable_text(path: Path) -> str | None:
    """The text of a file that people wrote, or None."""
    try:
        if not LEAST_BYTES <= path.stat().st_size <= MOST_BYTES:
            return None
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text or len(text) > LONGEST_MEAN_LINE * (text.count("\n") + 1):
        return None
    return text


class Novelty:
    """Tells copies, and near copies, of what it was shown before.

    A file of which most lines were seen counts as a near copy: other releases of a package, vendored ones, models made
    from one template. In a held-out split they would make the loss look better than it is.
    """

    def __init__(self) -> None:
        self._texts: set[bytes] = set()
        self._lines: set[int] = set()

    def judge(self, text: str) -> str:
        """ "copy", "near copy" or "new"; the lines of a new one count as seen from then on."""
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in self._texts:
            return "copy"
        self._texts.add(digest)
        lines = {hash(line) for line in map(str.strip, text.splitlines()) if len(line) >= TELLING_LINE}
        if lines and len(lines & self._lines) >= MOST_SEEN * len(lines):
            return "near copy"
        self._lines |= lines
        return "new"


def collect(roots: Iterable[Path], output: Path, *, megabytes: float) -> Collected:
    """Writes code/*.txt and documentation/*.txt, a file for each source file, unchanged.

    Args:
        roots: folders to search.
        output: a new folder.
        megabytes: of text (10^6 bytes); the search ends with the file that reaches it.

    Returns:
        What was found.
    """
    for kind in set(KINDS.values()):
        (output / kind).mkdir(parents=True)
    novelty, found = Novelty(), Collected()
    for path in source_files(roots):
        text = suitable_text(path)
        verdict = "unsuitable" if text is None else novelty.judge(text)
        if text is None:
            found.unsuitable += 1
        elif verdict == "copy":
            found.copies += 1
        elif verdict == "near copy":
            found.near_copies += 1
        else:
            kind = KINDS[path.suffix]
            content = text.encode()
            (output / kind / f"{found.files:06d}.txt").write_bytes(content)
            found.files += 1
            if kind == "code":
                found.code_bytes += len(content)
            else:
                found.documentation_bytes += len(content)
            if found.bytes >= megabytes * 1e6:
                found.full = True
                break
    return found
