"""The one place that knows whether triton is there, and which implementation a call takes.

Every op has a plain PyTorch reference and Triton kernels. `backend="auto"` takes the kernels on a CUDA device of
compute capability 8.0 or above, and on a CPU only under Triton's interpreter (TRITON_INTERPRET=1, set before the first
import); everything else runs the reference.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from fuselm.kernels.compile_key import key_compile_caches

Backend = Literal["auto", "triton", "reference"]

HAVE_TRITON = importlib.util.find_spec("triton") is not None
INTERPRET = HAVE_TRITON and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
MIN_ARCH = 80  # bf16 arithmetic and asynchronous copies begin with compute capability 8.0

if TYPE_CHECKING or HAVE_TRITON:
    import triton
    import triton.language as tl
else:
    # As triton.jit, with options or without: the decorated function is never called.
    triton, tl = SimpleNamespace(jit=lambda f=None, **_: f if f is not None else lambda g: g), SimpleNamespace()

key_compile_caches()
jit: Any = triton.jit  # Any: a type checker would reject ints passed for tl.constexpr


@dataclass(frozen=True)
class DeviceProfile:
    """What launch choices may depend on.

    Attributes:
        arch: compute capability as one number, 80 for 8.0, 90 for 9.0.
        num_sms: streaming multiprocessors.
        shared_memory: bytes of shared memory that one program may use.
    """

    arch: int
    num_sms: int
    shared_memory: int


KNOWN_PROFILES: dict[int, DeviceProfile] = {
    80: DeviceProfile(80, 108, 166912),
    90: DeviceProfile(90, 132, 232448),
    100: DeviceProfile(100, 148, 232448),
    120: DeviceProfile(120, 188, 101376),
}
_INTERPRETER_PROFILE = DeviceProfile(80, 3, 166912)  # three programs: a persistent grid still has to loop
_assumed: DeviceProfile | None = None


@functools.cache
def _cuda_profile(index: int) -> DeviceProfile:
    properties = torch.cuda.get_device_properties(index)
    shared = getattr(properties, "shared_memory_per_block_optin", 101376)
    return DeviceProfile(properties.major * 10 + properties.minor, properties.multi_processor_count, shared)


def device_profile(device: torch.device) -> DeviceProfile:
    """The profile that launch choices for tensors on `device` read; never synchronises."""
    if _assumed is not None:
        return _assumed
    if device.type == "cuda":
        return _cuda_profile(torch.cuda.current_device() if device.index is None else device.index)
    return _INTERPRETER_PROFILE


@contextlib.contextmanager
def assume_profile(profile: DeviceProfile) -> Iterator[None]:
    """Within this context every device looks like `profile` and CPU tensors take the Triton kernels (see aot.py)."""
    global _assumed
    before, _assumed = _assumed, profile
    try:
        yield
    finally:
        _assumed = before


def explain_backend(device: torch.device) -> tuple[Literal["triton", "reference"], str]:
    """What `backend="auto"` picks on `device`, and why in a few words."""
    if not HAVE_TRITON:
        return "reference", "triton is not installed (pip install triton; Linux only)"
    if _assumed is not None:
        return "triton", f"compiling ahead of time for sm_{_assumed.arch}"
    if device.type == "cuda":
        # Not device_profile(): torch.compile traces this function, and warns of caches that it looks through.
        major, minor = torch.cuda.get_device_capability(device)
        arch = major * 10 + minor
        if arch < MIN_ARCH:
            return "reference", f"compute capability {arch / 10:.1f} is below {MIN_ARCH / 10:.1f}"
        return "triton", f"CUDA device of compute capability {arch / 10:.1f}"
    if INTERPRET and device.type == "cpu":
        return "triton", "TRITON_INTERPRET=1: kernels run in Triton's interpreter"
    return "reference", f"device type {device.type!r} has no compiled Triton kernels"


def select_backend(backend: Backend, device: torch.device) -> Literal["triton", "reference"]:
    """Resolves a public function's `backend` argument for tensors on `device`.

    Raises:
        ValueError: `backend` is not one of auto, triton, reference.
        RuntimeError: "triton" was asked for by name where it cannot run; the message says what to do.
    """
    compiling = torch.compiler.is_compiling()
    if compiling:
        key_compile_caches()
    if backend == "reference":
        return "reference"
    if device.type == "cuda" and HAVE_TRITON and _assumed is None and not compiling:
        # The usual case, some hundred times a step, without a look at the device or a text.
        if backend in ("auto", "triton") and device_profile(device).arch >= MIN_ARCH:
            return "triton"
    choice, reason = explain_backend(device)
    if backend == "auto":
        return choice
    if backend != "triton":
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(map(repr, get_args(Backend)))}")
    if choice != "triton":
        hint = (
            "install it with `pip install triton` (Linux)"
            if not HAVE_TRITON
            else "move the tensors to an NVIDIA GPU, or set TRITON_INTERPRET=1 before the first import to run the "
            "kernels in the interpreter"
        )
        raise RuntimeError(f"backend='triton' cannot run here: {reason}; {hint}, or pass backend='auto'")
    return "triton"


def compute_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype a reference computes in: fp64 if any tensor is fp64 (so that the reference is its own oracle), else
    fp32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
