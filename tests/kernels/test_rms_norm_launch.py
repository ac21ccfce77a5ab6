"""RMSNorm: every form of the kernels gives the same result; launch choices; strides, heads and the weight's offset."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fuselm
from fuselm.kernels import rms_norm_launchers as module
from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.launch.rms_norm import RmsNormLaunch, backward_launch, forward_launch, split_width, sum_launch

LAUNCHES = {
    "padded": RmsNormLaunch(1, 512, 0, 4),
    "tail": RmsNormLaunch(1, 256, 64, 1),
    "rows": RmsNormLaunch(4, 512, 0, 4, 2),
    "rows and tail": RmsNormLaunch(2, 256, 64, 4, 3),
    "rows in one thread": RmsNormLaunch(2, 512, 0, 1, 2),
    "staged": RmsNormLaunch(1, 512, 0, 4, 3, 3),
    "late weight": RmsNormLaunch(2, 512, 0, 4, late_weight=True),
    "late weight, tail": RmsNormLaunch(1, 256, 64, 1, late_weight=True),
    "rows that stay in L2": RmsNormLaunch(1, 512, 0, 4, late_weight=True, load="evict_last"),
    "blocks, a row a warp": RmsNormLaunch(4, 128, 0, 4, late_weight=True, blocks=3),
    "one program": RmsNormLaunch(8, 512, 0, 4, 1),
    "one program, two rows": RmsNormLaunch(2, 256, 64, 4, 1),
    "chunked": RmsNormLaunch(1, 128, 0, 4, 3),
    "chunked rows": RmsNormLaunch(4, 64, 0, 4, 2),
}


def _inputs(device: torch.device, generator: torch.Generator, dtype: torch.dtype = torch.float32):
    """x and a residual of 7 rows of 300 elements, one row all zero, and a weight."""
    x, r = (torch.randn(7, 300, device=device, generator=generator).to(dtype) for _ in range(2))
    x[3], r[3] = 0, 0
    w = torch.randn(300, device=device, generator=generator).to(dtype)
    return [t.requires_grad_() for t in (x, r, w)]


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.parametrize("residual", [False, True])
def test_every_form_of_the_kernels_agrees_with_the_formula(launch, residual, device, generator, monkeypatch):
    monkeypatch.setattr(module, "forward_launch", lambda *_: launch)
    monkeypatch.setattr(module, "backward_launch", lambda *_: dataclasses.replace(launch, blocks=1))
    x, r, w = _inputs(device, generator)
    xd, rd, wd = (t.detach().double().requires_grad_() for t in (x, r, w))
    if residual:
        ours = fuselm.add_rms_norm(x, r, w, eps=1e-3, offset=1.0, backend="triton")
        h = xd + rd
        exact = (torch.nn.functional.rms_norm(h, (300,), 1 + wd, 1e-3), h)
        leaves, exact_leaves = (x, r, w), (xd, rd, wd)
    else:
        ours = (fuselm.rms_norm(x, w, eps=1e-3, offset=1.0, backend="triton"),)
        exact = (torch.nn.functional.rms_norm(xd, (300,), 1 + wd, 1e-3),)
        leaves, exact_leaves = (x, w), (xd, wd)
    upstream = [torch.randn(o.shape, device=device, generator=generator) for o in ours]
    grads = torch.autograd.grad(ours, leaves, upstream)
    exact_grads = torch.autograd.grad(exact, exact_leaves, [u.double() for u in upstream])
    for a, b in zip((*ours, *grads), (*exact, *exact_grads), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("n", "programs", "rows"),
    [
        (257, 8, 19),
        (301, 16, 24),  # a second block
        (301, 8, 9),
        (511, 8, 16),  # a row that begins at a border has one vector more than others
        (303, 0, 8),  # 0: the weight late
        (263, 0, 8),
    ],
)
def test_rows_that_start_anywhere_give_what_padded_ones_give(n, programs, rows, dtype, device, generator, monkeypatch):
    x, r = (torch.randn(rows, n, device=device, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    w = torch.randn(n, device=device, generator=generator).to(dtype).requires_grad_()
    dy, dh = (torch.randn(rows, n, device=device, generator=generator).to(dtype) for _ in range(2))
    results = []
    for launch in (
        RmsNormLaunch(1, 1024, 0, 4, 4),
        RmsNormLaunch(1, 256, 0 if n < 260 else 256, 4, programs, 3, unaligned=True, late_weight=not programs),
    ):
        monkeypatch.setattr(module, "forward_launch", functools.partial(lambda value, *_: value, launch))
        monkeypatch.setattr(module, "backward_launch", functools.partial(lambda value, *_: value, launch))
        y, h = fuselm.add_rms_norm(x, r, w, backend="triton")
        plain = fuselm.rms_norm(x, w, backend="triton")
        grads = torch.autograd.grad((y, h), (x, r, w), (dy, dh))
        results.append((y, h, plain, *grads, *torch.autograd.grad(plain, (x, w), dy)))
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("programs", [8, 0])
def test_rows_that_start_anywhere_of_several_dtypes_follow_the_formula(programs, device, generator, monkeypatch):
    """A weight that another dtype than its own would spoil, an offset, an eps that counts, and the rounded sum."""
    launch = RmsNormLaunch(1, 256, 64, 4, programs, 3, unaligned=True, late_weight=not programs)
    monkeypatch.setattr(module, "forward_launch", lambda *_: launch)
    monkeypatch.setattr(module, "backward_launch", lambda *_: launch)
    x, r, dy, dh = (torch.randn(9, 301, device=device, generator=generator) for _ in range(4))
    x, r, dy, dh = x.bfloat16(), r.half(), dy.bfloat16(), dh.half()
    w = -1 + 2.0**-10 * (1 + torch.rand(301, device=device, generator=generator))
    y, h, rstd = module.launch_forward(x, r, w, 0.5, 1.0)
    dx, dw = module.launch_backward(dy, None, h, w, rstd, 1.0, True)
    dx_of_both, none = module.launch_backward(dy, dh, h, w, rstd, 1.0, False)
    leaf, weight = h.double().requires_grad_(), w.double().requires_grad_()
    exact = torch.nn.functional.rms_norm(leaf, (301,), 1 + weight, 0.5)
    exact_dx, exact_dw = torch.autograd.grad(exact, (leaf, weight), dy.double())
    assert torch.equal(h, (x.float() + r.float()).half()) and none.numel() == 0
    torch.testing.assert_close(rstd, (leaf.square().mean(-1) + 0.5).rsqrt().float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(y.double(), exact, rtol=2.0**-7, atol=0)  # the interpreter truncates to bf16
    torch.testing.assert_close(dx.double(), exact_dx, rtol=2.0**-9, atol=2.0**-22)
    torch.testing.assert_close(dx_of_both.double(), exact_dx + dh.double(), rtol=2.0**-10, atol=2.0**-22)
    torch.testing.assert_close(dw, exact_dw.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter multiplies in numpy
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("programs", [8, 0])
def test_a_row_that_is_not_finite_spoils_no_neighbour_in_its_vectors(bad, programs, device, generator, monkeypatch):
    launch = RmsNormLaunch(1, 256, 0, 4, programs, 3, unaligned=True, late_weight=not programs)
    monkeypatch.setattr(module, "forward_launch", lambda *_: launch)
    monkeypatch.setattr(module, "backward_launch", lambda *_: launch)
    x, r, dy, dh = (torch.randn(19, 257, device=device, generator=generator).bfloat16() for _ in range(4))
    results = []
    for value in (0.0, bad):
        for t in (x, r, dy, dh):
            t[[0, 7, 18]] = value
        leaf = x.clone().requires_grad_()
        y, h = fuselm.add_rms_norm(leaf, r, backend="triton")
        results.append((y, h, *torch.autograd.grad((y, h), leaf, (dy, dh))))
    others = [i for i in range(19) if i not in (0, 7, 18)]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[others], b[others]) and a.isfinite().all()
        assert not b[[0, 7, 18]].isfinite().any()


class _Counting:
    """Stands in for a kernel and notes its launches."""

    def __init__(self, kernel, launches: list) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        self.launches.append(grid)
        return self.kernel[grid]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n"), [(1, 3), (1, 300), (1, 4096), (5, 257), (16, 768), (2, 4097), (64, 64)])
def test_few_rows_take_one_launch(rows, n, dtype, device, generator, monkeypatch):
    """A launch that adds partials takes as long as these backward passes: their one program writes dw itself."""
    assert backward_launch(rows, n, dtype.itemsize, KNOWN_PROFILES[90]).programs == 1
    launches = []
    for name in ("rms_norm_backward_kernel", "sum_partials_kernel"):
        monkeypatch.setattr(module, name, _Counting(getattr(module, name), launches))
    x, dy = (torch.randn(rows, n, device=device, generator=generator).to(dtype) for _ in range(2))
    w = torch.randn(n, device=device, generator=generator).to(dtype).requires_grad_()
    x.requires_grad_()
    dx, dw = torch.autograd.grad(fuselm.rms_norm(x, w, backend="triton"), (x, w), dy)
    assert launches == [(1,)] and dw.dtype == dtype
    xd, wd = (t.detach().double().requires_grad_() for t in (x, w))
    exact = torch.autograd.grad(torch.nn.functional.rms_norm(xd, (n,), wd, 1e-6), (xd, wd), dy.double())
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1e-2}[dtype]
    for ours, right in zip((dx, dw), exact, strict=True):
        error = (ours.double() - right).norm() / right.norm()
        assert error <= tolerance


@pytest.mark.parametrize("view", ["rows of a wider tensor", "one element into a tensor", "expanded"])
def test_unaligned_rows_of_tensors_that_are_not_dense_are_read_narrowly(view, device, generator, monkeypatch):
    base = torch.randn(20, 1100, device=device, generator=generator)
    x = {
        "rows of a wider tensor": base[:, 3:1030],
        "one element into a tensor": base.flatten()[1 : 1 + 20 * 1027].view(20, 1027),
        "expanded": base[:1, :1027].expand(20, 1027),
    }[view].requires_grad_()
    assert backward_launch(20, 1027, 4, KNOWN_PROFILES[90]).unaligned
    taken = []
    for name in ("rms_norm_unaligned_forward_kernel", "rms_norm_unaligned_backward_kernel"):
        monkeypatch.setattr(module, name, _Counting(getattr(module, name), taken))
    dense = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    results = []
    for leaf in (x, dense):
        y = fuselm.rms_norm(leaf, backend="triton")
        results.append((y, torch.autograd.grad(y, leaf, y.detach().cos())[0]))
    assert len(taken) == 2  # the dense tensor's
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_unaligned_rows_beside_tensors_that_are_not_dense(device, generator):
    """One tensor in turn has rows of a wider tensor, or the weight every second element."""
    base = torch.randn(4, 9, 1100, device=device, generator=generator)
    x_view, r_view, dy_view, dh_view = views = base[..., 3:1030]
    x, r, dy, dh = (view.contiguous() for view in views)
    w_view = torch.randn(1027, 2, device=device, generator=generator)[:, 1]
    w = w_view.contiguous()
    y, h, rstd = module.launch_forward(x, r, w, 1e-6, 0.0)
    dx, dw = module.launch_backward(dy, dh, x, w, rstd, 0.0, True)
    assert backward_launch(9, 1027, 4, KNOWN_PROFILES[90]).unaligned and module._all_dense(x, r, dy, dh)
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    for residual, weight in ((r_view, w), (r, w_view)):
        for a, b in zip(module.launch_forward(x, residual, weight, 1e-6, 0.0), (y, h, rstd), strict=True):
            close(a, b)
    for tensors in ((dy_view, dh, x, w), (dy, dh_view, x, w), (dy, dh, x_view, w), (dy, dh, x, w_view)):
        for a, b in zip(module.launch_backward(*tensors, rstd, 0.0, True), (dx, dw), strict=True):
            close(a, b)


def _launches(rows: int, n: int, itemsize: int, arch: int):
    """(launch, tensors it reads) of both directions, with a residual or without, of dense tensors or views."""
    for residual in (False, True):
        for dense in (False, True):
            arguments = rows, n, itemsize, KNOWN_PROFILES[arch], residual, dense
            yield forward_launch(*arguments), 1 + residual
            yield backward_launch(*arguments), 2 + residual


WIDTHS = (1, 3, 64, 96, 257, 641, 768, 769, 1536, 2880, 4096, 4097, 4352, 5120, 5121, 8192, 8193, 12001, 14336)


@pytest.mark.parametrize("rows", [1, 2, 65536])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_launches_are_possible_for_every_width(arch, itemsize, rows):
    profile = KNOWN_PROFILES[arch]
    for n in (*WIDTHS, 16383, 16384, 16385, 65535, 65536, *range(5, 16384, 211)):
        for launch, tensors in _launches(rows, n, itemsize, arch):
            for size in (launch.block_rows, launch.block_n, launch.num_warps):
                assert size > 0 and size & (size - 1) == 0, (n, launch)
            columns = launch.blocks * launch.block_n + launch.block_tail
            assert launch.num_warps <= 32 and columns < 2 * max(n, 16)
            assert not launch.block_tail or launch.covers(n)  # chunks have no tail
            assert launch.blocks == 1 or (launch.late_weight and launch.block_rows == launch.num_warps)  # a row a warp
            if launch.covers(n):  # elements a thread holds: with more some would spill
                most = 40
                if launch.unaligned:  # the weight late; backward; forward on a grid
                    most = 64 if launch.late_weight else 24 if launch.max_registers else 48
                assert launch.block_rows * columns / (32 * launch.num_warps) <= most, (n, launch)
            else:
                assert launch.block_rows * launch.block_n / (32 * launch.num_warps) <= 32, (n, launch)
            # Rows on their way through shared memory, all but the one that is computed.
            staged = (launch.num_stages - 1) * launch.block_rows * columns * itemsize * tensors
            assert staged + 512 <= profile.shared_memory, (n, launch)
        sums = sum_launch(132 * 8, n, profile)
        assert sums.block_partials * sums.block_n <= 16384


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("arch", [80, 90, 100, 120])
def test_unaligned_rows_begin_equally_deep_in_each_program_that_takes_several(arch, itemsize):
    vector, found = 16 // itemsize, 0
    for n in (*WIDTHS, 513, 521, *range(1025, 16384, 118)):
        for launch, _tensors in _launches(65536, n, itemsize, arch):
            if not launch.unaligned:
                continue
            found += 1
            assert n % vector and launch.block_n + launch.block_tail >= n // vector * vector and launch.block_rows == 1
            assert launch.programs % vector == 0 and (launch.programs == 0) == launch.late_weight
            # Registers come in eights. Of 84 the kernel takes 80, for bf16 and without a tail.
            assert launch.max_registers % 8 == 0 or (launch.max_registers, launch.block_tail, itemsize) == (84, 0, 2)
            resident = 65536 // (32 * launch.num_warps * max(launch.max_registers, 1))
            assert launch.programs <= max(resident * KNOWN_PROFILES[arch].num_sms, 8)
    assert found > 100


def test_a_row_is_covered_by_as_few_lanes_as_two_blocks_allow():
    assert split_width(768) == (512, 256) and split_width(5120) == (4096, 1024) and split_width(4097) == (4096, 16)
    assert split_width(4096) == (4096, 0) and split_width(4095) == (4096, 0) and split_width(1) == (16, 0)
    for n in range(256, 3000):
        main, tail = split_width(n)
        assert main + tail >= n and (main + tail) * 3 <= 4 * n + 64


def test_a_residual_takes_launches_of_its_own_where_they_were_faster():
    hopper = KNOWN_PROFILES[90]
    chosen = {
        n: [forward_launch(65536, n, 2, hopper, residual) for residual in (False, True)]
        for n in (768, 384, 2048, 4096, 5120, 8192)
    }
    kept = functools.partial(RmsNormLaunch, load="evict_last")
    assert chosen == {
        768: [kept(4, 256, 0, 4, late_weight=True, blocks=3), kept(2, 1024, 0, 4)],
        384: [kept(4, 512, 0, 2, late_weight=True), kept(1, 256, 128, 1)],
        2048: [kept(1, 2048, 0, 4, late_weight=True), kept(1, 2048, 0, 8)],
        4096: [kept(1, 4096, 0, 8, late_weight=True), kept(1, 4096, 0, 8)],
        5120: [kept(1, 4096, 1024, 4), kept(1, 4096, 1024, 4)],
        8192: [kept(1, 8192, 0, 8, late_weight=True), kept(1, 8192, 0, 16)],
    }
    late = [forward_launch(rows, 4096, 2, hopper).late_weight for rows in (1, hopper.num_sms, hopper.num_sms + 1)]
    assert late == [False, False, True]  # as long as no program waits for a place, registers are not scarce
    assert forward_launch(1, 768, 2, hopper) == kept(1, 256, 0, 1, late_weight=True, blocks=3)
    assert forward_launch(1, 768, 2, hopper, True) == kept(1, 1024, 0, 4)


def test_unaligned_rows_take_the_launches_that_were_faster():
    late = functools.partial(RmsNormLaunch, unaligned=True, late_weight=True)
    ahead = functools.partial(RmsNormLaunch, num_stages=3, unaligned=True)
    hopper = KNOWN_PROFILES[90]
    chosen = {
        n: [
            choose(65536, n, 2, hopper, residual) for choose in (forward_launch, backward_launch) for residual in (0, 1)
        ]
        for n in (513, 769, 3073, 4097, 5121, 8193)
    }
    of_two, of_eight = (functools.partial(ahead, num_warps=w, max_registers=128) for w in (2, 8))
    assert chosen == {
        513: [ahead(1, 512, 0, 1, 2112), late(1, 512, 0, 1)]
        + [ahead(1, 512, 0, 2, programs=1584, max_registers=84)] * 2,
        769: [late(1, 512, 256, 1)] * 2 + [of_two(1, 512, 256, programs=1056)] * 2,
        3073: [ahead(1, 2048, 1024, 2, 132 * 6), ahead(1, 2048, 1024, 4, 132 * 4)]
        + [ahead(1, 2048, 1024, 4, programs=392, max_registers=168)] * 2,
        4097: [late(1, 4096, 0, 4), late(1, 4096, 0, 8)] + [of_eight(1, 4096, 0, programs=264)] * 2,
        5121: [ahead(1, 4096, 1024, 4, 392), ahead(1, 4096, 1024, 8, 264)]
        + [of_eight(1, 4096, 1024, programs=264)] * 2,
        8193: [late(1, 8192, 0, 4), late(1, 8192, 0, 8)] + [ahead(1, 8192, 0, 16, programs=128, max_registers=128)] * 2,
    }
    assert not any(forward_launch(65536, n, 2, hopper, False, n == 511).unaligned for n in (511, 769))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_packed_qkv_are_normalised_without_a_copy(dtype, device, generator):
    qkv = torch.randn(2, 5, 8, 16, device=device, generator=generator).to(dtype).requires_grad_()
    q = qkv[:, :, 1:5]
    w = torch.randn(16, device=device, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(5, 2, 8, 16, device=device, generator=generator).to(dtype).transpose(0, 1)[:, :, 2:6]
    with profile(activities=[ProfilerActivity.CPU]) as events:
        y = fuselm.rms_norm(q, w, backend="triton")
        dq, dw = torch.autograd.grad(y, (q, w), upstream)
    copies = sum(event.name == "aten::clone" for event in events.events() or [])
    assert copies == 1  # the upstream gradient, whose first two dimensions do not merge
    dense = q.detach().clone().requires_grad_()
    want = fuselm.rms_norm(dense, w, backend="triton")
    want_dq, want_dw = torch.autograd.grad(want, (dense, w), upstream.contiguous())
    assert torch.equal(y, want) and torch.equal(dq, want_dq) and torch.equal(dw, want_dw)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_offset_is_added_in_fp32(backend, device):
    """A bf16 weight of 2**-10 vanishes in 1 + weight rounded to bf16; the product must still show it."""
    x = torch.full((2, 64), 3.0, device=device)
    w = torch.full((64,), 2.0**-10, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = fuselm.rms_norm(x, w, eps=0.0, offset=1.0, backend=backend)
    torch.testing.assert_close(y, torch.full_like(y, 1 + 2.0**-10), rtol=1e-6, atol=0)
    y.sum().backward()
    assert w.grad is not None and torch.equal(w.grad, torch.full_like(w, 2.0))


def test_offset_without_a_weight_is_refused(device):
    with pytest.raises(ValueError, match=r"offset=1.0 without a weight"):
        fuselm.rms_norm(torch.ones(2, 4, device=device), offset=1.0)


def test_dw_comes_in_the_dtype_of_the_weight_without_another_launch(device, generator):
    x, _, w = _inputs(device, generator, torch.bfloat16)
    wide = w.detach().float().requires_grad_()
    for weight in (w, wide):
        (dw,) = torch.autograd.grad(fuselm.rms_norm(x, weight, backend="triton").float().sum(), weight)
        assert dw.dtype == weight.dtype and dw.isfinite().all()
