"""Errors that are the user's to fix, and the one line they become."""

from __future__ import annotations

import functools
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper
from typing import Protocol


class Main(Protocol):
    """A program's entry point: its arguments, or those of the process; returns the exit code."""

    def __call__(self, args: Sequence[str] | None = None, /) -> int: ...


class UserError(Exception):
    """Something the user asked for cannot be done; the message says in one line what, with names and numbers.

    Entry points catch it, print it through `report`, and exit with its return value. Anything else is a bug of ours and
    keeps its traceback.
    """


def end_on_interrupt() -> None:
    """While modules load and nothing is written yet, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_interrupt() -> None:
    """Undo `end_on_interrupt`: from here on Ctrl-C is a KeyboardInterrupt, so that what was begun can be undone."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def warn(text: str) -> None:
    """Print `warning: ...` on one line of stderr, on rank 0 only."""
    _complain("warning: ", text)


def _complain(kind: str, text: str) -> None:
    # What is under way does not end because the disk with its log is full, or nobody reads along any more.
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print(kind + " ".join(text.split()), file=sys.stderr, flush=True)


def in_words(error: OSError) -> str:
    """What the operating system refused, and for which file."""
    return " ".join(str(part) for part in (error.strerror or error, error.filename and f"({error.filename})") if part)


def report(error: BaseException | str) -> int:
    """Print `error: ...` on one line of stderr, on rank 0 only.

    Args:
        error: the error, or its text.

    Returns:
        The exit code for bad input, 2.
    """
    _complain("error: ", str(error))
    return 2


def command(main: Main) -> Main:
    """Makes a program's `main` end with a line, too, where the operating system refuses something.

    A path that may not be looked at or is too long, a full disk behind stdout: one line and 2. A reader of stdout that
    has gone, as `| head` does: silence and 141, as SIGPIPE would give. Letters that stdout has no code for are
    replaced; bytes of stdin that are no text come in as lone surrogates, which are refused where text is encoded.
    """

    @functools.wraps(main)
    def guarded(args: Sequence[str] | None = None) -> int:
        for stream, errors in ((sys.stdout, "replace"), (sys.stdin, "surrogateescape")):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors=errors)
        try:
            code = main(args)
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:
            gone = isinstance(error, BrokenPipeError) and _reader_is_gone()
            code = 141 if gone else report(f"reading or writing failed: {in_words(error)}")
            _drop_output()
        return code

    return guarded


def _reader_is_gone() -> bool:
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # no stdout, or none of the operating system's
        return False
    return bool(poll.poll(0))


def _drop_output() -> None:
    """Where stdout takes nothing any more: the interpreter would try once more at its end, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
