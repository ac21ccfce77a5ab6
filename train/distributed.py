"""Processes: start and end of the process group, and the few things that all ranks must decide alike.

One process without torchrun gets a process group of its own with an in-memory store, so that the trainer has one path:
FSDP2 on a mesh of one rank. Host-side agreement goes through gloo and never touches a GPU's queue.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from fuselm.train.errors import UserError

T = TypeVar("T")


class AgreedError(UserError):
    """A UserError that every rank raises at the same place, so that all can leave in order."""


@dataclass(frozen=True)
class World:
    """This process's place among the others.

    Attributes:
        rank, size: among all processes.
        local_rank: among those of this machine.
        device: its own.
        group: over which everything below goes; None for the default group.
    """

    rank: int
    local_rank: int
    size: int
    device: torch.device
    group: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place, on the tensor's device and without a host sync; returns the tensor."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group)
        return tensor

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; where it raises UserError on one of them, raise it as AgreedError on all."""
        error: UserError | None = None
        result: T | None = None
        try:
            result = action()
        except UserError as caught:
            error = caught
        if self.size > 1:
            failing = torch.tensor(self.rank if error else self.size)
            dist.all_reduce(failing, op=dist.ReduceOp.MIN, group=self.group)
            first = int(failing.item())
            if first < self.size:
                message = [str(error) if self.rank == first else None]
                dist.broadcast_object_list(message, src=first, group=self.group, device=torch.device("cpu"))
                raise AgreedError(message[0])
        if error is not None:
            raise AgreedError(str(error))
        return cast(T, result)

    def from_main(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 while the others wait, and return its (small, picklable) result on every rank."""
        result = self.together(lambda: action() if self.is_main else None)
        if self.size > 1:
            box = [result]
            dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
            result = box[0]
        return cast(T, result)

    def gather_dicts(self, part: dict[str, Any]) -> dict[str, Any]:
        """The union of small dicts on rank 0; the rank's own part elsewhere."""
        if self.size > 1:
            parts: list[Any] | None = [None] * self.size if self.is_main else None
            dist.gather_object(part, parts, dst=0, group=self.group)
            for other in parts or ():
                part = part | other
        return part

    def barrier(self) -> None:
        """Wait on the host for all ranks."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1), group=self.group)


def world_size_from_environment() -> int:
    """Number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def pick_device(choice: Literal["auto", "cuda", "cpu"], local_rank: int = 0) -> torch.device:
    """The device of a local rank.

    Raises:
        UserError: cuda was asked for by name and there are not enough GPUs.
    """
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise UserError("parallel.device is cuda, but PyTorch finds no GPU here")
    if local_rank >= gpus:
        raise UserError(f"local rank {local_rank} has no GPU: this machine has {gpus}; start fewer processes")
    return torch.device("cuda", local_rank)


def start(choice: Literal["auto", "cuda", "cpu"] = "auto") -> World:
    """Join the process group that torchrun describes in the environment, or make one of a single process.

    Raises:
        UserError: there is no device for this rank.
    """
    size = world_size_from_environment()
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = pick_device(choice, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the flight recorder, for hang_watch.py
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if size > 1:
        timeout = timedelta(minutes=30)
        store = _store_of_this_attempt(timeout)
        if store is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    else:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one process needs no name service and no network
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return World(rank, local_rank, size, device)


def _store_of_this_attempt(timeout: timedelta) -> Store | None:
    """torchrun's store, with names of this attempt's own; None where torchrun has none for us.

    torchrun keeps one store over all its restarts, and PyTorch 2.13 looks there under the same names: ranks that were
    started again would find the addresses of those that died, and wait for them.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}_{os.environ['WORLD_SIZE']}"
    store = TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    return PrefixStore(attempt, store)


def is_lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because another process ended, was killed, or does not answer."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    text = str(error)
    signs = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "Timed out waiting",
        "Connection refused",
    )
    return isinstance(error, RuntimeError) and "gloo" in text and any(sign in text for sign in signs)


def abandon(error: UserError, code: int = 2) -> NoReturn:
    """End this process at once with one line, for an error that the other ranks do not know of.

    Args:
        error: what happened.
        code: of the exit; 2 for what is the user's to fix.
    """
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def stop(world: World) -> None:
    """Leave the process group. Drop every reference to models, optimizers and meshes before the call.

    gloo's threads end the process with SIGABRT when tensors or meshes outlive the group, hence the barrier and the
    collections around it.
    """
    world.barrier()
    gc.collect()
    dist.destroy_process_group()
    gc.collect()
