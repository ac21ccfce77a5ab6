"""Checkpoints: written whole or not at all, checked before they are loaded, loadable on any number of ranks.

    runs/NAME/checkpoints/step_00000200/
        __0_0.distcp ... .metadata   torch.distributed.checkpoint: model, optimizer, RNG state
        manifest.json                step, position in the data, configuration, size and CRC-32 of every file and itself

Everything goes to step_XXXXXXXX.tmp; the manifest is written last and the folder renamed, so a folder without .tmp is
whole. Sizes are compared when a checkpoint is looked for, CRCs before it is loaded: a flipped bit is otherwise just
another weight. Old checkpoints go only after the new one is in place. Writing is checkpoint_writer.py's.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.tensor import DTensor

from fuselm.train.distributed import World
from fuselm.train.errors import UserError, warn

MANIFEST = "manifest.json"
OWN_CRC = "crc32"  # the manifest's key for the checksum over all of its other keys
FOLDER = "checkpoints"
# DCP wraps what went wrong on any rank in a CheckpointException, which is a BaseException but no Exception.
DCP_ERRORS = (Exception, CheckpointException)
# Checkpoints whose checksums this process has compared or written: retention need not read them again.
trusted: set[Path] = set()
STATE_BYTES = 12  # a parameter: fp32 value and two fp32 moments


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return run / FOLDER / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint folder."""
    return int(folder.name.removeprefix("step_"))


# --- Finding and checking -------------------------------------------------------------------------------------------


def open_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked against its own checksum; the files that it lists are not looked at.

    Raises:
        ValueError: it cannot be used; the message says why.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"no readable {MANIFEST}") from error
    except ValueError:
        manifest = None
    # Its own checksum, for a flipped bit may be another step, or another checksum that then fits a damaged file.
    if not isinstance(manifest, dict) or manifest.pop(OWN_CRC, None) != _manifest_crc32(manifest):
        raise ValueError(f"{MANIFEST} is damaged")
    return manifest


def wrong_sizes(checkpoint: Path, manifest: dict[str, Any]) -> dict[str, str]:
    """What is wrong with each file that is missing or of another size than the manifest says; cheap."""
    wrong = {}
    for name, entry in manifest["files"].items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            wrong[name] = f"{'is missing' if size is None else f'has {size} bytes'}, expected {entry['bytes']} bytes"
    return wrong


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are all there with the right sizes.

    Raises:
        UserError: the checkpoint is incomplete; the message says what is missing.
    """
    try:
        manifest = open_manifest(checkpoint)
    except ValueError as error:
        raise UserError(f"{checkpoint} is not a complete checkpoint: {error}") from error
    for name, problem in wrong_sizes(checkpoint, manifest).items():
        raise UserError(f"{checkpoint} is not a complete checkpoint: {name} {problem}")
    return manifest


def checkpoints_of(run: Path) -> list[Path]:
    """All checkpoint folders of a run, complete or not, the newest first."""
    folders = (run / FOLDER).glob("step_*")
    return sorted((f for f in folders if f.is_dir() and f.name[5:].isdecimal()), key=step_of, reverse=True)


def latest_checkpoint(run: Path) -> Path | None:
    """The newest complete checkpoint of a run; warns about each newer one that is not complete."""
    for folder in checkpoints_of(run):
        try:
            read_manifest(folder)
        except UserError as error:
            warn(f"{error}; looking for an older one")
            continue
        return folder
    return None


def verify(checkpoint: Path, world: World | None = None) -> dict[str, Any]:
    """Compare every file with the manifest's checksum; ranks share the reading.

    Returns:
        The manifest.

    Raises:
        UserError: on every rank, when any file differs.
    """

    def check() -> dict[str, Any]:
        manifest = read_manifest(checkpoint)
        rank, size = (world.rank, world.size) if world else (0, 1)
        for name, entry in sorted(manifest["files"].items())[rank::size]:
            try:
                crc = file_crc32(checkpoint / name)
            except OSError as error:  # on every rank: the others would wait for one that left alone
                raise UserError(f"{checkpoint / name} cannot be read: {error.strerror}") from error
            if crc != entry["crc32"]:
                raise UserError(f"{checkpoint} is damaged: {name} does not have the checksum it was written with")
        return manifest

    manifest = world.together(check) if world else check()
    trusted.add(checkpoint)
    return manifest


def resumable(run: Path, world: World) -> Path | None:
    """The newest checkpoint of a run whose checksums hold; warns about each newer one that is not."""
    folders = world.from_main(lambda: [folder.name for folder in checkpoints_of(run)])
    for name in folders:
        folder = run / FOLDER / name
        try:
            verify(folder, world)
        except UserError as error:
            warn(f"{error}; looking for an older one")
            continue
        return folder
    return None


# --- Space ----------------------------------------------------------------------------------------------------------


def checkpoint_bytes(model: nn.Module) -> int:
    """What a checkpoint of this model takes on disk, in bytes, all ranks together."""
    return sum(p.numel() for p in model.parameters()) * STATE_BYTES + (4 << 20)


def require_space(folder: Path, needed: int, purpose: str) -> None:
    """Raise UserError, with the numbers, when the file system of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{purpose} needs {human_bytes(needed)} in {folder}, but only {human_bytes(free)} are free there"
        )


