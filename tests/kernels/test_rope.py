"""rope: values and gradients against the rotation in fp64, strides, positions, autograd, compile, bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.launch.rope import RopeLaunch, rope_launch
from fuselm.kernels.numerics import check_budget
from fuselm.kernels.rope import rope, rope_reference
from fuselm.kernels.specs.rope import ROPE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tables(length: int, head_dim: int, device, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 500.0 ** (-torch.arange(head_dim // 2, dtype=torch.float64, device=device) * 2 / head_dim)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def exact(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, sign: int = 1
) -> torch.Tensor:
    """The rotation as a product of complex numbers in fp64; sign -1 is the inverse, the gradient."""
    x1, x2 = x.double().chunk(2, -1)
    factor = torch.complex(cos.double(), sign * sin.double())[positions].unsqueeze(-2)
    y = torch.complex(x1, x2) * factor
    return torch.cat((y.real, y.imag), -1)


def total(tensors) -> torch.Tensor:
    return torch.stack([x.sum() for x in tensors]).sum()


def qk(shape, heads, kv_heads, head_dim, dtype, generator, grad=True) -> tuple[torch.Tensor, torch.Tensor]:
    device = generator.device
    q = torch.randn((*shape, heads, head_dim), generator=generator, device=device).to(dtype)
    k = torch.randn((*shape, kv_heads, head_dim), generator=generator, device=device).to(dtype)
    return q.requires_grad_(grad), k.requires_grad_(grad)


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
@pytest.mark.parametrize("head_dim", [2, 16, 40, 64, 80, 96, 128, 192, 256])
def test_values_and_gradients(head_dim, dtype, device, generator):
    q, k = qk((2, 3), 5, 2, head_dim, dtype, generator)
    cos, sin = tables(9, head_dim, device)
    outputs = rope(q, k, cos, sin, offset=6, backend="triton")
    upstream = [torch.randn(x.shape, generator=generator, device=device).to(dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, (q, k), upstream)
    positions = torch.arange(6, 9, device=device)
    plain = ROPE.plain(q, k, cos, sin, None, 6)
    plain_grads = torch.autograd.grad(plain, (q, k), upstream)
    for i, x in enumerate((q, k)):
        assert outputs[i].dtype == dtype and outputs[i].is_contiguous() and grads[i].is_contiguous()
        wanted, wanted_grad = exact(x, cos, sin, positions), exact(upstream[i], cos, sin, positions, -1)
        check_budget(outputs[i], wanted, as_interpreted(plain[i], wanted), name="qk"[i])
        check_budget(grads[i], wanted_grad, as_interpreted(plain_grads[i], wanted_grad), name="d" + "qk"[i])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_ways_to_give_positions_agree(index_dtype, backend, device, generator):
    q, k = qk((2, 5), 4, 2, 16, torch.bfloat16, generator)
    cos, sin = tables(12, 16, device)
    by_offset = rope(q, k, cos, sin, offset=7, backend=backend)
    one = torch.arange(7, 12, device=device, dtype=index_dtype)
    flat = rope(q.flatten(0, 1), k.flatten(0, 1), cos, sin, positions=one.repeat(2), backend=backend)
    strided = torch.stack((one, -one), -1)[:, 0].expand(2, 5)
    for other in (
        rope(q, k, cos, sin, positions=one, backend=backend),
        rope(q, k, cos, sin, positions=strided, backend=backend),
        [x.unflatten(0, (2, 5)) for x in flat],
    ):
        for a, b in zip(by_offset, other, strict=True):
            assert torch.equal(a, b)
    packed = rope(q[0], k[0], cos, sin, offset=7, backend=backend)
    assert torch.equal(packed[0], by_offset[0][0]) and torch.equal(packed[1], by_offset[1][0])


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_positions_outside_the_table_give_nan_for_their_token_only(backend, device, generator):
    q, k = qk((1, 6), 2, 1, 40, torch.float32, generator)
    cos, sin = tables(4, 40, device)
    positions = torch.tensor([0, -1, 3, 4, 2**40, -(2**40)], device=device)
    for x in rope(q, k, cos, sin, positions=positions, backend=backend):
        assert x.isnan().all(-1).all(-1).squeeze(0).tolist() == [False, True, False, True, True, True]
        assert not x[:, [0, 2]].isnan().any()


def test_views_of_packed_qkv_are_not_copied(device, generator):
    qkv = torch.randn((2, 5, 4 + 2 * 2, 80), generator=generator, device=device, requires_grad=True)
    q, k, _ = qkv.split((4, 2, 2), dim=2)
    cos, sin = tables(5, 80, device)
    with CopyCounter() as counter:
        y = rope(q, k, cos, sin, backend="triton")
    assert counter.copies == 0
    for a, b in zip(y, rope(q.contiguous(), k.contiguous(), cos, sin, backend="triton"), strict=True):
        assert torch.equal(a, b)
    (grad,) = torch.autograd.grad(y, qkv, [torch.ones_like(x) for x in y])
    reference = rope_reference(q, k, cos, sin)
    (wanted,) = torch.autograd.grad(reference, qkv, [torch.ones_like(x) for x in reference])
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("layout", ["transposed_heads", "transposed_dim", "every_second", "expanded"])
def test_any_strides_of_inputs_and_tables(layout, device, generator):
    x = torch.randn((2, 6, 6, 32), generator=generator, device=device)
    q = {
        "transposed_heads": x.transpose(1, 2),
        "transposed_dim": x[..., :6].transpose(-1, -2)[:, :, :6],
        "every_second": x[:, :, :, ::2],
        "expanded": x[:1, :1, :, :16].expand(2, 6, 6, 16),
    }[layout]
    cos, sin = tables(6, q.shape[-1], device)
    wide = torch.stack((cos, sin), -1)  # strided tables
    with CopyCounter() as counter:
        actual = rope(q, q[:, :, :2], cos, sin, backend="triton")
    assert counter.copies == 0
    again = rope(q, q[:, :, :2], wide[..., 0], wide[..., 1], backend="triton")
    for a, b, c in zip(actual, again, rope_reference(q, q[:, :, :2], cos, sin), strict=True):
        torch.testing.assert_close(a, c)
        assert torch.equal(a, b)


def test_upstream_gradients_of_any_strides_are_used_in_place_and_left_alone(device, generator):
    q, k = qk((2, 5), 4, 2, 16, torch.float32, generator)
    cos, sin = tables(5, 16, device)
    outputs = rope(q, k, cos, sin, backend="triton")
    for dq in (
        torch.full((), 2.0, device=device).expand(2, 5, 4, 16),
        torch.randn((2, 5, 4, 32), generator=generator, device=device)[..., ::2],
        torch.randn((16, 4, 5, 2), generator=generator, device=device).permute(3, 2, 1, 0),
    ):
        before = dq.clone()
        dk = torch.ones_like(k)
        with CopyCounter() as counter:
            actual = torch.autograd.grad(outputs, (q, k), (dq, dk), retain_graph=True)
        assert counter.copies == 0 and torch.equal(dq, before) and torch.equal(dk, torch.ones_like(k))
        wanted = torch.autograd.grad(outputs, (q, k), (dq.contiguous(), dk), retain_graph=True)
        assert torch.equal(actual[0], wanted[0]) and torch.equal(actual[1], wanted[1])


def test_one_used_output_frozen_inputs_and_no_grad(device, generator):
    q, k = qk((1, 3), 4, 2, 16, torch.float32, generator)
    cos, sin = tables(3, 16, device)
    both = torch.autograd.grad([x.sum() for x in rope(q, k, cos, sin, backend="triton")], (q, k))
    for i in (0, 1):
        y = rope(q, k, cos, sin, backend="triton")[i]
        one = torch.autograd.grad(y.sum(), (q, k), allow_unused=True)
        assert torch.equal(one[i], both[i])
        other = one[1 - i]
        assert other is None or not other.any()
        inputs = [x.detach().requires_grad_(i == j) for j, x in enumerate((q, k))]
        total(rope(inputs[0], inputs[1], cos, sin, backend="triton")).backward()
        grad = inputs[i].grad
        assert grad is not None and torch.equal(grad, both[i]) and inputs[1 - i].grad is None
    with torch.no_grad():
        assert not any(x.requires_grad for x in rope(q, k, cos, sin, backend="triton"))
    learned = cos.clone().requires_grad_()
    for backend in ("triton", "reference"):
        total(rope(q, k, learned, sin, backend=backend)).backward()
        assert learned.grad is None


def test_backward_twice_adds_the_same_gradient(device, generator):
    q, k = qk((1, 3), 2, 1, 16, torch.float32, generator)
    cos, sin = tables(3, 16, device)
    loss = total([x * x for x in rope(q, k, cos, sin, backend="triton")])
    loss.backward(retain_graph=True)
    assert q.grad is not None
    first = q.grad.clone()
    loss.backward()
    assert torch.equal(q.grad, 2 * first)
    torch.testing.assert_close(first, 2 * q.detach())  # a rotation keeps the norm


@pytest.mark.parametrize(("seq_len", "heads", "kv_heads", "head_dim"), [(5, 3, 1, 40), (130, 1, 1, 6), (1, 9, 17, 96)])
def test_every_element_is_written(seq_len, heads, kv_heads, head_dim, device, generator):
    q, k = qk((2, seq_len), heads, kv_heads, head_dim, torch.float32, generator)
    cos, sin = tables(seq_len, head_dim, device)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert q.new_empty(3).isnan().all()
        outputs = rope(q, k, cos, sin, backend="triton")
        grads = torch.autograd.grad(outputs, (q, k), [torch.ones_like(x) for x in outputs])
    finally:
        torch.use_deterministic_algorithms(False)
    assert not any(x.isnan().any() for x in (*outputs, *grads))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_nothing_to_rotate(shape, device, generator):
    q, k = qk(shape, 2, 1, 16, torch.bfloat16, generator)
    cos, sin = tables(4, 16, device)
    outputs = rope(q, k, cos, sin, backend="triton")
    total(outputs).backward()
    assert outputs[0].shape == q.shape and q.grad is not None and q.grad.shape == q.shape
    assert outputs[1].shape == k.shape and k.grad is not None and k.grad.shape == k.shape


def test_scores_depend_on_the_distance_only(device, generator):
    q, k = qk((1, 1), 1, 1, 64, torch.float32, generator, grad=False)
    cos, sin = tables(4096, 64, device)

    def score(i: int, j: int) -> torch.Tensor:
        at = [torch.tensor([p], device=device) for p in (i, j)]
        rotated_q = rope(q, k, cos, sin, positions=at[0], backend="triton")[0]
        return (rotated_q * rope(q, k, cos, sin, positions=at[1], backend="triton")[1]).sum()

    torch.testing.assert_close(score(4000, 3900), score(100, 0), rtol=1e-4, atol=1e-4)


def test_fp64_runs_the_reference_exactly(device, generator):
    q, k = qk((1, 3), 2, 1, 16, torch.float64, generator)
    cos, sin = tables(3, 16, device, torch.float64)
    outputs = rope(q, k, cos, sin)
    torch.testing.assert_close(outputs[0], exact(q, cos, sin, torch.arange(3, device=device)), rtol=1e-14, atol=1e-14)
    with pytest.raises(TypeError, match="float64"):
        rope(q, k, cos, sin, backend="triton")


@pytest.mark.parametrize("positions", [None, "batch"])
def test_opcheck(positions, device, generator):
    q, k = qk((2, 3), 4, 2, 16, torch.float32, generator)
    cos, sin = tables(5, 16, device)
    at = None if positions is None else torch.randint(5, (2, 3), generator=generator, device=device)
    ops = torch.ops.fuselm
    torch.library.opcheck(ops.rope_forward.default, (q, k, cos, sin, at, 0 if at is not None else 1))
    torch.library.opcheck(ops.rope_backward.default, (q.detach(), k.detach(), cos, sin, at, 0))
    torch.library.opcheck(ops.rope_backward.default, (None, k.detach(), cos, sin, at, 0))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic, device, generator):
    cos, sin = tables(64, 16, device)

    def step(q: torch.Tensor, k: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rope(q, k, cos, sin, offset=offset, backend="triton")

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for batch, seq_len, offset in [(2, 5, 3)] + [(3, 9, 4), (2, 17, 0)] * dynamic:
        qkv = torch.randn((batch, seq_len, 8, 16), generator=generator, device=device, requires_grad=True)
        q, k, _ = qkv.split((4, 2, 2), dim=2)
        got, wanted = compiled(q, k, offset), step(q, k, offset)
        upstream = [torch.randn(x.shape, generator=generator, device=device) for x in wanted]
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
        grads = [torch.autograd.grad(outputs, (q, k), upstream, retain_graph=True) for outputs in (got, wanted)]
        assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1])
        one = torch.autograd.grad(step(q, k, offset)[1].sum(), qkv)[0]
        torch.testing.assert_close(torch.autograd.grad(compiled(q, k, offset)[1].sum(), qkv)[0], one)


_LARGE_STRIDES = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
from fuselm.kernels.rope import rope, rope_reference
token, head = 2**30 + 64, 2**30 + 80
cos, sin = (torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).to(device) for i in (0, 1))
far_tokens, far_heads = ((1, 3, 1, 16), (0, token, 0, 1)), ((1, 1, 4, 16), (0, 0, head, 1))
for shape, strides in (far_tokens, far_heads, ((4, 1, 1, 16), (token, 0, 0, 1))):
    q = torch.empty_strided(shape, strides, dtype=torch.float16, device=device)  # only the pages that are written exist
    q.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(2)))
    k = q.detach().clone()
    for x in (q, k):
        x.requires_grad_()
    y = rope(q, k, cos, sin, offset=1, backend="triton")
    assert torch.equal(y[0], y[1]) and torch.isfinite(y[0]).all(), (shape, y)
    torch.testing.assert_close(y[1], rope_reference(k, k, cos, sin, offset=1)[1])
    upstream = torch.empty_strided(shape, strides, dtype=torch.float16, device=device)
    upstream.copy_(k.detach())
    dk = torch.autograd.grad(y, (k,), (torch.zeros_like(y[0]), k.detach()), retain_graph=True)[0]
    dq = torch.ops.fuselm.rope_backward(upstream, None, cos, sin, None, 1)[0]
    assert torch.equal(dq, dk), (shape, dq, dk)
print("same")
"""


