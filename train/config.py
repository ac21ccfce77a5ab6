"""The configuration of a run: nested dataclasses, a section a concern; to and from JSON and the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from fuselm.model.config import LlamaConfig
from fuselm.train.errors import UserError
from fuselm.train.guard_config import GuardConfig
from fuselm.train.lr_schedule import ScheduleConfig
from fuselm.train.wandb_log import require_wandb

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train, and on how much at a time."""

    steps: int = 100
    """Optimizer steps of the whole run."""

    seq_len: int = 256
    """Tokens a sequence; at most model.max_seq_len."""

    global_batch_size: int = 4
    """Sequences an optimizer step, over all ranks and micro-batches; 0 for micro_batch_size * ranks."""

    micro_batch_size: int = 4
    """Sequences a rank puts through the model at once. A step has global_batch_size / (micro_batch_size * ranks)
    micro-batches, over which gradients accumulate."""

    seed: int = 0
    """Seeds the initial weights and the order of the data."""

    max_nonfinite_steps: int = 5
    """Stop after this many steps in a row whose loss or gradient norm is not finite. Such a step changes no weight."""


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    path: Path | None = None
    """Folder written by prepare_data.py; none for the bundled plays, which are tokenized on first use."""

    vocab_size: int = 1024
    """Size of the tokenizer trained on the bundled plays; unused when data.path is given."""

    document_mask: bool = False
    """Keep packed documents apart: attention does not cross their borders."""

    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """concatenate cuts the running text into rows; best_fit lays whole documents into rows and needs document_mask."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) and gradient clipping."""

    lr: float = 1e-3
    """Peak learning rate."""

    beta1: float = 0.9
    """Decay of the first moment."""

    beta2: float = 0.95
    """Decay of the second moment."""

    eps: float = 1e-8
    """Added to the denominator, after the bias correction."""

    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only (not on norm weights)."""

    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this; None for no clipping."""


@dataclass(frozen=True)
class ParallelConfig:
    """Where and how the model runs."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto takes the GPUs when there are any."""

    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the forward and backward pass. Parameters, gradient reductions and optimizer state stay float32."""

    sharding: Literal["auto", "fsdp", "none"] = "auto"
    """fsdp: FSDP2. none: one rank holds the whole model, with a copy in param_dtype. auto: fsdp on several ranks."""

    cuda_graph: bool = True
    """On one GPU without sharding, launch each micro-batch's forward and backward pass as one CUDA graph. Steps with a
    document mask, whose shapes change, run without."""

    reshard_after_forward: bool = True
    """Free each block's gathered parameters between its forward and backward pass: less memory, one more all-gather."""

    activation_checkpointing: Literal["none", "swiglu", "selective", "full"] = "none"
    """Recompute in the backward pass. swiglu: the MLP's activation only, which is cheap. selective: each block but
    attention and every second matmul. full: each block."""

    timeout: float = 600.0
    """Seconds without any progress after which the run ends, naming the rank that holds the others up; 0 for never."""

    compile: bool | None = None
    """torch.compile each block; None compiles on a GPU and not on a CPU."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation loss."""

    every: int = 100
    """Steps between two validations; 0 for none in between. Before the first and after the last step there is one."""

    batches: int = 10
    """Global batches a validation; fewer when the validation split is shorter; 0 turns validation off."""

    source_documents: int = 0
    """Measure so many held-out documents of each source with each validation; 0 for none."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and resuming."""

    every: int = 500
    """Steps between two checkpoints; 0 saves only at the end and on SIGINT or SIGTERM."""

    keep: int = 2
    """How many of the newest checkpoints stay; older ones go once a newer one is complete."""

    keep_every: int = 0
    """Checkpoints of steps divisible by this stay for ever; 0 for none."""

    keep_best: bool = True
    """The checkpoint with the lowest validation loss stays, of those that were validated at their very step."""

    asynchronous: bool = True
    """Pause training only for a copy to host memory, and write in the background."""

    resume: str = "auto"
    """auto: go on from the run folder's newest complete checkpoint, if any. never: start over (an earlier run of that
    name is moved aside). Or the path of a checkpoint or run folder to start from."""

    save: bool = True
    """Write checkpoints at all."""


