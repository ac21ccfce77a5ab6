"""The Hopper kernels that bring rows by TMA: what they take, what they compile to, their values on a GPU. Their
protocol: test_rms_norm_ring_protocol.py."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from fuselm.kernels import rms_norm_launchers as launchers
from fuselm.kernels._triton import KNOWN_PROFILES, device_profile
from fuselm.kernels.launch.rms_norm import RingLaunch
from fuselm.kernels.rms_norm_ring import ring_refusal

Watched: Any = importlib.import_module("watched").Watched  # of benchmarks/

HOPPER = KNOWN_PROFILES[90]
# With a residual a slot has two tiles: all fit.
LAUNCHES = {
    768: (RingLaunch(8, 3, 8, 2, max_registers=80), RingLaunch(4, 2, 4, evict_first=True), RingLaunch(2, 4, 2)),
    4096: (
        RingLaunch(1, 4, 8, 2, max_registers=80),
        RingLaunch(1, 4, 8),
        RingLaunch(2, 3, 16, 1, runs=True, max_registers=96),
    ),
    8192: (RingLaunch(1, 3, 16, 1, runs=True, max_registers=96), RingLaunch(1, 2, 8), RingLaunch(1, 1, 16)),
    16384: (RingLaunch(1, 3, 16, 1, max_registers=96), RingLaunch(1, 2, 16)),
}


def _x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "residual", "words"),
    [
        (_x(3, 128), None, None),
        (_x(2, 3, 128, dtype=torch.float16), _x(2, 3, 128, dtype=torch.float16), None),
        (_x(3, 16384), None, None),
        (_x(3, 16448), None, "up to 16384"),
        (_x(3, 96), None, "multiple of 64"),
        (_x(3, 128, dtype=torch.float32), None, "bf16 and fp16"),
        (_x(3, 128), _x(3, 128, dtype=torch.float32), "alike"),
    ],
)
def test_what_the_kernels_take(x, residual, words):
    reason = ring_refusal(x, residual, True, HOPPER)
    assert (reason is None) if words is None else (reason is not None and words in reason)


def test_devices_and_rows_that_they_do_not_take(monkeypatch):
    assert "side by side" in str(ring_refusal(_x(3, 128), None, False, HOPPER))
    for arch in (80, 100, 120):
        assert "9.0" in str(ring_refusal(_x(3, 128), None, True, KNOWN_PROFILES[arch]))
    monkeypatch.setattr(launchers, "forward_launch", lambda *_: RingLaunch(1, 2, 4))
    monkeypatch.setattr(launchers, "device_profile", lambda _: HOPPER)
    with pytest.raises(ValueError, match=r"RingLaunch\(.*\) for x \(3, 96\): rows of 96 elements"):
        launchers.launch_forward(_x(3, 96), None, None, 1e-6, 0.0)
    with pytest.raises(ValueError, match="less than 1024 bytes"):
        launchers.launch_forward(_x(3, 256), None, None, 1e-6, 0.0)


_COMPILED = """
import json, re, torch
import fuselm.kernels.rms_norm_launchers as launchers
from fuselm.kernels._triton import triton
from fuselm.kernels.aot import compile_only
from fuselm.kernels.launch.rms_norm import RingLaunch

def orders(ptx, ends, kinds):
    # what stands before each of `ends` (an arrival, or a copy out of shared memory), from the last of `kinds` on
    found, since = [], []
    for event in re.findall(f"{kinds}|fence.proxy.async|bar.sync|{ends}", ptx):
        if re.fullmatch(ends, event):
            found.append(" ".join(since))
        else:
            since = [event] if re.fullmatch(kinds, event) else [*since, event]
    return found

report = []
for n, launch, residual in CASES:
    kernels = []
    with compile_only(90) as compiled:
        run = triton.runtime.jit.JITFunction.run
        triton.runtime.jit.JITFunction.run = lambda *a, **k: (kernels.append(run(*a, **k)), kernels[-1])[1]
        launchers.forward_launch = lambda *_: launch
        x = torch.empty((999, n), dtype=torch.bfloat16)
        launchers.launch_forward(x, x if residual else None, x[0], 1e-6, 0.0)
        triton.runtime.jit.JITFunction.run = run
    ptx = kernels[0].asm["ptx"]
    report.append({
        "what": f"{n} {launch} {residual}",
        "spills": compiled[0].spill_bytes,
        "shared": compiled[0].shared_memory,
        "given back": orders(ptx, "mbarrier.arrive.shared::cta", "ld.shared.v4|cp.async.bulk.wait_group.read"),
        "sent": orders(ptx, "cp.async.bulk.tensor.3d.global", "st.shared.v4"),
        "wide stores": len(re.findall("st[.]global[^ ]*[.]v4", ptx)),
    })
