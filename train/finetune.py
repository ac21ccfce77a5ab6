"""Teach a model to answer: supervised fine-tuning on conversations, of all weights or of adapters (LoRA).

    python train/finetune.py MODEL chat.jsonl --name my_chat
    torchrun --nproc-per-node 8 train/finetune.py MODEL chat.jsonl --lora-rank 16 --lr 2e-4

MODEL is a Hugging Face Llama folder or a run of pretrain.py. Everything is written to runs/NAME: a Hugging Face folder
`model`, or with --lora-rank a folder `adapter`. Talk to it with `python train/chat.py runs/NAME`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

if importlib.util.find_spec("fuselm") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fuselm.train.errors import UserError, command, end_on_interrupt, in_words, raise_on_interrupt, report

if __name__ == "__main__":
    end_on_interrupt()

import time

import torch
import tyro

import fuselm
from fuselm.kernels.adamw import AdamW
from fuselm.model.hf import export_hf
from fuselm.model.llama import kernel_backend
from fuselm.model.lora import TARGETS, LoRAConfig, add_lora, remove_lora, save_lora
from fuselm.train import distributed
from fuselm.train.chat_data import ChatStream, ChatTemplate, Encoded, read_conversations
from fuselm.train.command_line import parse_arguments
from fuselm.train.config import LoggingConfig, ParallelConfig, TrainConfig, TrainingConfig, to_json
from fuselm.train.distributed import AgreedError, World
from fuselm.train.evaluation import Feed, evaluate, forward_backward
from fuselm.train.finetune_model import ADAPTER, MODEL, build_model, gather, open_base, whole_model
from fuselm.train.lr_schedule import ScheduleConfig, lr_factor
from fuselm.train.memory_advice import Names, is_out_of_memory, out_of_memory
from fuselm.train.metrics import Reporter, Speedometer, StepMetrics, memory_gib
from fuselm.train.parallelize import STATE_BYTES, require_memory
from fuselm.train.run_folder import RunFolder, temporary_folder
from fuselm.train.trainer import StopSignal
from fuselm.train.validation import ValidationResult

Recompute = Literal["none", "swiglu", "selective", "full"]
Device = Literal["auto", "cuda", "cpu"]
Dtype = Literal["bfloat16", "float32"]
_MAX_NONFINITE = 5  # steps in a row without a finite gradient, before the run gives up


@dataclass
class Arguments:
    """Fine-tune a model on conversations."""

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="MODEL")]
    """Hugging Face Llama folder, or run folder."""
    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """Conversations, a line each: {"messages": [{"role": "user", "content": "..."}, ...]}."""
    name: str = "finetuned"
    """Name of the run; everything is written to RUNS/NAME."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    validation: Path | None = None
    """Conversations that are not learnt, whose loss is printed before and after."""
    template: Path | None = None
    """File with a Jinja chat template; by default the tokenizer's own, or a plain built-in one."""
    epochs: float = 3.0
    """How often each conversation is seen."""
    steps: int = 0
    """Optimizer steps, instead of --epochs."""
    seq_len: int = 1024
    """Tokens of a row, into which conversations are packed; longer ones are cut off. At most what the model takes."""
    micro_batch_size: int = 4
    """Rows that a rank puts through the model at once."""
    global_batch_size: int = 0
    """Rows an optimizer step, over all ranks; 0 for one micro-batch a rank."""
    lr: float = 2e-5
    """Peak learning rate. Adapters take about ten times that of all weights."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises; then it falls along a cosine to a tenth."""
    weight_decay: float = 0.0
    """Of matrices."""
    max_grad_norm: float = 1.0
    """The gradient's norm is clipped to this."""
    lora_rank: int = 0
    """Train adapters of this rank and leave the weights alone; 0 trains all weights."""
    lora_alpha: float = 0.0
    """Adapters are multiplied by alpha / rank; 0 for twice the rank."""
    lora_targets: str = ",".join(TARGETS)
    """Linear layers that get an adapter."""
    merge: bool = False
    """With --lora-rank, also write a whole model with the adapters merged."""
    device: str = "auto"
    """auto, cuda or cpu."""
    dtype: str = "bfloat16"
    """What forward and backward pass compute in, and what the model is written in: bfloat16 or float32."""
    recompute: str = "none"
    """What is computed again in the backward pass, to save memory: none; swiglu, the MLP's activation, hardly slower;
    selective, blocks without attention and every second matmul; or full, whole blocks."""
    seed: int = 0
    """Of the order of the data and of the adapters."""


