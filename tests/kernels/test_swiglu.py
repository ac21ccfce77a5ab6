"""swiglu: values and gradients against the formula in fp64, strides, autograd, compile, large indices, bad input."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.launch.swiglu import swiglu_launch
from fuselm.kernels.numerics import check_budget
from fuselm.kernels.specs.swiglu import SWIGLU
from fuselm.kernels.swiglu import swiglu, swiglu_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(gate_up: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and d(gate_up) in fp64, the gradient written out by hand."""
    gate, up = gate_up.detach().double().chunk(2, -1)
    sigma = 1 / (1 + torch.exp(-gate))
    dy = grad.double()
    return gate * sigma * up, torch.cat((dy * up * sigma * (1 + gate * (1 - sigma)), dy * gate * sigma), -1)


def draw(shape, dtype, generator, scale=1.0) -> torch.Tensor:
    x = torch.randn(shape, generator=generator, device=generator.device) * scale
    return x.to(dtype).requires_grad_()


class CopyCounter(profile):
    """Counts copies by contiguous, reshape and clone, also inside custom ops (the interpreter itself uses copy_)."""

    def __init__(self) -> None:
        super().__init__(activities=[ProfilerActivity.CPU])

    @property
    def copies(self) -> int:
        return sum(event.name == "aten::clone" for event in self.events() or [])


def as_interpreted(plain: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """What the budget compares with: `plain`; for bf16 in Triton's interpreter the exact result rounded towards zero,
    since that is how the interpreter casts to bf16 (a GPU rounds to nearest)."""
    if plain.dtype != torch.bfloat16 or plain.is_cuda:
        return plain
    return (exact.detach().float().view(torch.int32) & -65536).view(torch.float32).bfloat16()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ffn", [1, 15, 16, 37, 128, 2047, 2049])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_values_and_gradients(ffn, scale, dtype, device, generator):
    x = draw((3, 2 * ffn), dtype, generator, scale)
    y = swiglu(x, backend="triton")
    dy = torch.randn(y.shape, generator=generator, device=device).to(dtype)
    (dx,) = torch.autograd.grad(y, x, dy)
    plain = SWIGLU.plain(x)
    (plain_dx,) = torch.autograd.grad(plain, x, dy)
    wanted, wanted_dx = exact(x, dy)
    assert y.dtype == dx.dtype == dtype and y.is_contiguous() and dx.is_contiguous()
    check_budget(y, wanted, as_interpreted(plain, wanted))
    check_budget(dx, wanted_dx, as_interpreted(plain_dx, wanted_dx), name="d(gate_up)")


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_large_gates_neither_overflow_nor_vanish(backend, device):
    gate = torch.tensor([-1e4, -200.0, -89.0, 0.0, 89.0, 200.0, 1e4], device=device)
    x = torch.cat((gate, torch.full_like(gate, 2.0))).requires_grad_()
    y = swiglu(x, backend=backend)
    y.sum().backward()
    assert torch.equal(y, 2 * gate.clamp(min=0)) or torch.allclose(y, 2 * gate.clamp(min=0), atol=1e-30)
    assert x.grad is not None and x.grad.isfinite().all()
    torch.testing.assert_close(x.grad[:7], torch.tensor([0.0, 0, 0, 1, 2, 2, 2], device=device))


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 8), (2, 3, 2, 8), (2, 1, 2, 3, 8)])
def test_leading_shapes(shape, device, generator):
    x = draw(shape, torch.float32, generator)
    y = swiglu(x, backend="triton")
    torch.testing.assert_close(y, swiglu_reference(x))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(swiglu_reference(x).sum(), x)[0])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8), (0,)])
def test_nothing_to_compute(shape, device, generator):
    x = draw(shape, torch.bfloat16, generator)
    y = swiglu(x, backend="triton")
    y.sum().backward()
    assert y.shape == (*shape[:-1], shape[-1] // 2) and x.grad is not None and x.grad.shape == x.shape


@pytest.mark.parametrize("layout", ["rows", "columns", "batch", "transposed", "expanded", "sliced"])
def test_any_strides_without_a_copy(layout, device, generator):
    x = torch.randn((4, 6, 32), generator=generator, device=device)
    view = {
        "rows": x[:, ::2],
        "columns": x[:, :, ::2],
        "batch": x.transpose(0, 1),
        "transposed": x.transpose(1, 2),
        "expanded": x[:1, :1].expand(3, 5, 32),
        "sliced": x[:, 1:4, 2:30],
    }[layout]
    view = view.detach().requires_grad_()
    dense = view.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    with CopyCounter() as counter:
        y = swiglu(view, backend="triton")
    assert counter.copies == 0
    wanted = swiglu(dense, backend="triton")
    assert torch.equal(y, wanted) and y.is_contiguous()
    grads = [torch.autograd.grad((out * out).sum(), leaf)[0] for out, leaf in ((y, view), (wanted, dense))]
    assert torch.equal(grads[0], grads[1])


def test_leading_dimensions_that_do_not_merge_are_copied_once(device, generator):
    x = torch.randn((2, 4, 6, 16), generator=generator, device=device)[:, :3, :, :]
    with CopyCounter() as counter:
        y = swiglu(x, backend="triton")
    assert counter.copies == 1
    torch.testing.assert_close(y, swiglu_reference(x))


def test_upstream_gradients_of_any_strides_are_used_in_place_and_left_alone(device, generator):
    x = draw((2, 5, 16), torch.float32, generator)
    y = swiglu(x, backend="triton")
    for dy in (
        torch.full((), 2.0, device=device).expand(2, 5, 8),
        torch.randn((2, 5, 16), generator=generator, device=device)[..., ::2],
        torch.randn((8, 5, 2), generator=generator, device=device).permute(2, 1, 0),
    ):
        before = dy.clone()
        with CopyCounter() as counter:
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        assert counter.copies == 0 and torch.equal(dy, before)
        assert torch.equal(dx, torch.autograd.grad(y, x, dy.contiguous(), retain_graph=True)[0])


def test_backward_twice_frozen_input_and_no_grad(device, generator):
    x = draw((3, 16), torch.float32, generator)
    before = x.detach().clone()
    loss = swiglu(x, backend="triton").square().sum()
    loss.backward(retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first) and torch.equal(x.detach(), before)
    assert not swiglu(x.detach(), backend="triton").requires_grad
    with torch.no_grad():
        assert not swiglu(x, backend="triton").requires_grad


@pytest.mark.parametrize(("rows", "ffn"), [(3, 37), (130, 3), (1, 2049), (5, 16)])
def test_every_element_is_written(rows, ffn, device, generator):
    x = draw((rows, 2 * ffn), torch.float32, generator)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert x.new_empty(3).isnan().all()
        y = swiglu(x, backend="triton")
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not y.isnan().any() and not dx.isnan().any()


def test_fp64_runs_the_reference_exactly(device, generator):
    x = draw((3, 16), torch.float64, generator)
    y = swiglu(x)
    dy = torch.randn(y.shape, generator=generator, device=device, dtype=torch.float64)
    wanted, wanted_dx = exact(x, dy)
    torch.testing.assert_close(y, wanted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], wanted_dx, rtol=1e-13, atol=1e-13)
    with pytest.raises(TypeError, match="float64"):
        swiglu(x, backend="triton")


