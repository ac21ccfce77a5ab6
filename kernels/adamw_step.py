"""One step of AdamW over all parameters by Triton kernels: when tables are made anew, and the launches.

    squares    one program a norm chunk  -> one fp32 partial sum each; one launch for each dtype of gradients
    finish     one program               -> norm, clip factor, verdict; advances step counters, bias corrections
    update     one program a chunk; one launch for each combination of dtypes

Where parameters are sharded, `finish` comes in two: class sums (see adamw_sharding.py), their all-reduce, the rest.
With a veto it comes in two as well, and between them one more launch makes the norm that the veto is asked about.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuselm.kernels._triton import tl
from fuselm.kernels.adamw_kernels import (
    adamw_kernel,
    class_sums_kernel,
    finish_kernel,
    norm_kernel,
    squares_kernel,
)
from fuselm.kernels.adamw_tables import HYPER, RECORD, Entry, Hyper, Plan
from fuselm.kernels.adamw_veto import Veto, ask
from fuselm.kernels.launch.adamw import FINISH_BLOCK, FINISH_WARPS, SUM_BLOCK, norm_launch, step_launch

_TL_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
KERNEL_DTYPES = frozenset(_TL_NAMES)


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


def _same_layout(tensors: Sequence[torch.Tensor]) -> bool:
    if all(t.is_contiguous() for t in tensors):
        return True
    return is_dense(tensors[0]) and all(t.stride() == tensors[0].stride() for t in tensors)


class TritonStep:
    """Runs whole steps, and keeps the tables between them."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.kept: list[Any] = []  # what captured graphs read

    def run(
        self,
        entries: list[Entry],
        grads: list[torch.Tensor],
        hypers: Sequence[Hyper],
        *,
        num_classes: int,
        all_reduce: Callable[[torch.Tensor], None] | None,
        veto: Veto | None,
        max_grad_norm: float,
        grad_norm: torch.Tensor,
        skipped_steps: torch.Tensor,
        stochastic: bool,
    ) -> None:
        """One step: the norm, the verdict, the update.

        Args:
            entries: the parameters that have gradients; the same objects in every step as long as nothing but the
                gradients changed.
            grads: their gradients, of the parameters' shapes and any floating dtype.
            hypers: by group.
            num_classes: classes that entries' shard_class counts.
            all_reduce: adds up the (num_classes + 1,) fp64 class sums over processes, in place; None: one process.
            veto: see AdamW; asked once, behind all_reduce.
            max_grad_norm: inf where nothing is clipped.
            grad_norm: () fp32, written.
            skipped_steps: () int64, goes up by one if the norm is not finite, or at a veto.
            stochastic: whether bf16 parameters and moments are rounded stochastically.

        Raises:
            RuntimeError: sizes or dtypes changed under CUDA graph capture.
            TypeError, ValueError: what the veto returns is not a () bool tensor on the device.
        """
        device = grad_norm.device
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        plan, grads = self._prepare(entries, grads, len(hypers), num_classes, device, copies)
        plan.send([g.data_ptr() for g in grads], hypers, self.kept)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            launch_norm(plan)
            reduced, refused = all_reduce is not None or veto is not None, None
            if reduced:
                class_sums_kernel[(1,)](
                    plan.partials, plan.bounds, plan.sums, plan.num_classes, BLOCK=SUM_BLOCK, num_warps=FINISH_WARPS
                )
            if all_reduce is not None:
                all_reduce(plan.sums)
            if veto is not None:
                norm = torch.empty((), dtype=torch.float64, device=device)
                norm_kernel[(1,)](plan.sums, plan.num_classes, norm, num_warps=1)
                refused = ask(veto, norm).view(torch.uint8)
            finish_kernel[(1,)](
                plan.partials, plan.bounds, plan.sums, plan.num_classes, plan.table, plan.num_tensors, plan.scalars,
                plan.keys, plan.control, grad_norm, skipped_steps, plan.control if refused is None else refused,
                float(max_grad_norm), REDUCED=reduced, VETO=refused is not None, ROUND=stochastic, BLOCK=FINISH_BLOCK,
                SUM_BLOCK=SUM_BLOCK, RECORD=RECORD, HYPER=HYPER, num_warps=FINISH_WARPS,
            )  # fmt: skip
            launch_step(plan, stochastic)
        for destination, source in copies:
            destination.copy_(source)

    def _prepare(
        self,
        entries: list[Entry],
        grads: list[torch.Tensor],
        num_groups: int,
        num_classes: int,
        device: torch.device,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[Plan, list[torch.Tensor]]:
        """The plan, bound to these entries, and gradients laid out as the parameters."""
        plan = self.plan
        if (
            plan is not None
            and plan.entries == entries
            and plan.contiguous
            and plan.grad_dtypes == [g.dtype for g in grads]
            and all([g.is_contiguous() for g in grads])
        ):
            return plan, grads
        bound, laid_out = [], []
        for entry, grad in zip(entries, grads, strict=True):
            if not _same_layout([*entry.tensors(), grad]):
                entry, grad = _straighten(entry, grad, copies)
            bound.append(entry)
            laid_out.append(grad)
        structure = (
            num_classes,
            num_groups,
            *(
                (e.shard_class, e.param.numel(), bool(e.place.gap), g.dtype, *(t.dtype for t in e.tensors()))
                for e, g in zip(bound, laid_out, strict=True)
            ),
        )
        if plan is None or plan.structure != structure:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "run an eager step with the same parameters and gradients before capturing a CUDA graph"
                )
            choices = (norm_launch, step_launch)
            plan = self.plan = Plan(structure, bound, laid_out, num_groups, num_classes, device, choices)
        plan.bind(bound)
        return plan, laid_out


