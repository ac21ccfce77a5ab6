"""From text to token shards: `python train/prepare_data.py SOURCE OUTPUT`, `fuselm-prepare-data`, or `prepare(...)`.

Trains a byte-level BPE on the text (or takes a given tokenizer.json), checks that every document comes back exactly
from its tokens, and writes shards that `fuselm.train.data_stream` memory-maps. The output folder appears when whole.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, end_on_interrupt, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from fuselm.train.command_line import parse_arguments
from fuselm.train.documents import Document, Piece, TextSource, split_document
from fuselm.train.shards import (
    TOKENIZER_FILE,
    SplitIndex,
    SplitWriter,
    check_output,
    token_dtype,
    whole_folder,
    write_index,
)
from fuselm.train.tokenizer import TextTokenizer, check_round_trip, check_vocab_size, tokenizer_hash

DEFAULT_VOCAB_SIZE = 32_768
DEFAULT_SHARD_TOKENS = 100_000_000
DEFAULT_VALIDATION_FRACTION = 0.05
# A batch is encoded on all cores at once; an encoded character costs some 50 bytes of memory, so this is about 50 MB.
BATCH_CHARS = 1 << 20
SAMPLE_CHARS = 1 << 20
# More text than this hardly changes the merges, but needs memory for every distinct word.
TOKENIZER_TRAINING_CHARS = 1 << 30


@dataclass(frozen=True)
class PreparedData:
    """What `prepare` wrote: the folder, its vocabulary, and per split the tokens, documents, text bytes and shards."""

    path: Path
    vocab_size: int
    eos_id: int
    dtype: str
    tokenizer_hash: str
    splits: dict[str, SplitIndex]
    empty_documents: int
    seconds: float

    def summary(self) -> str:
        """A few lines for people."""
        lines = [f"wrote {self.path}: vocabulary {self.vocab_size:,} ({self.dtype}), in {self.seconds:.1f} s"]
        for name, split in self.splits.items():
            ratio = f", {split.text_bytes / split.tokens:.2f} bytes a token" if split.tokens else ""
            lines.append(
                f"  {name:<10} {split.tokens:>13,} tokens of {split.documents:,} documents "
                f"in {len(split.shards):,} shard(s){ratio}"
            )
        if self.empty_documents:
            lines.append(f"  {self.empty_documents:,} empty documents skipped")
        return "\n".join(lines)


def prepare(
    source: Path,
    output: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    text_key: str = "text",
    eos_token: str | None = None,
    bos_token: str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> PreparedData:
    """Tokenises a folder of text into shards; all of `output` is written or nothing.

    A document ends with exactly one end-of-text token, and begins with `bos_token` if one is named. Empty documents are
    counted and skipped. From 1,000 documents on, whole documents go to validation by a hash of their text; with fewer,
    each document gives its last `validation_fraction`, as a document of its own.

    Args:
        source: a folder of .txt files (one document each) and .jsonl files (one a line; .gz and .xz too), or one file.
        output: the folder to make.
        tokenizer: a tokenizer.json to use; None trains one on the training split (on its first 2^30 characters).
        vocab_size: tokens to train, at least 257; not used with `tokenizer`.
        validation_fraction: share of the text for validation, in [0, 1).
        shard_tokens: tokens a shard.
        text_key: the key of the text in JSON lines.
        eos_token: the end-of-text token of a given tokenizer; None looks for the usual names.
        bos_token: a token to put before each document; None for none.
        overwrite: replace an existing folder of token shards.
        progress: draw a progress bar on stderr.

    Raises:
        UserError: with what is wrong in one line; then nothing was written.
    """
    began = time.monotonic()
    if not 0 <= validation_fraction < 1:
        raise UserError(f"validation_fraction is {validation_fraction}; it must be at least 0 and below 1")
    if shard_tokens < 1:
        raise UserError(f"shard_tokens is {shard_tokens}; a shard needs at least 1 token")
    if tokenizer is None:
        check_vocab_size(vocab_size)
        for name, token in (("eos_token", eos_token), ("bos_token", bos_token)):
            if token is not None:
                raise UserError(f"{name} {token!r} names a token of a given tokenizer, but there is none (tokenizer)")
    check_output(output, overwrite=overwrite)
    texts = TextSource(source, text_key=text_key)
    job = _Job(texts, validation_fraction, whole=texts.has_many_documents(), progress=progress)

    if tokenizer is not None:
        coder = TextTokenizer.load(tokenizer, eos_token=eos_token, bos_token=bos_token)
        tokenizer_json = tokenizer.read_bytes()
    else:
        coder = TextTokenizer.train(_limited(job.pieces("training the tokenizer")), vocab_size)
        tokenizer_json = coder.to_json()
    tokens_a_byte = _check_sample(coder, job)

    dtype = token_dtype(coder.vocab_size)
    with whole_folder(output, overwrite=overwrite) as folder:
        _check_space(folder, int(texts.text_bytes * tokens_a_byte * dtype.itemsize), output)
        splits = _write_splits(folder, coder, job, shard_tokens)
        if not splits["train"].tokens:
            raise UserError(f"source {source} holds no text: all {job.empty} documents are empty")
        (folder / TOKENIZER_FILE).write_bytes(tokenizer_json)
        digest = tokenizer_hash(tokenizer_json)
        content = {
            "dtype": dtype.name,
            "vocab_size": coder.vocab_size,
            "eos_id": coder.eos_id,
            "bos_id": coder.bos_id,
            "tokenizer_sha256": digest,
            "empty_documents": job.empty,
            "settings": {
                "source_fingerprint": texts.fingerprint,
                "trained_vocab_size": vocab_size if tokenizer is None else None,
                "validation_fraction": validation_fraction,
                "validation_by": "document" if job.whole else "tail",
            },
        }
        write_index(folder, content, splits)
    seconds = time.monotonic() - began
    return PreparedData(output, coder.vocab_size, coder.eos_id, dtype.name, digest, splits, job.empty, seconds)


@dataclass
class _Job:
    """One source and how it is split; each pass over it draws a bar of its own."""

    texts: TextSource
    fraction: float
    whole: bool
    progress: bool
    empty: int = 0

    def pieces(self, title: str | None = None) -> Generator[Piece, None, None]:
        """One pass over the text, with a bar if it has a title; counts empty documents anew."""
        self.empty = 0
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not (title and self.progress)) as bar:
            task = bar.add_task(title or "", total=self.texts.total_bytes)
            for document in self.texts.documents():
                yield from self._of(document)
                bar.update(task, completed=self.texts.bytes_read)

    def _of(self, document: Document) -> Iterator[Piece]:
        if document.size == 0:
            self.empty += 1
        else:
            yield from split_document(document, fraction=self.fraction, whole=self.whole)


def _limited(pieces: Iterable[Piece]) -> Iterator[str]:
    used = 0
    for piece in pieces:
        if piece.split == "train":
            used += len(piece.text)
            yield piece.text
        if used >= TOKENIZER_TRAINING_CHARS:
            return


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _encode(coder: TextTokenizer, batch: list[Piece]) -> list[np.ndarray[Any, Any]]:
    texts = [piece.text for piece in batch]
    ids = coder.encode_batch(texts)
    check_round_trip(coder, texts, ids, [piece.origin for piece in batch])
    return ids


def _check_sample(coder: TextTokenizer, job: _Job) -> float:
    """Tries the tokenizer on the first text of the source, so that a wrong one is found out at once, not hours later.

    It also joins two pieces of a long document: a tokenizer that adds or drops something at the start of each text
    passes piece by piece and fails there.

    Returns:
        Tokens per byte of that text.
    """
    sample: list[Piece] = []
    chars = 0
    with closing(job.pieces()) as pieces:
        for piece in pieces:
            sample.append(piece)
            chars += len(piece.text)
            if chars >= SAMPLE_CHARS:
                break
    ids = _encode(coder, sample)
    for i in range(len(sample) - 1):
        if not sample[i].ends:
            both = np.concatenate(ids[i : i + 2])
            check_round_trip(coder, [sample[i].text + sample[i + 1].text], [both], [sample[i].origin])
            break
    text_bytes = sum(len(piece.text.encode()) for piece in sample)
    return sum(run.size + 1 for run in ids) / max(text_bytes, 1)


def _check_space(folder: Path, needed: int, output: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{output} needs about {needed / 1e9:.2f} GB, but {folder.parent} has {free / 1e9:.2f} GB free")


def _write_splits(folder: Path, coder: TextTokenizer, job: _Job, shard_tokens: int) -> dict[str, SplitIndex]:
    def writer(split: str) -> SplitWriter:
        return SplitWriter(folder, split, vocab_size=coder.vocab_size, shard_tokens=shard_tokens)

    writers = {"train": writer("train"), "validation": writer("validation")}
    bos = np.asarray([] if coder.bos_id is None else [coder.bos_id], dtype=np.int64)
    eos = np.asarray([coder.eos_id], dtype=np.int64)
    try:
        for batch in _batches(job.pieces("writing tokens")):
            for piece, ids in zip(batch, _encode(coder, batch), strict=True):
                to = writers[piece.split]
                if piece.starts:
                    to.append(bos)
                to.append(ids, text_bytes=len(piece.text.encode()))
                if piece.ends:
                    to.append(eos)
                    to.end_document()
        return {name: to.close() for name, to in writers.items()}
    finally:
        for to in writers.values():
            to.abandon()


@dataclass
class Arguments:
    """Turn text into token shards for training."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """Folder of .txt files (one document each) and .jsonl files (one a line; .jsonl.gz and .xz too), or one file."""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    """Folder to make."""
    tokenizer: Path | None = None
    """A tokenizer.json to use. Without it a byte-level BPE is trained on the text."""
    vocab_size: int = DEFAULT_VOCAB_SIZE
    """Tokens of the BPE to train."""
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION
    """Share of the text that is kept for validation."""
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    """Tokens a shard file."""
    text_key: str = "text"
    """Key of the text in JSON lines."""
    eos_token: str | None = None
    """End-of-text token of a given tokenizer; by default the first usual name that it has."""
    bos_token: str | None = None
    """Token to put before each document; by default none."""
    overwrite: bool = False
    """Replace an existing folder of token shards."""


def _terminated(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(args: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 after an error of the user's, 130 when interrupted."""
    raise_on_interrupt()
    try:
        arguments = parse_arguments(Arguments, args, "prepare_data.py")
    except UserError as error:
        return report(error)
    before = signal.signal(signal.SIGTERM, _terminated)  # so that a polite kill cleans up as Ctrl-C does
    try:
        prepared = prepare(**vars(arguments), progress=sys.stderr.isatty())
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        report("interrupted; nothing was written")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(prepared.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
