"""Errors that are the user's to fix, and the one line they become."""

from __future__ import annotations

import os
import signal
import sys


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
    if os.environ.get("RANK", "0") == "0":
        print("warning: " + " ".join(text.split()), file=sys.stderr, flush=True)


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
    if os.environ.get("RANK", "0") == "0":
        print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    return 2
