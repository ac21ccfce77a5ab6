"""linear + cross-entropy in chunks of the vocabulary, for the little memory that chunks of rows waste their time in.

A chunk of few rows reads and writes the whole fp32 dW for a small multiplication. Chunks of the vocabulary go through
all rows instead, block by block: a first round computes each logsumexp, a second the logits again, their gradient, dx
(+)= and a part of dW that is complete when the rows are through, in the weight's own dtype. Up to four multiplications
for three, and no fp32 dW:

    lse = log Σ_c Σ exp(logits_c)        dW_c = dlogits_cᵀ · x        dx = Σ_c dlogits_c · W_c

Until dW is written, its memory holds logits: chunks wider than the buffer allows, and one that both rounds share, so
that its logits are computed once, like those that the first round leaves in the buffer
(`launch.linear_cross_entropy.column_chunks`).

Order: columns outside, rows inside. That reads and writes dx (fp32, R·dim) once a chunk of columns and an fp32
dW_c (columns·dim, in L2 where it is small) once a block of rows. Rows outside would keep dx in L2 and need the whole dW
in fp32, which is what chunks of the vocabulary are there to avoid.

Memory beside x, W, dW and dx in their dtypes: the buffer (what a memory budget speaks of), dx in fp32, and, where
a chunk is more than one block of rows, an fp32 dW_c. The result's dx takes the buffer's place.

`launch.linear_cross_entropy.chunk_plan` says from when on that is faster than chunks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fuselm.kernels.chunk_products import accumulate_dw, accumulate_dx, multiply_dw, multiply_logits
from fuselm.kernels.cross_entropy_launchers import Options
from fuselm.kernels.direct import launch_device
from fuselm.kernels.launch.linear_cross_entropy import ChunkPlan, ColumnChunk, Rounds, column_chunks
from fuselm.kernels.vocab_chunks_kernels import PADDING, PLANES, BlockGradients, BlockSums, launch_row_losses


class _Layer(NamedTuple):
    """What all blocks share: the layer, its rows, and the memory that logits pass through."""

    x: torch.Tensor  # (rows, dim)
    weight: torch.Tensor  # (vocab, dim)
    block_rows: int
    buffer: torch.Tensor  # 1-dim
    dw: torch.Tensor  # (vocab, dim)

    def blocks(self, chunk: ColumnChunk) -> Iterator[tuple[int, torch.Tensor]]:
        """The first row of each block of a chunk and where its logits are, with rows padded to 16-byte borders."""
        rows, columns = self.x.shape[0], chunk.stop - chunk.start
        stride = -(-columns // PADDING) * PADDING
        memory, height = self.buffer, self.block_rows
        if chunk.lent is not None:
            memory, height = self.dw.view(-1).view(self.x.dtype)[chunk.lent :], rows
        block = memory[: min(height, rows) * stride].view(-1, stride)[:, :columns]
        for start in range(0, rows, height):
            yield start, block if rows - start >= height else block[: rows - start]


def run_vocab_chunks(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    options: Options,
    *,
    plan: ChunkPlan,
    want_lse: bool,
    need_dx: bool,
    dw_dtype: torch.dtype,
    scale: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and lse of each row, dx, dW.

    Args:
        x: (rows, dim), rows >= 1, in the compute dtype.
        weight: (vocab, dim), the same dtype.
        targets: (rows,).
        options: ignore_index, label_smoothing, z_loss, softcap (0 for none).
        plan: the blocks, with columns > 0.
        want_lse: whether lse of rows that are ignored matters.
        need_dx: otherwise dx is empty.
        dw_dtype: of dW.
        scale: fp32, (rows,) or 0-dim, multiplies the gradient of each row's loss; None for 1.
        grad_lse: (rows,) fp32 upstream gradient of lse; None for 0.
    """
    (rows, dim), vocab = x.shape, weight.shape[0]
    dw = torch.empty((vocab, dim), dtype=dw_dtype, device=x.device)
    rounds = column_chunks(rows, vocab, plan, dim * dw.element_size() // x.element_size())
    buffer = torch.empty(min(plan.rows, rows) * plan.columns, dtype=x.dtype, device=x.device)
    layer = _Layer(x, weight, plan.rows, buffer, dw)
    skip_ignored = not want_lse and grad_lse is None
    numbers = torch.empty((PLANES, rows), dtype=torch.float32, device=x.device)
    dx = torch.empty((rows, dim) if need_dx else (0, dim), dtype=torch.float32, device=x.device)
    with launch_device(x):
        first_round(layer, rounds, BlockSums(targets, numbers, options))
        loss, lse, lse_low = launch_row_losses(targets, numbers, vocab, options, skip_ignored)
        gradients = BlockGradients(targets, numbers, lse, lse_low, scale, grad_lse, vocab, options)
        second_round(layer, rounds, gradients, dx if need_dx else None)
    del layer, buffer  # the result's dx may have its memory
    return loss, lse, dx.to(x.dtype), dw


def first_round(layer: _Layer, rounds: Rounds, sums: BlockSums) -> None:
    """Adds up the rows' numbers."""
    parts = layer.x.split(layer.block_rows)  # once: views cost the host time, and each block of rows comes once a chunk
    for chunk in rounds.first:
        weight = layer.weight[chunk.start : chunk.stop]
        xs = parts if chunk.lent is None else (layer.x,)
        for x, (first, logits) in zip(xs, layer.blocks(chunk), strict=True):
            multiply_logits(x, weight, logits)
            sums.add(logits, first, chunk.start)


def second_round(layer: _Layer, rounds: Rounds, gradients: BlockGradients, dx: torch.Tensor | None) -> None:
    """Writes dW and dx (fp32; None for no gradient)."""
    dw, dtype = layer.dw, layer.x.dtype
    sums = torch.empty(0)
    x_parts = layer.x.split(layer.block_rows)
    dx_parts = (None,) * len(x_parts) if dx is None else dx.split(layer.block_rows)
    for chunk in rounds.second:
        weight, dw_part = layer.weight[chunk.start : chunk.stop], dw[chunk.start : chunk.stop]
        xs, dxs = (x_parts, dx_parts) if chunk.lent is None else ((layer.x,), (dx,))
        total = dw_part
        if dw.dtype != torch.float32 and not (len(xs) == 1 and dw.dtype == dtype):
            if sums.shape[0] < dw_part.shape[0]:
                sums = torch.empty_like(dw_part, dtype=torch.float32)
            total = sums[: dw_part.shape[0]]
        for x, block_dx, (first, logits) in zip(xs, dxs, layer.blocks(chunk), strict=True):
            if chunk not in rounds.ready:
                multiply_logits(x, weight, logits)
            gradients.write(logits, first, chunk.start)
            if len(xs) == 1 and total is dw_part:
                multiply_dw(dw_part, logits, x)
            else:
                accumulate_dw(total, logits, x, first=first == 0)
            if block_dx is not None:
                accumulate_dx(block_dx, logits, weight, first=chunk == rounds.second[0])
        if total is not dw_part:
            dw_part.copy_(total)