def launch_norm(plan: Plan) -> None:
    """Launches the sums of squares: plan.partials."""
    for norm in plan.norms:
        squares_kernel[(norm.chunks.shape[1],)](
            plan.table, norm.chunks, plan.partials, DTYPE=_tl_dtype(norm.dtypes[0]), BLOCK=norm.launch.block,
            ITERATIONS=norm.launch.iterations, RECORD=RECORD, num_warps=norm.launch.num_warps,
        )  # fmt: skip


def launch_step(plan: Plan, stochastic: bool) -> None:
    """Launches the update, by what the finish kernel has written."""
    for step in plan.steps:
        param, grad, state = step.dtypes
        launch = step.launch
        adamw_kernel[(step.chunks.shape[1],)](
            plan.table, step.chunks, plan.scalars, plan.keys, plan.control,
            PARAM=_tl_dtype(param), GRAD=_tl_dtype(grad), STATE=_tl_dtype(state), HAS_MASTER=step.has_master,
            ROUND=stochastic and torch.bfloat16 in (param, state), GAPS=stochastic and step.gaps,
            BLOCK=launch.block, ITERATIONS=launch.iterations, HINT2=min(16, 2 * launch.vector),
            HINT4=min(16, 4 * launch.vector), EVICT=launch.eviction, RECORD=RECORD, num_warps=launch.num_warps,
        )  # fmt: skip


def _tl_dtype(dtype: torch.dtype) -> Any:
    return getattr(tl, _TL_NAMES[dtype])


def _straighten(
    entry: Entry, grad: torch.Tensor, copies: list[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Entry, torch.Tensor]:
    """The entry and its gradient with every tensor laid out as a dense copy of the parameter; `copies` gets what to
    write back after the step. Only gradients of another layout and parameters with gaps come here."""
    pattern = torch.empty_like(entry.param)  # the parameter's own strides where it is dense, otherwise dense ones

    def dense(tensor: torch.Tensor, *, written: bool = True) -> torch.Tensor:
        if tensor.stride() == pattern.stride():
            return tensor
        copy = torch.empty_like(pattern, dtype=tensor.dtype).copy_(tensor)
        if written:
            copies.append((tensor, copy))
        return copy

    straight = Entry(
        entry.group,
        entry.shard_class,
        entry.number,
        dense(entry.param),
        dense(entry.exp_avg),
        dense(entry.exp_avg_sq),
        entry.step,
        None if entry.master is None else dense(entry.master),
        entry.place,
    )
    return straight, dense(grad, written=False)
