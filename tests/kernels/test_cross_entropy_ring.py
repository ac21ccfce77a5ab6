"""The Hopper cross-entropy kernels that keep rows in shared memory: what they take, what they compile to, their
values on a GPU. Their protocol: test_cross_entropy_ring_protocol.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from fuselm.kernels._triton import KNOWN_PROFILES
from fuselm.kernels.cross_entropy_ring import ring_refusal
from fuselm.kernels.launch.cross_entropy import RingLaunch

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


def test_slots_of_a_row():
    launch = RingLaunch(64, 28, 8, writers=8, stream=3)
    assert launch.slots_of(28 * 4096) == (28, 0)
    assert launch.slots_of(28 * 4096 + 64) == (22, 3)
    for stream in (0, 14):
        with pytest.raises(ValueError, match="do not fit"):
            RingLaunch(64, 28, 8, writers=8, stream=stream).slots_of(128256)
    launch = RingLaunch(64, 28, 8, writers=8, parts=2)
    assert launch.slots_of(56 * 4096) == (28, 0)
    for vocab in (56 * 4096 + 64, 4096):
        with pytest.raises(ValueError, match="do not fit"):
            launch.slots_of(vocab)


_COMPILED = """
import json, re, sys, torch
import fuselm.kernels.cross_entropy_launchers as launchers
from fuselm.kernels._triton import triton
from fuselm.kernels.aot import compile_only
from fuselm.kernels.cross_entropy import cross_entropy
from fuselm.kernels.launch.cross_entropy import RingLaunch

def arrivals(body):
    # what stands before each arrival, from the last read of a slot on, or from the last wait
    kinds = "ld[.]shared[.]v4|fence[.]proxy[.]async|bar[.]sync|mbarrier[.]arrive[.]shared|mbarrier[.]try_wait"
    found, events = [], []
    for event in re.findall(kinds, body):
        if "arrive" in event:
            found.append(events)
        events = [*events, event] if "bar" in event[:3] or "fence" in event else []
    return found

report = []
for vocab, values in ((50304, (128, 13, 16)), (128256, (128, 7, 16, 2)), (128256, (64, 28, 8, 1, 8, 3)),
                      (50304, (64, 14, 4, 2, 4)), (50304, (64, 28, 8, 1, 8, 0, 2)),
                      (128256, (64, 28, 8, 1, 8, 0, 0, 2)), (50304, None)):
    ring = RingLaunch(*values) if values else None
    launchers.ring_launch = lambda *_: ring
    kernels = []
    with compile_only(90) as compiled:
        run = triton.runtime.jit.JITFunction.run
        triton.runtime.jit.JITFunction.run = lambda *a, **k: (kernels.append(run(*a, **k)), kernels[-1])[1]
        logits = torch.empty((40, vocab), dtype=torch.bfloat16).requires_grad_()
        cross_entropy(logits, torch.zeros(40, dtype=torch.int64), backend="triton", z_loss=1e-4)
        triton.runtime.jit.JITFunction.run = run
    names = [k.metadata.name for k in kernels]
    mine = [i for i, name in enumerate(names) if name in ("cross_entropy_ring_kernel", "cross_entropy_groups_kernel")]
    if ring is None:
        assert not mine and "cross_entropy_forward_kernel" in names, names
        break
    (i,) = mine
    numbers, ptx = compiled[i], kernels[i].asm["ptx"]
    report.append({
        "launch": str(ring),
        "spills": numbers.spill_bytes,
        "fits": (numbers.shared_memory + 1024) * ring.programs <= 233472,
        "registers": numbers.registers <= ring.max_registers,
        "copies": len(re.findall(r"cp[.]async[.]bulk[.]tensor", ptx)),
        "wide stores": len(re.findall(r"st[.]global[^ ]*[.]v4", ptx)) * 32 * (ring.writers or ring.num_warps),
        "vectors": ring.tile * 8,
        "arrivals": arrivals(ptx),
    })
print(json.dumps(report))
"""


def test_compiled_for_hopper():
    """No spills, as many programs fit on an SM as the launch says, stores of 16 bytes. Before an arrival that gives a
    slot back stands a proxy fence of every thread that read it and then a barrier of them all."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    # copies by TMA, loops that store, places where slots are given back, other arrivals: for the notes, and for slots
    # that TMA has stored
    for row, (copies, stores, given_back, others) in zip(
        report, ((1, 3, 4, 0), (1, 3, 4, 0), (3, 3, 5, 2), (1, 2, 2, 2), (2, 0, 1, 3), (1, 2, 2, 2)), strict=True
    ):
        assert row["spills"] == 0 and row["fits"] and row["registers"] and row["copies"] == copies, row
        assert row["wide stores"] == stores * row["vectors"], row
        fenced = [before for before in row["arrivals"] if "fence.proxy.async bar.sync" in " ".join(before)]
        assert len(fenced) == given_back and len(row["arrivals"]) == given_back + others, row