def check(arguments: Arguments) -> LoRAConfig | None:
    """Refuse numbers that cannot be; returns the adapters' configuration, if there are to be any.

    Raises:
        UserError: one cannot; the message names the option.
    """
    for name, least in (("micro_batch_size", 1), ("seq_len", 1), ("steps", 0), ("global_batch_size", 0), ("lr", 0)):
        if not getattr(arguments, name) >= least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: it must be at least {least}")
    for name in ("epochs", "max_grad_norm"):
        if not getattr(arguments, name) > 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}: it must be above 0")
    for name in ("lr", "epochs", "weight_decay"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise UserError(
                f"--{name.replace('_', '-')} is {getattr(arguments, name)}: it must be finite and not below 0"
            )
    if not 0 <= arguments.warmup <= 1:
        raise UserError(f"--warmup is {arguments.warmup}: it must be from 0 to 1")
    for name, choices in (("device", Device), ("dtype", Dtype), ("recompute", Recompute)):
        if getattr(arguments, name) not in get_args(choices):
            wanted = ", ".join(get_args(choices))
            raise UserError(f"--{name} is {getattr(arguments, name)!r}: it must be one of {wanted}")
    name = arguments.name
    if Path(name).name != name or not name.strip() or name in (".", ".."):
        raise UserError(f"--name is {name!r}: it must be the name of a folder inside {arguments.runs}, without slashes")
    if not arguments.lora_rank:
        if arguments.merge:
            raise UserError("--merge is for adapters: give --lora-rank too, or leave it out")
        return None
    try:
        alpha = arguments.lora_alpha or 2.0 * arguments.lora_rank
        return LoRAConfig(arguments.lora_rank, alpha, tuple(arguments.lora_targets.split(",")))
    except ValueError as error:
        raise UserError(f"--lora-rank, --lora-alpha, --lora-targets: {error}") from error


def encode(path: Path, template: ChatTemplate) -> list[Encoded]:
    """The conversations of a file as tokens.

    Raises:
        UserError: one cannot be read or encoded; the message has its number.
    """
    encoded = []
    for number, conversation in enumerate(read_conversations(path), 1):
        try:
            encoded.append(template.encode(conversation))
        except UserError as error:
            raise UserError(f"{path}, conversation {number}: {error}") from error
    return encoded


class FineTuning:
    """One fine-tuning run on this rank.

    Args:
        arguments: of the command line, checked.
        lora: the adapters' configuration, or None for all weights.
        world: from `distributed.start`.

    Raises:
        AgreedError: model, data or run folder cannot be used.
    """

    def __init__(self, arguments: Arguments, lora: LoRAConfig | None, world: World) -> None:
        self.arguments, self.lora, self.world = arguments, lora, world
        self.base = world.together(lambda: open_base(arguments.model, world.device))
        self.run = arguments.runs / arguments.name
        whole = self.base.path.resolve()
        if self.run.resolve() in (whole, *whole.parents):  # it would be moved aside under our feet
            raise AgreedError(f"{self.run} holds the model to start from: give the new run another --name")
        self.template = world.together(lambda: ChatTemplate.load(self.base.tokenizer, arguments.template))
        config = self.base.config
        if self.template.vocab_size > config.vocab_size:
            raise AgreedError(
                f"{self.base.tokenizer} has {self.template.vocab_size} tokens, the model of {self.base.path} only "
                f"{config.vocab_size}"
            )
        self.seq_len = min(arguments.seq_len, config.max_seq_len)
        together = arguments.micro_batch_size * world.size
        rows = arguments.global_batch_size or together
        if rows % together:
            raise AgreedError(
                f"--global-batch-size {rows} does not divide by {world.size} ranks x --micro-batch-size "
                f"{arguments.micro_batch_size} = {together}"
            )
        self.feed, self.learnt = self._feed(arguments.data, rows)
        self.validation = None
        if arguments.validation is not None:
            self.validation, _ = self._feed(arguments.validation, together, whole_steps=True)
        per_epoch = self.feed.stream.sequences_per_epoch / rows
        self.steps = arguments.steps or max(1, round(arguments.epochs * per_epoch))
        if lora is None:  # it counts gradients and moments of all weights
            world.together(lambda: require_memory(config, world))
        self.parallel = ParallelConfig(
            device=cast(Device, arguments.device),
            param_dtype=cast(Dtype, arguments.dtype),
            sharding="fsdp",
            activation_checkpointing=cast(Recompute, arguments.recompute),
            compile=False,  # packed rows have another number of documents each time
        )
        self.model = world.together(lambda: build_model(self.base, self.parallel, lora, world, arguments.seed))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        matrices = {"params": [p for p in trained if p.ndim >= 2], "weight_decay": arguments.weight_decay}
        vectors = {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}
        groups = [group for group in (matrices, vectors) if group["params"]]
        self.optimizer = AdamW(
            groups,
            lr=arguments.lr,
            betas=(0.9, 0.95),
            max_grad_norm=arguments.max_grad_norm,
            backend=kernel_backend(config),
        )
        self.folder = RunFolder(self.run)
        self.moved = world.from_main(self._claim)
        self.trained = sum(p.numel() for p in trained)
        self.losses: dict[str, float] = {}
        logging = LoggingConfig(tensorboard=False, plot=False)
        self.reporter = Reporter(self.run if world.is_main else None, logging, total_steps=self.steps, start_step=0)

    def _feed(self, path: Path, rows: int, *, whole_steps: bool = False) -> tuple[Feed, int]:
        """The packed rows of a file, and how many of its tokens are answers; see ChatStream for `whole_steps`."""
        arguments, world = self.arguments, self.world

        def read() -> tuple[ChatStream, int]:
            encoded = encode(path, self.template)
            stream = ChatStream(
                encoded, seq_len=self.seq_len, global_batch_size=rows, seed=arguments.seed, whole_steps=whole_steps
            )
            return stream, sum(int(c.answers.sum()) for c in encoded)

        stream, answers = world.together(read)
        if world.is_main and (stream.cut or stream.dropped):
            print(
                f"{path}: {stream.cut} conversations are longer than {self.seq_len} tokens and were cut off; of "
                f"{stream.dropped} no answer was left",
                flush=True,
            )
        return Feed(stream, world, arguments.micro_batch_size, document_mask=True), answers

    def _claim(self) -> Path | None:
        size = getattr(torch, self.arguments.dtype).itemsize
        whole = sum(p.numel() for p in self.model.parameters()) * size
        adapters = 0 if self.lora is None else 4 * sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        needed = adapters + (0 if self.lora is not None and not self.arguments.merge else whole) + (4 << 20)
        return self.folder.claim(
            goes_on=False,
            needed=needed,
            what=f"the model of {self.run}",
            compiles=False,
            files={
                "finetune.json": to_json(self.arguments).encode(),
                "tokenizer.json": self.base.tokenizer.read_bytes(),
                "tokenizer_config.json": self._tokenizer_config(),
            },
        )

    def _tokenizer_config(self) -> bytes:
        beside = self.base.tokenizer.with_name("tokenizer_config.json")
        settings = json.loads(beside.read_bytes()) if beside.is_file() else {}
        return (json.dumps(settings | {"chat_template": self.template.source}, indent=2) + "\n").encode()

    def train(self, stop: StopSignal) -> None:
        """All steps, or those until SIGINT or SIGTERM; then the model is written.

        Raises:
            AgreedError: gradients were not finite too often in a row.
        """
        say = self.reporter.say
        if self.moved:
            say(f"the earlier run of this name is now {self.moved}")
        what = "all weights" if self.lora is None else f"adapters of rank {self.lora.rank}"
        stream = self.feed.stream
        say(
            f"{self.run}: {what}, {self.trained / 1e6:,.2f} M parameters, of a model with "
            f"{self.model.num_parameters() / 1e6:,.2f} M; "
            f"{stream.sequences_per_epoch} rows x {self.seq_len} tokens with {self.learnt:,} tokens of answers; "
            f"{self.steps} steps x {stream.global_batch_size} rows"
        )
        try:
            with temporary_folder(self.run) as scratch:
                self._validate("before", 0)
                done = self._run(stop)
                self._validate("after", done)
                self._write(scratch, done)
        finally:
            self.reporter.close()
            self.folder.release()

    def out_of_memory(self, error: BaseException) -> str:
        """What takes the memory that did not suffice, and which options take less."""
        rows = self.feed.stream.global_batch_size
        training = TrainingConfig(
            seq_len=self.seq_len, micro_batch_size=self.arguments.micro_batch_size, global_batch_size=rows
        )
        config = TrainConfig(model=self.base.config, training=training, parallel=self.parallel)
        held = sum(p.numel() * (STATE_BYTES if p.requires_grad else p.element_size()) for p in self.model.parameters())
        same = f"with --global-batch-size {rows} a step stays the same"
        names = Names("--recompute", "--micro-batch-size", "--seq-len", same)
        keeps = self.lora is None or "down" in self.lora.targets
        return out_of_memory(error, config, self.world, state_bytes=held, keeps_swiglu=keeps, names=names)

    def _validate(self, when: str, step: int) -> None:
        if self.validation is not None:
            batches = self.validation.stream.sequences_per_epoch // self.validation.stream.global_batch_size
            loss, tokens = evaluate(self.model, self.validation, batches)
            self.losses[f"Validation loss {when}"] = loss
            self.reporter.validation(step, ValidationResult(loss, tokens))

    def _run(self, stop: StopSignal) -> int:
        arguments, world = self.arguments, self.world
        schedule = ScheduleConfig(warmup_steps=round(arguments.warmup * self.steps))
        speed = Speedometer.of(self.base.config, self.seq_len, world.device, world.size)
        places = self.feed.stream.global_batch_size * self.seq_len  # of a step, those that stayed free included
        tokens, bad = 0, 0
        for step in range(self.steps):
            began = time.perf_counter()
            lr = arguments.lr * lr_factor(step, self.steps, schedule)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            batches = self.feed.micro_batches(step)
            loss, count, stops = forward_backward(self.model, batches, world, stop=stop.received is not None)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            numbers = torch.stack([loss, count, stops, self.optimizer.grad_norm.double()]).tolist()
            tokens += int(numbers[1])
            bad = 0 if numbers[3] < float("inf") else bad + 1
            if bad >= _MAX_NONFINITE:
                raise AgreedError(
                    f"the gradient was not finite in {bad} steps in a row: try a lower --lr; nothing saved"
                )
            rate, tflops, mfu = speed.read(places, time.perf_counter() - began)
            memory = memory_gib(world.device)
            skipped = "nonfinite" if bad else None
            self.losses["Training loss"] = numbers[0]
            self.reporter.step(
                StepMetrics(step + 1, numbers[0], numbers[3], lr, tokens, rate, tflops, mfu, memory, step, skipped)
            )
            if numbers[2]:
                self.reporter.say("asked to stop: writing the model first")
                return step + 1
        return self.steps

    def _write(self, scratch: Path, done: int) -> None:
        """On rank 0: the adapters, and the whole model unless only these were trained."""
        state = gather(self.model, self.world)
        self.world.from_main(lambda: self._write_state(state, scratch, done))

    def _write_state(self, state: dict[str, torch.Tensor], scratch: Path, done: int) -> None:
        facts: dict[str, Any] = {
            "Base": self.base.path.resolve().name,
            "Data": f"{self.arguments.data.name}, answers of {self.learnt:,} tokens",
            "Steps": f"{done} x {self.feed.stream.global_batch_size} rows of {self.seq_len} tokens",
            "Trained": "all weights" if self.lora is None else f"adapters, {dataclasses.asdict(self.lora)}",
            "Learning rate": f"{self.arguments.lr:g}",
            "fuselm": fuselm.__version__,
        } | {name: f"{loss:.4f}" for name, loss in self.losses.items()}
        config, say = self.base.config, self.reporter.say
        if self.lora is not None:
            save_lora(scratch / ADAPTER, state, self.lora, {"base": str(self.base.path.resolve()), "facts": facts})
            (scratch / ADAPTER).rename(self.run / ADAPTER)
            say(f"saved {self.run / ADAPTER}")
        if self.lora is None or self.arguments.merge:
            if self.lora is None:
                whole = whole_model(config, state)
            else:
                whole = whole_model(config, {name: p.float() for name, p in self.base.parameters()})
                add_lora(whole, self.lora)
                whole.load_state_dict(state, strict=False)
                remove_lora(whole)
            folder = export_hf(
                whole,
                self.run / MODEL,
                dtype=getattr(torch, self.arguments.dtype),
                tokenizer=self.run / "tokenizer.json",
                facts=facts,
                chat_template=self.template.source,
                stop_ids=self.template.stop_ids,
            )
            say(f"saved {folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder}")
        say(f"talk to it: python train/chat.py {self.run}")


@command
def main(given: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 0, also after SIGINT or SIGTERM, 2 after an error of the user's."""
    try:
        arguments = parse_arguments(Arguments, given, "finetune.py")
        lora = check(arguments)
        world = distributed.start(cast(Device, arguments.device))
    except UserError as error:
        return report(error)
    raise_on_interrupt()
    failure: str | None = None
    tuning: FineTuning | None = None
    try:
        with StopSignal() as stop:
            tuning = FineTuning(arguments, lora, world)
            tuning.train(stop)
    except AgreedError as error:
        failure = str(error)
    except UserError as error:  # this rank alone met it: the others wait in a collective and end with the job
        distributed.abandon(error)
    except OSError as error:
        distributed.abandon(UserError(f"reading or writing failed: {in_words(error)}"))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first = str(error).partition("\n")[0]
        loading = f"out of memory ({first}) before the first step: use more ranks, --lora-rank, or a smaller model"
        distributed.abandon(UserError(loading if tuning is None else tuning.out_of_memory(error)))
    distributed.stop(world)
    return 0 if failure is None else report(failure)


if __name__ == "__main__":
    sys.exit(main())
