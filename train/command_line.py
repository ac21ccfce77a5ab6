"""Command lines of the small programs: arguments from a dataclass, and one line for each way to get them wrong.

(`pretrain.py` has sections and presets, and its own parser in config.py.)
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from fuselm.train.config import nearest, type_in_words
from fuselm.train.errors import UserError

T = TypeVar("T")


def parse_arguments(cls: type[T], arguments: Sequence[str] | None, prog: str) -> T:
    """Read a command line.

    Args:
        cls: a dataclass; a field without a default is a positional argument, a bool a flag.
        arguments: without the program's name; None takes those of this process.
        prog: the program's name, for `--help`.

    Raises:
        UserError: what is wrong with them.
        SystemExit: after `--help`.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # tyro draws boxes of many lines
            return tyro.cli(cls, args=given, prog=prog)
    except SystemExit as done:
        if done.code in (0, None):
            raise
    raise UserError(_complaint(cls, given, prog))


def _complaint(cls: type, given: list[str], prog: str) -> str:
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    positional = [f.name.upper() for f in fields if f.default is dataclasses.MISSING]
    options = {f"--{f.name.replace('_', '-')}": hints[f.name] for f in fields if f.default is not dataclasses.MISSING}
    flags = {prefix + name[2:] for name, hint in options.items() if hint is bool for prefix in ("--", "--no-")}
    places: list[str] = []
    words = iter(given)
    for word in words:
        if not word.startswith("--"):
            places.append(word)
            continue
        option, equals, value = word.partition("=")
        option = option.replace("_", "-")
        if option in flags:
            continue
        if option not in options:
            return f"unknown option {option}{nearest(option, list(options))}"
        value = value if equals else next(words, None)
        if value is None or not _parses(value, options[option]):
            got = "nothing" if value is None else repr(value)
            return f"{option} wants {type_in_words(options[option])}, got {got}"
    if len(places) < len(positional):
        return f"{positional[len(places)]} is missing: {prog} {' '.join(positional)} [OPTIONS]; --help lists them"
    if len(places) > len(positional):
        return f"unexpected argument {places[len(positional)]!r}: {prog} {' '.join(positional)} [OPTIONS]"
    return f"cannot parse {' '.join(given)}"


def _parses(value: str, hint: Any) -> bool:
    for option in typing.get_args(hint) or (hint,):
        if option is type(None):
            if value == "None":
                return True
            continue
        with contextlib.suppress(ValueError):
            assert option in (int, float, str, Path), option
            option(value)
            return True
    return False
