"""Encoding on many cores: worker processes that take batches of text and give token ids back, in order.

Workers are processes of their own rather than threads, because half of the work around the encoding itself is Python's.
They are started with a fresh interpreter, which is safe in any program, and end when their parent does, however it
ends.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fuselm.train.errors import UserError
from fuselm.train.shards import Unfinished, token_dtype
from fuselm.train.tokenizer import TextTokenizer, check_round_trip

T = TypeVar("T")
Encoded = list[NDArray[np.integer[Any]]]
# A worker imports and builds its tokenizer in a second, in which one core encodes some megabytes.
BYTES_A_WORKER = 1 << 24


def encode_checked(coder: TextTokenizer, texts: Sequence[str], origins: Sequence[str]) -> Encoded:
    """The ids of texts in the dtype of token files, after they were found to give the texts back.

    Raises:
        UserError: they do not, with the first difference.
    """
    ids = coder.encode_batch(texts)
    check_round_trip(coder, texts, ids, origins)
    dtype = token_dtype(coder.vocab_size)
    return [run.astype(dtype) for run in ids]


def worker_count(wanted: int, text_bytes: int | None) -> int:
    """Processes to encode with: `wanted`, or for 0 one a usable core, but no more than the text keeps busy."""
    if wanted:
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if text_bytes is None else max(1, min(cores, text_bytes // BYTES_A_WORKER))


class EncoderPool:
    """Encodes in `workers` processes; in this one, on all cores by the library's threads, for 1.

    Args:
        coder: the tokenizer.
        workers: how many processes.
    """

    def __init__(self, coder: TextTokenizer, workers: int) -> None:
        self._coder, self._workers = coder, workers
        self._processes: list[subprocess.Popen[bytes]] = []
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> EncoderPool:
        if self._workers > 1:
            setup = pickle.dumps((self._coder.to_json(), self._coder.eos_token, self._coder.bos_token))
            for _ in range(self._workers):
                self._start(setup)
            self._threads = ThreadPoolExecutor(self._workers)
        return self

    def _start(self, setup: bytes) -> None:
        ours, theirs = Pipe()
        load = f"import sys; sys.path[:] = {sys.path!r}; from fuselm.train.encoder_pool import serve"
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", f"{load}; serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Each has one core; and a worker does not hear the Ctrl-C that its parent answers.
                env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,
            )
        self._processes.append(process)
        self._idle.append(ours)
        ours.send_bytes(setup)

    def map(self, batches: Iterable[tuple[T, list[str], list[str]]]) -> Iterator[tuple[T, Encoded]]:
        """Encodes batches ahead of their use, in order.

        Args:
            batches: (anything, texts, their origins).

        Yields:
            (the anything, for each text its ids).

        Raises:
            UserError: a text does not come back from its ids.
            Unfinished: a worker died.
        """
        if self._threads is None:
            for key, texts, origins in batches:
                yield key, encode_checked(self._coder, texts, origins)
            return
        waiting: list[tuple[T, Future[Encoded]]] = []
        for key, texts, origins in batches:
            waiting.append((key, self._threads.submit(self._encode, texts, origins)))
            if len(waiting) >= 2 * self._workers:
                first, future = waiting.pop(0)
                yield first, future.result()
        for key, future in waiting:
            yield key, future.result()

    def _encode(self, texts: list[str], origins: list[str]) -> Encoded:
        with self._lock:
            connection = self._idle.pop()
        try:
            connection.send_bytes(pickle.dumps((texts, origins)))
            result = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise Unfinished(
                "an encoding process ended (was it killed for memory?); the same command goes on from here, with "
                "--workers for fewer"
            ) from error
        with self._lock:
            self._idle.append(connection)
        if isinstance(result, str):
            raise UserError(result)
        lengths, ids = result
        return np.split(ids, np.cumsum(lengths)[:-1])

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for connection in self._idle:
            connection.close()


def serve(handle: int) -> None:
    """The worker: answers batches that come over a connection until it closes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection = Connection(handle)
    with suppress(EOFError, OSError):
        content, eos_token, bos_token = pickle.loads(connection.recv_bytes())
        coder = TextTokenizer.from_json(content, eos_token=eos_token, bos_token=bos_token)
        while True:
            texts, origins = pickle.loads(connection.recv_bytes())
            try:
                ids = encode_checked(coder, texts, origins)
            except UserError as error:
                answer: Any = str(error)
            else:
                answer = ([run.size for run in ids], np.concatenate(ids))
            connection.send_bytes(pickle.dumps(answer, protocol=5))