def test_strides_beyond_int32():
    done = subprocess.run([sys.executable, "-c", _LARGE_STRIDES], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0 and done.stdout.strip() == "same", done.stderr


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(device):
    q = torch.randn((1, 2**20 + 3, 16, 128), device=device, dtype=torch.bfloat16)
    k = q[:, :, :2]
    cos, sin = tables(q.shape[1], 128, device)
    y, rotated_k = rope(q, k, cos, sin)
    tail = slice(q.shape[1] - 5, None)
    wanted = rope_reference(q[:, tail], k[:, tail], cos, sin, offset=q.shape[1] - 5)
    torch.testing.assert_close(y[:, tail], wanted[0])
    torch.testing.assert_close(rotated_k[:, tail], wanted[1])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"offset": 6}, ValueError, r"offset=6 with 3 tokens.*6 to 8.*0 to 7"),
        ({"offset": -1}, ValueError, "offset=-1"),
        ({"offset": 1, "positions": torch.zeros(3, dtype=torch.int64)}, ValueError, "offset=1 together with positions"),
        (
            {"positions": torch.zeros(4, dtype=torch.int64)},
            ValueError,
            r"positions has shape \(4,\): expected \(3,\) or \(2, 3\)",
        ),
        ({"positions": torch.zeros(3)}, TypeError, "positions is torch.float32: expected int32 or int64"),
        ({"q": torch.zeros(3, 16)}, ValueError, r"q has shape \(3, 16\)"),
        ({"k": torch.zeros(2, 4, 1, 16)}, ValueError, "number of heads"),
        ({"q": torch.zeros(2, 3, 4, 15), "k": torch.zeros(2, 3, 1, 15)}, ValueError, "head_dim 15: expected an even"),
        ({"k": torch.zeros(2, 3, 1, 16).half()}, TypeError, "k torch.float16"),
        ({"q": torch.zeros(2, 3, 4, 16).int(), "k": torch.zeros(2, 3, 4, 16).int()}, TypeError, "q is torch.int32"),
        ({"cos": torch.zeros(8, 8).bfloat16()}, TypeError, "cos is torch.bfloat16"),
        ({"sin": torch.zeros(8, 16)}, ValueError, r"sin has shape \(8, 16\): expected \(max_seq, 8\)"),
        ({"sin": torch.zeros(9, 8)}, ValueError, r"sin has shape \(9, 8\)"),
        ({"cos": torch.zeros(8, 8, device="meta")}, ValueError, "cos is on meta"),
    ],
)
def test_bad_input_is_named(change, error, message, backend, device):
    arguments: dict[str, Any] = {
        "q": torch.zeros(2, 3, 4, 16),
        "k": torch.zeros(2, 3, 1, 16),
        "cos": torch.ones(8, 8),
        "sin": torch.ones(8, 8),
    }
    arguments |= change
    moved: dict[str, Any] = {
        n: x.to(device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x for n, x in arguments.items()
    }
    with pytest.raises(error, match=message):
        rope(**moved, backend=backend)


def test_launch_fills_threads_with_vectors():
    profile = KNOWN_PROFILES[90]
    for head_dim, itemsize in ((64, 2), (128, 2), (128, 4), (256, 2), (16, 2)):
        launch = rope_launch(4096, 32, 8, head_dim, itemsize, profile)
        per_thread = launch.block_tokens * launch.block_heads * launch.block_half // (32 * launch.num_warps)
        assert per_thread * itemsize == 16 and launch.block_half == head_dim // 2
    assert rope_launch(1, 32, 8, 128, 2, profile).block_tokens == 1
    # Two warps where a token's run in a tile is 512 bytes, four where it is longer.
    assert rope_launch(1024, 12, 12, 64, 2, profile) == RopeLaunch(4, 4, 32, 2, "evict_last")
    assert [rope_launch(1024, *shape, 2, profile).num_warps for shape in ((28, 4, 128), (32, 8, 64))] == [4, 4]
    assert rope_launch(1, 12, 12, 64, 2, profile) == RopeLaunch(1, 4, 32, 1, "evict_last")
    # Halves of whole vectors, and others.
    assert [rope_launch(1024, 24, 8, dim, 2, profile).load for dim in (16, 128, 8, 20)] == ["evict_last"] * 2 + [""] * 2
