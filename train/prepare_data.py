"""From text to token shards: `python train/prepare_data.py SOURCE OUTPUT`, `fuselm-prepare-data`, or `prepare(...)`.

Trains a byte-level BPE on the text (or takes a given tokenizer), checks that every document comes back exactly from its
tokens, drops copies, and writes shards that `fuselm.train.data_stream` memory-maps. The output folder appears when
whole; a job that was killed goes on where it was.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

import numpy as np
import tyro
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

import fuselm
from fuselm.train.command_line import parse_arguments
from fuselm.train.data_statistics import DataStatistics
from fuselm.train.documents import PIECE_CHARS, Piece
from fuselm.train.encoder_pool import EncoderPool, encode_checked, worker_count
from fuselm.train.mixture import Mixture, PieceReader, sample_pieces, whole_documents
from fuselm.train.seen_texts import SeenTexts
from fuselm.train.shards import (
    INDEX_FILE,
    TOKENIZER_FILE,
    SplitIndex,
    SplitWriter,
    bytes_in_words,
    check_output,
    token_dtype,
    whole_folder,
    write_index,
)
from fuselm.train.tokenizer import (
    TextTokenizer,
    check_on_own_text,
    check_round_trip,
    check_vocab_size,
    tokenizer_hash,
)
from fuselm.train.tokenizer_formats import tokenizer_json

DEFAULT_VOCAB_SIZE = 32_768
DEFAULT_SHARD_TOKENS = 100_000_000
DEFAULT_VALIDATION_FRACTION = 0.05
# An encoded character costs some 50 bytes of memory, so a batch costs a worker about 25 MB.
BATCH_CHARS = 1 << 19
SAMPLE_CHARS = 1 << 20
# More text than this hardly changes the merges, but every distinct word takes memory: 0.7 GB at 2^28 of source code.
TOKENIZER_TRAINING_CHARS = 1 << 27
# A killed job does at most so many seconds of its work again.
SAVE_SECONDS = 10.0
PROGRESS_FILE = "progress.json"
SCRATCH = "scratch"


@dataclass(frozen=True)
class PreparedData:
    """What `prepare` wrote: the folder, its vocabulary, and per split the tokens, documents, text bytes and shards.

    `seconds` is what this call took; `encoded_bytes` of text were encoded in `encoding_seconds` of it, by `workers`
    processes.
    """

    path: Path
    vocab_size: int
    eos_id: int
    dtype: str
    tokenizer_hash: str
    splits: dict[str, SplitIndex]
    statistics: DataStatistics
    empty_documents: int
    duplicate_documents: int
    ended_by: str | None
    seconds: float
    encoded_bytes: int
    encoding_seconds: float
    workers: int

    def summary(self) -> str:
        """A few lines for people."""
        rate = self.encoded_bytes / max(self.encoding_seconds, 1e-9) / 1e6
        lines = [
            f"wrote {self.path}: vocabulary {self.vocab_size:,} ({self.dtype}), in {self.seconds:.1f} s; encoded "
            f"{self.encoded_bytes / 1e6:,.1f} MB at {rate:.2f} MB/s ({self.workers} process(es))",
            *self.statistics.table(),
        ]
        if self.empty_documents:
            lines.append(f"  {self.empty_documents:,} empty documents skipped")
        if self.duplicate_documents:
            lines.append(f"  {self.duplicate_documents:,} copies of earlier documents dropped")
        if self.ended_by is not None:
            lines.append(f"  the mix ended where {self.ended_by} had no more; of the others some may be left")
        return "\n".join(lines)


def prepare(
    source: Path | str,
    output: Path,
    *,
    tokenizer: Path | None = None,
    encoding: str | None = None,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    tokenizer_chars: int = TOKENIZER_TRAINING_CHARS,
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    text_key: str = "text",
    eos_token: str | None = None,
    bos_token: str | None = None,
    keep_duplicates: bool = False,
    workers: int = 0,
    overwrite: bool = False,
    progress: bool = False,
) -> PreparedData:
    """Tokenises text into shards; all of `output` is written or nothing.

    A document ends with exactly one end-of-text token, and begins with `bos_token` if one is named. Empty documents and
    copies of earlier ones are counted and left out. From 1,000 documents of a source on, whole documents go to
    validation by a hash of their text; with fewer, each gives its last `validation_fraction`, as a document of its own.

    What a killed or interrupted call has done is kept in a hidden folder beside `output`; a call with the same
    arguments and unchanged text goes on from there, and writes the same bytes as one that was never interrupted.

    Args:
        source: a folder of text files, or one file (see `fuselm.train.sources`); hf:OWNER/NAME; or a mix of several of
            these in a .toml file (see `fuselm.train.mixture`).
        output: the folder to make.
        tokenizer: a tokenizer.json, tiktoken ranks or a SentencePiece model to use; None trains one on the training
            split.
        encoding: which encoding a file of ranks is; None tells by their number.
        vocab_size: tokens to train, at least 257; not used with `tokenizer`.
        tokenizer_chars: characters, from all files alike, to train them on.
        validation_fraction: share of the text for validation, in [0, 1).
        shard_tokens: tokens a shard.
        text_key: the key of the text in JSON lines, or its column.
        eos_token: the end-of-text token of a given tokenizer; None looks for the usual names.
        bos_token: a token to put before each document; None for none.
        keep_duplicates: keep copies of earlier documents.
        workers: processes that encode; 0 for one a usable core. The output does not depend on it.
        overwrite: replace an existing folder of token shards.
        progress: draw a progress bar on stderr.

    Raises:
        UserError: with what is wrong in one line; then nothing was written.
        Unfinished: a dataset could no longer be reached or a worker was killed; the same call goes on from there.
    """
    began = time.monotonic()
    if not 0 <= validation_fraction < 1:
        raise UserError(f"validation_fraction is {validation_fraction}; it must be at least 0 and below 1")
    if shard_tokens < 1:
        raise UserError(f"shard_tokens is {shard_tokens}; a shard needs at least 1 token")
    if workers < 0:
        raise UserError(f"workers is {workers}; it must be at least 0, for one a core")
    if tokenizer_chars < 1:
        raise UserError(f"tokenizer_chars is {tokenizer_chars}; it must be at least 1")
    if tokenizer is None:
        check_vocab_size(vocab_size)
        for name, token in (("eos_token", eos_token), ("bos_token", bos_token), ("encoding", encoding)):
            if token is not None:
                raise UserError(f"{name} {token!r} belongs to a given tokenizer, but there is none (tokenizer)")
    check_output(output, overwrite=overwrite)
    mixture = Mixture.open(source, text_key=text_key)
    given = None if tokenizer is None else tokenizer_json(tokenizer, encoding=encoding)
    if given is not None:  # an error in it comes before anything else
        TextTokenizer.from_json(given, eos_token=eos_token, bos_token=bos_token, origin=tokenizer or "")
    whole = whole_documents(mixture)
    settings = {
        "source_fingerprint": mixture.fingerprint,
        "sources": mixture.describe(),
        "trained_vocab_size": vocab_size if given is None else None,
        "tokenizer_chars": tokenizer_chars if given is None else None,
        "validation_fraction": validation_fraction,
        "validation_by": ["document" if w else "tail" for w in whole],
        "keep_duplicates": keep_duplicates,
    }
    digest = None if given is None else tokenizer_hash(given)
    others = [fuselm.__version__, shard_tokens, text_key, eos_token, bos_token, PIECE_CHARS, digest]
    key = json.dumps([settings, others, [s.state for s in mixture.sources]])
    with whole_folder(output, overwrite=overwrite, job=key) as folder:
        scratch = folder / SCRATCH
        scratch.mkdir(exist_ok=True)
        (folder / INDEX_FILE).unlink(missing_ok=True)  # written by a process that was killed a moment later
        if not (folder / TOKENIZER_FILE).exists():
            if given is None:
                given = _train(mixture, whole, validation_fraction, vocab_size, tokenizer_chars, progress)
            _replace(folder / TOKENIZER_FILE, given)
        content = (folder / TOKENIZER_FILE).read_bytes()
        coder = TextTokenizer.from_json(content, eos_token=eos_token, bos_token=bos_token, origin=tokenizer or "")
        job = _Job(folder, mixture, coder, whole, validation_fraction, shard_tokens, keep_duplicates)
        if not job.resumed:
            _check_space(folder, mixture, job.check_sample(), token_dtype(coder.vocab_size).itemsize, output)
        workers = worker_count(workers, mixture.text_bytes)
        splits, reader = job.run(workers, progress)
        if not splits["train"].tokens:
            raise UserError(f"source {source} holds no text: all {reader.empty} documents are empty")
        job.statistics.draw(folder / "lengths.png")
        write_index(
            folder,
            {
                "dtype": token_dtype(coder.vocab_size).name,
                "vocab_size": coder.vocab_size,
                "eos_id": coder.eos_id,
                "bos_id": coder.bos_id,
                "tokenizer_sha256": tokenizer_hash(content),
                "empty_documents": reader.empty,
                "duplicate_documents": reader.duplicates,
                "mix_ended_by": reader.ended_by,
                "settings": settings,
                "statistics": job.statistics.state(),
            },
            splits,
        )
        shutil.rmtree(scratch)
    return PreparedData(
        output,
        coder.vocab_size,
        coder.eos_id,
        token_dtype(coder.vocab_size).name,
        tokenizer_hash(content),
        splits,
        job.statistics,
        reader.empty,
        reader.duplicates,
        reader.ended_by,
        seconds=time.monotonic() - began,
        encoded_bytes=job.encoded_bytes,
        encoding_seconds=job.encoding_seconds,
        workers=workers,
    )


def _train(mixture: Mixture, whole: list[bool], fraction: float, vocab_size: int, chars: int, progress: bool) -> bytes:
    total = min(chars, mixture.text_bytes or chars)

    def texts() -> Iterator[str]:
        with _bar("reading text for the tokenizer", total, progress) as (bar, task):
            for piece in sample_pieces(mixture, whole, fraction, chars):
                if piece.split == "train":
                    yield piece.text
                bar.advance(task, len(piece.text))

    return TextTokenizer.train(texts(), vocab_size).to_json()


class _Job:
    """One pass over a mixture that writes its tokens into a folder, from where an earlier one was."""

    def __init__(
        self,
        folder: Path,
        mixture: Mixture,
        coder: TextTokenizer,
        whole: list[bool],
        fraction: float,
        shard_tokens: int,
        keep_duplicates: bool,
    ) -> None:
        self._folder, self._mixture, self._coder = folder, mixture, coder
        self._whole, self._fraction, self._shard_tokens = whole, fraction, shard_tokens
        self._keep_duplicates = keep_duplicates
        path = folder / SCRATCH / PROGRESS_FILE
        self._state: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        self.resumed = bool(self._state)
        if not self.resumed:
            for pattern in ("*.bin", "*.idx", "*.sources"):
                for file in folder.glob(pattern):
                    file.unlink()
        self.statistics = DataStatistics(mixture.names, self._state.get("statistics"))
        self._in_document: dict[str, int] = self._state.get("in_document", {"train": 0, "validation": 0})
        self.encoded_bytes = 0
        self.encoding_seconds = 0.0

    def check_sample(self) -> float:
        """Tries the tokenizer on some text of all sources, so that a wrong one is found out at once, not hours later.

        It also joins two pieces of a long document: a tokenizer that adds or drops something at the start of each text
        passes piece by piece and fails there.

        Returns:
            Tokens per byte of that text.
        """
        sample = list(sample_pieces(self._mixture, self._whole, self._fraction, SAMPLE_CHARS))
        texts = [piece.text for piece in sample]
        ids = encode_checked(self._coder, texts, [piece.origin for piece in sample])
        cut = [i for i in range(len(sample) - 1) if not sample[i].ends and sample[i].origin == sample[i + 1].origin]
        for i in cut[:1]:
            both = np.concatenate(ids[i : i + 2]).astype(np.int64)
            check_round_trip(self._coder, [texts[i] + texts[i + 1]], [both], [sample[i].origin])
        if sample:
            check_on_own_text(self._coder, texts[0], origin=sample[0].origin, joined=bool(cut))
        text_bytes = sum(len(text.encode()) for text in texts)
        return sum(run.size + 1 for run in ids) / max(text_bytes, 1)

    def run(self, workers: int, progress: bool) -> tuple[dict[str, SplitIndex], PieceReader]:
        """Writes all documents; returns what the splits hold, and the reader with its counts."""
        began = saved = time.monotonic()
        state = self._state
        seen = None
        if not self._keep_duplicates:
            seen = SeenTexts(self._folder / SCRATCH, state["reader"]["seen"] if state else 0)
        reader = PieceReader(self._mixture, seen, fraction=self._fraction, whole=self._whole, state=state.get("reader"))
        writers = {
            split: SplitWriter(
                self._folder,
                split,
                vocab_size=self._coder.vocab_size,
                shard_tokens=self._shard_tokens,
                mixed=len(self._mixture.names) > 1,
                state=state["splits"][split] if state else None,
            )
            for split in ("train", "validation")
        }
        try:
            with (
                _bar("writing tokens", self._mixture.total_bytes, progress) as (bar, task),
                EncoderPool(self._coder, workers) as pool,
            ):
                for (pieces, place), ids in pool.map(_batches(reader)):
                    for piece, run in zip(pieces, ids, strict=True):
                        self._write(writers[piece.split], piece, run)
                    bar.update(task, completed=reader.bytes_read)
                    if time.monotonic() - saved >= SAVE_SECONDS:
                        self._save(writers, seen, place)
                        saved = time.monotonic()
            self.encoding_seconds = time.monotonic() - began
            return {split: writer.close() for split, writer in writers.items()}, reader
        finally:
            for writer in writers.values():
                writer.abandon()
            if seen is not None:
                seen.close()

    def _write(self, writer: SplitWriter, piece: Piece, ids: np.ndarray[Any, Any]) -> None:
        split = piece.split
        if piece.starts:
            self._in_document[split] = 0
            if self._coder.bos_id is not None:
                writer.append(np.asarray([self._coder.bos_id]))
                self._in_document[split] = 1
        text_bytes = len(piece.text.encode())
        writer.append(ids, text_bytes=text_bytes)
        self._in_document[split] += ids.size
        self.encoded_bytes += text_bytes
        self.statistics.text(split, piece.source, text_bytes)
        if piece.ends:
            writer.append(np.asarray([self._coder.eos_id]))
            writer.end_document(piece.source)
            self.statistics.document(split, piece.source, self._in_document[split] + 1)

    def _save(self, writers: dict[str, SplitWriter], seen: SeenTexts | None, place: dict[str, Any]) -> None:
        if seen is not None:
            seen.sync()
        state = {
            "splits": {split: writer.state() for split, writer in writers.items()},
            "reader": place,
            "statistics": self.statistics.state(),
            "in_document": self._in_document,
        }
        _replace(self._folder / SCRATCH / PROGRESS_FILE, json.dumps(state).encode())


def _batches(reader: PieceReader) -> Iterator[tuple[tuple[list[Piece], dict[str, Any]], list[str], list[str]]]:
    """((pieces, where the reader is after them), their texts, their origins)."""
    batch: list[Piece] = []
    chars = 0

    def whole() -> tuple[tuple[list[Piece], dict[str, Any]], list[str], list[str]]:
        return (batch, reader.state()), [piece.text for piece in batch], [piece.origin for piece in batch]

    for piece in reader:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield whole()
            batch, chars = [], 0
    if batch:
        yield whole()


@contextmanager
def _bar(title: str, total: int | None, shown: bool) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar of bytes on stderr, and its task."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        yield bar, bar.add_task(title, total=total)


def _replace(path: Path, content: bytes) -> None:
    """Writes a file that is either there as a whole or not at all."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _check_space(folder: Path, mixture: Mixture, tokens_a_byte: float, itemsize: int, output: Path) -> None:
    needed = int((mixture.text_bytes or 0) * tokens_a_byte * itemsize)
    free = shutil.disk_usage(folder).free
    if needed > free:
        room = f"{folder.parent} has {bytes_in_words(free)} free"
        raise UserError(f"{output} needs about {bytes_in_words(needed)}, but {room}")


