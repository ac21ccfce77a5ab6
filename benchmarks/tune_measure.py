"""The two ends of tune.py's measuring: the process that runs choices on the card, and what watches it.

The measuring process answers requests, one JSON line each, and says before each step what it is at: `set up` (inputs
and reference), `compile`, `run` (the first launch, and the check), `time`. A kernel that never ends shows as silence
after `run` or `time`; the process is then killed and the next request gets a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timing import Timing, describe, interleaved, tensors_of
from tune_compile import called, compile_only
from tuning.base import Target
from watched import Watched

from fuselm.kernels._triton import HAVE_TRITON, INTERPRET, triton
from fuselm.kernels.numerics import UNIT_ROUNDOFF

CURRENT = "current"
ROUNDINGS = 4.0  # relative error that a candidate may have, in roundings of its output's dtype
FP32_ERROR = 1e-5  # and at least this: fp32 sums in another order differ by more than a rounding
CHUNK = 2**26  # elements compared at a time in fp64
SET_UP, COMPILE, RUN, TIME = "set up", "compile", "run", "time"
START_S = 120.0  # seconds for a measuring process to import torch and open the card
PREPARE_S = 90.0  # and for inputs and reference, or for compiling a choice: no kernel that is tried runs meanwhile
OVERTIME_S = 5.0  # that a step may go on past the deadline


@dataclass
class Row:
    """One candidate's result.

    Attributes:
        choice: the launch value as text; "current" for what the library takes now.
        status: "ok", "failed: why" or "left out: why".
        timing: milliseconds, None where it was not timed.
        of_current: its median over that of the current choice in the same rounds; None without one.
        rounds: timed rounds.
        registers, spills, shared: largest over the kernels that a run launched: registers a thread, spilled 32-bit
            registers a thread, bytes of shared memory a program; None where Triton does not tell.
    """

    choice: str
    status: str = "ok"
    timing: Timing | None = None
    of_current: float | None = None
    rounds: int = 0
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None

    def timed(self, timings: dict[str, Timing], rounds: int) -> None:
        """Takes its part of the timings of some choices."""
        self.timing, self.rounds = timings[self.choice], rounds
        current = timings.get(CURRENT)
        self.of_current = None if current is None else self.timing.median_ms / current.median_ms


class LostError(RuntimeError):
    """The measuring process ended, or was ended, before it answered.

    Attributes:
        step: what it was at.
    """

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message)
        self.step = step


class NoTimeError(RuntimeError):
    """The deadline came before the answer."""


class StartError(RuntimeError):
    """No measuring process can be started: nothing further can be measured."""


@contextlib.contextmanager
def launched_kernels() -> Iterator[list[Any]]:
    """Collects the compiled Triton kernels that are launched within this context."""
    kernels: list[Any] = []
    if not HAVE_TRITON or INTERPRET:
        yield kernels
        return
    jit_function: Any = triton.runtime.jit.JITFunction
    run = jit_function.run

    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        kernels.append(kernel)
        return kernel

    jit_function.run = recording
    try:
        yield kernels
    finally:
        jit_function.run = run


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """‖actual - exact‖ / ‖exact‖ in fp64, a piece at a time; infinite where one is not finite and the other differs."""
    if actual.shape != exact.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)}, reference {tuple(exact.shape)}")
    difference = magnitude = 0.0
    for a, e in zip(actual.reshape(-1).split(CHUNK), exact.reshape(-1).split(CHUNK), strict=True):
        a, e = a.double(), e.double()
        apart = torch.where(a == e, 0.0, a - e)
        if not bool(apart.isfinite().all()):
            return math.inf
        difference += apart.square().sum().item()
        magnitude += torch.where(e.isfinite(), e, 0.0).square().sum().item()
    return math.sqrt(difference) / (math.sqrt(magnitude) or 1.0)


def check(outputs: Any, exact: list[torch.Tensor | None]) -> None:
    """Raises ValueError where an output is further from the reference than its dtype's roundings allow."""
    actual = tensors_of(outputs)
    if len(actual) != len(exact):
        raise ValueError(f"{len(actual)} outputs, the reference has {len(exact)}")
    for i, (a, e) in enumerate(zip(actual, exact, strict=True)):
        if a is None or e is None:
            continue
        error, limit = relative_error(a, e), max(ROUNDINGS * UNIT_ROUNDOFF.get(a.dtype, 0.0), FP32_ERROR)
        if not error <= limit:
            raise ValueError(f"output {i} is wrong: relative error {error:.2e}, allowed {limit:.2e}")


