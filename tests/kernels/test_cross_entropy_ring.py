"""The Hopper cross-entropy kernel that keeps rows in shared memory: what it takes, what it compiles to, its values on a
GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.attention.hopper_common import python_function
from fuselm.kernels.cross_entropy_ring import _chunks_of, ring_refusal

HOPPER = KNOWN_PROFILES[90]


def _logits(rows: int, vocab: int, pitch: int = 0, start: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    pitch = pitch or vocab
    memory = torch.zeros(start + rows * pitch, dtype=dtype)
    return memory.as_strided((1, rows, vocab), (rows * pitch, pitch, 1), start)


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (_logits(3, 128), None),
        (_logits(3, 128, dtype=torch.float16), None),
        (_logits(3, 128, pitch=144), None),
        (_logits(1, 128, pitch=129), None),
        (_logits(6, 128).view(2, 3, 128), None),
        (_logits(12, 128).view(4, 3, 128)[::2, :2], "no constant distance"),
        (_logits(3, 128, pitch=136), "32 bytes"),
        (_logits(3, 128, start=8), "32 bytes"),
        (_logits(3, 120), "multiple of 64"),
        (_logits(3, 128, dtype=torch.float32), "fp32"),
    ],
)
def test_what_the_kernel_takes(logits, words):
    reason = ring_refusal(logits, logits, HOPPER, smoothing=False, softcap=False)
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_options_and_devices_that_keep_the_portable_kernel():
    logits = _logits(3, 128)
    for smoothing, softcap in ((True, False), (False, True)):
        assert "smoothing" in str(ring_refusal(logits, logits, HOPPER, smoothing, softcap))
    for arch in (80, 100, 120):
        assert "9.0" in str(ring_refusal(logits, logits, KNOWN_PROFILES[arch], False, False))
    gradient = _logits(3, 128, pitch=129)
    assert ring_refusal(logits, gradient, HOPPER, False, False) is not None


@pytest.mark.parametrize(("tile", "slots"), [(128, 13), (128, 7), (64, 1), (64, 13), (256, 2)])
@pytest.mark.parametrize("vocab", [64, 4096, 8192, 8256, 50304, 106496, 106560, 128256])
def test_a_row_has_as_many_loads_as_slots_are_freed_and_no_slot_is_taken_twice(tile, slots, vocab):
    """The order in which the kernel's docstring has chunks loaded, used and freed, played through for three rows."""
    chunks, again = python_function(_chunks_of)(vocab, tile, slots)
    assert (chunks - 1) * tile * 64 < vocab <= chunks * tile * 64 and 0 <= again < chunks
    order = [(row, chunk) for row in range(3) for chunk in (*range(chunks), *range(again))]
    held: dict[int, tuple[int, int]] = {}
    asked = 0

    def produce() -> None:
        nonlocal asked
        while asked < len(order) and asked % slots not in held:
            held[asked % slots] = order[asked]
            asked += 1

    produce()
    for row in range(3):
        base = row * (chunks + again)
        for i in range(chunks):  # the first pass
            assert held[(base + i) % slots] == (row, i)
            if i < again:
                del held[(base + i) % slots]
                produce()
        for i in (*range(again, chunks), *range(again)):  # the second
            number = base + i if i >= again else base + chunks + i
            assert held.pop(number % slots) == (row, i)
            produce()
    assert asked == len(order) and not held


_COMPILED = """
import json, re, torch
import fuselm.kernels.cross_entropy_launchers as launchers
from fuselm.kernels._triton import triton
from fuselm.kernels.aot import compile_only
from fuselm.kernels.cross_entropy import cross_entropy
from fuselm.kernels.launch.cross_entropy import RingLaunch

report = []
for choice in ((128, 13, 16), (128, 7, 16, 2), (64, 9, 8, 3)):
    for ring in (RingLaunch(*choice), None):
        launchers.ring_launch = lambda *_: ring
        kernels = []
        with compile_only(90) as compiled:
            run = triton.runtime.jit.JITFunction.run
            triton.runtime.jit.JITFunction.run = lambda *a, **k: (kernels.append(run(*a, **k)), kernels[-1])[1]
            logits = torch.empty((40, 50304), dtype=torch.bfloat16).requires_grad_()
            cross_entropy(logits, torch.zeros(40, dtype=torch.int64), backend="triton", z_loss=1e-4)
            triton.runtime.jit.JITFunction.run = run
        names = [k.metadata.name for k in kernels]
        if ring is None:
            assert "cross_entropy_ring_kernel" not in names and "cross_entropy_forward_kernel" in names, names
            break
        kernel = kernels[names.index("cross_entropy_ring_kernel")]
        numbers = next(k for k in compiled if k.name == "cross_entropy_ring_kernel")
        ptx = kernel.asm["ptx"]
        report.append({
            "spills": numbers.spill_bytes,
            "fits": (numbers.shared_memory + 1024) * ring.programs <= 233472,
            "registers": numbers.registers <= ring.max_registers,
            "loads": len(re.findall(r"cp\\.async\\.bulk\\.tensor", ptx)),
            "wide stores": len(re.findall(r"st\\.global\\S*\\.v4", ptx)),
            "wide reads": len(re.findall(r"ld\\.shared\\S*\\.v4", ptx)),
            "vectors": ring.tile * 8 // (32 * ring.num_warps),
        })
print(json.dumps(report))
"""