LAUNCHES = (
    (128, 13, 16),
    (128, 7, 16, 2),
    (64, 28, 8, 1, 8, 3),
    (64, 9, 8, 3),
    (64, 2, 16),
    (128, 14, 8, 1, 8, 2),
    (64, 14, 4, 2, 4, 2),
    (64, 14, 8, 2, 8, 1),
    (64, 28, 8, 1, 8, 3, 2),
    (128, 14, 8, 1, 8, 3, 1),
    (64, 14, 4, 2, 4, 2, 3),
    (64, 28, 8, 1, 8, 0, 0, 2),
    (64, 28, 8, 1, 8, 0, 2, 2),
    (128, 14, 8, 1, 8, 0, 0, 2),
)

_VALUES = """
import torch
import fuselm.kernels.cross_entropy_launchers as launchers
from fuselm.kernels.launch.cross_entropy import RingLaunch

launchers.parts_launch = lambda *_: None  # a single row comes here too
launch = launchers.launch_ring
generator = torch.Generator("cuda").manual_seed(0)

def run(ring, logits, targets, inplace, options, extra):
    launchers.ring_launch = lambda *_: ring
    taken = []
    launchers.launch_ring = lambda *a: (taken.append(1), launch(*a))
    loss, lse, low = (torch.full(targets.shape, float("nan"), device="cuda") for _ in range(3))
    memory = logits.clone()
    gradient = memory if inplace else torch.full_like(logits, float("nan"))
    launchers.launch_forward(memory, targets, loss, lse, low, options=options, gradient=gradient, **extra)
    assert bool(taken) == (ring is not None)
    return loss, lse, low, gradient

def check(ring, dtype, rows, vocab, z_loss, inplace, scaled, with_lse, times):
    what = (str(ring), dtype, rows, vocab, inplace)
    print(*what, flush=True)
    logits = (torch.randn((1, rows, vocab), device="cuda", generator=generator) * 3).to(dtype)
    targets = torch.randint(0, vocab, (rows,), device="cuda", generator=generator)
    if rows > 3:
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
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    pairs = (got[0], want[0], 1e-5), (got[1].double() + got[2], want[1].double() + want[2], 1e-6)
    for name, (a, b, rtol) in zip(("loss", "lse", "gradient"), (*pairs, (got[3].float(), want[3].float(), step))):
        torch.testing.assert_close(a, b, rtol=rtol, atol=3e-7, equal_nan=True, msg=lambda m: f"{name} {what}: {m}")
    for time in range(times):
        again = run(ring, logits, targets, inplace, options, extra)
        for a, b in zip(got, again):
            bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
            assert torch.equal(a.view(bits), b.view(bits)), (what, f"run {time + 2} differs")

modes = ((1e-4, True, True, False), (0.0, False, False, False), (1e-2, False, True, True))
for values in LAUNCHES:
    ring = RingLaunch(*values)
    for vocab in (64, 4096, 8256, 50304, 57344, 57408, 128256):
        if vocab <= 64 * ring.tile and ring.parts > 1:
            continue  # a single chunk
        check(ring, torch.bfloat16, 300, vocab, *modes[0], 20)
    for rows, vocab in ((300, 128256), (8193, 32000), (1, 50304), (1, 128256)):
        check(ring, torch.bfloat16, rows, vocab, *modes[1], 20)
for values in (v for v in LAUNCHES if v[1] == 7 or len(v) > 5):
    check(RingLaunch(*values), torch.bfloat16, 8193, 128256, *modes[0], 5)
    for rows, vocab in ((137, 57408), (34, 128256)):
        check(RingLaunch(*values), torch.float16, rows, vocab, *modes[2], 20)
print("fine")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4))
def test_values_are_those_of_the_portable_kernel(part):
    """In place and not, the gradient on poisoned memory, and the same bits 20 times more. In a process of its own, as a
    kernel that waits for a barrier in vain never returns."""
    if torch.cuda.get_device_capability() != (9, 0):
        assert ring_refusal(_logits(3, 128), _logits(3, 128), KNOWN_PROFILES[80], False, False) is not None
        return
    script = f"LAUNCHES = {LAUNCHES[part::4]}\n{_VALUES}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and "fine" in done.stdout, (done.stdout[-500:], done.stderr[-3000:])
