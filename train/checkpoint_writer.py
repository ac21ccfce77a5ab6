"""Writing checkpoints: training pauses for a copy to host memory, the rest happens in the background.

    all ranks, training waits       room on the disk? -> copy of the state to (pinned) host memory
    all ranks, in the background    torch.distributed.checkpoint.async_save -> checksums -> manifest -> old ones go

The background has a process group of its own, so that its messages and training's do not mix. One save is under way at
a time; the next one waits for it. A save that fails leaves nothing behind, and earlier checkpoints untouched.
"""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from fuselm.env import versions
from fuselm.train import checkpointing
from fuselm.train.checkpointing import (
    MANIFEST,
    checkpoints_of,
    file_crc32,
    human_bytes,
    read_manifest,
    step_of,
    trusted,
)
from fuselm.train.distributed import World
from fuselm.train.errors import UserError

# Threads of a rank that write in the background, a file each, and read back for the checksums. One core does about
# 1 GB/s at either; two halve the time, and leave the others to whoever makes the batches.
_THREADS = 2


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        keep: so many of the newest.
        keep_every: steps divisible by this, for ever; 0 for none.
        keep_best: the one with the lowest validation loss, of those that were validated at their very step.
    """

    keep: int
    keep_every: int = 0
    keep_best: bool = True

    def is_permanent(self, step: int) -> bool:
        return bool(self.keep_every) and step % self.keep_every == 0

    def most(self, first: int, last: int, every: int, there: int) -> int:
        """How many more than `there` can lie side by side in a run that goes from step `first` to `last`, and saves
        each `every` steps (0: not in between) and at the end."""
        saves = set(range(first + every - first % every, last, every)) | {last} if every else {last}
        saves = {step for step in saves if step > first}
        permanent = sum(self.is_permanent(step) for step in saves)
        # The newest are `keep`, one more while it is being written, and the best.
        passing = min(len(saves) - permanent + there, self.keep + 1 + self.keep_best)
        return max(passing + permanent - there, 0) if saves else 0


@dataclass(frozen=True)
class Outcome:
    """How a save ended; the same on every rank but for the times.

    Attributes:
        step: of the checkpoint.
        folder: where it lies, if it does.
        size: bytes written, on rank 0.
        paused: seconds that training waited.
        seconds: from the start to the end.
        error: why it failed; None where it did not.
    """

    step: int
    folder: Path
    size: int
    paused: float
    seconds: float
    error: str | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return self.error
        return (
            f"saved {self.folder} ({human_bytes(self.size)} in {self.seconds:.1f} s, of which training waited "
            f"{self.paused:.2f} s)"
        )


class CheckpointWriter:
    """Saves one run's checkpoints.

    Args:
        run: the run folder, shared by all ranks.
        model: sharded or not.
        optimizer: its state is saved by parameter name.
        world: all of its ranks make a writer, and call its methods, together.
        retention: which old checkpoints go once a new one is whole.
        config: the resolved configuration, for the manifest.
        position: what fixes the order of the data (see feeds.py), for the manifest.
        asynchronous: False writes while training waits, and needs no copy in host memory.
    """

    def __init__(
        self,
        run: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        world: World,
        retention: Retention,
        config: dict[str, Any],
        position: dict[str, Any],
        asynchronous: bool = True,
    ) -> None:
        self.run, self.model, self.optimizer, self.retention = run, model, optimizer, retention
        self.config, self.position, self.asynchronous = config, position, asynchronous
        self.world, self.versions = world, versions()
        self._future: Future[Outcome] | None = None
        if asynchronous:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            # Pinned memory is allocated once and kept; on a CPU the copy is freed after each save.
            self._stager = BlockingAsyncStager(cache_staged_state_dict=world.device.type == "cuda")
            if world.size > 1:  # a rank may be slow to write, and training does not wait for it
                group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
                self._background = replace(world, group=group)
            else:
                self._background = world

    def save(self, progress: dict[str, Any]) -> None:
        """Begin to write a checkpoint; `outcome` says how that ended. Waits for the save before this one.

        Args:
            progress: how far the run is (see progress.py), for the manifest; its step names the checkpoint.

        Raises:
            AgreedError: there is no room on the disk or in memory; nothing was written.
        """
        if self._future is not None:
            raise RuntimeError("take the outcome of the save before this one first")
        began = time.perf_counter()
        step = progress["step"]
        folder = checkpointing.step_folder(self.run, step)
        size = checkpointing.checkpoint_bytes(self.model)
        self.world.from_main(lambda: _prepare(folder, size, step))
        if not self.asynchronous:
            state = checkpointing.training_state(self.model, self.optimizer, self.world)
            self._future = Future()
            self._future.set_result(
                self._write(lambda: save(state, checkpoint_id=_unfinished(folder)), progress, began)
            )
            return
        staged = self.world.together(self._stage)
        upload = async_save(
            staged,
            storage_writer=FileSystemWriter(_unfinished(folder), thread_count=_THREADS),
            process_group=self._background.group,
            async_stager=cast(AsyncStager, _Staged()),
        )
        paused = time.perf_counter() - began
        self._future = self._executor.submit(self._write, cast(Future, upload).result, progress, began, paused)

    def is_done(self) -> bool:
        """Whether there is an outcome to take without waiting. Ranks may differ for a moment."""
        return self._future is not None and self._future.done()

    def outcome(self) -> Outcome | None:
        """How the last save ended; waits for it; None where none was begun since the last call."""
        future, self._future = self._future, None
        return None if future is None else future.result()

    def close(self) -> None:
        """Wait for what is under way, and drop what is held. Safe to call twice."""
        if self.asynchronous:
            self._executor.shutdown(wait=True)
            self._stager.close()
            self._background = self.world

    def _stage(self) -> dict[str, Any]:
        state = checkpointing.training_state(self.model, self.optimizer, self.world)
        try:
            return self._stager.stage(state)  # type: ignore[return-value]
        except (RuntimeError, MemoryError) as error:
            raise UserError(
                f"the state of rank {self.world.rank} could not be copied to host memory ({error}); "
                "--checkpoint.asynchronous False needs no copy"
            ) from error

    def _write(self, write: Any, progress: dict[str, Any], began: float, paused: float | None = None) -> Outcome:
        """Everything after the copy, on all ranks together."""
        world = self._background if self.asynchronous else self.world
        step = progress["step"]
        folder = checkpointing.step_folder(self.run, step)
        temporary = _unfinished(folder)
        size, files = 0, {}

        def finish_writing() -> None:
            try:
                write()
            except checkpointing.DCP_ERRORS as error:
                free, needed = shutil.disk_usage(self.run).free, checkpointing.checkpoint_bytes(self.model)
                raise UserError(
                    f"the checkpoint of step {step} could not be written to {temporary}: "
                    f"{checkpointing.cause_of(error)} ({human_bytes(needed)} were needed, {human_bytes(free)} are free "
                    "there)"
                ) from None

        error: str | None = None
        try:
            world.together(finish_writing)
            files = _checksums(temporary, world)
            size = sum(entry["bytes"] for entry in files.values())
            world.from_main(lambda: self._finish(temporary, folder, files, progress))
            trusted.add(folder)
            world.from_main(lambda: delete_old(self.run, self.retention))
        except UserError as caught:
            error = str(caught)
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
        seconds = time.perf_counter() - began
        return Outcome(step, folder, size, seconds if paused is None else paused, seconds, error)

    def _finish(self, temporary: Path, folder: Path, files: dict[str, Any], progress: dict[str, Any]) -> None:
        manifest = {
            "step": progress["step"],
            "position": self.position,
            "progress": progress,
            "world_size": self.world.size,
            "device": self.world.device.type,
            "versions": self.versions,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "files": files,
            "config": self.config,
        }
        try:
            checkpointing.write_manifest(temporary, manifest)
            replaced = folder.with_suffix(".replaced.tmp")
            if folder.exists():  # an incomplete or older one of the same step
                folder.rename(replaced)
            temporary.rename(folder)
            checkpointing.sync_folder(folder.parent)
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            raise UserError(
                f"the checkpoint of step {progress['step']} could not be written to {folder}: {error.strerror}"
            ) from error


class _Staged:
    """An AsyncStager for a state that was copied already."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


