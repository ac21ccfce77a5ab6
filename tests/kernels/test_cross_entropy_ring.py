"""The Hopper cross-entropy kernels that keep rows in shared memory: what they take, what they compile to, their
values on a GPU. Their protocol: test_cross_entropy_ring_protocol.py."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import select
import subprocess
import sys
import tempfile
from typing import Any

import pytest
import torch

from fuselm.kernels import cross_entropy_launchers as launchers
from fuselm.kernels._triton import KNOWN_PROFILES, assume_profile
from fuselm.kernels.cross_entropy_ring import launch_ring, ring_refusal
from fuselm.kernels.launch import cross_entropy as launch_cross_entropy
from fuselm.kernels.launch.cross_entropy import RingLaunch, ring_launch, ring_rows

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
        (_logits(1, 128).expand(1, 3, 128), "stride of 0"),
        (_logits(1, 128).expand(3, 1, 128), "stride of 0"),
        (_logits(1, 128).expand(3, 2, 128), "stride of 0"),
        (_logits(3, 128).view(3, 1, 128).expand(3, 2, 128), "no constant distance"),
        (_logits(3, 120), "multiple of 64"),
        (_logits(8, 120), None),
        (_logits(64, 129, dtype=torch.float16), None),
        (_logits(64, 129).view(4, 16, 129), None),
        (_logits(64, 129).view(64, 1, 129), None),
        (_logits(63, 129), "multiple of 64"),
        (_logits(64, 129, pitch=130), "side by side"),
        (_logits(64, 129, start=8), "side by side"),
        (_logits(1, 129).expand(1, 64, 129), "side by side"),
        (torch.empty((2, 2**20, 50257), dtype=torch.bfloat16, device="meta"), "32 bits"),
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
    for gradient in (_logits(64, 129, pitch=144), _logits(64, 129, start=8)):
        assert "side by side" in str(ring_refusal(_logits(64, 129), gradient, HOPPER, False, False))


def test_launches_that_cannot_be():
    """Refused by name, before anything is launched."""
    numbers = torch.zeros(64)
    for vocab, launch in (
        (8192, RingLaunch(64, 28, 8, writers=8, kept=1)),
        (8192, RingLaunch(64, 1, 8, 8)),
        (8192, RingLaunch(128, 13, 16, kept=1)),
        (8191, RingLaunch(128, 13, 16)),
        (8191, RingLaunch(64, 2, 8, 8)),
    ):
        logits = _logits(64, vocab)
        with pytest.raises(ValueError, match=f"{vocab} logits"):
            launch_ring(
                launch, logits, numbers.long(), numbers, numbers, numbers, logits, None, None, -100, 0.0, False, 132
            )


def test_chunks_for_which_there_is_no_room():
    launch = RingLaunch(64, 28, 8, writers=8)
    assert [launch.again(28 * 4096 + more) for more in (0, 64, 4096, 4160)] == [0, 1, 1, 2]
    assert [launch.again(28 * 4096 - less) for less in (63, 62)] == [0, 1]  # 63 logits of another row in front
    launch = RingLaunch(128, 14, 16, kept=5)
    assert [launch.again(19 * 8192 + more) for more in (-8192, 0, 64)] == [0, 0, 1]


def test_rows_that_are_kept_in_shared_memory():
    groups, long = (ring_launch(vocab, HOPPER) for vocab in (50304, 128256))
    assert groups and groups.writers and not groups.kept and long and long.kept and not long.writers
    ends = (28 * 4096, 25 * 8192)  # of a row in slots; of one of whose chunks six are brought twice
    for launch, vocabs in (
        (groups, (40960, 40961, 50257, 65536, ends[0] - 63, ends[0])),
        (long, (ends[0] + 64, 131072, 151936, ends[1])),
        (None, (32000, 40959, ends[0] - 62, ends[0] + 1, 128255, ends[1] + 64)),
    ):
        for vocab in vocabs:
            assert ring_launch(vocab, HOPPER) == launch, vocab
    for arch, vocab in itertools.product((80, 100, 120), (50257, 50304, 128256)):
        assert ring_launch(vocab, KNOWN_PROFILES[arch]) is None
    assert ring_launch(50304, dataclasses.replace(HOPPER, shared_memory=166912)) is None


def test_rows_of_which_the_ring_takes_most():
    shapes = {
        (16383, 50257): 16320,
        (4095, 50257): 4095,
        (8193, 73448): 8192,
        (8193, 50272): 8192,
        (8193, 128256): 8193,
    }
    assert {shape: ring_rows(*shape) for shape in shapes} == shapes


def test_rows_that_are_left_over(monkeypatch):
    """12 rows of 72 logits make 13.5 lines, the first 8 make 9. The same bits as in one launch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, 6, 72), generator=generator).bfloat16()
    targets = torch.randint(0, 72, (12,), generator=generator)
    targets[[1, 9]], targets[[2, 8]] = -100, 72
    scale, grad_lse = (torch.rand(12, generator=generator) for _ in range(2))
    taken = []

    def portable(_: Any, *tensors: Any) -> None:
        *rows, gradient, scale, grad_lse, ignore_index, z_loss, skip, _sms = tensors
        taken.append(tuple(rows[0].shape))
        options, extra = (ignore_index, 0.0, z_loss, 0.0), {"skip_ignored": skip, "scale": scale, "grad_lse": grad_lse}
        with monkeypatch.context() as patch:
            patch.setattr(launchers, "ring_launch", lambda *_: None)
            launchers.launch_forward(*rows, options=options, gradient=gradient, **extra)

    def run(inplace: bool, **extra: Any) -> list[torch.Tensor]:
        memory = logits.clone()
        gradient = memory if inplace else torch.full_like(logits, float("nan"))
        rows = [torch.full((12,), float("nan")) for _ in range(3)]
        with assume_profile(HOPPER):
            launchers.launch_forward(memory, targets, *rows, options=(-100, 0.0, 1e-2, 0.0), gradient=gradient, **extra)
        return [*rows, gradient.float()]

    calls: tuple[dict[str, Any], ...] = (
        {"inplace": True, "skip_ignored": False, "scale": scale, "grad_lse": grad_lse},
        {"inplace": False, "skip_ignored": False, "scale": scale[0]},
    )
    whole = [run(**call) for call in calls]
    monkeypatch.setattr(launchers, "ring_launch", lambda *_: RingLaunch(64, 28, 8, 8))
    monkeypatch.setattr(launchers, "launch_ring", portable)
    monkeypatch.setattr(launch_cross_entropy, "_SPLIT_ROWS", 9)
    for call, want in zip(calls, whole, strict=True):
        for mine, other in zip(run(**call), want, strict=True):
            assert torch.equal(mine.view(torch.int32), other.view(torch.int32))
    assert taken == 2 * [(1, 8, 72)]
    for x, smoothing, rows in (
        (logits, False, 8),
        (logits, True, 0),
        (logits.float(), False, 0),
        (_logits(10, 72, pitch=80), False, 0),
        (_logits(8, 72), False, 8),
        (_logits(7, 72), False, 0),
    ):
        assert launchers._rows_in_ring(x, x, HOPPER, smoothing, False) == rows
    assert launchers._rows_in_ring(_logits(10, 72), _logits(10, 72, pitch=80), HOPPER, False, False) == 0


