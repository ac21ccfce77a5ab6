"""The tables through which AdamW's kernels reach all parameters at once.

    tensor table   one record a parameter, then one row a group, int64 in device memory. Record: addresses of
                   parameter, gradient, exp_avg, exp_avg_sq, master and step; number of elements; which addresses are
                   multiples of 16 bytes (1: all but the gradient's, 3: all); group; number and place of the parameter,
                   for its random bits. Row: lr as the bits of a double, address and bytes of a tensor lr; as bits of
                   doubles log β1, log β2, 1 - β1, 1 - β2, ε, λ; seed.
    chunk tables   which (tensor, chunk) a program handles, int32

Chunk tables depend on sizes only. The tensor table is sent again, in one small copy from pinned memory, when an
address (gradients move under FSDP2) or a hyperparameter changes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fuselm.kernels._triton import device_profile
from fuselm.kernels.adamw_sharding import Place, upload
from fuselm.kernels.launch.adamw import ChunkLaunch

RECORD = 16  # int64 numbers a tensor: one line of 128 bytes
HYPER = 10  # int64 numbers a group


@dataclass(slots=True, eq=False)
class Entry:
    """A parameter and its state: local shards, all of one shape.

    Attributes:
        group: index of its parameter group.
        shard_class: class of its sum of squares (see adamw_sharding.py).
        number: of the parameter within the optimizer.
        param: fp32, bf16, fp16 (fp64: reference only).
        exp_avg, exp_avg_sq: first and second moment, fp32 or bf16, laid out as param.
        step: () fp32 counter.
        master: fp32 copy of param, laid out as param, or None.
        place: where the shard lies in its parameter.
        numel, contiguous, dtypes: elements; whether param and its state all are contiguous; their dtypes.
    """

    group: int
    shard_class: int
    number: int
    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    master: torch.Tensor | None
    place: Place
    numel: int = field(init=False)
    contiguous: bool = field(init=False)
    dtypes: set[torch.dtype] = field(init=False)

    def __post_init__(self) -> None:
        walked = self.tensors()
        self.numel = self.param.numel()
        self.contiguous = all(t.is_contiguous() for t in walked)
        self.dtypes = {t.dtype for t in walked}

    def tensors(self) -> list[torch.Tensor]:
        """The tensors, besides the gradient, that a kernel walks through with one offset."""
        walked = [self.param, self.exp_avg, self.exp_avg_sq]
        return walked if self.master is None else [*walked, self.master]

    def addresses(self) -> tuple[int, int, int, int, int]:
        """Of param, exp_avg, exp_avg_sq, master (0 for none), step."""
        master = 0 if self.master is None else self.master.data_ptr()
        moments = self.exp_avg.data_ptr(), self.exp_avg_sq.data_ptr()
        return (self.param.data_ptr(), *moments, master, self.step.data_ptr())


@dataclass(frozen=True)
class Hyper:
    """One group's hyperparameters; lr is a float or a one-element fp32 or fp64 tensor on the parameters' device."""

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    seed: int = 0

    def row(self) -> tuple[tuple[int, int, int], tuple[float, ...]]:
        """Integers (address and bytes of lr, seed) and floats (lr, log β1, log β2, 1 - β1, 1 - β2, ε, λ)."""
        lr, address, width = self.lr, 0, 0
        if isinstance(lr, torch.Tensor):
            lr, address, width = 0.0, lr.data_ptr(), lr.element_size()
        betas = (_log(self.beta1), _log(self.beta2), 1.0 - self.beta1, 1.0 - self.beta2)
        return (address, width, self.seed), (lr, *betas, self.eps, self.weight_decay)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf


def _chunk_rows(counts: Sequence[int], tensors: Sequence[int]) -> list[torch.Tensor]:
    """[tensor of each chunk, its number within that tensor], int64 on the CPU; vectorised, there may be millions."""
    chunks = torch.tensor(counts, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.tensor(tensors, dtype=torch.int64), chunks)
    first = torch.repeat_interleave(chunks.cumsum(0) - chunks, chunks)
    return [owner, torch.arange(owner.numel()) - first]


def _integers(values: Sequence[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else torch.empty(0, dtype=torch.int64)


@dataclass(eq=False)
class Launch:
    """One kernel launch over a table of chunks.

    Attributes:
        chunks: (2 or 3, programs) int32.
        launch: its shape.
        dtypes: param, grad, moments; only grad for a norm.
        has_master: whether there are master copies.
        gaps: whether a shard is not one stretch of its parameter.
    """

    chunks: torch.Tensor
    launch: ChunkLaunch
    dtypes: tuple[torch.dtype, ...]
    has_master: bool = False
    gaps: bool = False


class Plan:
    """Tables for one structure: a list of (class, size, dtypes).

    Attributes:
        norms, steps: the launches: one for each dtype of gradients, and one for each combination of dtypes.
    """

    def __init__(
        self,
        structure: tuple[Any, ...],
        entries: Sequence[Entry],
        grads: Sequence[torch.Tensor],
        num_groups: int,
        num_classes: int,
        device: torch.device,
        choices: tuple[Any, Any],
    ) -> None:
        norm_launch, step_launch = choices
        self.structure = structure
        self.device = device
        self.num_tensors = count = len(entries)
        self.num_classes = num_classes
        self.table = torch.empty(count * RECORD + num_groups * HYPER, dtype=torch.int64, device=device)
        self.sums = torch.empty(num_classes + 1, dtype=torch.float64, device=device)
        self.scalars = torch.empty((count, 8), dtype=torch.float32, device=device)
        self.keys = torch.empty((count, 2), dtype=torch.int32, device=device)
        self.control = torch.empty(2, dtype=torch.float32, device=device)
        self._host = torch.zeros_like(self.table, device="cpu")
        self._records = self._host[: count * RECORD].view(count, RECORD)
        self._rows = self._host[count * RECORD :].view(num_groups, HYPER)
        self._spare: torch.Tensor | None = None  # pinned memory for one refresh under graph capture
        self._sent: tuple[Any, ...] | None = None
        self._captured = False
        self.entries: list[Entry] | None = None
        self.contiguous = False
        self.grad_dtypes = [g.dtype for g in grads]

        profile = device_profile(device)
        numels = [e.numel for e in entries]
        self.norms: list[Launch] = []
        # A norm's chunks begin at the multiple of 16 bytes before the gradient, which may take one chunk more.
        launches = [norm_launch(dtype, profile) for dtype in self.grad_dtypes]
        programs = [
            -(-(n + 16 // d.itemsize - 1) // launch.chunk) if n else 0
            for n, d, launch in zip(numels, self.grad_dtypes, launches, strict=True)
        ]
        bounds = [0] * (num_classes + 1)
        slots = torch.zeros(count, dtype=torch.int64)
        total = 0
        for i in sorted(range(count), key=lambda i: entries[i].shard_class):
            slots[i] = total
            total += programs[i]
            bounds[entries[i].shard_class + 1] = total
        for k in range(num_classes):
            bounds[k + 1] = max(bounds[k + 1], bounds[k])
        self.bounds = upload(torch.tensor(bounds, dtype=torch.int32), device)
        self.partials = torch.empty(max(total, 1), dtype=torch.float32, device=device)
        for dtype in dict.fromkeys(self.grad_dtypes):
            members = [i for i in range(count) if self.grad_dtypes[i] == dtype]
            owner, number = _chunk_rows([programs[i] for i in members], members)
            self._add(self.norms, [owner, number, slots[owner] + number], Launch(owner, launches[members[0]], (dtype,)))

        self.steps: list[Launch] = []
        kinds: dict[Any, list[int]] = {}
        for i, (e, grad) in enumerate(zip(entries, grads, strict=True)):
            kinds.setdefault(((e.param.dtype, grad.dtype, e.exp_avg.dtype), e.master is not None), []).append(i)
        for (dtypes, has_master), members in kinds.items():
            launch = step_launch(dtypes, has_master, profile)
            rows = _chunk_rows([-(-numels[i] // launch.chunk) for i in members], members)
            # Last chunks first: of the gradients, the cache still holds what the norm has read last.
            gaps = any(entries[i].place.gap for i in members)
            self._add(self.steps, [row.flip(0) for row in rows], Launch(rows[0], launch, dtypes, has_master, gaps))

    def _add(self, launches: list[Launch], rows: list[torch.Tensor], launch: Launch) -> None:
        if rows[0].numel():  # nothing but empty shards: nothing to launch
            launch.chunks = upload(torch.stack(rows).to(torch.int32), self.device)
            launches.append(launch)

    def bind(self, entries: list[Entry]) -> None:
        """Takes over the entries' addresses."""
        self.entries, self._sent = entries, None
        self.contiguous = all(e.contiguous for e in entries)
        columns = torch.tensor([e.addresses() for e in entries], dtype=torch.int64).view(len(entries), 5)
        self._records[:, 0] = columns[:, 0]
        self._records[:, 2:6] = columns[:, 1:]
        self._records[:, 6] = _integers([e.numel for e in entries])
        self._fixed_aligned = (columns[:, :4] % 16 == 0).all(1)
        self._records[:, 8] = _integers([e.group for e in entries])
        self._records[:, 9] = _integers([e.number for e in entries])
        self._records[:, 10] = _integers([e.place.base for e in entries])
        self._records[:, 11] = _integers([e.place.run for e in entries])
        self._records[:, 12] = _integers([e.place.gap for e in entries])

    def send(self, grads: list[int], hypers: Sequence[Hyper], kept: list[Any]) -> None:
        """Brings the tensor table up to date.

        Args:
            grads: the gradients' addresses.
            hypers: by group.
            kept: under graph capture the copy becomes part of the graph, so it is always made, and its source stays
                alive, unchanged, in this list.
        """
        rows = [h.row() for h in hypers]
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.device.type == "cuda" and self._spare is None:
            self._spare = self._pinned()
        # Once a graph has a copy of its own, any replay may have put that into the table.
        if not capturing and not self._captured and self._sent == (grads, rows):
            return
        addresses = _integers(grads)
        self._records[:, 1] = addresses
        self._records[:, 7] = self._fixed_aligned * (1 + 2 * (addresses % 16 == 0))
        integers = torch.tensor([row[0] for row in rows], dtype=torch.int64)
        floats = torch.tensor([row[1] for row in rows], dtype=torch.float64).view(torch.int64)
        self._rows[:, 0] = floats[:, 0]
        self._rows[:, 1:3] = integers[:, :2]
        self._rows[:, 3:9] = floats[:, 1:]
        self._rows[:, 9] = integers[:, 2]
        if self.device.type != "cuda":
            self.table.copy_(self._host)
        else:
            pinned = self._spare if capturing and self._spare is not None else self._pinned()
            if capturing:
                kept.append((self, pinned))
                self._spare, self._captured = None, True
            pinned.copy_(self._host)
            self.table.copy_(pinned, non_blocking=True)
        self._sent = (grads, rows)

    def _pinned(self) -> torch.Tensor:
        return torch.empty(self._host.shape, dtype=torch.int64, pin_memory=True)
