"""The training run: build, resume, step, report, validate, save, stop."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import time
import weakref
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fuselm.kernels._triton import select_backend
from fuselm.kernels.adamw import AdamW
from fuselm.model.attention_backends import require_attention
from fuselm.model.llama import Llama, kernel_backend
from fuselm.train import checkpointing, distributed
from fuselm.train.config import TrainConfig, resolve, to_json
from fuselm.train.corpus import prepare_bundled
from fuselm.train.data_stream import DataStream, TokenDataset
from fuselm.train.distributed import AgreedError, World
from fuselm.train.errors import UserError, in_words, report
from fuselm.train.evaluation import Feed, evaluate, forward_backward
from fuselm.train.lr_schedule import lr_factor
from fuselm.train.metrics import Reporter, Speedometer, StepMetrics, memory_gib
from fuselm.train.parallelize import build_mesh, materialize, parallelize, require_memory
from fuselm.train.shards import hold

# What a checkpoint's configuration must share with the run that loads it; other fields (kernels, ...) may change.
_SHAPE = [
    "vocab_size",
    "dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "ffn_dim",
    "head_dim",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "tie_embeddings",
    "qk_norm",
]


_SAVES_MEMORY = (
    "halve training.micro_batch_size (the global batch can stay), or set parallel.activation_checkpointing to full"
)


class StopSignal:
    """Remembers that SIGINT or SIGTERM came, so that the step can be finished first. A context manager."""

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._remember) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name


@dataclasses.dataclass
class Pending:
    """A step that was queued on the device and not yet read by the host.

    `values` is (4,) fp64 on the host: loss, grad norm, valid tokens, stops; valid once `done` has happened. `began` is
    the `done` of the step before, so that what the device waits for the host counts too.
    """

    step: int
    lr: float
    values: torch.Tensor
    began: torch.cuda.Event | None
    done: torch.cuda.Event | None


class Trainer:
    """One training run on this rank.

    Args:
        config: resolved for the number of ranks.
        world: from `distributed.start`.

    Raises:
        UserError: the data, the run folder, the checkpoint or the disk do not fit the configuration.
    """

    def __init__(self, config: TrainConfig, world: World, stop: StopSignal) -> None:
        self.config, self.world, self.stop = config, world, stop
        self.lock: weakref.finalize[..., Any] | None = None
        self.run = config.run_folder
        world.together(self._check_kernels)
        self.dataset, self.training, self.validation = self._open_data()
        checkpoint = self._find_checkpoint()
        world.together(lambda: require_memory(config.model, world))
        self.model, self.optimizer = build(config, world)
        self.step = 0
        if checkpoint is not None:
            manifest = checkpointing.load_checkpoint(checkpoint, self.model, self.optimizer, world=world)
            self.step = manifest["step"]
        self.start_step = self.step
        self.saved_step = self.step if checkpoint is not None and checkpoint.parent.parent == self.run else None
        moved = world.from_main(lambda: self._claim_folder(checkpoint))
        self.speed = Speedometer.of(config.model, config.training.seq_len, world.device, world.size)
        self.reporter = Reporter(
            self.run if world.is_main else None,
            config.logging,
            total_steps=config.training.steps,
            start_step=self.start_step,
        )
        self.pending: deque[Pending] = deque()
        self.nonfinite = 0
        self.stopping = False
        self.clock = time.perf_counter()
        self.step_began: torch.cuda.Event | None = None
        self._introduce(checkpoint, moved)

    # --- Building ---

    def _check_kernels(self) -> None:
        try:
            select_backend(kernel_backend(self.config.model), self.world.device)
        except RuntimeError as error:
            raise UserError(f"model.kernels is {self.config.model.kernels}: {error}") from error
        dtype = getattr(torch, self.config.parallel.param_dtype)
        try:
            require_attention(self.config.model, self.world.device, dtype, documents=self.config.data.document_mask)
        except (ValueError, ImportError) as error:
            raise UserError(f"model.{error}") from error

    def _open_data(self) -> tuple[TokenDataset, Feed, Feed | None]:
        """The training split, and how this rank reads the training and the validation split, if that is wanted."""
        config, world = self.config, self.world
        path = config.data.path
        if path is None:
            path = config.runs / "data" / f"plays_{config.data.vocab_size}"
            bundled = path
            # Rank 0 first; then one process a machine, which finds the folder there or makes it where none is shared.
            for turn in (world.rank == 0, world.local_rank == 0):
                world.together(lambda turn=turn: prepare_bundled(bundled, config.data.vocab_size) if turn else None)

        def feed(dataset: TokenDataset, shuffle: bool) -> Feed:
            stream = DataStream(
                dataset,
                seq_len=config.training.seq_len,
                global_batch_size=config.training.global_batch_size,
                seed=config.training.seed,
                shuffle=shuffle,
            )
            return Feed(stream, world, config.training.micro_batch_size, config.data.document_mask)

        def open_both() -> tuple[TokenDataset, Feed, Feed | None]:
            training = TokenDataset.open(path, "train")
            validation = TokenDataset.open(path, "validation") if config.evaluation.batches else None
            if training.vocab_size > config.model.vocab_size:
                raise UserError(
                    f"the data in {path} has a vocabulary of {training.vocab_size}, but model.vocab_size is "
                    f"{config.model.vocab_size}: pass --model.vocab_size {training.vocab_size} or larger"
                )
            return training, feed(training, True), None if validation is None else feed(validation, False)

        return world.together(open_both)

    def _position(self) -> dict[str, Any]:
        """What fixes the order of the data: with the step, it says which sequences come next."""
        training = self.config.training
        return {
            "training.global_batch_size": training.global_batch_size,
            "training.seq_len": training.seq_len,
            "training.seed": training.seed,
            "tokenizer": self.dataset.tokenizer_hash,
            "tokens of the training data": self.dataset.num_tokens,
        }

    def _find_checkpoint(self) -> Path | None:
        """The checkpoint to start from, its checksums and its configuration compared."""
        resume, world = self.config.checkpoint.resume, self.world
        if resume == "never":
            return None
        if resume == "auto":
            found = checkpointing.resumable(self.run, world)
        else:
            found = Path(resume)
            if not world.from_main(found.is_dir):
                raise AgreedError(f"checkpoint.resume: there is no folder {found}; it is auto, never, or a path")
            if not found.name.startswith("step_"):
                run, found = found, checkpointing.resumable(found, world)
                if found is None:
                    raise AgreedError(f"checkpoint.resume: {run} holds no complete checkpoint")
            newest = world.from_main(lambda: checkpointing.latest_checkpoint(self.run))
            if newest is not None and found.resolve().parent == newest.resolve().parent and found.name != newest.name:
                raise AgreedError(
                    f"checkpoint.resume: {self.run} goes on to {newest.name}; to branch off at {found.name}, "
                    "give the new run another --name"
                )
        if found is not None:
            manifest = world.from_main(lambda: checkpointing.read_manifest(found))
            world.together(lambda: self._compare(found, manifest))
        return found

    def _compare(self, checkpoint: Path, manifest: dict[str, Any]) -> None:
        now = json.loads(to_json(self.config))["model"]
        pairs = [(f"model.{k}", manifest["config"]["model"].get(k), now[k]) for k in _SHAPE]
        pairs += [(k, manifest["position"].get(k), v) for k, v in self._position().items()]
        for name, before, after in pairs:
            if before != after:
                raise UserError(
                    f"{checkpoint} was written with {name} {before}, but it is {after} now; give the same, or start "
                    "a run with another --name or --checkpoint.resume never"
                )

    def _claim_folder(self, checkpoint: Path | None) -> str | None:
        """On rank 0: check space, move an earlier run aside, create the folder and its configuration."""
        goes_on = checkpoint is not None and checkpoint.parent.parent == self.run
        moved = None
        try:
            if self.run.is_dir():
                self._hold()
            if self.config.checkpoint.save:
                self._require_space(len(checkpointing.checkpoints_of(self.run)) if goes_on else 0)
            if not goes_on and (self.run / "metrics.jsonl").exists():
                number = 1
                while (aside := self.run.with_name(f"{self.run.name}.{number}")).exists():
                    number += 1
                self.run.rename(aside)
                moved = str(aside)
                self.release()
            self.run.mkdir(parents=True, exist_ok=True)
            self._hold()
            checkpointing.clean(self.run)
            checkpointing.write_atomically(self.run / "config.json", to_json(self.config))
            shutil.copyfile(self.dataset.tokenizer_path, self.run / "tokenizer.json")
        except OSError as error:
            raise UserError(f"the run folder {self.run} cannot be written: {in_words(error)}") from error
        return moved

    def _hold(self) -> None:
        """Lock the run folder while this run lives, so that no two write to it."""
        if self.lock is not None:
            return
        try:
            handle = hold(self.run)
        except BlockingIOError as error:
            raise UserError(
                f"another process is training in {self.run}: wait for it, or give this run another --name"
            ) from error
        self.lock = None if handle is None else weakref.finalize(self, os.close, handle)

    def release(self) -> None:
        """Give the run folder's lock back; safe to call twice."""
        if self.lock is not None:
            self.lock()
            self.lock = None

    def _require_space(self, there: int) -> None:
        """For the checkpoints that the run will hold at most, beside those that are there."""
        config = self.config.checkpoint
        left = self.config.training.steps - self.step
        saves = math.ceil(left / config.every) if config.every else min(left, 1)
        more = max(min(config.keep + 1, saves + there) - there, 0)
        needed = more * checkpointing.checkpoint_bytes(self.model)
        folder = next(parent for parent in (self.run, *self.run.absolute().parents) if parent.exists())
        checkpointing.require_space(folder, needed, f"{more} checkpoint(s) of {self.run}")

    def _introduce(self, checkpoint: Path | None, moved: str | None) -> None:
        config, world, say = self.config, self.world, self.reporter.say
        training = config.training
        if moved:
            say(f"the earlier run of this name is now {moved}")
        accumulation = training.global_batch_size // (training.micro_batch_size * world.size)
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
        say(
            f"{self.run}: {self.model.num_parameters() / 1e6:,.2f} M parameters on {world.size} x {device}, "
            f"{config.parallel.param_dtype} compute; {training.global_batch_size} sequences x {training.seq_len} "
            f"tokens a step ({world.size} ranks x {training.micro_batch_size} x {accumulation} micro-batches); "
            f"{self.dataset.num_tokens:,} training tokens"
        )
        if checkpoint is not None:
            say(f"resuming from {checkpoint} at step {self.step}")
        self.reporter.explain(self.speed, world.device, training.seq_len)

    # --- Running ---

    def train(self) -> None:
        """Train to the last step, or until SIGINT or SIGTERM; save; draw; say what was written.

        Raises:
            UserError: the loss was not finite too often in a row, or a checkpoint could not be written.
        """
        total, every = self.config.training.steps, self.config.evaluation.every
        try:
            if self.step == 0:
                self._validate()
            while self.step < total and not self.stopping:
                self._train_step()
                if every and self.step % every == 0 and self.step < total:
                    self._validate()
                if self.config.checkpoint.every and self.step % self.config.checkpoint.every == 0:
                    self._save()
            self._read_pending()
            if self.step >= total and self.step > self.start_step:
                self._validate()
            self._save()
            self.reporter.plot()
        finally:
            self.reporter.close()
            self.release()
        self._conclude()

    def _train_step(self) -> None:
        config = self.config
        began = self.step_began
        if began is None and self.world.device.type == "cuda":  # the first step, or the first after a pause
            began = torch.cuda.Event(enable_timing=True)
            began.record()
        lr = config.optimizer.lr * lr_factor(self.step, config.training.steps, config.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches = self.training.micro_batches(self.step)
        loss, count, stops = forward_backward(self.model, batches, self.world, stop=self.stop.received is not None)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        values = torch.stack([loss, self.optimizer.grad_norm.double(), count, stops])
        done = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        self.pending.append(Pending(self.step, lr, values, began, done))
        self.step_began = done
        # A GPU's step is read while the next one runs, so that its queue never empties.
        self._read_pending(leave=1 if done is not None else 0)

    def _read_pending(self, leave: int = 0) -> None:
        while len(self.pending) > leave:
            pending = self.pending.popleft()
            if pending.done is not None:
                pending.done.synchronize()
            loss, grad_norm, _, stops = pending.values.tolist()
            seconds = self._seconds(pending)
            training = self.config.training
            tokens = training.global_batch_size * training.seq_len
            rate, tflops, mfu = self.speed.read(tokens, seconds)
            memory = memory_gib(self.world.device)
            self.reporter.step(
                StepMetrics(pending.step, loss, grad_norm, pending.lr, pending.step * tokens, rate, tflops, mfu, memory)
            )
            if stops and not self.stopping:
                self.stopping = True
                self.reporter.say("asked to stop: saving first")
            self._count_nonfinite(pending.step, loss, grad_norm)

    def _seconds(self, pending: Pending) -> float:
        """What a step took: by the GPU's events, since the host reads it late; by the clock on a CPU."""
        if pending.began is not None and pending.done is not None:
            return pending.began.elapsed_time(pending.done) / 1e3
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        return seconds

    def _pause(self) -> None:
        """The time since the last step belongs to no step."""
        self.clock, self.step_began = time.perf_counter(), None

    def _count_nonfinite(self, step: int, loss: float, grad_norm: float) -> None:
        # Both numbers are sums over all ranks, so every rank comes to the same verdict.
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.nonfinite = 0
            return
        self.nonfinite += 1
        self.reporter.say(
            f"warning: step {step} is not finite (loss {loss}, grad_norm {grad_norm}) and changed no weight"
        )
        limit = self.config.training.max_nonfinite_steps
        if self.nonfinite >= limit:
            raise AgreedError(
                f"loss or gradient norm was not finite in {limit} steps in a row (up to step {step}); try a lower "
                f"optimizer.lr or a longer schedule.warmup_steps. Checkpoints in {self.run / checkpointing.FOLDER} are "
                "from before"
            )

    def _validate(self) -> None:
        if self.validation is not None:
            self._read_pending()
            loss, tokens = evaluate(self.model, self.validation, self.config.evaluation.batches)
            self.reporter.validation(self.step, loss, tokens)
            self._pause()

    def _save(self) -> None:
        if not self.config.checkpoint.save or self.saved_step == self.step:
            return
        self._read_pending()
        if not checkpointing.all_finite(self.model, self.world):
            raise AgreedError(f"weights are not finite after step {self.step}; they were not saved")
        folder = checkpointing.save_checkpoint(
            self.run,
            self.step,
            self.model,
            self.optimizer,
            world=self.world,
            keep=self.config.checkpoint.keep,
            config=json.loads(to_json(self.config)),
            position=self._position(),
        )
        self.saved_step = self.step
        self.reporter.say(f"saved {folder}")
        self._pause()

    def _conclude(self) -> None:
        say, total = self.reporter.say, self.config.training.steps
        state = f"done at step {self.step}" if self.step >= total else f"stopped at step {self.step} of {total}"
        say(f"{state}. In {self.run}:")
        newest = checkpointing.step_folder(self.run, self.step)
        for name, what in (
            ("config.json", "the resolved configuration"),
            ("metrics.jsonl", "every step's numbers"),
            ("loss.png", "the loss curves"),
            ("tensorboard", f"tensorboard --logdir {self.run / 'tensorboard'}"),
            (str(newest.relative_to(self.run)), "model and optimizer"),
            ("tokenizer.json", "the data's tokenizer"),
        ):
            if self.world.is_main and (self.run / name).exists():
                say(f"  {name:<28} {what}")
        if self.step < total:
            say("the same command goes on from here")


def build(config: TrainConfig, world: World) -> tuple[Llama, AdamW]:
    """Model and optimizer of a run, sharded over the world's ranks, with initial weights."""
    with torch.device("meta"):
        model = Llama(config.model)
    parallelize(model, config.parallel, build_mesh(world))
    materialize(model, world.device, config.training.seed)
    settings = config.optimizer
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        groups,
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        max_grad_norm=settings.max_grad_norm,
        backend=kernel_backend(config.model),
    )
    return model, optimizer


def run(config: TrainConfig) -> int:
    """Train from start to end in this process, one of those that torchrun started or the only one.

    Returns:
        The exit code: 0, also after SIGINT or SIGTERM; 2 after one line on stderr for what is the user's to fix.
    """
    try:
        config = resolve(config, distributed.world_size_from_environment())
        world = distributed.start(config.parallel.device)
    except UserError as error:
        return report(error)
    failure: str | None = None
    try:
        with StopSignal() as stop:
            Trainer(config, world, stop).train()
    except AgreedError as error:
        failure = str(error)
    except UserError as error:
        # This rank alone met it: the others wait in a collective and end with the job.
        distributed.abandon(error)
    except OSError as error:  # a full disk, a folder that went away
        distributed.abandon(UserError(f"reading or writing failed: {in_words(error)}"))
    except (RuntimeError, MemoryError) as error:
        first = str(error).partition("\n")[0]
        if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and "allocate memory" not in first:
            raise
        distributed.abandon(UserError(f"out of memory on rank {world.rank} ({first}): {_SAVES_MEMORY}"))
    distributed.stop(world)
    return 0 if failure is None else report(failure)
