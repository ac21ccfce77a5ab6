"""Ahead-of-time compilation: run a real launcher on CPU tensors and compile what it would have launched, without a GPU.

    with compile_only(90) as compiled:
        fuselm.rms_norm(x, w)            # nothing runs on a device; outputs hold whatever memory held
    for kernel in compiled: print(kernel.name, kernel.spill_bytes, kernel.warnings)

Because the launch itself is intercepted, the signature, the specialisation and the launch choices are those of
production; there is no second list of signatures to keep in step. It needs Triton without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fuselm.kernels._triton import HAVE_TRITON, INTERPRET, KNOWN_PROFILES, assume_profile, triton


@dataclass
class CompiledKernel:
    """One compiled specialisation.

    Attributes:
        name: the kernel's name.
        arch: compute capability times ten.
        registers: registers a thread, as ptxas reports them.
        spill_bytes: bytes of spill stores plus loads.
        shared_memory: bytes a program.
        warnings: ptxas messages C75xx (a serialised wgmma), verbatim.
        options: num_warps and num_stages of the launch.
    """

    name: str
    arch: int
    registers: int
    spill_bytes: int
    shared_memory: int
    warnings: list[str] = field(default_factory=list)
    options: dict[str, int] = field(default_factory=dict)


class _StubDriver:
    """Answers what the launcher asks a driver before compiling; each architecture looks like a device of its own."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


def parse_ptxas_log(log: str) -> tuple[int, int, list[str]]:
    """Registers, spill bytes (stores plus loads) and C75xx messages in what `ptxas -v` printed."""
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    return registers, spills, [line.strip() for line in log.splitlines() if re.search(r"\(C75\d\d\)", line)]


@contextlib.contextmanager
def compile_only(arch: int) -> Iterator[list[CompiledKernel]]:
    """Within this context Triton launches compile for compute capability `arch` (80, 90, 100, 120) and do not run.

    Yields:
        The list of compiled specialisations, filled as launches happen.

    Raises:
        RuntimeError: Triton is missing, or runs as an interpreter in this process.
        ValueError: `arch` is not one whose device profile is known.
    """
    if not HAVE_TRITON or INTERPRET:
        raise RuntimeError("ahead-of-time compilation needs triton and a process without TRITON_INTERPRET")
    if arch not in KNOWN_PROFILES:
        raise ValueError(f"arch={arch}: known architectures are {sorted(KNOWN_PROFILES)}")
    jit_function: Any = triton.runtime.jit.JITFunction
    driver: Any = triton.runtime.driver
    compiled: list[CompiledKernel] = []
    seen: set[int] = set()
    run = jit_function.run

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            registers, spills, warnings = parse_ptxas_log(log.getvalue())
            options = {name: getattr(kernel.metadata, name) for name in ("num_warps", "num_stages")}
            compiled.append(
                CompiledKernel(kernel.metadata.name, arch, registers, spills, kernel.metadata.shared, warnings, options)
            )
        return kernel

    knobs: Any = importlib.import_module("triton.knobs")
    with contextlib.ExitStack() as stack:
        stack.enter_context(assume_profile(KNOWN_PROFILES[arch]))
        stack.enter_context(_set_attribute(jit_function, "run", compile_instead))
        stack.enter_context(_set_attribute(knobs.nvidia, "dump_ptxas_log", True))
        stack.enter_context(_set_attribute(knobs.compilation, "always_compile", True))
        # Not reset_active(): that looks for a real driver, which a machine without a GPU does not have.
        stack.enter_context(_set_attribute(driver, "_active", _StubDriver(arch)))
        yield compiled


@contextlib.contextmanager
def _set_attribute(target: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, before)
