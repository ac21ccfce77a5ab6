"""Errors that are the user's to fix, and the one line they become."""

from __future__ import annotations

import os
import sys


class UserError(Exception):
    """Something the user asked for cannot be done; the message says in one line what, with names and numbers.

    Entry points catch it, print it through `report`, and exit with its return value. Anything else is a bug of ours and
    keeps its traceback.
    """


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