def test_compiled_for_hopper():
    """No spills, as many programs fit on an SM as the launch says, all accesses of 16 bytes, one TMA copy a chunk."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 3
    for row in report:
        assert row["spills"] == 0 and row["fits"] and row["registers"] and row["loads"] == 1, row
        assert row["wide stores"] == 3 * row["vectors"] and row["wide reads"] == 6 * row["vectors"], row


_VALUES = """
import torch
import fuselm.kernels.cross_entropy_launchers as launchers
from fuselm.kernels.launch.cross_entropy import RingLaunch

def run(ring, logits, targets, inplace, options, extra):
    launchers.ring_launch = lambda *_: ring
    taken = []
    kept, launchers.launch_ring = launchers.launch_ring, lambda *a: (taken.append(1), launch(*a))
    rows = targets.numel()
    loss, lse, low = (torch.full((rows,), float("nan"), device="cuda") for _ in range(3))
    memory = logits.clone()
    gradient = memory if inplace else torch.full_like(logits, float("nan"))
    launchers.launch_forward(memory, targets, loss, lse, low, options=options, gradient=gradient, **extra)
    launchers.launch_ring = kept
    assert bool(taken) == (ring is not None)
    return loss, lse.double() + low.double(), gradient.double()

launch = launchers.launch_ring
generator = torch.Generator("cuda").manual_seed(0)
launches = [RingLaunch(128, 13, 16), RingLaunch(128, 7, 16, 2), RingLaunch(64, 9, 8, 3), RingLaunch(64, 2, 16)]
modes = ((300, 1e-4, True, True, False), (34, 0.0, False, False, False), (137, 1e-2, False, True, True))
cases = [(launches[0], torch.bfloat16, mode) for mode in modes]
cases += [(ring, torch.bfloat16, modes[0]) for ring in launches[1:]]
cases += [(launches[1], torch.float16, modes[2])]
for ring, dtype, (rows, z_loss, inplace, scaled, with_lse) in cases:
    for vocab in (64, 4096, 8192, 8256, 50304, 57344, 57408, 128256):
        logits = (torch.randn((1, rows, vocab), device="cuda", generator=generator) * 3).to(dtype)
        targets = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)
        targets[::7] = -100
        logits[0, 0] = float("nan")  # ignored
        logits[0, 1, : vocab // 2] = float("-inf")
        targets[2], targets[3] = vocab, vocab - 1
        logits[0, 3, vocab - 1] += 12  # p - 1 is small beside p
        extra = {"skip_ignored": not with_lse}
        extra["scale"] = torch.rand(rows, device="cuda", generator=generator) if scaled else None
        extra["grad_lse"] = torch.randn(rows, device="cuda", generator=generator) if with_lse else None
        options = (-100, 0.0, z_loss, 0.0)
        want = run(None, logits, targets, inplace, options, extra)
        got = run(ring, logits, targets, inplace, options, extra)
        again = run(ring, logits, targets, inplace, options, extra)
        step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
        for name, a, b, c, rtol in zip(("loss", "lse", "gradient"), got, want, again, (1e-5, 1e-6, step)):
            what = (name, vocab, ring, dtype, rows)
            torch.testing.assert_close(a, b, rtol=rtol, atol=3e-7, equal_nan=True, msg=lambda m: f"{what}: {m}")
            assert torch.equal(a.nan_to_num(7.0), c.nan_to_num(7.0)), what
print("fine")
"""


@pytest.mark.gpu
def test_values_are_those_of_the_portable_kernel():
    """In a process of its own, as a kernel that waits for a barrier in vain never returns."""
    if torch.cuda.get_device_capability() != (9, 0):
        assert ring_refusal(_logits(3, 128), _logits(3, 128), KNOWN_PROFILES[80], False, False) is not None
        return
    done = subprocess.run([sys.executable, "-c", _VALUES], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr[-3000:]