print(json.dumps(report))
"""


def _ways(launch: RingLaunch) -> tuple[RingLaunch, RingLaunch]:
    return launch, dataclasses.replace(launch, by_tma=True)


CASES = [
    (n, launch, residual)
    for n, launches in LAUNCHES.items()
    for launch, residual in ((launches[0], n == 768), (launches[1], n != 768))
    for launch in _ways(launch)
]


def test_compiled_for_hopper():
    """No spills, programs fit on an SM, stores of 16 bytes. Before a slot is given back, or its outputs are copied,
    stand a proxy fence of every thread and then a barrier of them all; where outputs have left a slot, the barrier."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = f"from fuselm.kernels.launch.rms_norm import RingLaunch\nCASES = {CASES}\n{_COMPILED}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    for (_, launch, residual), row in zip(CASES, report, strict=True):
        assert row["spills"] == 0, row
        assert (row["shared"] + 1024) * max(launch.programs, 1) <= 233472, row
        if launch.by_tma:
            assert row["wide stores"] == 0 and len(row["sent"]) == 1 + residual, row
            assert all("fence.proxy.async bar.sync" in sent for sent in row["sent"]), row
        else:
            assert row["wide stores"] and not row["sent"], row
        assert len(row["given back"]) == bool(launch.programs), row
        order = "wait_group.read bar.sync" if launch.by_tma else "fence.proxy.async bar.sync"
        assert all(order in before for before in row["given back"]), row


_VALUES = """
import torch
import fuselm.kernels.rms_norm_launchers as launchers
from fuselm.kernels.launch.rms_norm import RingLaunch
from fuselm.kernels.numerics import check_budget
from fuselm.kernels.specs.rms_norm import ADD_RMS_NORM, RMS_NORM

generator = torch.Generator("cuda").manual_seed(0)
empty = torch.empty
torch.empty = lambda *a, **k: empty(*a, **k).fill_(float("nan"))  # every element is written

def check(launch, rows, n, residual, weight, offset, dtype):
    what = (str(launch), rows, n, residual, weight, offset, dtype)
    spec = ADD_RMS_NORM if residual else RMS_NORM
    case = {"rows": (rows,), "n": n, "weight": weight, "offset": offset}
    inputs = spec.make_inputs(case, dtype, torch.device("cuda"), generator)
    inputs = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    plain, exact = spec.plain(**inputs), spec.plain(**wide)
    plain, exact = ((o,) if isinstance(o, torch.Tensor) else o for o in (plain, exact))
    torch.cuda.synchronize()
    print("run", *what, flush=True)
    launchers.forward_launch = lambda *_: launch
    arguments = inputs["x"], inputs.get("residual"), inputs["weight"], inputs["eps"], offset
    y, h, rstd = got = launchers.launch_forward(*arguments)
    torch.cuda.synchronize()
    for name, ours, p, e in zip(("y", "h"), (y, h), plain, exact):
        check_budget(ours, e, p, name=f"{name} {what}")
    if residual:
        assert torch.equal(h, plain[1]), what
    mean = h.double().square().mean(-1) if residual else wide["x"].square().mean(-1)
    torch.testing.assert_close(rstd.double(), (mean + inputs["eps"]).rsqrt(), rtol=1e-5, atol=0)
    for _ in range(TIMES):
        again = launchers.launch_forward(*arguments)
        for a, b in zip(got, again):
            bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
            assert torch.equal(a.view(bits), b.view(bits)), (what, "other bits")

TIMES = 10
for launch in LAUNCHES:
    for residual in (False, True):
        for rows in (1, 7, 8193):
            check(launch, rows, n, residual, True, 1.0, torch.bfloat16)
        check(launch, 300, n, residual, False, 0.0, torch.float16)
print("fine", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("n", LAUNCHES)
def test_values(n):
    """In a process of its own, which is ended when it says nothing for 20 s: a kernel that waits in vain never
    returns. Other cards refuse the kernels, and have nothing else to show."""
    x = torch.empty((7, n), dtype=torch.bfloat16, device="cuda")
    reason = ring_refusal(x, None, True, device_profile(x.device))
    if torch.cuda.get_device_capability() != (9, 0):
        assert reason is not None and "9.0" in reason
        return
    assert reason is None
    launches = [way for launch in LAUNCHES[n] for way in _ways(launch)]
    script = f"from fuselm.kernels.launch.rms_norm import RingLaunch\nn, LAUNCHES = {n}, {launches}\n{_VALUES}"
    process = Watched([sys.executable, "-c", script], stderr=subprocess.STDOUT, asked=False)
    said, line, patience = [], "", 120.0  # until modules are loaded
    try:
        while line is not None:
            line = process.line(patience)
            said, patience = [*said[-30:], line or ""], 20.0
    except TimeoutError:
        pytest.fail(f"hung: {said[-1]}")
    finally:
        process.end()
    assert "fine\n" in said, "".join(said)