@dataclass(frozen=True)
class LoggingConfig:
    """What a run prints and writes."""

    every: int = 1
    """Steps between two printed lines. metrics.jsonl has every step."""

    progress: Literal["auto", "bar", "plain"] = "auto"
    """A progress bar on a terminal, plain lines elsewhere; or always one of them."""

    tensorboard: bool = True
    """Write TensorBoard events."""

    plot: bool = True
    """Draw loss.png."""

    wandb: str | None = None
    """Project at Weights & Biases that gets the same numbers (pip install wandb); WANDB_MODE=offline works."""

    alert_command: str | None = None
    """Shell command that rank 0 runs on NaN, spike, rollback, stall, failed save, stop and end; FUSELM_EVENT,
    FUSELM_MESSAGE, FUSELM_STEP and FUSELM_RUN in its environment say what happened."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    preset: str = "debug"
    """The named configuration to start from; every other option overrides one field of it."""

    name: str = ""
    """Name of the run; the preset's name when empty."""

    runs: Path = Path("runs")
    """Folder of all runs. The run writes to RUNS/NAME."""

    model: LlamaConfig = field(default_factory=lambda: LlamaConfig.from_preset("debug"))
    training: TrainingConfig = field(default_factory=TrainingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def run_folder(self) -> Path:
        return self.runs / (self.name or self.preset)


# Which numbers can run. (LlamaConfig checks its own; any whole number is a seed.)
_AT_LEAST_1 = (lambda value: value >= 1, "at least 1")
_AT_LEAST_0 = (lambda value: value >= 0, "at least 0")
_FINITE = (lambda value: 0 <= value < math.inf, "a finite number, at least 0")
_POSITIVE = (lambda value: value > 0, "above 0")
_DECAY = (lambda value: 0 <= value < 1, "at least 0 and below 1")
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "training.steps": _AT_LEAST_1,
    "training.seq_len": _AT_LEAST_1,
    "training.global_batch_size": _AT_LEAST_0,
    "training.micro_batch_size": _AT_LEAST_1,
    "training.max_nonfinite_steps": _AT_LEAST_1,
    "data.vocab_size": (lambda value: value >= 257, "at least 257, all bytes and the end of text"),
    "optimizer.lr": _FINITE,
    "optimizer.beta1": _DECAY,
    "optimizer.beta2": _DECAY,
    "optimizer.eps": (lambda value: 0 < value < math.inf, "a finite number, above 0"),
    "optimizer.weight_decay": _FINITE,
    "optimizer.max_grad_norm": (lambda value: value is None or value > 0, "above 0, or None"),
    "schedule.warmup_steps": _AT_LEAST_0,
    "schedule.decay_steps": _AT_LEAST_0,
    "schedule.min_lr_ratio": (lambda value: 0 <= value <= 1, "from 0 to 1"),
    "evaluation.every": _AT_LEAST_0,
    "evaluation.batches": _AT_LEAST_0,
    "evaluation.source_documents": _AT_LEAST_0,
    "checkpoint.every": _AT_LEAST_0,
    "checkpoint.keep": _AT_LEAST_1,
    "checkpoint.keep_every": _AT_LEAST_0,
    "parallel.timeout": _FINITE,
    "guard.window": (lambda value: value >= 4, "at least 4"),
    "guard.min_history": (lambda value: value >= 2, "at least 2"),
    "guard.loss_threshold": _POSITIVE,
    "guard.norm_threshold": _POSITIVE,
    "guard.rollback_after": _AT_LEAST_0,
    "guard.rollback_within": _AT_LEAST_1,
    "guard.pass_over_before": _AT_LEAST_0,
    "guard.max_rollbacks": _AT_LEAST_0,
    "guard.forget_after": _AT_LEAST_1,
    "logging.every": _AT_LEAST_1,
}
_LONGEST_NAME = 200  # bytes; a file system takes 255, and names like NAME.12 are made of it