def test_opcheck(device, generator):
    x = draw((2, 3, 20), torch.float32, generator)
    torch.library.opcheck(torch.ops.fuselm.swiglu_forward.default, (x,))
    grad = torch.randn((2, 3, 10), generator=generator, device=device)
    torch.library.opcheck(torch.ops.fuselm.swiglu_backward.default, (grad, x.detach()))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic, device, generator):
    def step(x: torch.Tensor) -> torch.Tensor:
        return swiglu(x, backend="triton")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for batch, seq_len in [(2, 5)] + [(3, 9), (4, 17)] * dynamic:
        x = draw((batch, seq_len, 32), torch.float32, generator)
        got, wanted = compiled(x), step(x)
        dy = torch.randn(wanted.shape, generator=generator, device=device)
        assert torch.equal(got, wanted)
        assert torch.equal(torch.autograd.grad(got, x, dy)[0], torch.autograd.grad(wanted, x, dy)[0])


_LARGE_STRIDES = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
from fuselm.kernels.swiglu import swiglu
big = 2**30 + 64
for shape, strides in (((3, 16), (big, 1)), ((4, 1, 16), (big, 0, 1)), ((1, 2, 4), (0, 1, big))):
    x = torch.empty_strided(shape, strides, dtype=torch.float16, device=device)  # only the pages that are written exist
    x.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(2)))
    dense = x.clone(memory_format=torch.contiguous_format).requires_grad_()
    y = swiglu(x, backend="triton")
    wanted = swiglu(dense, backend="triton")
    assert torch.equal(y, wanted) and torch.isfinite(y).all(), (shape, y, wanted)
    grad = torch.empty_strided(wanted.shape, strides, dtype=torch.float16, device=device)
    grad.copy_(wanted.detach())
    dx = torch.ops.fuselm.swiglu_backward(grad, x)
    assert torch.equal(dx, torch.autograd.grad(wanted, dense, wanted.detach())[0]), (shape, dx)
print("same")
"""


def test_strides_beyond_int32():
    done = subprocess.run([sys.executable, "-c", _LARGE_STRIDES], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stderr


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    x = torch.randn((2**17 + 3, 2 * 8192), device=device, dtype=torch.bfloat16, requires_grad=True)
    y = swiglu(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones((), device=device, dtype=y.dtype).expand_as(y))
    tail = x.detach()[-3:].requires_grad_()
    wanted = swiglu_reference(tail)
    torch.testing.assert_close(y[-3:], wanted)
    torch.testing.assert_close(dx[-3:], torch.autograd.grad(wanted.sum(), tail)[0])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(3, 7), ValueError, r"gate_up has shape \(3, 7\): expected \(\.\.\., 2 \* ffn\)"),
        (torch.zeros(()), ValueError, r"gate_up has shape \(\)"),
        (torch.zeros(3, 8, dtype=torch.int64), TypeError, "gate_up is torch.int64"),
    ],
)
def test_bad_input_is_named(x, error, message, backend, device):
    with pytest.raises(error, match=message):
        swiglu(x.to(device), backend=backend)


def test_launch_fills_threads_with_vectors():
    profile = KNOWN_PROFILES[90]
    for ffn, itemsize in ((8192, 2), (8192, 4), (14336, 2), (48, 2), (2, 2)):
        for backward in (False, True):
            launch = swiglu_launch(16384, ffn, itemsize, profile, backward)
            per_thread = launch.block_rows * launch.block_columns // (32 * launch.num_warps)
            assert per_thread * itemsize == (16 if backward or ffn < 512 else 32)
    assert swiglu_launch(1, 8, 2, profile, False).block_rows == 1
    assert [swiglu_launch(64, n, 2, profile, False).load for n in (8192, 48, 4097, 2)] == ["evict_last"] * 2 + [""] * 2
