"""Named configurations. Each is a function, so that one can build on another.

The learning rates up to 1B are for the 16 to 32 thousand tokens a step that one GPU gives. What is published for these
sizes (6e-4 and 3e-4) belongs to batches of half a million tokens and more; on so few it makes the first hundred steps
rough (docs/performance.md has what was tried). Raise optimizer.lr with the batch.
"""

from __future__ import annotations

from collections.abc import Callable

from fuselm.model.config import LlamaConfig
from fuselm.train.config import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    TrainingConfig,
)
from fuselm.train.lr_schedule import ScheduleConfig


def debug() -> TrainConfig:
    """A model of 0.2 M parameters: seconds, to see that everything works."""
    return TrainConfig(
        preset="debug",
        model=LlamaConfig.from_preset("debug"),
        training=TrainingConfig(steps=20, seq_len=128, global_batch_size=0, micro_batch_size=4),
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=ScheduleConfig(warmup_steps=2),
        evaluation=EvaluationConfig(every=10, batches=2),
    )


def demo() -> TrainConfig:
    """A model of 3 M parameters that learns to write like the bundled plays in minutes on two CPU cores."""
    return TrainConfig(
        preset="demo",
        model=LlamaConfig.from_preset("demo"),
        training=TrainingConfig(steps=850, seq_len=256, global_batch_size=4, micro_batch_size=4),
        optimizer=OptimizerConfig(lr=2e-3),
        schedule=ScheduleConfig(warmup_steps=50, min_lr_ratio=0.05),
        evaluation=EvaluationConfig(every=170, batches=8),
        checkpoint=CheckpointConfig(every=0),
        logging=LoggingConfig(every=10),
    )


def _pretraining(
    preset: str,
    *,
    micro_batch_size: int,
    seq_len: int,
    lr: float,
    steps: int,
    warmup_steps: int,
    parallel: ParallelConfig | None = None,
) -> TrainConfig:
    return TrainConfig(
        preset=preset,
        model=LlamaConfig.from_preset(preset),
        training=TrainingConfig(steps=steps, seq_len=seq_len, global_batch_size=0, micro_batch_size=micro_batch_size),
        optimizer=OptimizerConfig(lr=lr),
        schedule=ScheduleConfig(warmup_steps=warmup_steps),
        parallel=parallel or ParallelConfig(),
    )


def gpt2_124m() -> TrainConfig:
    """124 M parameters, 32 sequences of 1,024 tokens a GPU."""
    return _pretraining("124m", micro_batch_size=32, seq_len=1024, lr=3e-4, steps=5000, warmup_steps=500)


def gpt2_350m() -> TrainConfig:
    """350 M parameters, 16 sequences of 1,024 tokens a GPU."""
    return _pretraining("350m", micro_batch_size=16, seq_len=1024, lr=2e-4, steps=10_000, warmup_steps=1000)


def llama3_1b() -> TrainConfig:
    """Llama 3.2 1B, 4 sequences of 4,096 tokens a GPU."""
    return _pretraining("llama3_1b", micro_batch_size=4, seq_len=4096, lr=2e-4, steps=20_000, warmup_steps=1000)


def llama3_3b() -> TrainConfig:
    """Llama 3.2 3B, 2 sequences of 4,096 tokens a GPU."""
    return _pretraining("llama3_3b", micro_batch_size=2, seq_len=4096, lr=3e-4, steps=50_000, warmup_steps=1000)


def llama3_8b() -> TrainConfig:
    """Llama 3.1 8B, 1 sequence of 4,096 tokens a GPU."""
    return _pretraining("llama3_8b", micro_batch_size=1, seq_len=4096, lr=3e-4, steps=100_000, warmup_steps=2000)


# The learning rates of the two largest are those of "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3.


def llama3_70b() -> TrainConfig:
    """Llama 3.1 70B, 1 sequence of 8,192 tokens a GPU, every block recomputed."""
    parallel = ParallelConfig(activation_checkpointing="full")
    return _pretraining(
        "llama3_70b", micro_batch_size=1, seq_len=8192, lr=1.5e-4, steps=100_000, warmup_steps=8000, parallel=parallel
    )


def llama3_405b() -> TrainConfig:
    """Llama 3.1 405B, 1 sequence of 8,192 tokens a GPU, every block recomputed."""
    parallel = ParallelConfig(activation_checkpointing="full")
    return _pretraining(
        "llama3_405b", micro_batch_size=1, seq_len=8192, lr=8e-5, steps=100_000, warmup_steps=8000, parallel=parallel
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {
    "debug": debug,
    "demo": demo,
    "124m": gpt2_124m,
    "350m": gpt2_350m,
    "llama3_1b": llama3_1b,
    "llama3_3b": llama3_3b,
    "llama3_8b": llama3_8b,
    "llama3_70b": llama3_70b,
    "llama3_405b": llama3_405b,
}
