"""The matrix multiplications of linear + cross-entropy over one chunk of rows, and the buffer of logits between them.

cuBLAS has no fast kernel for 16-bit matrices of a vocabulary that fills no whole 16-byte vectors, wherever rows start:
on an H200 logits and dx of 50257 columns take several times as long as those of 50264 (`benchmarks/tune.py
linear_cross_entropy` times the parts of both 50304 and 50257). The vocabulary is therefore cut at its last whole
vector, and the few columns after it are multiplied apart; what two parts add to is added up in fp32 and rounded once.
"""

from __future__ import annotations

import torch

from fuselm.kernels.launch.linear_cross_entropy import LEAST_APART, VECTOR_BYTES, row_bytes


def logits_buffer(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(rows, vocab), not initialised. Rows start on 16-byte borders, which matrix multiplications and vector loads
    want (V = 50257)."""
    aligned = row_bytes(vocab, dtype.itemsize) // dtype.itemsize
    buffer = torch.empty((rows, aligned), dtype=dtype, device=device)
    if device.type == "cpu":  # whose bf16 multiplications (2.13) take an odd row's next number, too, times 0
        buffer[:, vocab:] = 0
    return buffer[:, :vocab]


def vocab_parts(vocab: int, dtype: torch.dtype, device: torch.device) -> tuple[slice, ...]:
    """The parts of the vocabulary that are multiplied apart."""
    main = vocab - vocab % (VECTOR_BYTES // dtype.itemsize)
    if device.type != "cuda" or main == vocab or vocab < LEAST_APART:
        return (slice(0, vocab),)
    return slice(0, main), slice(main, vocab)


def _rows(tensor: torch.Tensor, part: slice) -> torch.Tensor:
    # tensor[part]; a view of everything would cost the host time
    return tensor if part.stop - part.start == tensor.shape[0] else tensor[part]


def _columns(tensor: torch.Tensor, part: slice) -> torch.Tensor:
    # tensor[:, part]
    return tensor if part.stop - part.start == tensor.shape[1] else tensor[:, part]


def multiply_logits(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
    """logits (rows, vocab) = x (rows, dim) · weight (vocab, dim)ᵀ."""
    for part in vocab_parts(logits.shape[1], logits.dtype, logits.device):
        torch.mm(x, _rows(weight, part).t(), out=_columns(logits, part))


def multiply_dx(dlogits: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor) -> None:
    """dx (rows, dim) = dlogits (rows, vocab) · weight (vocab, dim)."""
    if len(vocab_parts(dlogits.shape[1], dlogits.dtype, dlogits.device)) == 1:
        torch.mm(dlogits, weight, out=dx)
        return
    total = dx if dx.dtype == torch.float32 else torch.empty_like(dx, dtype=torch.float32)
    accumulate_dx(total, dlogits, weight, first=True)
    if total is not dx:
        dx.copy_(total)


def accumulate_dx(dx: torch.Tensor, dlogits: torch.Tensor, weight: torch.Tensor, first: bool) -> None:
    """dx (rows, dim), fp32, (+)= dlogits (rows, vocab) · weight (vocab, dim); written, not added to, where `first`."""
    for part in vocab_parts(dlogits.shape[1], dlogits.dtype, dlogits.device):
        multiply_in_fp32(_columns(dlogits, part), _rows(weight, part), dx, first and part.start == 0)


def multiply_dw(dw: torch.Tensor, dlogits: torch.Tensor, x: torch.Tensor) -> None:
    """dw (vocab, dim), fp32 or x's dtype, = dlogits (rows, vocab)ᵀ · x (rows, dim)."""
    if dw.dtype == torch.float32:
        accumulate_dw(dw, dlogits, x, first=True)
        return
    for part in vocab_parts(dlogits.shape[1], dlogits.dtype, dlogits.device):
        torch.mm(_columns(dlogits, part).t(), x, out=_rows(dw, part))


def accumulate_dw(dw: torch.Tensor, dlogits: torch.Tensor, x: torch.Tensor, first: bool) -> None:
    """dw (vocab, dim), fp32, (+)= dlogits (rows, vocab)ᵀ · x (rows, dim); written, not added to, where `first`."""
    for part in vocab_parts(dlogits.shape[1], dlogits.dtype, dlogits.device):
        multiply_in_fp32(_columns(dlogits, part).t(), x, _rows(dw, part), first)


def multiply_in_fp32(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, first: bool) -> None:
    """out, fp32, (+)= a · b for operands of any dtype; written, not added to, where `first`."""
    if a.dtype == torch.float32 or not a.is_cuda:  # only CUDA multiplies 16-bit operands into fp32
        a, b = a.float(), b.float()
        if first:
            torch.mm(a, b, out=out)
        else:
            out.addmm_(a, b)
    elif first:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
