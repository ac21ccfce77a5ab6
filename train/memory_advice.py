"""What to change when the memory does not suffice, with numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from fuselm.model.flops import parameter_counts
from fuselm.train.config import TrainConfig
from fuselm.train.distributed import World
from fuselm.train.metrics import memory_gib
from fuselm.train.parallelize import STATE_BYTES


@dataclass(frozen=True)
class Names:
    """What the command calls the options that save memory, and what it says of the global batch."""

    recompute: str = "parallel.activation_checkpointing"
    micro_batch_size: str = "training.micro_batch_size"
    seq_len: str = "training.seq_len"
    global_batch: str = "the global batch can stay"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of a GPU or of a CPU says that memory did not suffice."""
    first = str(error).partition("\n")[0]
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in first


def out_of_memory(
    error: BaseException,
    config: TrainConfig,
    world: World,
    *,
    state_bytes: float | None = None,
    keeps_swiglu: bool = True,
    names: Names | None = None,
) -> str:
    """The message for a run that ran out of memory.

    Args:
        error: what PyTorch said.
        config: resolved.
        world: of this rank.
        state_bytes: of parameters, gradients and moments on all ranks; by default those of training all weights.
        keeps_swiglu: as in `advice`.
        names: of the command's options; by default pretrain.py's.
    """
    first = str(error).partition("\n")[0]
    if world.device.type == "cuda":
        total = torch.cuda.get_device_properties(world.device).total_memory / 2**30
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if state_bytes is None:
        state_bytes = parameter_counts(config.model)[0] * STATE_BYTES
    state, peak = state_bytes / world.size / 2**30, memory_gib(world.device)
    return f"out of memory on rank {world.rank} ({first}): " + advice(
        total=total,
        state=state,
        peak=peak,
        config=config,
        ranks=world.size,
        keeps_swiglu=keeps_swiglu,
        names=names or Names(),
    )


def advice(
    *,
    total: float,
    state: float,
    peak: float,
    config: TrainConfig,
    ranks: int,
    keeps_swiglu: bool = True,
    names: Names | None = None,
) -> str:
    """What takes the memory, and what would take less, the cheapest way first.

    Args:
        total: GiB of the device.
        state: GiB of parameters, gradients and moments on this rank.
        peak: GiB that were in use at most; what failed to fit is not among them.
        config: resolved.
        ranks: processes.
        keeps_swiglu: whether the backward pass needs what SwiGLU gives, as that of a frozen layer behind it does not.
        names: of the command's options; by default pretrain.py's.
    """
    names = names or Names()
    training, parallel = config.training, config.parallel
    micro = training.micro_batch_size
    activations = max(peak - state, 0.0)
    each = activations / micro
    text = (
        f"of {total:.1f} GiB, {peak:.1f} GiB were in use: parameters, gradients and moments take {state:.1f} GiB, the "
        f"activations of {micro} sequences of {training.seq_len} tokens at least {activations:.1f} GiB"
    )
    smaller = [m for m in range(micro - 1, 0, -1) if training.global_batch_size % (m * ranks) == 0]
    fitting = [m for m in smaller if state + m * each <= 0.85 * total] or smaller[-1:]
    ways = []
    if parallel.activation_checkpointing == "none" and keeps_swiglu and state < 0.95 * total:
        width = getattr(torch, parallel.param_dtype).itemsize
        kept = config.model.num_layers * micro * training.seq_len * config.model.ffn_dim * width / 2**30
        ways.append(f"set {names.recompute} to swiglu (about {kept:.1f} GiB less, hardly slower)")
    if fitting and state < 0.95 * total:
        needed = f"about {state + fitting[0] * each:.1f} GiB" if each else "less"
        ways.append(f"set {names.micro_batch_size} to {fitting[0]} ({needed}; {names.global_batch})")
    if parallel.activation_checkpointing != "full":
        ways.append(f"set {names.recompute} to full")
    ways.append(f"use {2 * ranks} ranks ({state / 2:.1f} GiB of parameters, gradients and moments each)")
    if training.micro_batch_size == 1:
        ways.append(f"shorten {names.seq_len}, now {training.seq_len}")
    return f"{text}. {', or '.join(ways)}"
