"""The files of a tokenised data set, and how they come to be all at once or not at all.

    index.json         dtype, vocabulary, tokenizer hash, and for each split its shards, tokens, documents
    tokenizer.json     the tokenizer, byte for byte as it was given or trained
    train_00000.bin    header, then token ids: little-endian uint16 for a vocabulary up to 65,536, else uint32
    train.idx          header, then documents + 1 int64: document i is tokens [idx[i], idx[i+1]) of the whole split
    train.sources      header, then documents uint8, the source of each; only where the data was mixed of several
    validation_...     the same
    lengths.png        histogram of the lengths of documents

The shards of a split are one run of tokens cut every `shard_tokens`; a document may go on in the next shard. The header
of 32 bytes is: 8 bytes magic, uint32 version, uint32 bytes an entry, uint64 number of entries, 8 bytes zero.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fuselm.train.errors import UserError

FORMAT = "fuselm-tokens"
VERSION = 1
INDEX_FILE = "index.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENS_MAGIC = b"FUSELMTK"
BORDERS_MAGIC = b"FUSELMIX"
SOURCES_MAGIC = b"FUSELMSR"
JOB_FILE = "job.json"
_HEADER = struct.Struct("<8sIIQ8x")
HEADER_BYTES = _HEADER.size


class DataError(UserError, ValueError):
    """Token shards, or a request for tokens, that cannot be right; one line for the user."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype of token files for a vocabulary: uint16 up to 65,536 ids, uint32 above."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Unfinished(UserError):
    """A long job could not go on, through no fault of its input; what it has done is kept for the next call."""


@dataclass
class SplitIndex:
    """What one split holds. `text_bytes` counts UTF-8 bytes of text, `tokens` counts BOS and EOS too."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)  # {"file": name, "tokens": count} in order
    borders: str = ""
    sources: str = ""


class SplitWriter:
    """Appends documents to the shards of one split.

    Args:
        folder: an existing folder.
        split: the name that files start with.
        vocab_size: one more than the largest id that may be written; it decides the dtype.
        shard_tokens: tokens a shard; the last one may hold fewer.
        dtype: another dtype than that of `token_dtype`.
        mixed: also write the source of each document.
        state: what `state()` of an earlier writer of these files returned: all that was written after it is dropped,
            and writing goes on from there.

    Raises:
        DataError: the dtype cannot hold the vocabulary.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        vocab_size: int,
        shard_tokens: int,
        dtype: np.dtype[Any] | None = None,
        mixed: bool = False,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.dtype = token_dtype(vocab_size) if dtype is None else dtype
        check_dtype_holds(self.dtype, vocab_size)
        self._folder, self._split = folder, split
        self._vocab_size, self._shard_tokens = vocab_size, shard_tokens
        self._shard: BinaryIO | None = None
        self._in_shard = 0
        self._sources: BinaryIO | None = None
        if state is None:
            self.index = SplitIndex(borders=f"{split}.idx", sources=f"{split}.sources" if mixed else "")
            self._borders = _create(folder / self.index.borders)
            self._borders.write(np.zeros(1, "<i8").tobytes())
            if mixed:
                self._sources = _create(folder / self.index.sources)
            return
        self.index = SplitIndex(**state)
        known = {str(shard["file"]) for shard in self.index.shards}
        for file in folder.glob(f"{glob.escape(split)}_*.bin"):
            if file.name not in known:
                file.unlink()
        self._borders = _reopen(folder / self.index.borders, 8 * (self.index.documents + 1))
        if self.index.sources:
            self._sources = _reopen(folder / self.index.sources, self.index.documents)
        if self.index.shards and self.index.shards[-1]["tokens"] < shard_tokens:
            self._in_shard = int(self.index.shards[-1]["tokens"])
            self._shard = _reopen(folder / str(self.index.shards[-1]["file"]), self._in_shard * self.dtype.itemsize)

    def state(self) -> dict[str, Any]:
        """Brings what was written to the disk, and says what it is, for another writer to go on."""
        for file in (self._shard, self._borders, self._sources):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        return asdict(self.index)

    def append(self, ids: NDArray[np.integer[Any]], *, text_bytes: int = 0) -> None:
        """Writes tokens of the current document.

        Args:
            ids: (tokens,) integers in [0, vocab_size).
            text_bytes: the UTF-8 bytes of text that they stand for.

        Raises:
            DataError: an id lies outside the vocabulary; nothing of `ids` was written.
        """
        if ids.size and (int(ids.max()) >= self._vocab_size or int(ids.min()) < 0):
            wrong = int(ids.max()) if int(ids.max()) >= self._vocab_size else int(ids.min())
            raise DataError(f"token id {wrong} lies outside the vocabulary of {self._vocab_size} ({self.dtype.name})")
        self.index.text_bytes += text_bytes
        while ids.size:
            if self._shard is None:
                name = f"{self._split}_{len(self.index.shards):05d}.bin"
                self._shard, self._in_shard = _create(self._folder / name), 0
                self.index.shards.append({"file": name, "tokens": 0})
            part = ids[: self._shard_tokens - self._in_shard]
            self._shard.write(part.astype(self.dtype).tobytes())
            self._in_shard += part.size
            self.index.tokens += part.size
            self.index.shards[-1]["tokens"] = self._in_shard
            ids = ids[part.size :]
            if self._in_shard == self._shard_tokens:
                self._close_shard()

    def end_document(self, source: int = 0) -> None:
        """Marks the border after the current document, which comes from this source."""
        self._borders.write(np.asarray([self.index.tokens], "<i8").tobytes())
        if self._sources is not None:
            self._sources.write(bytes([source]))
        self.index.documents += 1

    def close(self) -> SplitIndex:
        """Completes the headers, brings everything to the disk and returns what was written."""
        self._close_shard()
        _finish(self._borders, BORDERS_MAGIC, 8, self.index.documents + 1)
        if self._sources is not None:
            _finish(self._sources, SOURCES_MAGIC, 1, self.index.documents)
        return self.index

    def _close_shard(self) -> None:
        if self._shard is not None:
            _finish(self._shard, TOKENS_MAGIC, self.dtype.itemsize, self._in_shard)
            self._shard = None

    def abandon(self) -> None:
        """Closes the files as they are, after an error."""
        for file in (self._shard, self._borders, self._sources):
            if file is not None:
                file.close()


