"""Chunks to try for linear_cross_entropy, forward and backward together, and its parts alone, which say where the time
goes: the three multiplications of one chunk, the loss over it, the rounding of dweight to bf16.

With "budget" in their names: blocks of chunks of the vocabulary where the buffer of logits is no larger than Liger's,
and the parts of such a run, each with the others left out (where the kernels between the multiplications stand alone,
the host is in their times); with "block" the launches of those kernels, by bytes:

    python benchmarks/tune.py linear_cross_entropy --only "budget,block" --rounds 9 --budget-s 60
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tuning.base import Target, some_rows

from fuselm.kernels import linear_cross_entropy as module
from fuselm.kernels import vocab_chunks
from fuselm.kernels.chunk_products import accumulate_dw, logits_buffer, multiply_dx, multiply_logits
from fuselm.kernels.cross_entropy_launchers import launch_forward
from fuselm.kernels.launch.linear_cross_entropy import BlockLaunch, ChunkPlan
from fuselm.kernels.loss_scaling import launch_multiply
from fuselm.kernels.vocab_chunks_kernels import PLANES, BlockGradients, BlockSums

SHAPES = ((8192, 4096, 128256), (16384, 2048, 128256), (32768, 768, 50304), (32768, 768, 50257))
CHUNK = 4096
PARTS = ("logits", "loss", "dx", "dweight of the first chunk", "dweight of a later chunk", "dweight to bf16")
LIGER_ROWS = {2048: 512, 768: 512}  # of Liger's buffer of logits, by dim
BLOCKS = {  # rows x columns, by dim
    2048: (ChunkPlan(8192, 7936), ChunkPlan(8192, 4096), ChunkPlan(4096, 4096), ChunkPlan(512)),
    768: (ChunkPlan(4096, 3072), ChunkPlan(4096, 6144), ChunkPlan(16384, 1536), ChunkPlan(512)),
}
STEPS = {  # the functions of each step of a run in blocks
    "logits": ((vocab_chunks, "multiply_logits"),),
    "sums": ((BlockSums, "add"),),
    "gradient": ((BlockGradients, "write"),),
    "dx": ((vocab_chunks, "accumulate_dx"),),
    "dweight": ((vocab_chunks, "multiply_dw"), (vocab_chunks, "accumulate_dw")),
}
BLOCK_STEPS = ((8192, 3072), (16384, 3968))
BLOCKS_A_RUN = 8
BLOCK_LAUNCHES = (BlockLaunch(2048, 2), BlockLaunch(4096, 4), BlockLaunch(2048, 1), BlockLaunch(4096, 2))
ATTRIBUTE = "fuselm.kernels.linear_cross_entropy.chunk_plan"


def _inputs(rows: int, dim: int, vocab: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn((rows, dim), device=device, generator=generator, dtype=torch.bfloat16)
    weight = torch.randn((vocab, dim), device=device, generator=generator, dtype=torch.bfloat16) * dim**-0.5
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, (rows,), device=device)


def _whole(rows: int, dim: int, vocab: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    rows, dim, vocab = (rows, dim, vocab) if device.type == "cuda" else (32, 8, 64)
    chunk = min(rows, 1024)
    x, weight, targets = _inputs(rows, dim, vocab, device)

    def run() -> torch.Tensor:
        loss = module.linear_cross_entropy(x, weight, targets)
        torch.autograd.grad(loss, (x, weight), torch.ones_like(loss))
        return loss.detach()

    def reference() -> torch.Tensor:
        total = torch.zeros((), device=device, dtype=torch.float64)
        for xs, ts in zip(x.detach().split(chunk), targets.split(chunk), strict=True):
            logits = (xs @ weight.detach().t()).float()
            total += torch.nn.functional.cross_entropy(logits, ts, reduction="sum").double()
        return total / rows

    return run, reference


def _budgeted(rows: int, dim: int, vocab: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    liger_rows = LIGER_ROWS[dim]
    rows, dim, vocab = (rows, dim, vocab) if device.type == "cuda" else (32, 8, 64)
    x, weight, targets = _inputs(rows, dim, vocab, device)
    some, classes = some_rows(rows), some_rows(vocab)

    def run() -> tuple[torch.Tensor, ...]:
        loss = module.linear_cross_entropy(x, weight, targets, memory_budget=liger_rows * vocab * 2)
        dx, dw = torch.autograd.grad(loss, (x, weight), torch.ones_like(loss))
        return loss.detach(), dx[some], dw[classes]

    def reference() -> tuple[torch.Tensor, ...]:
        xs, w = x.detach(), weight.detach()
        total = torch.zeros((), device=device, dtype=torch.float64)
        dw = torch.zeros_like(w[classes], dtype=torch.float32)
        chosen = torch.arange(vocab, device=device)[classes]
        for part, ts in zip(xs.split(1024), targets.split(1024), strict=True):
            logits = (part @ w.t()).float()
            total += torch.nn.functional.cross_entropy(logits, ts, reduction="sum").double()
            p = (logits[:, classes] - logits.logsumexp(1, keepdim=True)).exp()
            dw += (p - (ts[:, None] == chosen).float()).t() @ part.float()
        p = (xs[some] @ w.t()).float().softmax(1)
        p[torch.arange(p.shape[0], device=device), targets[some]] -= 1
        return total / rows, p @ w.float() / rows, dw / rows

    return run, reference


@contextlib.contextmanager
def _only(kept: str) -> Iterator[None]:
    # of the steps of vocab_chunks only this one; or the whole first round
    dropped: list[tuple[Any, str]] = [f for step, functions in STEPS.items() if step != kept for f in functions]
    if kept == "first round":
        dropped = [(vocab_chunks, "second_round")]
    before = [(owner, name, getattr(owner, name)) for owner, name in dropped]
    for owner, name in dropped:
        setattr(owner, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def _step(
    kept: str, rows: int, dim: int, vocab: int, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    whole, _ = _budgeted(rows, dim, vocab, device)

    def run() -> None:
        with _only(kept):
            whole()

    whole()  # so that memory that a step left out would have filled holds what it wrote here, not zeros
    return run, lambda: None


def _part(name: str, dim: int, vocab: int, device: torch.device) -> tuple[Callable[[], Any], Callable[[], Any]]:
    rows, dim, vocab = (CHUNK, dim, vocab) if device.type == "cuda" else (8, 8, 64)
    x, weight, targets = (t.detach() for t in _inputs(rows, dim, vocab, device))
    logits = logits_buffer(rows, vocab, x.dtype, device)
    multiply_logits(x, weight, logits)
    filled = logits.clone()
    dx = torch.empty_like(x)
    dw = torch.zeros((vocab, dim), device=device)
    one = torch.ones((), device=device)
    loss, lse, low = (torch.empty(rows, device=device) for _ in range(3))

    def run() -> None:
        if name == "logits":
            multiply_logits(x, weight, logits)
        elif name == "loss":
            launch_forward(
                filled[None],
                targets,
                loss,
                lse,
                low,
                options=(-100, 0.0, 0.0, 0.0),
                skip_ignored=True,
                gradient=filled[None],
                scale=one,
            )
        elif name == "dx":
            multiply_dx(logits, weight, dx)
        elif name == "dweight to bf16":
            launch_multiply(dw, torch.empty_like(weight), one)
        else:
            accumulate_dw(dw, logits, x, first="first" in name)

    return run, lambda: None


def _block_step(
    step: str, rows: int, columns: int, device: torch.device
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One of the two kernels, over BLOCKS_A_RUN blocks that lie apart."""
    if device.type != "cuda":
        rows, columns = 8, 64
    generator = torch.Generator(device).manual_seed(0)
    shape = (BLOCKS_A_RUN, rows, columns)
    blocks = torch.randn(shape, device=device, generator=generator).bfloat16()
    targets = torch.randint(0, columns, (rows,), device=device, generator=generator)
    numbers = torch.zeros((PLANES, rows), device=device)
    lse = torch.full((rows,), 10.0, device=device)
    options = (-100, 0.0, 0.0, 0.0)

    def run() -> None:
        sums = BlockSums(targets, numbers, options)
        gradients = BlockGradients(targets, numbers, lse, lse * 0, lse[0], None, columns * BLOCKS_A_RUN, options)
        for i, block in enumerate(blocks):
            if step == "sums":
                sums.add(block, 0, columns * i)
            else:
                gradients.write(block, 0, columns * i)

    return run, lambda: None