def human_bytes(size: int) -> str:
    """A size in MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"


def clean(run: Path) -> None:
    """Remove what an interrupted save left behind in this run."""
    for stale in (run / FOLDER).glob("*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)


# --- Files ----------------------------------------------------------------------------------------------------------


def write_manifest(checkpoint: Path, manifest: dict[str, Any]) -> None:
    manifest = json.loads(json.dumps(manifest, default=str))  # as a reader will see it
    manifest[OWN_CRC] = _manifest_crc32(manifest)
    write_atomically(checkpoint / MANIFEST, json.dumps(manifest, indent=1).encode())


def rewind(run: Path, checkpoint: Path, progress: dict[str, Any]) -> None:
    """Make a checkpoint of a run the newest again, with another progress in its manifest; later ones are deleted.

    Raises:
        UserError: the manifest cannot be written; nothing was deleted then.
    """
    try:
        write_manifest(checkpoint, open_manifest(checkpoint) | {"progress": progress})
    except OSError as error:
        raise UserError(f"{checkpoint / MANIFEST} cannot be written: {error.strerror}") from error
    for folder in checkpoints_of(run):
        if step_of(folder) > step_of(checkpoint):
            gone = folder.rename(folder.with_suffix(".deleted.tmp"))  # what an interruption leaves is no checkpoint
            shutil.rmtree(gone, ignore_errors=True)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it is either the old one or the new one, whole, also after a crash."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_crc32(path: Path, advance: Callable[[int], None] | None = None) -> int:
    """CRC-32 of a file; `advance` hears of each piece that was read, in bytes."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
            if advance is not None:
                advance(len(block))
    return crc


def _manifest_crc32(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def cause_of(error: BaseException) -> str:
    """The first underlying error in words; DCP keeps one a rank in `.failures`."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    if "inline_container" in str(error):  # how torch.save words a write that the operating system refused
        return "writing failed, as on a full disk"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves and loads; tensors are the training's own, not copies.

    Random number generators are each rank's own, under its number: plain tensors of one name would be rank 0's only.
    """
    rng = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "rng": {f"rank_{world.rank}": rng},
    }


# --- Loading --------------------------------------------------------------------------------------------------------


def load_checkpoint(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, world: World
) -> dict[str, Any]:
    """Load model, optimizer and RNG state from all ranks, in place; the number of ranks may differ from the saved one.

    Returns:
        The manifest.

    Raises:
        UserError: the checkpoint is incomplete or damaged, or is of another model.
    """
    manifest = verify(checkpoint, world)
    state = training_state(model, optimizer, world)
    rng = state["rng"][f"rank_{world.rank}"]
    if manifest["device"] != "cuda":
        rng.pop("cuda", None)  # saved on a CPU
    if world.rank >= manifest["world_size"]:
        rng.clear()  # saved by fewer ranks: this one's generators stay as they are

    def read() -> None:
        try:
            dcp_load(state, checkpoint_id=checkpoint)
        except DCP_ERRORS as error:
            raise UserError(f"{checkpoint} does not fit this model: {cause_of(error)}") from None

    world.together(read)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])
    return manifest


def load_model(checkpoint: Path, model: nn.Module) -> None:
    """Load the weights only, in one process, into a plain module whose parameters are allocated.

    Raises:
        UserError: the checkpoint is incomplete or damaged, or is of another model.
    """
    verify(checkpoint)
    weights = model.state_dict()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group
            dcp_load({"model": weights}, checkpoint_id=checkpoint, no_dist=True)
    except DCP_ERRORS as error:
        raise UserError(f"{checkpoint} does not fit this model: {cause_of(error)}") from None
    model.load_state_dict(weights)


def all_finite(model: nn.Module, world: World) -> bool:
    """Whether no weight on any rank is NaN or infinite. Waits for the device."""
    shards = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    bad = torch.stack([(~torch.isfinite(shard.detach())).any() for shard in shards]).any()
    return int(world.sum(bad.to(torch.int64)).item()) == 0