_COMPILED = """
import json, os, re, subprocess, sys, tempfile, torch
import fuselm.kernels.cross_entropy_launchers as launchers
from fuselm.kernels._triton import KNOWN_PROFILES, assume_profile, triton
from fuselm.kernels.aot import compile_only
from fuselm.kernels.cross_entropy import cross_entropy
from fuselm.kernels.linear_cross_entropy import linear_cross_entropy

KERNELS = ("cross_entropy_ring_kernel", "cross_entropy_groups_kernel", "cross_entropy_forward_kernel")

def arrivals(body):
    # what stands before each arrival, from the last read of a slot on, or from the last wait
    kinds = "ld[.]shared[.]v4|fence[.]proxy[.]async|bar[.]sync|mbarrier[.]arrive[.]shared|mbarrier[.]try_wait"
    found, events = [], []
    for event in re.findall(kinds, body):
        if "arrive" in event:
            found.append(events)
        events = [*events, event] if "bar" in event[:3] or "fence" in event else []
    return found

def waits(cubin):
    # the address that each copy by TMA has waited for
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found, address = [], None
    for wait, copy in re.findall(r"TRYWAIT P[0-9], \\[(.*?)\\]|(UTMALDG)", sass):
        address = wait or address
        if copy:
            found.append(address)
    return found

def launched(function):
    kernels = []
    with compile_only(90) as compiled:
        run = triton.runtime.jit.JITFunction.run
        triton.runtime.jit.JITFunction.run = lambda *a, **k: (kernels.append(run(*a, **k)), kernels[-1])[1]
        function()
        triton.runtime.jit.JITFunction.run = run
    return [(k, numbers) for k, numbers in zip(kernels, compiled, strict=True) if k.metadata.name in KERNELS]

def chosen(function):
    # the loss kernel that would be launched
    names, run = [], triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.run = lambda kernel, *a, **k: names.append(kernel.__name__)
    with assume_profile(KNOWN_PROFILES[90]):
        function()
    triton.runtime.jit.JITFunction.run = run
    return [name for name in names if name in KERNELS]

def loss_of(vocab, pitch=0):
    logits = torch.empty((64, pitch or vocab), dtype=torch.bfloat16)[:, :vocab].requires_grad_()
    cross_entropy(logits, torch.zeros(64, dtype=torch.int64), backend="triton", z_loss=1e-4)

def linear_loss_of(vocab):
    x, weight = (torch.empty((n, 16), dtype=torch.bfloat16).requires_grad_() for n in (64, vocab))
    linear_cross_entropy(x, weight, torch.zeros(64, dtype=torch.int64), backend="triton")

choices = [chosen(lambda: loss_of(*vocab)) for vocab in ((32000,), (50304, 50368), (50257, 50264))]
choices += [chosen(lambda: linear_loss_of(vocab)) for vocab in (50264, 50257)]
report = []
for vocab in (50304, 50257, 128256):
    ring = launchers.ring_launch(vocab, KNOWN_PROFILES[90])
    ((kernel, numbers),) = launched(lambda: loss_of(vocab))
    ptx = kernel.asm["ptx"]
    report.append({
        "launch": str(ring),
        "kept": ring.kept,
        "name": kernel.metadata.name,
        "spills": numbers.spill_bytes,
        "fits": numbers.shared_memory + 1024 <= 233472,
        "registers": numbers.registers <= ring.max_registers,
        "waits": waits(kernel.asm["cubin"]),
        "wide stores": len(re.findall(r"st[.]global[^ ]*[.]v4", ptx)) * 32 * (ring.writers or ring.num_warps),
        "vectors": ring.tile * 8,
        "arrivals": arrivals(ptx),
    })
print(json.dumps([choices, report]))
"""