def _part_bytes(name: str, vocab: int, dim: int) -> int:
    return {"loss": 2 * CHUNK * vocab * 2, "dweight to bf16": 6 * vocab * dim}.get(name, 0)


TARGETS: list[Target] = [
    *(
        Target(
            name=f"linear_cross_entropy {rows}x{dim}x{vocab} bf16",
            attribute=ATTRIBUTE,
            candidates=tuple(ChunkPlan(n) for n in (4096, 8192, 2048, 5504) if n <= rows),
            make=partial(_whole, rows, dim, vocab),
            bytes_moved=0,
        )
        for rows, dim, vocab in SHAPES
    ),
    *(
        Target(
            name=f"linear_cross_entropy part: {part} {CHUNK}x{dim}x{vocab} bf16",
            attribute=ATTRIBUTE,
            candidates=(),
            make=partial(_part, part, dim, vocab),
            bytes_moved=_part_bytes(part, vocab, dim),
        )
        for _, dim, vocab in SHAPES
        for part in PARTS
    ),
    *(
        Target(
            name=f"linear_cross_entropy budget of Liger's buffer {rows}x{dim}x{vocab} bf16",
            attribute=ATTRIBUTE,
            candidates=BLOCKS[dim],
            make=partial(_budgeted, rows, dim, vocab),
            bytes_moved=0,
        )
        for rows, dim, vocab in SHAPES[1:3]
    ),
    *(
        Target(
            name=f"linear_cross_entropy budget, only {step} {rows}x{dim}x{vocab} bf16",
            attribute=ATTRIBUTE,
            candidates=(),
            make=partial(_step, step, rows, dim, vocab),
            bytes_moved=0,
        )
        for rows, dim, vocab in SHAPES[2:3]
        for step in ("first round", *STEPS)
    ),
    *(
        Target(
            name=f"linear_cross_entropy block {step} {rows}x{columns} bf16",
            attribute="fuselm.kernels.vocab_chunks_kernels.block_launch",
            candidates=BLOCK_LAUNCHES,
            make=partial(_block_step, step, rows, columns),
            bytes_moved=(2 if step == "sums" else 4) * BLOCKS_A_RUN * rows * columns,
        )
        for rows, columns in BLOCK_STEPS
        for step in ("sums", "gradient")
    ),
]