@dataclass
class Arguments:
    """Turn text into token shards for training."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """Folder of .txt files (one document each), .jsonl files (one a line; .gz, .xz and .zst too) and .parquet files
    (one a row), or one file; hf:OWNER/NAME, a dataset; or a .toml file that mixes several by weight."""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    """Folder to make."""
    tokenizer: Path | None = None
    """A tokenizer.json, tiktoken ranks file or SentencePiece model. Without it a byte-level BPE is trained."""
    encoding: str | None = None
    """For a ranks file: gpt2, cl100k_base, o200k_base or llama3; by default told by the number of ranks."""
    vocab_size: int = DEFAULT_VOCAB_SIZE
    """Tokens of the BPE to train."""
    tokenizer_chars: int = TOKENIZER_TRAINING_CHARS
    """Characters, from all files alike, to train them on."""
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION
    """Share of the text that is kept for validation."""
    shard_tokens: int = DEFAULT_SHARD_TOKENS
    """Tokens a shard file."""
    text_key: str = "text"
    """Key of the text in JSON lines, or its column."""
    eos_token: str | None = None
    """End-of-text token of a given tokenizer; by default the first usual name that it has."""
    bos_token: str | None = None
    """Token to put before each document; by default none."""
    keep_duplicates: bool = False
    """Keep documents whose text came already."""
    workers: int = 0
    """Processes that encode; 0 for one a core."""
    overwrite: bool = False
    """Replace an existing folder of token shards."""


def _terminated(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


@command
def main(args: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, 2 after an error of the user's, 130 when interrupted."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        raise_on_interrupt()
        signal.signal(signal.SIGTERM, _terminated)  # a polite kill stops it as Ctrl-C does
        arguments = parse_arguments(Arguments, args, "prepare_data.py")
        prepared = prepare(**vars(arguments), progress=sys.stderr.isatty())
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        report("interrupted; there is no output yet, and the same command goes on where this one stopped")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(prepared.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