def test_compiled_for_hopper():
    """What is chosen is launched. No spills, a program fits on an SM, stores of 16 bytes. Before an arrival that gives
    a slot back stands a proxy fence of every thread that read it and then a barrier of them all. The producer waits at
    an address in a uniform register: those of forms that hung on an H200 did not."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED], capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    choices, report = json.loads(done.stdout.splitlines()[-1])
    # linear_cross_entropy's rows of 50264 logits lie side by side in its buffer, those of 50257 do not
    names = ("forward", "groups", "forward", "groups", "forward")
    assert choices == [[f"cross_entropy_{name}_kernel"] for name in names]
    # loops that store, places where slots are given back, other arrivals: for the notes
    counts = ((2, 2, 2), (3, 3, 2), (3 + report[2]["kept"], 4 + report[2]["kept"], 0))
    for row, name, (stores, given_back, others) in zip(report, ("groups", "groups", "ring"), counts, strict=True):
        assert row["name"] == f"cross_entropy_{name}_kernel"
        assert row["spills"] == 0 and row["fits"] and row["registers"], row
        assert len(row["waits"]) == 1 and row["waits"][0].startswith("UR"), row
        assert row["wide stores"] == stores * row["vectors"], row
        fenced = [before for before in row["arrivals"] if "fence.proxy.async bar.sync" in " ".join(before)]
        assert len(fenced) == given_back and len(row["arrivals"]) == given_back + others, row


_VALUES = """
import torch
import fuselm.kernels.cross_entropy_launchers as launchers

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
    torch.cuda.synchronize()
    print("run", *what, flush=True)
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
for rows, vocab in SHAPES:
    check(ring, torch.bfloat16, rows, vocab, *modes[0], 20)
    check(ring, torch.bfloat16, rows, vocab, *modes[1], 20)
many, some = (8191, 192) if SHAPES[-1][1] % 64 else (8193, 137)  # the former: 63 rows are left over
check(ring, torch.bfloat16, many, SHAPES[-1][1], *modes[0], 4)
check(ring, torch.float16, some, SHAPES[-1][1], *modes[2], 20)
print("fine", flush=True)
"""


def _values(ring: RingLaunch, shapes: tuple[tuple[int, int], ...]) -> None:
    """In place and not, the gradient on poisoned memory, and the same bits again and again. In a process of its own,
    which is ended when a kernel that was launched is not done in 20 s: one that waits in vain never returns."""
    if torch.cuda.get_device_capability() != (9, 0):
        assert ring_launch(50304, KNOWN_PROFILES[80]) is None
        return
    script = f"from fuselm.kernels.launch.cross_entropy import RingLaunch\nring, SHAPES = {ring}, {shapes}\n{_VALUES}"
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            said, piece, patience = b"", b" ", 120.0  # until modules are loaded
            while piece and select.select([process.stdout], [], [], patience)[0]:
                piece = os.read(process.stdout.fileno(), 4096)
                said, patience = said + piece, 20.0
            silent = bool(piece)
            process.kill()
        errors.seek(0)
        assert not silent, f"hung: {said[-300:]}"
        assert said.endswith(b"fine\n"), (said[-300:], errors.read()[-3000:])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("vocab", "shapes"),
    [
        (50304, ((1, 50304), (137, 57408), (300, 28 * 4096), (1000, 40960), (300, 50304))),
        (50257, ((64, 50257), (192, 40961), (64, 28 * 4096 - 63), (192, 50257))),
        (128256, ((1, 50304), (300, 25 * 8192), (137, 19 * 8192), (137, 128256))),
    ],
)
def test_values_are_those_of_the_portable_kernel(vocab, shapes):
    ring = ring_launch(vocab, HOPPER)
    assert ring is not None
    _values(ring, shapes)