def bytes_in_words(count: int) -> str:
    """A size in MB or GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"


def check_dtype_holds(dtype: np.dtype[Any], vocab_size: int) -> None:
    """Raises DataError where the largest id would wrap around."""
    largest = int(np.iinfo(dtype).max)
    if vocab_size - 1 > largest:
        raise DataError(f"{dtype.name} holds ids up to {largest}, but the vocabulary has ids up to {vocab_size - 1}")


def _create(path: Path) -> BinaryIO:
    file = path.open("xb", buffering=1 << 20)
    file.write(bytes(HEADER_BYTES))  # the real one comes last: a file without it was never finished
    return file


def _reopen(path: Path, length: int) -> BinaryIO:
    """Opens an unfinished file to go on after `length` bytes of its content."""
    file = path.open("r+b", buffering=1 << 20)
    file.write(bytes(HEADER_BYTES))
    file.truncate(HEADER_BYTES + length)
    file.seek(HEADER_BYTES + length)
    return file


def _finish(file: BinaryIO, magic: bytes, itemsize: int, count: int) -> None:
    file.seek(0)
    file.write(_HEADER.pack(magic, VERSION, itemsize, count))
    file.flush()
    os.fsync(file.fileno())
    file.close()


def map_entries(path: Path, magic: bytes, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Memory-maps the entries of a shard or border file, after its header and size were checked.

    Args:
        path: the file.
        magic: `TOKENS_MAGIC` or `BORDERS_MAGIC`.
        dtype: of the entries.
        count: entries that the index promises.

    Returns:
        (count,) read-only array on the file; nothing is read yet.

    Raises:
        DataError: the file is missing, of another kind or version, or not as long as it should be.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing")
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or head[:8] != magic:
        raise DataError(f"{path} is not a {magic.decode()} file: it starts with {head[:8]!r}")
    _, version, itemsize, entries = _HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path} has version {version}; this program reads version {VERSION}: prepare the data again")
    if itemsize != dtype.itemsize or entries != count:
        raise DataError(
            f"{path} says {entries} entries of {itemsize} bytes, the index says {count} of {dtype.itemsize}: "
            "the files are not from one run"
        )
    size, expected = path.stat().st_size, HEADER_BYTES + count * dtype.itemsize
    if size != expected:
        raise DataError(f"{path} is damaged: {size} bytes instead of {expected}")
    return np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,)).view(np.ndarray)


def write_index(folder: Path, content: dict[str, Any], splits: dict[str, SplitIndex]) -> None:
    """Writes index.json; it comes last, so a folder that has one is whole."""
    whole = {"format": FORMAT, "version": VERSION, **content, "splits": {name: asdict(s) for name, s in splits.items()}}
    with (folder / INDEX_FILE).open("x", encoding="utf-8") as file:
        json.dump(whole, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def read_index(folder: Path) -> dict[str, Any]:
    """Reads index.json; raises DataError where the folder or the file is missing or is something else."""
    path = folder / INDEX_FILE
    if not folder.exists():
        raise DataError(f"data folder {folder} does not exist: make it with prepare_data.py SOURCE {folder}")
    if not path.is_file():
        raise DataError(f"{folder} is not a folder of token shards: it has no {INDEX_FILE}")
    try:
        index = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DataError(f'{path} is not an index of token shards: "format" is not "{FORMAT}"')
    if index.get("version") != VERSION:
        raise DataError(
            f"{path} has version {index.get('version')}; this program reads version {VERSION}: prepare the data again"
        )
    return index


@contextmanager
def whole_folder(output: Path, *, overwrite: bool = False, job: str | None = None) -> Iterator[Path]:
    """Gives a temporary folder beside `output` that becomes `output` at the end, or vanishes on any error.

    The temporary folder is locked while its process lives, so that the next call can tell what a killed one left behind
    and take it over or remove it.

    Args:
        output: the folder to make. Its parents are made where missing.
        overwrite: replace an existing folder of token shards, at the moment when the new one is complete. Anything else
            that stands there is never replaced.
        job: says what is being made. Then a killed process, a KeyboardInterrupt and an `Unfinished` leave the temporary
            folder, and the next call with the same `job` gets it as it was left. None for a new one each time.

    Raises:
        UserError: `output` exists already, or writing fails, here or in the body of the `with` statement.
    """
    output = Path(os.path.abspath(output))  # so that it has a name and a parent
    check_output(output, overwrite=overwrite)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with locked(output.parent):
            partial, alive = _partial_folder(output.parent, f".{output.name}.partial-", job)
    except OSError as error:
        raise UserError(f"cannot write to {output.parent}: {error.strerror or error}") from error
    keep = False
    try:
        yield partial
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)  # mkdtemp made it private
        (partial / JOB_FILE).unlink(missing_ok=True)
        _move_into_place(partial, output, overwrite=overwrite)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}") from error
    except (KeyboardInterrupt, Unfinished):
        keep = job is not None
        raise
    finally:
        if not keep:
            shutil.rmtree(partial, ignore_errors=True)
        if alive is not None:
            os.close(alive)


def _partial_folder(parent: Path, prefix: str, job: str | None) -> tuple[Path, int | None]:
    """The folder that a dead process left with this job, or a new one; removes those left with other jobs.

    Returns:
        It, and a descriptor that holds its lock, or None where there are no locks.
    """
    found: tuple[Path, int | None] | None = None
    for folder in sorted(parent.glob(f"{glob.escape(prefix)}*")):
        handle = _lock(folder, block=False)
        if handle is None:  # its process lives
            continue
        same = found is None and job is not None and (folder / JOB_FILE).is_file()
        if same and (folder / JOB_FILE).read_text(encoding="utf-8") == job:
            found = folder, handle
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)
    if found is None:
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        found = partial, _lock(partial, block=False)
        if job is not None:
            try:
                (partial / JOB_FILE).write_text(job, encoding="utf-8")
            except OSError:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    return found


def check_output(output: Path, *, overwrite: bool) -> None:
    """Raises UserError unless `output` is free, or holds token shards that may be replaced."""
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise UserError(f"output {output} exists already: choose another name or pass --overwrite")
    if output.is_symlink() or not output.is_dir():
        raise UserError(f"output {output} is not a folder; it is not replaced")
    if any(output.iterdir()):
        try:
            read_index(output)
        except DataError as error:
            raise UserError(f"output {output} holds something other than token shards; it is not replaced") from error


def _move_into_place(partial: Path, output: Path, *, overwrite: bool) -> None:
    check_output(output, overwrite=overwrite)  # somebody may have made it meanwhile
    if not output.exists():
        partial.rename(output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.partial-", dir=output.parent))
    output.rename(old / output.name)
    try:
        partial.rename(output)
    except BaseException:
        (old / output.name).rename(output)
        raise
    finally:
        if output.exists():
            shutil.rmtree(old, ignore_errors=True)


def _lock(path: Path, *, block: bool) -> int | None:
    """A descriptor that holds the lock of a file or folder; None where another has it, or there are no locks."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if block else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


def hold(path: Path) -> int | None:
    """Takes the lock of an existing folder for as long as the returned descriptor stays open.

    Returns:
        The descriptor; None where the file system has no locks.

    Raises:
        BlockingIOError: another process has it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        os.close(handle)
        return None
    return handle


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of an existing file or folder, waiting for it; nothing where the file system has no locks."""
    handle = _lock(path, block=True)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)
