"""What lies in a run's checkpoint folder: what it is, whether its bytes are those that were written, what can go.

For people and scripts beside a run (checkpoints.py); the trainer's own saving, loading and retention is in
checkpointing.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fuselm.train.checkpointing import (
    FOLDER,
    MANIFEST,
    checkpoints_of,
    file_crc32,
    open_manifest,
    step_folder,
    step_of,
    wrong_sizes,
)
from fuselm.train.errors import UserError, in_words
from fuselm.train.shards import hold


@dataclass(frozen=True)
class Entry:
    """A checkpoint, or what is left of one."""

    folder: Path
    step: str
    size: int
    """Bytes on disk."""
    state: str
    """complete, or what is wrong as far as names and sizes tell."""
    world_size: int | None = None
    written: str | None = None
    """ISO 8601; None, as for world_size, without a readable manifest."""


@dataclass
class Plan:
    """What `prune` is to delete."""

    delete: list[Path] = field(default_factory=list)
    """Left-overs, then checkpoints, the oldest first."""
    newest_good: Path | None = None
    """The newest checkpoint whose checksums hold."""
    damaged: dict[Path, list[str]] = field(default_factory=dict)
    """Checkpoints that are not complete, or of wrong checksum; they stay, and count for nothing."""


def existing(run: Path) -> Path:
    """The run folder, which must be there.

    Raises:
        UserError: it is not.
    """
    if not run.is_dir():
        raise UserError(f"run folder {run} does not exist")
    return run


def folder_bytes(folder: Path) -> int:
    """Bytes of all files under a folder (or of a file); what vanishes meanwhile counts as nothing."""
    total = 0
    for path in [folder, *folder.rglob("*")]:
        with suppress(OSError):
            total += 0 if path.is_symlink() or path.is_dir() else path.stat().st_size
    return total


def leftovers(run: Path) -> list[Path]:
    """What interrupted saves and deletions left; while a run trains, also what it is writing."""
    return sorted((run / FOLDER).glob("step_*.tmp"))


def entries(run: Path) -> list[Entry]:
    """Everything in the checkpoint folder of a run, by step; files are not read, only their sizes compared.

    Raises:
        UserError: there is no such run folder.
    """
    found = [_entry(folder) for folder in reversed(checkpoints_of(existing(run)))]
    for folder in leftovers(run):
        step = folder.name.removeprefix("step_").partition(".")[0]
        found.append(Entry(folder, step.lstrip("0") or "0", folder_bytes(folder), f"unfinished: {folder.name}"))
    return found


def _entry(folder: Path) -> Entry:
    step, size = str(step_of(folder)), folder_bytes(folder)
    try:
        manifest = open_manifest(folder)
    except ValueError as error:
        return Entry(folder, step, size, f"{'damaged' if (folder / MANIFEST).is_file() else 'incomplete'}: {error}")
    state = "complete"
    for name, problem in wrong_sizes(folder, manifest).items():
        state = f"{'damaged size' if (folder / name).is_file() else 'incomplete'}: {name} {problem}"
        break
    return Entry(folder, step, size, state, manifest.get("world_size"), manifest.get("written"))


def select(run: Path, step: int | None) -> list[Path]:
    """The checkpoints of a run, the oldest first, or the one of a step.

    Raises:
        UserError: there is no such run or checkpoint, or none at all.
    """
    found = checkpoints_of(existing(run))[::-1]
    if not found:
        raise UserError(f"run folder {run} has no checkpoints")
    if step is None:
        return found
    if (folder := step_folder(run, step)) in found:
        return [folder]
    raise UserError(f"{run} has no checkpoint of step {step}; it has {', '.join(str(step_of(f)) for f in found)}")


def problems(checkpoint: Path, advance: Callable[[int], None] | None = None) -> list[str]:
    """Everything that differs from the manifest, a text for each file; empty for a sound checkpoint. Reads all of it.

    Args:
        checkpoint: its folder.
        advance: hears of each piece that was read, in bytes.
    """
    try:
        manifest = open_manifest(checkpoint)
    except ValueError as error:
        return [str(error)]
    wrong = wrong_sizes(checkpoint, manifest)
    for name, entry in sorted(manifest["files"].items()):
        if name in wrong:
            continue
        try:
            if file_crc32(checkpoint / name, advance) != entry["crc32"]:
                wrong[name] = "does not have the checksum it was written with"
        except OSError as error:
            wrong[name] = f"cannot be read: {error.strerror}"
    return [f"{name} {problem}" for name, problem in sorted(wrong.items())]


@contextmanager
def held(run: Path) -> Iterator[None]:
    """Keep every run out of a run folder.

    Raises:
        UserError: one is in it, or the folder cannot be opened.
    """
    try:
        handle = hold(existing(run))
    except BlockingIOError as error:
        raise UserError(f"a process is training in {run}: stop it, or wait for its end") from error
    except OSError as error:
        raise UserError(f"{run} cannot be opened: {in_words(error)}") from error
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def plan_prune(run: Path, *, keep: int, every: int | None, check: Callable[[Path], list[str]] = problems) -> Plan:
    """Decide what goes; deletes nothing. Without any sound checkpoint nothing does.

    Args:
        run: the run folder.
        keep: sound checkpoints that stay, the newest ones; only these are read.
        every: steps divisible by it stay too.
        check: as `problems`.
    """
    plan = Plan()
    kept, old = 0, []
    for folder in checkpoints_of(run):
        if kept < keep:
            wrong = check(folder)
            kept += not wrong
            plan.newest_good = plan.newest_good or (None if wrong else folder)
        else:
            state = _entry(folder).state
            wrong = [] if state == "complete" else [state]
            if not wrong and (every is None or step_of(folder) % every):
                old.append(folder)
        if wrong:
            plan.damaged[folder] = wrong
    if plan.newest_good is not None:
        plan.delete = leftovers(run) + old[::-1]
    return plan


def delete(folder: Path) -> int:
    """Delete a checkpoint or left-over, so that what an interruption leaves is no half checkpoint but a left-over.

    Returns:
        Bytes freed.

    Raises:
        UserError: the operating system refuses.
    """
    size = 0 if folder.is_symlink() else folder_bytes(folder)
    try:
        if folder.suffix != ".tmp":
            folder = folder.rename(folder.with_suffix(".deleted.tmp"))
        if folder.is_symlink() or not folder.is_dir():
            folder.unlink()  # where a link leads is not the run's
        else:
            shutil.rmtree(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be deleted: {in_words(error)}") from error
    return size
