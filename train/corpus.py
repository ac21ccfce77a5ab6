"""The bundled text: Shakespeare's plays and poems, in the public domain, so that a first run needs no download."""

from __future__ import annotations

from pathlib import Path

from fuselm.train.prepare_data import prepare
from fuselm.train.shards import DataError, locked, read_index
from fuselm.train.sources import FileSource

BUNDLED_TEXT = Path(__file__).parent / "corpus" / "plays.jsonl.xz"


def prepare_bundled(output: Path, vocab_size: int = 1024) -> Path:
    """Makes token shards of the bundled plays, or reuses those that are there.

    Several processes may call it at once: one works, the others wait and reuse. It takes a few seconds.

    Args:
        output: the folder to make or to reuse.
        vocab_size: tokens of the byte-level BPE that is trained on the plays.

    Returns:
        `output`.

    Raises:
        DataError: `output` holds something else, or the plays with another vocabulary.
        UserError: it cannot be written.
    """
    with locked(BUNDLED_TEXT):
        if not output.exists():
            prepare(BUNDLED_TEXT, output, vocab_size=vocab_size)
            return output
    settings = read_index(output).get("settings", {})
    if settings.get("source_fingerprint") != FileSource(BUNDLED_TEXT).fingerprint:
        raise DataError(f"{output} holds other data than the bundled plays: choose another folder")
    if settings.get("trained_vocab_size") != vocab_size:
        raise DataError(
            f"{output} holds the plays with a vocabulary of {settings.get('trained_vocab_size')}, not {vocab_size}: "
            "choose another folder, or remove it"
        )
    return output