class Measurer:
    """Runs, checks and times choices in this process.

    Args:
        targets: what requests count by their index.
        device: where.
        say: gets the name of each step before it begins.
    """

    def __init__(self, targets: Sequence[Target], device: torch.device, say: Callable[[str], None]) -> None:
        self._targets, self._device, self._say = targets, device, say
        self._made: dict[int, tuple[Callable[[], Any], list[torch.Tensor | None]]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what is asked, {"do": "attempt" or "finals", and that method's arguments}.

        Returns:
            what the method gives, and `lost`: whether the device is unusable now.
        """
        request = dict(request)
        method = {"attempt": self.attempt, "finals": self.finals}[request.pop("do")]
        answer = method(**request)
        try:
            self._synchronize()
            self._make_room()
            return answer | {"lost": False}
        except RuntimeError:
            return answer | {"lost": True}

    def attempt(self, index: int, turn: int, beside: bool, rounds: int) -> dict[str, Any]:
        """Runs, checks and briefly times the current choice (turn 0) or a candidate.

        Args:
            index: of the target.
            turn: 0, or 1 + the candidate's index.
            beside: time the current choice in the same rounds.
            rounds: timed rounds.

        Returns:
            row: a Row as a dict; broken: whether the target cannot be set up at all.
        """
        row = Row(CURRENT if turn == 0 else str(self._targets[index].candidates[turn - 1]))
        try:
            exact = self._make(index)[1]
        except Exception as error:  # a target that cannot be set up is a failed row, and the others get their turn
            row.status = f"failed: {describe(error)}"
            return {"row": dataclasses.asdict(row), "broken": True}
        calls = {name: self._call(index, t) for name, t in ([(CURRENT, 0)] if beside else []) + [(row.choice, turn)]}
        try:
            self._compile(calls[row.choice])
            self._run(calls[row.choice], exact, row)
            self._say(TIME)
            row.timed(interleaved(calls, self._device, rounds, hide_launch=True), rounds)
        except Exception as error:  # whatever a candidate raises is its result
            row.status = f"failed: {describe(error)}"
        return {"row": dataclasses.asdict(row), "broken": False}

    def finals(self, index: int, choices: dict[str, int], rounds: int) -> dict[str, Any]:
        """Times a target's best choices (name -> turn) in the same rounds.

        Returns:
            timings: name -> a Timing as a dict; error: why there are none, or "".
        """
        try:
            self._make(index)
            calls = {name: self._call(index, turn) for name, turn in choices.items()}
            for call in calls.values():  # nothing to do, unless this process is a new one
                self._compile(call)
            self._say(TIME)
            timings = interleaved(calls, self._device, rounds, hide_launch=True)
        except Exception as error:  # for example no memory: the other targets are still measured
            return {"timings": {}, "error": describe(error)}
        finally:
            self._made.pop(index, None)
        return {"timings": {name: dataclasses.asdict(timing) for name, timing in timings.items()}, "error": ""}

    def _make(self, index: int) -> tuple[Callable[[], Any], list[torch.Tensor | None]]:
        if index not in self._made:
            self._say(SET_UP)
            run, reference = self._targets[index].make(self._device)
            self._made[index] = run, [None if e is None else e.detach() for e in tensors_of(reference())]
            self._synchronize()
        return self._made[index]

    def _call(self, index: int, turn: int) -> Callable[[], Any]:
        run, target = self._made[index][0], self._targets[index]
        return run if turn == 0 else called(run, target.attribute, target.candidates[turn - 1])

    def _compile(self, call: Callable[[], Any]) -> None:
        """Compiles without launching, so that silence after this is the kernel's; an error comes again with the run."""
        if self._device.type == "cuda":
            self._say(COMPILE)
            with contextlib.suppress(Exception), compile_only():
                call()

    def _run(self, call: Callable[[], Any], exact: list[torch.Tensor | None], row: Row) -> None:
        self._say(RUN)
        with launched_kernels() as kernels:
            outputs = call()
        self._synchronize()
        for name, source in (("registers", "n_regs"), ("spills", "n_spills")):
            values = [getattr(k, source, None) for k in kernels]
            setattr(row, name, max((v for v in values if v is not None), default=None))
        row.shared = max((k.metadata.shared for k in kernels if k is not None), default=None)
        check(outputs, exact)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _make_room(self) -> None:
        """Lets go of all inputs where less than half of the device's memory is left."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
            if free + reserved - allocated < total / 2:
                self._made.clear()
                torch.cuda.empty_cache()


def serve(targets: Sequence[Target], device: torch.device) -> None:
    """Answers requests from stdin on stdout until this process is killed, or whoever asks is gone."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what targets and compilers print is no answer
    requests: queue.Queue[dict[str, Any]] = queue.Queue()

    def collect() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        os.kill(os.getpid(), signal.SIGKILL)  # the only end that a kernel which hangs does not hold up

    threading.Thread(target=collect, daemon=True).start()

    def tell(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    torch.zeros(1, device=device)  # opens the card
    measurer = Measurer(targets, device, lambda step: tell({"at": step}))
    tell({"at": "ready"})
    while True:
        tell(measurer.answer(requests.get()))


class Worker:
    """Asks a measuring process, and starts a new one after one that was lost.

    Args:
        command: starts a process that calls `serve`.
        silent_s: seconds without a line after which a launched kernel counts as hung.
    """

    def __init__(self, command: Sequence[str], silent_s: float) -> None:
        self._command, self._silent_s = command, silent_s
        self._process: Watched | None = None

    def ask(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        """The answer to a request, see `Measurer.answer`.

        Raises:
            LostError: the process hung or ended; the message says how, and after how many seconds.
            NoTimeError: time.monotonic() is OVERTIME_S past the deadline.
            StartError: there is no process to ask.
        """
        late = max(deadline, time.monotonic()) + OVERTIME_S
        process = self._process = self._process or self._start(late)
        process.send(json.dumps(request))
        step = SET_UP
        while True:
            limit = self._silent_s if step in (RUN, TIME) else PREPARE_S
            try:
                line = process.line(min(limit, late - time.monotonic()))
            except TimeoutError:
                self.end()
                if time.monotonic() >= late:
                    raise NoTimeError(f"{step} was not done by the deadline") from None
                during = {RUN: "hung", TIME: "hung while it was timed"}.get(step, f"{step} did not end")
                raise LostError(f"{during}, ended after {limit:g} s", step) from None
            if line is None:
                code = process.exit_code()
                self.end()
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise LostError(f"its process ended with {how} (step: {step})", step)
            answer = json.loads(line)
            if "at" not in answer:
                if answer["lost"]:
                    self.end()
                return answer
            step = answer["at"]

    def _start(self, late: float) -> Watched:
        process = Watched(self._command, asked=True)
        try:
            ready = process.line(min(START_S, late - time.monotonic()))
        except TimeoutError:
            process.end()
            if time.monotonic() >= late:
                raise NoTimeError("the measuring process was not ready by the deadline") from None
            raise StartError(f"the measuring process was not ready after {START_S:g} s") from None
        except BaseException:
            process.end()
            raise
        if ready is None:
            raise StartError(f"the measuring process ended with exit code {process.exit_code()} before it was ready")
        return process

    def end(self) -> None:
        """Kills the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None