def resolve(config: TrainConfig, ranks: int) -> TrainConfig:
    """Fill in what follows from other fields, and refuse what cannot run.

    Args:
        config: as the user gave it.
        ranks: processes of the run.

    Returns:
        The configuration with its name and global batch size filled in.

    Raises:
        UserError: fields that contradict each other, with their values.
    """
    training = config.training
    for field_name, (allowed, in_words) in _RANGES.items():
        section, _, name = field_name.partition(".")
        value = getattr(getattr(config, section), name)
        if not allowed(value):
            raise UserError(f"{field_name} is {value}: it must be {in_words}")
    if config.guard.min_history > config.guard.window:
        raise UserError(
            f"guard.min_history is {config.guard.min_history}: it must be at most guard.window, {config.guard.window}"
        )
    if config.data.packing == "best_fit" and not config.data.document_mask:
        raise UserError("data.packing is best_fit, which needs data.document_mask: pass --data.document_mask True")
    if config.logging.wandb is not None:
        if not config.logging.wandb.strip():
            raise UserError("logging.wandb is empty: it is the name of a project, or None")
        require_wandb()
    if not config.checkpoint.resume:
        raise UserError("checkpoint.resume is empty: it is auto, never, or a path")
    if training.seq_len > config.model.max_seq_len:
        raise UserError(
            f"training.seq_len is {training.seq_len}, but the model takes at most {config.model.max_seq_len} tokens "
            "(model.max_seq_len)"
        )
    together = training.micro_batch_size * ranks
    global_batch_size = training.global_batch_size or together
    if global_batch_size % together:
        raise UserError(
            f"training.global_batch_size {global_batch_size} does not divide by {ranks} ranks x "
            f"training.micro_batch_size {training.micro_batch_size} = {together}: give a "
            f"multiple of it, or 0 for {together}"
        )
    name = config.name or config.preset
    if Path(name).name != name or not name.strip() or name in (".", "..") or "\0" in name:
        raise UserError(f"name is {name!r}: it must be the name of a folder inside {config.runs}, without slashes")
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise UserError(f"name has {len(os.fsencode(name))} bytes: it must have at most {_LONGEST_NAME}")
    if name == "data":
        raise UserError(f"name is 'data': {config.runs / name} is where tokens of the bundled plays lie")
    training = dataclasses.replace(training, global_batch_size=global_batch_size)
    return dataclasses.replace(config, name=name, training=training)


# --- JSON -----------------------------------------------------------------------------------------------------------


