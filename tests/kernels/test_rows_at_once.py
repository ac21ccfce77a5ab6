"""linear_cross_entropy's default in bf16: all rows at once where that takes no more memory than chunks."""

from __future__ import annotations

import torch

import fuselm.kernels.linear_cross_entropy as module
from fuselm.kernels.launch.linear_cross_entropy import chunk_rows, row_bytes, rows_at_once
from fuselm.kernels.linear_cross_entropy import linear_cross_entropy

from .test_linear_cross_entropy import check, make


def test_all_rows_at_once_where_that_takes_no_more_memory(device, generator, monkeypatch):
    """In bf16 dW is then rounded as it is computed; else it is summed in fp32, which no sum of fp16 may exceed."""
    shapes = ((128256, 4096), (128256, 16384), (50304, 768), (50257, 16384), (2**22, 64), (37, 16))
    assert [rows_at_once(*shape) for shape in shapes] == [8192, 32768, 5504, 19833, 512, 5504]
    for vocab, dim in shapes:
        most, row = rows_at_once(vocab, dim), row_bytes(vocab, 2) + (4 * dim if vocab == 50257 else 0)
        for rows in (most, most // 2 + 1, most // 3):
            chunk = chunk_rows(rows, vocab, 2)
            chunks = max(chunk * row + 4 * vocab * dim, 6 * vocab * dim)
            assert rows * row + 2 * vocab * dim <= chunks
    taken: list[tuple[int, torch.dtype]] = []
    run = module._run_chunks

    def spied(x, *args, **options):
        results = run(x, *args, **options)
        taken.append((options["chunk_size"], results[3].dtype))
        return results

    monkeypatch.setattr(module, "_run_chunks", spied)
    made = {dtype: make(20, 37, 16, device, generator, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
    for inputs in made.values():
        check(*inputs)
    check(*made[torch.bfloat16], chunk_size=8)
    monkeypatch.setattr(module, "rows_at_once", lambda vocab, dim: 19)
    check(*made[torch.bfloat16])
    assert taken == [(-1, torch.bfloat16), (0, torch.float32), (8, torch.float32), (0, torch.float32)]


def test_compiled_with_a_number_of_rows_that_is_not_known(device, generator):
    x, weight, targets = make(12, 37, 16, device, generator, dtype=torch.bfloat16, ignored=0)

    def loss_of(x, weight, targets, chosen):
        return linear_cross_entropy(x[chosen], weight, targets[chosen], backend="triton")

    torch.compiler.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
        for fewest in (2, 7):
            chosen = torch.arange(12, device=device) >= fewest
            got, want = (function(x, weight, targets, chosen) for function in (compiled, loss_of))
            gradients = [torch.autograd.grad(loss, (x, weight)) for loss in (got, want)]
            assert all(torch.equal(a, b) for a, b in zip((got, *gradients[0]), (want, *gradients[1]), strict=True))


def test_rows_of_a_declared_range_stay_unbounded(device, generator):
    """Which rows go through at once must not bound a dynamic number of rows."""
    x, weight, targets = make(12, 37, 16, device, generator, dtype=torch.bfloat16, ignored=0)
    torch.compiler.reset()
    for tensor in (x, targets):
        torch._dynamo.mark_dynamic(tensor, 0, min=2, max=100000)
    compiled = torch.compile(
        lambda x, targets: linear_cross_entropy(x * 1.0, weight, targets, backend="triton"),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(x, targets), linear_cross_entropy(x, weight, targets, backend="triton"))
