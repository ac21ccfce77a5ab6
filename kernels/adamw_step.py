"""One step of AdamW over all parameters: the tables that the kernels of adamw_kernels.py read, and their launches.

All parameters go through a tensor table in device memory: one row a field, one column a parameter, addresses as int64.
A chunk table says which (tensor, chunk) a program handles. The chunk tables depend on sizes only; the tensor table also
on addresses, and is sent again when one of them changes (gradients move under FSDP2): a small copy from pinned memory.

    squares     one program a norm chunk         -> one fp32 partial sum each
    class sums  one program                      -> fp64 sums by class (see adamw_sharding.py), then their all-reduce
    scalars     one program                      -> norm, clip factor, verdict; advances step counters, bias corrections
    update      one program a chunk; a launch for each (group, dtypes)
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuselm.kernels._triton import device_profile, tl
from fuselm.kernels.adamw_kernels import adamw_kernel, class_sums_kernel, scalars_kernel, squares_kernel
from fuselm.kernels.adamw_sharding import upload
from fuselm.kernels.launch.adamw import (
    SUM_BLOCK,
    SUM_WARPS,
    TENSOR_BLOCK,
    TENSOR_WARPS,
    ChunkLaunch,
    norm_launch,
    step_launch,
)

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TL_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(slots=True, eq=False)
class Entry:
    """One parameter that has a gradient: local shards, all of one shape.

    Attributes:
        group: index of its parameter group.
        shard_class: class of its sum of squares (see adamw_sharding.py).
        param: fp32, bf16, fp16 (fp64: reference only).
        grad: the same shape; any floating dtype.
        exp_avg, exp_avg_sq: first and second moment, fp32 or bf16, laid out as param.
        step: () fp32 counter.
        master: fp32 copy of param, laid out as param, or None.
    """

    group: int
    shard_class: int
    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    master: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        """The tensors a kernel walks through with one offset."""
        walked = [self.param, self.grad, self.exp_avg, self.exp_avg_sq]
        return walked if self.master is None else [*walked, self.master]


@dataclass(frozen=True)
class Hyper:
    """One group's hyperparameters; lr is a float or a one-element tensor on the parameters' device."""

    lr: float | torch.Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in some order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _same_layout(entry: Entry) -> bool:
    tensors = entry.tensors()
    if all(t.is_contiguous() for t in tensors):
        return True
    return is_dense(entry.param) and all(t.stride() == entry.param.stride() for t in tensors)


def _chunk_rows(numels: Sequence[int], tensors: Sequence[int], chunk: int) -> list[torch.Tensor]:
    """[tensor of each chunk, its number within that tensor], int64 on the CPU; vectorised, there may be millions."""
    counts = torch.tensor([-(-n // chunk) for n in numels], dtype=torch.int64)
    owner = torch.repeat_interleave(torch.tensor(tensors, dtype=torch.int64), counts)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    return [owner, torch.arange(owner.numel()) - first]


@dataclass(eq=False)
class _Launch:
    chunks: torch.Tensor  # (2 or 3, programs) int32
    launch: ChunkLaunch
    group: int
    dtypes: tuple[torch.dtype, ...]  # param, grad, state
    has_master: bool


class _Plan:
    """Tables for one list of (group, class, size, dtypes). Chunk tables are sent once, the tensor table as it
    changes."""

    def __init__(
        self, structure: tuple[Any, ...], entries: Sequence[Entry], num_classes: int, device: torch.device
    ) -> None:
        self.structure = structure
        self.device = device
        self.num_tensors = len(entries)
        self.num_classes = num_classes
        profile = device_profile(device)
        numels = [e.param.numel() for e in entries]
        self.table = torch.empty((10, len(entries)), dtype=torch.int64, device=device)
        self.rows: list[list[int]] | None = None
        self.spare: torch.Tensor | None = None  # pinned memory for one refresh under graph capture
        self.sums = torch.empty(num_classes + 1, dtype=torch.float64, device=device)
        self.corrections = torch.empty((2, len(entries)), dtype=torch.float32, device=device)
        self.control = torch.empty(2, dtype=torch.float32, device=device)

        self.norms: list[_Launch] = []
        order = sorted(range(len(entries)), key=lambda i: entries[i].shard_class)
        counts = [0] * (num_classes + 1)
        slot_of: dict[int, int] = {}
        total = 0
        for i in order:
            chunk = norm_launch(entries[i].grad.dtype, profile).chunk
            slot_of[i] = total
            total += -(-numels[i] // chunk)
            counts[entries[i].shard_class + 1] = total
        for k in range(num_classes):
            counts[k + 1] = max(counts[k + 1], counts[k])
        self.bounds = upload(torch.tensor(counts, dtype=torch.int32), device)
        self.partials = torch.empty(max(total, 1), dtype=torch.float32, device=device)
        for dtype in dict.fromkeys(e.grad.dtype for e in entries):
            members = [i for i, e in enumerate(entries) if e.grad.dtype == dtype]
            launch = norm_launch(dtype, profile)
            owner, number = _chunk_rows([numels[i] for i in members], members, launch.chunk)
            slots = torch.tensor([slot_of.get(i, 0) for i in range(len(entries))], dtype=torch.int64)
            self._add(
                self.norms, [owner, number, slots[owner] + number], _Launch(self.bounds, launch, 0, (dtype,), False)
            )

        self.steps: list[_Launch] = []
        kinds = {}
        for i, e in enumerate(entries):
            key = (e.group, (e.param.dtype, e.grad.dtype, e.exp_avg.dtype), e.master is not None)
            kinds.setdefault(key, []).append(i)
        for (group, dtypes, has_master), members in kinds.items():
            launch = step_launch(dtypes[0], profile)
            rows = _chunk_rows([numels[i] for i in members], members, launch.chunk)
            self._add(self.steps, rows, _Launch(self.bounds, launch, group, dtypes, has_master))

    def _add(self, launches: list[_Launch], rows: list[torch.Tensor], launch: _Launch) -> None:
        if rows[0].numel():  # nothing but empty shards: nothing to launch
            launch.chunks = upload(torch.stack(rows).to(torch.int32), self.device)
            launches.append(launch)

    def send(self, rows: list[list[int]], kept: list[Any]) -> None:
        """Brings the tensor table up to date. Under graph capture the copy becomes part of the graph, so it is always
        made, and its source stays alive, unchanged, in `kept`."""
        if self.device.type != "cuda":
            if rows != self.rows:
                self.table.copy_(torch.tensor(rows, dtype=torch.int64))
                self.rows = rows
            return
        capturing = torch.cuda.is_current_stream_capturing()
        spare = self._pinned() if self.spare is None else self.spare
        self.spare = None if capturing else spare
        if not capturing and rows == self.rows:
            return
        pinned = spare if capturing else self._pinned()
        if capturing:
            kept.append((self, pinned))
        pinned.copy_(torch.tensor(rows, dtype=torch.int64))
        self.table.copy_(pinned, non_blocking=True)
        # What a captured copy wrote is in the table only after a replay: the next eager step sends its own.
        self.rows = None if capturing else rows

    def _pinned(self) -> torch.Tensor:
        return torch.empty((10, self.num_tensors), dtype=torch.int64, pin_memory=True)


def _bits(value: float) -> int:
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf


class TritonStep:
    """Runs whole steps, and keeps the tables between them."""

    def __init__(self) -> None:
        self.plan: _Plan | None = None
        self.kept: list[Any] = []  # what captured graphs read

    def run(
        self,
        entries: Sequence[Entry],
        hypers: Sequence[Hyper],
        *,
        num_classes: int,
        all_reduce: Callable[[torch.Tensor], None],
        max_grad_norm: float,
        grad_norm: torch.Tensor,
        skipped_steps: torch.Tensor,
    ) -> None:
        """One step: the norm, the verdict, the update.

        Args:
            entries: the parameters that have gradients.
            hypers: by group.
            num_classes: classes that entries' shard_class counts.
            all_reduce: adds up the (num_classes + 1,) fp64 class sums over processes, in place.
            max_grad_norm: inf where nothing is clipped.
            grad_norm: () fp32, written.
            skipped_steps: () int64, goes up by one if the norm is not finite.

        Raises:
            RuntimeError: sizes or dtypes changed under CUDA graph capture.
        """
        device = grad_norm.device
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        entries = [e if _same_layout(e) else _straighten(e, copies) for e in entries]
        structure = (
            num_classes,
            *((e.group, e.shard_class, e.param.numel(), *(t.dtype for t in e.tensors())) for e in entries),
        )
        plan = self.plan
        if plan is None or plan.structure != structure:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "run an eager step with the same parameters and gradients before capturing a CUDA graph"
                )
            plan = self.plan = _Plan(structure, entries, num_classes, device)
        plan.send(_table_rows(entries, hypers), self.kept)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._launch(plan, hypers, all_reduce, max_grad_norm, grad_norm, skipped_steps)
        for destination, source in copies:
            destination.copy_(source)

    def _launch(
        self,
        plan: _Plan,
        hypers: Sequence[Hyper],
        all_reduce: Callable[[torch.Tensor], None],
        max_grad_norm: float,
        grad_norm: torch.Tensor,
        skipped_steps: torch.Tensor,
    ) -> None:
        count = plan.num_tensors
        for norm in plan.norms:
            squares_kernel[(norm.chunks.shape[1],)](
                plan.table, count, norm.chunks, plan.partials, DTYPE=_tl_dtype(norm.dtypes[0]),
                BLOCK=norm.launch.block, ITERATIONS=norm.launch.iterations, num_warps=norm.launch.num_warps,
            )  # fmt: skip
        class_sums_kernel[(1,)](
            plan.partials, plan.bounds, plan.sums, plan.num_classes, BLOCK=SUM_BLOCK, num_warps=SUM_WARPS
        )
        all_reduce(plan.sums)
        scalars_kernel[(1,)](
            plan.sums, plan.num_classes, plan.table, count, plan.corrections, plan.control, grad_norm, skipped_steps,
            float(max_grad_norm), BLOCK=TENSOR_BLOCK, num_warps=TENSOR_WARPS,
        )  # fmt: skip
        for step in plan.steps:
            hyper = hypers[step.group]
            param, grad, state = step.dtypes
            adamw_kernel[(step.chunks.shape[1],)](
                plan.table, count, step.chunks, plan.corrections, plan.control, hyper.lr,
                1.0 - hyper.beta1, 1.0 - hyper.beta2, hyper.eps, hyper.weight_decay,
                PARAM=_tl_dtype(param), GRAD=_tl_dtype(grad), STATE=_tl_dtype(state),
                HAS_MASTER=step.has_master, LR_TENSOR=isinstance(hyper.lr, torch.Tensor),
                BLOCK=step.launch.block, ITERATIONS=step.launch.iterations, num_warps=step.launch.num_warps,
            )  # fmt: skip


def _tl_dtype(dtype: torch.dtype) -> Any:
    return getattr(tl, _TL_NAMES[dtype])


def _straighten(entry: Entry, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Entry:
    """The entry with every tensor laid out as a dense copy of the parameter; `copies` gets what to write back after the
    step. Only gradients of another layout and parameters with gaps come here."""
    pattern = torch.empty_like(entry.param)  # the parameter's own strides where it is dense, otherwise dense ones

    def dense(tensor: torch.Tensor, *, written: bool = True) -> torch.Tensor:
        if tensor.stride() == pattern.stride():
            return tensor
        copy = torch.empty_like(pattern, dtype=tensor.dtype).copy_(tensor)
        if written:
            copies.append((tensor, copy))
        return copy

    return Entry(
        entry.group,
        entry.shard_class,
        dense(entry.param),
        dense(entry.grad, written=False),
        dense(entry.exp_avg),
        dense(entry.exp_avg_sq),
        entry.step,
        None if entry.master is None else dense(entry.master),
    )


def _table_rows(entries: Sequence[Entry], hypers: Sequence[Hyper]) -> list[list[int]]:
    """The tensor table: addresses of param, grad, exp_avg, exp_avg_sq, master, step; numel; 1 if all addresses are
    multiples of 16 bytes; log β1, log β2 as the bits of doubles."""
    logs = [(_bits(_log(h.beta1)), _bits(_log(h.beta2))) for h in hypers]
    columns = []
    for e in entries:
        addresses = [t.data_ptr() for t in e.tensors()]
        master = addresses[4] if e.master is not None else 0
        aligned = int(all(a % 16 == 0 for a in addresses))
        columns.append((*addresses[:4], master, e.step.data_ptr(), e.param.numel(), aligned, *logs[e.group]))
    return [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in range(10)]