def to_json(config: Any) -> str:
    """A configuration dataclass as JSON text; `from_dict` reads it back."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n"


def from_dict(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """Build a configuration dataclass from the dict that `to_json` wrote.

    Raises:
        UserError: a field that does not exist, with the nearest one that does.
    """
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise UserError(f"unknown field {where}{name}{nearest(name, known)}")
    return cls(**{name: _convert(hints[name], value, f"{where}{name}.") for name, value in values.items()})


def config_from_json(run: Path) -> TrainConfig:
    """The resolved configuration of a run.

    Args:
        run: the run folder, or its config.json.

    Raises:
        UserError: the file is missing or is not a configuration.
    """
    path = run / "config.json" if run.is_dir() else run
    try:
        return from_dict(TrainConfig, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a run's configuration: {error}") from error


def _convert(hint: Any, value: Any, where: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return from_dict(typing.cast(type, option), value, where)
        if option is Path and isinstance(value, str):
            return Path(value)
        if typing.get_origin(option) is Literal and value in typing.get_args(option):
            return value
        if option in (int, float, bool, str):
            number = option is float and isinstance(value, int) and not isinstance(value, bool)
            if type(value) is option or number:
                return value
    raise UserError(f"field {where.rstrip('.')} is {value!r}: it must be {type_in_words(hint)}")


# --- The command line -----------------------------------------------------------------------------------------------


def parse_command_line(arguments: list[str], presets: dict[str, Any], description: str) -> TrainConfig:
    """`--preset NAME [--section.field value]` to a configuration.

    Args:
        arguments: the command line without the program's name.
        presets: name to function that returns the `TrainConfig` of that preset.
        description: first paragraph of `--help`.

    Raises:
        UserError: an unknown preset or option (the message has the nearest name), or a value of the wrong type.
        SystemExit: after `--help`.
    """
    arguments = [part for argument in arguments for part in _split_option(argument)]
    help_wanted = any(argument in ("-h", "--help") for argument in arguments)
    name = _preset_name(arguments)
    if name not in presets:
        raise UserError(f"unknown preset {name!r}{nearest(name, list(presets))}; there are {', '.join(presets)}")
    default: TrainConfig = presets[name]()
    if help_wanted:
        _tyro(["--help"], default, f"{description}\n\nPresets: {', '.join(presets)}.", quiet=False)
    options = list(option_names(default))
    for argument in arguments:
        if argument.startswith("--") and argument not in options:
            raise UserError(f"unknown option {argument}{nearest(argument, options)}")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return _tyro(arguments, default, description, quiet=True)
    except SystemExit:
        # A dataclass that refused its values says why; tyro draws a box around it, of hyphens where it must.
        text = " ".join(line.strip(" │|") for line in printed.getvalue().splitlines())
    refused = re.search(r"Error parsing (?!--)[\w.]+: (.*?)( ─| ---|$)", text)
    if refused:
        raise UserError(refused[1])
    # One option at a time, so that the message can name the one that does not parse.
    for option, values in _groups(arguments):
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                _tyro([option, *values], default, description, quiet=True)
        except SystemExit:
            expected = option_names(default).get(option)
            if expected is None:
                raise UserError(f"unexpected argument {option!r}; options look like --section.field value") from None
            got = repr(" ".join(values)) if values else "nothing"
            raise UserError(f"{option} wants {expected}, got {got}") from None
    raise UserError(f"cannot parse {' '.join(arguments)}")


def option_names(config: Any, prefix: str = "--") -> dict[str, str]:
    """Every option of a configuration, with the type it wants in words."""
    names: dict[str, str] = {}
    hints = typing.get_type_hints(type(config))
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value):
            names |= option_names(value, f"{prefix}{entry.name}.")
        elif not any(dataclasses.is_dataclass(option) for option in typing.get_args(hints[entry.name])):
            # (a section that the preset leaves out has no options)
            names[prefix + entry.name] = type_in_words(hints[entry.name])
    return names


def type_in_words(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(type_in_words(option) for option in typing.get_args(hint))
    if dataclasses.is_dataclass(hint):
        return "a section"
    words = {int: "a whole number", float: "a number", bool: "True or False", Path: "a path", str: "text"}
    return words.get(hint, "None" if hint is type(None) else str(hint))


def _tyro(arguments: list[str], default: TrainConfig, description: str, *, quiet: bool) -> TrainConfig:
    import tyro

    return tyro.cli(
        TrainConfig,
        args=arguments,
        default=default,
        prog="pretrain.py",
        description=description,
        console_outputs=not quiet,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    )


def _split_option(argument: str) -> list[str]:
    """`--a-b=c` as `--a_b c`: one spelling for all that follows."""
    if not argument.startswith("--"):
        return [argument]
    option, equals, value = argument.partition("=")
    return [option.replace("-", "_").replace("__", "--", 1), *([value] if equals else [])]


def _preset_name(arguments: list[str]) -> str:
    if "--preset" not in arguments:
        return TrainConfig.preset
    position = len(arguments) - arguments[::-1].index("--preset")
    if position >= len(arguments):
        raise UserError("--preset wants the name of a preset")
    return arguments[position]


def _groups(arguments: list[str]) -> list[tuple[str, list[str]]]:
    groups: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--") or not groups:
            groups.append((argument, []))
        else:
            groups[-1][1].append(argument)
    return groups


def nearest(name: str, known: list[str]) -> str:
    # The last part counts too, so that --lr finds --optimizer.lr.
    tails = {entry.rpartition(".")[2].lstrip("-"): entry for entry in known}
    wanted = name.rpartition(".")[2].lstrip("-")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    close = close or [tails[t] for t in difflib.get_close_matches(wanted, list(tails), n=1, cutoff=0.6)]
    close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f" (did you mean {close[0]}?)" if close else ""