def _unfinished(folder: Path) -> Path:
    return folder.with_suffix(".tmp")


def _prepare(folder: Path, size: int, step: int) -> None:
    temporary = _unfinished(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        checkpointing.require_space(folder.parent, size, f"the checkpoint of step {step}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise UserError(f"cannot write {temporary}: {error.strerror}") from error


def _checksums(folder: Path, world: World) -> dict[str, Any]:
    """Size and CRC of every file; each rank reads its own, which are still in its page cache."""

    def mine() -> dict[str, Any]:
        try:
            names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
            # DCP names files __RANK_N.distcp; a rank without data writes none, and .metadata is rank 0's.
            own = [n for n in names if (int(n[2:].partition("_")[0]) if n.startswith("__") else 0) == world.rank]
            with ThreadPoolExecutor(_THREADS) as pool:
                sums = list(pool.map(lambda name: file_crc32(folder / name), own))
            sizes = [(folder / name).stat().st_size for name in own]
            return {n: {"bytes": size, "crc32": crc} for n, size, crc in zip(own, sizes, sums, strict=True)}
        except OSError as error:
            raise UserError(f"cannot read back {folder}: {error.strerror}") from error

    return world.gather_dicts(world.together(mine))


def delete_old(run: Path, retention: Retention) -> None:
    """Delete complete checkpoints that nothing keeps. What is damaged stays to be looked at, and keeps nothing."""
    folders = checkpoints_of(run)
    if len(folders) <= retention.keep:
        return
    kept = 0
    best = _best(folders) if retention.keep_best else None
    for folder in folders:
        if kept >= retention.keep and (folder == best or retention.is_permanent(step_of(folder))):
            continue
        if not _is_sound(folder, read=kept < retention.keep):
            continue
        kept += 1
        if kept > retention.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _best(folders: list[Path]) -> Path | None:
    """The sound checkpoint with the lowest loss in a validation at its own step; of equals the newest."""
    losses = []
    for place, folder in enumerate(folders):
        try:
            progress = read_manifest(folder)["progress"]
        except UserError:
            continue
        loss = progress.get("validation_loss")
        if loss is not None and progress.get("validation_step") == progress.get("step"):
            losses.append((loss, place))
    return next((folders[place] for _, place in sorted(losses) if _is_sound(folders[place], read=True)), None)


def _is_sound(folder: Path, *, read: bool) -> bool:
    """Whether a checkpoint is complete. `read`: one from an earlier process is compared with its checksums, once, so
    that no sound one goes in favour of a damaged one."""
    try:
        if folder in trusted or not read:
            read_manifest(folder)
        else:
            checkpointing.verify(folder)
    except UserError:
        return False
    return True


def save_checkpoint(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    world: World,
    retention: Retention,
    config: dict[str, Any],
    position: dict[str, Any],
    progress: dict[str, Any],
) -> Path:
    """Write a checkpoint from all ranks while they wait; the arguments are those of `CheckpointWriter`.

    Returns:
        The folder.

    Raises:
        UserError: on every rank, when it could not be written; earlier checkpoints are untouched.
    """
    writer = CheckpointWriter(
        run,
        model,
        optimizer,
        world=world,
        retention=retention,
        config=config,
        position=position,
        asynchronous=False,
    )
    writer.save(progress)
    outcome = writer.outcome()
    assert outcome is not None
    if outcome.error is not None:
        raise UserError(outcome.error)
    return outcome.folder
