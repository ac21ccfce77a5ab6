"""The training run: build, resume, step, report, validate, save, stop."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections import deque
from pathlib import Path
from types import FrameType

import torch

from fuselm.kernels._triton import select_backend
from fuselm.kernels.adamw import AdamW
from fuselm.model.attention_backends import require_attention
from fuselm.model.llama import Llama, kernel_backend
from fuselm.train import checkpointing, distributed
from fuselm.train.announce import conclude, introduce
from fuselm.train.checkpoint_writer import CheckpointWriter, Retention
from fuselm.train.config import TrainConfig, resolve, to_json
from fuselm.train.distributed import AgreedError, World
from fuselm.train.errors import UserError, in_words, report
from fuselm.train.evaluation import forward_backward
from fuselm.train.event_log import EventLog
from fuselm.train.feeds import data_position, open_feeds
from fuselm.train.graphed import graph_backward
from fuselm.train.guard import Alarm, Guard, Verdict, take_notice
from fuselm.train.hang_watch import HangWatch
from fuselm.train.lr_schedule import lr_factor
from fuselm.train.memory_advice import is_out_of_memory, out_of_memory
from fuselm.train.metrics import Reporter, Speedometer, StepMetrics, memory_gib
from fuselm.train.parallelize import build_mesh, make_copies, materialize, parallelize, require_memory
from fuselm.train.progress import Progress
from fuselm.train.recovery import describe_skipped, diagnose, roll_back
from fuselm.train.resume import find_checkpoint, go_on_with_batch, job_id
from fuselm.train.run_folder import RunFolder, temporary_folder

_RECORDED = 5  # numbers in Guard.record


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

    `values` is fp64 on the host: the guard's record, valid tokens, stops, and each rank's share of the loss; valid
    once `done` has happened. `began` is the `done` of the step before, so that what the device waits for the host
    counts too. `seconds` is what it took on the host.
    """

    step: int
    batch: int
    lr: float
    values: torch.Tensor
    seconds: float
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
        self.run = config.run_folder
        self.folder = RunFolder(self.run)
        world.together(self._check_kernels)
        self.dataset, self.training, self.validation = open_feeds(config, world)
        self.position = data_position(config, self.dataset)
        checkpoint = find_checkpoint(config, self.position, world)
        world.together(lambda: require_memory(config.model, world))
        self.model, self.optimizer = build(config, world)
        self.progress = Progress()
        if checkpoint is not None:
            manifest = checkpointing.load_checkpoint(checkpoint, self.model, self.optimizer, world=world)
            self.progress = Progress.from_dict(manifest["progress"])
        self.step = self.start_step = self.progress.step
        self.saved_step = self.step if checkpoint is not None and checkpoint.parent.parent == self.run else None
        settings = config.checkpoint
        self.retention = Retention(settings.keep, settings.keep_every, settings.keep_best)
        moved = world.from_main(lambda: self._claim_folder(checkpoint))
        self.writer = CheckpointWriter(
            self.run,
            self.model,
            self.optimizer,
            world=world,
            retention=self.retention,
            config=json.loads(to_json(config)),
            position=self.position,
            asynchronous=settings.asynchronous,
        )
        self.speed = Speedometer.of(config.model, config.training.seq_len, world.device, world.size)
        self.reporter = Reporter(
            self.run if world.is_main else None,
            config.logging,
            total_steps=config.training.steps,
            start_step=self.start_step,
        )
        self.events = EventLog(self.run if world.is_main else None, config.logging.alert_command)
        self.guard = Guard(config.guard, world, self.optimizer)
        self.guard.restore(self.progress.history)
        self.pending: deque[Pending] = deque()
        self.alarm: Alarm | None = None
        self.failure = ""
        self.stopping = False
        self.clock = time.perf_counter()
        self.step_began: torch.cuda.Event | None = None
        self.watch = HangWatch(world, config.parallel.timeout, self._stalled)
        introduce(
            config,
            world,
            parameters=self.model.num_parameters(),
            tokens=self.dataset.num_tokens,
            step=self.step,
            checkpoint=checkpoint,
            moved=moved,
            say=self.reporter.say,
        )
        self.reporter.explain(self.speed, world.device, config.training.seq_len)
        resumed = f" from {checkpoint}" if checkpoint is not None else ""
        self.events.add("start", self.step, f"started at step {self.step}{resumed}", job=job_id(), ranks=world.size)

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

    def _claim_folder(self, checkpoint: Path | None) -> Path | None:
        """On rank 0: the run folder, with room for the checkpoints that it will hold at most, beside those there."""
        goes_on = checkpoint is not None and checkpoint.parent.parent == self.run
        config, more = self.config.checkpoint, 0
        if config.save:
            there = len(checkpointing.checkpoints_of(self.run)) if goes_on else 0
            more = self.retention.most(self.step, self.config.training.steps, config.every, there)
        compiled = self.config.parallel.compile
        return self.folder.claim(
            goes_on=goes_on,
            needed=more * checkpointing.checkpoint_bytes(self.model),
            what=f"{more} checkpoint(s) of {self.run}",
            compiles=compiled if compiled is not None else self.world.device.type == "cuda",
            files={
                "config.json": to_json(self.config).encode(),
                "tokenizer.json": self.dataset.tokenizer_path.read_bytes(),
            },
        )

    def release(self) -> None:
        """Give the run folder back; safe to call twice."""
        self.folder.release()

    # --- Running ---

    def train(self) -> None:
        """Train to the last step, or until SIGINT or SIGTERM; save; draw; say what was written.

        Raises:
            UserError: the loss was not finite too often in a row, or a checkpoint could not be written.
        """
        total = self.config.training.steps
        try:
            with temporary_folder(self.run), self.watch:
                if self.step == 0:
                    self._validate()
                self._run_steps(total)
                if self.step >= total and self.step > self.start_step:
                    self._validate()
                self._save(last=True)
                self.reporter.plot()
                ended = "done" if self.step >= total else "asked to stop"
                self.events.add("end", self.step, f"{ended} at step {self.step} of {total}")
        except UserError as error:
            self.events.add("stop", self.progress.step, str(error))
            raise
        finally:
            self.training.close()
            self.writer.close()
            self.reporter.close()
            self.events.close()
            self.release()
        if self.world.is_main:
            conclude(self.run, self.step, total, self.reporter.say)

    def _run_steps(self, total: int) -> None:
        """Train until the last step is done and read, or the run is asked to stop; go back where the guard says so."""
        while True:
            ended = self.step >= total or self.stopping
            if not ended:
                self._train_step()
            validates, saves = self._is_due(self.config.evaluation.every), self._is_due(self.config.checkpoint.every)
            if ended or validates or saves:
                self._read_pending()
            if self.alarm is not None:
                with self.watch.patiently():
                    self._answer(self.alarm)
            elif ended:
                return
            else:
                if validates and self.step < total:  # the last step's validation and checkpoint are train's
                    self._validate()
                if saves and self.step < total:
                    self._save()

    def _is_due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _train_step(self) -> None:
        config = self.config
        began = self.step_began
        if began is None and self.world.device.type == "cuda":  # the first step, or the first after a pause
            began = torch.cuda.Event(enable_timing=True)
            began.record()
        lr = config.optimizer.lr * lr_factor(self.step, config.training.steps, config.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self.progress.batch_of(self.step)
        self.watch.at("reading a batch", self.step)
        micro_batches = self.training.micro_batches(batch)
        self.watch.at("the forward and backward pass", self.step)
        shares = torch.empty(self.world.size, dtype=torch.float64, device=self.world.device)
        loss, count, stops = forward_backward(
            self.model,
            micro_batches,
            self.world,
            stop=self.stop.received is not None,
            rank_losses=shares,
        )
        self.watch.at("the optimizer's step", self.step)
        self.guard.expect(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        values = torch.cat([self.guard.record, torch.stack([count, stops]), shares])
        done = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        now = time.perf_counter()
        self.pending.append(Pending(self.step, batch, lr, values, now - self.clock, began, done))
        self.clock, self.step_began = now, done
        self.watch.at("reading a step's numbers", self.step)
        # A step is read while the next one runs, so that a GPU's queue never empties; on a CPU too, to be one path.
        self._read_pending(leave=1)
        if self.writer.is_done():
            self._settle()

    def _read_pending(self, leave: int = 0) -> None:
        """Read queued steps but for the last `leave`; no further than one that raises an alarm."""
        while len(self.pending) > leave and self.alarm is None:
            pending = self.pending.popleft()
            if pending.done is not None:
                pending.done.synchronize()
            *record, count, stops = pending.values[: _RECORDED + 2].tolist()
            verdict = Guard.read(record)
            self.progress.step = pending.step
            self.progress.tokens += int(count)
            training = self.config.training
            rate, tflops, mfu = self.speed.read(training.global_batch_size * training.seq_len, self._seconds(pending))
            self.reporter.step(
                StepMetrics(
                    step=pending.step,
                    loss=verdict.loss,
                    grad_norm=verdict.grad_norm,
                    lr=pending.lr,
                    tokens=self.progress.tokens,
                    tokens_per_second=rate,
                    tflops=tflops,
                    mfu=mfu,
                    memory_gib=memory_gib(self.world.device),
                    batch=pending.batch,
                    skipped=verdict.kind,
                )
            )
            if stops and not self.stopping:
                self.stopping = True
                self.reporter.say("asked to stop: saving first")
            if verdict.kind is not None:
                self._report_skipped(pending, verdict)
            self.alarm = take_notice(
                self.progress,
                pending.batch,
                verdict,
                self.config.guard,
                max_nonfinite_steps=training.max_nonfinite_steps,
            )

    def _report_skipped(self, pending: Pending, verdict: Verdict) -> None:
        message, details = describe_skipped(
            self.training, pending.step, pending.batch, verdict, pending.values[_RECORDED + 2 :].tolist()
        )
        self.reporter.say(f"warning: {message}")
        self.events.add(verdict.kind or "", pending.step, message, **details)

    def _answer(self, alarm: Alarm) -> None:
        """Go back to the last checkpoint from before the bad steps and pass over their batches; or stop.

        Raises:
            AgreedError: with a diagnosis, when it happens too often.
        """
        self.alarm = None
        self._settle()
        if alarm.stop:
            self.pending.clear()
            found = diagnose(self.model, self.optimizer, self.training, alarm)
            raise AgreedError(
                f"{alarm.reason}. {found}. Try a lower optimizer.lr or a longer schedule.warmup_steps. Checkpoints in "
                f"{self.run / checkpointing.FOLDER} are from before"
            )
        back = roll_back(
            self.run, self.model, self.optimizer, self.training, alarm, self.progress,
            pass_over_before=self.config.guard.pass_over_before, say=self.reporter.say, events=self.events,
        )  # fmt: skip
        if back is None:
            self.reporter.say(f"warning: {alarm.reason}; there is no checkpoint from before to go back to")
            return
        self.progress, self.step, self.saved_step = back, back.step, back.step
        self.pending.clear()
        self.guard.restore(back.history)
        self.reporter.rewind(back.step)
        self._pause()

    def _seconds(self, pending: Pending) -> float:
        """What a step took: by the GPU's events, since the host runs ahead of it; by the clock on a CPU."""
        if pending.began is not None and pending.done is not None:
            return pending.began.elapsed_time(pending.done) / 1e3
        return pending.seconds

    def _stalled(self, message: str) -> None:
        self.events.add("stall", self.step, message)

    def _pause(self) -> None:
        """The time since the last step belongs to no step."""
        self.clock, self.step_began = time.perf_counter(), None

    def _validate(self) -> None:
        if self.validation is not None:
            self._read_pending()
            self.watch.at("the validation", self.step)
            found = self.validation(self.model)
            self.progress.validated(found.loss)
            self.reporter.validation(self.step, found)
            self._pause()

    def _save(self, last: bool = False) -> None:
        """Begin a checkpoint of this step, or with `last` write it to its end.

        Raises:
            AgreedError: the weights are not finite, or the last checkpoint could not be written.
        """
        self._settle()
        if self.config.checkpoint.save and self.saved_step != self.step:
            self._read_pending()
            if not checkpointing.all_finite(self.model, self.world):
                raise AgreedError(f"weights are not finite after step {self.step}; they were not saved")
            self.saved_step = self.step
            try:
                with self.watch.patiently():
                    self.writer.save(self.progress.to_dict())
            except AgreedError as error:
                self._save_failed(str(error))
            self._pause()
        if last:
            self._settle()
            if self.config.checkpoint.save and self.saved_step is None:
                raise AgreedError(f"the last checkpoint, of step {self.step}, could not be written: {self.failure}")

    def _settle(self) -> None:
        """Wait for the save that is under way, and say how it ended."""
        with self.watch.patiently():
            outcome = self.writer.outcome()
        if outcome is None:
            return
        if outcome.error is not None:
            self._save_failed(outcome.error)
            return
        self.reporter.say(str(outcome))
        details = {"bytes": outcome.size, "seconds": outcome.seconds, "paused_seconds": outcome.paused}
        self.events.add("save", outcome.step, str(outcome), **details)

    def _save_failed(self, error: str) -> None:
        """Training goes on with the checkpoints that there are."""
        self.saved_step, self.failure = None, error
        self.reporter.say(f"warning: {error}. Training goes on; earlier checkpoints are untouched")
        self.events.add("save_failed", self.progress.step, error)


def build(config: TrainConfig, world: World) -> tuple[Llama, AdamW]:
    """Model and optimizer of a run, sharded over the world's ranks, with initial weights."""
    with torch.device("meta"):
        model = Llama(config.model)
    mesh = build_mesh(world)
    parallelize(model, config.parallel, mesh)
    materialize(model, world.device, config.training.seed)
    copies = make_copies(model, config.parallel, mesh)
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
        copies=None if copies is None else copies.of,
        backend=kernel_backend(config.model),
    )
    if copies is not None:
        copies.attach(optimizer)
        if config.parallel.cuda_graph and world.device.type == "cuda":
            graph_backward(model, copies)
    return model, optimizer


def run(config: TrainConfig) -> int:
    """Train from start to end in this process, one of those that torchrun started or the only one.

    Returns:
        The exit code: 0, also after SIGINT or SIGTERM; 2 after one line on stderr for what is the user's to fix.
    """
    try:
        ranks = distributed.world_size_from_environment()
        config = resolve(go_on_with_batch(config, ranks), ranks)
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
        if is_out_of_memory(error):
            distributed.abandon(UserError(out_of_memory(error, config, world)))
        if distributed.is_lost_contact(error):
            distributed.abandon(UserError(f"rank {world.rank} lost contact with another process ({first})"), code=1)
        raise
    distributed.stop(world)
    return 0 if failure is None else report(failure)
