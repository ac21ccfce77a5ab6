"""One row of the kernel comparison: every provider checked, then all timed in turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from expected import Expected, check_ours, check_peer, expect, gradients, run_call
from peers.base import Call, Maker, NotOfferedError, is_ours
from rows import BACKWARD, FORWARD, GOAL_PEERS, ODD_ROWS, STEP, Row, make_inputs, make_upstream, work
from timing import L2_FLUSH_BYTES, PRODUCT_OPERATIONS, describe, interleaved, load_of, product_of

GOAL_CARD = "H200"  # the card that the rows' goals are for
GRAPH_BELOW_MS = 0.3  # calls shorter than this are timed in a CUDA graph too
COPY = "copy"  # of as many bytes, among the providers that are timed in turn
PRODUCT = "product"  # a large one, among the providers that start from a load
LARGEST_COPY = 2**30  # bytes, read plus written: a larger one runs at the ceiling
ROUNDS_MS = 500.0  # time that the calls of one row and direction may take together, beyond the fewest rounds
MIN_ROUNDS = 11  # five gave medians of 36 and 39 ms for one call (torch.compile's linear + cross-entropy)
LOADED_OPERATIONS = 2.5e12  # rows with more start each call from the same load, which decides the card's clock
LOADED_ROUNDS = 21  # at least: with eleven the ratio to a peer differed by up to 6 % from run to run
# Ops whose kernels, ours and some that torch.compile makes, tell L2 to keep what they read. Part of that outlives the
# flush before the next provider's call.
KEEPS_IN_L2 = ("rms_norm", "add_rms_norm", "rope", "swiglu")


@dataclass(frozen=True)
class Ceilings:
    """What this card does at best: bytes copied (read plus written) and bf16 operations of a large matmul, a second;
    0 where they were not measured."""

    copy: float = 0.0
    matmul: float = 0.0


@dataclass
class Measurement:
    """One provider at one row and direction.

    Attributes:
        status: "ok"; "wrong: ..." for a peer that was timed though its results are not what was asked for;
            "failed: ..."; or "not timed: ...".
        ms, low_ms, high_ms: median and 20th and 80th percentile.
        graph_ms: the same call replayed from a CUDA graph: without what launching costs the host.
        graph_note: why there is no graph_ms for a short call.
        gb_s, tflops: of the work that must be done, see rows.work.
        share: of the ceiling that bounds the row: copying, or a large product, from the load where this starts from it.
        extra_gib: peak memory that a call takes beyond what was there.
    """

    status: str = "ok"
    ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    graph_ms: float | None = None
    graph_note: str = ""
    gb_s: float | None = None
    tflops: float | None = None
    share: float | None = None
    extra_gib: float | None = None


@dataclass
class Result:
    """A row in one direction: provider -> measurement, and what the table needs of the row: `odd` is a size off the
    block borders, `near` the round one beside it, `goal_peer` the best peer and its milliseconds when the goal was set,
    `copy_ms` what a copy that moves as many bytes takes in the same rounds, where a row is bound by memory;
    `product_tflops` the rate of a large product in the same rounds, where calls start from a load."""

    op: str
    label: str
    direction: str
    dtype: str
    bytes: int
    flops: int
    goal_ms: float | None
    near: str
    odd: bool
    rounds: int = 0
    goal_peer: tuple[str, float] | None = None
    copy_ms: float | None = None
    product_tflops: float | None = None
    providers: dict[str, Measurement] = field(default_factory=dict)


def function_of(call: Call, direction: str, upstream: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """What is timed: a forward pass without a graph, a backward pass on a kept graph, both, or an optimizer's step."""
    if call.context is None:
        return _function_of(call, direction, upstream)
    with call.context():
        function = _function_of(call, direction, upstream)
    return partial(_within, call.context, function)


def _function_of(call: Call, direction: str, upstream: Sequence[torch.Tensor]) -> Callable[[], Any]:
    if direction == STEP:
        return call.function
    if direction == FORWARD:
        return partial(_forward, call)
    if direction == BACKWARD:
        if call.reset is not None:
            call.reset()
        return partial(gradients, call.function(), call.leaves, upstream, retain_graph=True)
    return partial(_both, call, upstream)


def _within(context: Callable[[], AbstractContextManager[Any]], function: Callable[[], Any]) -> None:
    with context():
        function()


def _forward(call: Call) -> None:
    with torch.no_grad():
        call.function()


def _both(call: Call, upstream: Sequence[torch.Tensor]) -> None:
    gradients(call.function(), call.leaves, upstream)


def _captured(make: Callable[[], Callable[[], Any]], reset: Callable[[], None] | None) -> Callable[[], None]:
    """A CUDA graph of one call. What is kept for a backward pass is made on the capturing stream: autograd runs a node
    on the stream of its forward pass."""
    before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            function = make()
            for _ in range(2):
                if reset is not None:
                    reset()
                function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            function()
    finally:
        torch.cuda.set_stream(before)  # a capture that fails leaves its own stream behind
    return partial(_replay, graph, function)


def _replay(graph: torch.cuda.CUDAGraph, function: Callable[[], Any]) -> None:
    """Replays the graph; `function` is here to keep what the graph reads alive."""
    del function
    graph.replay()


def _once(call: Call, function: Callable[[], Any], device: torch.device) -> tuple[float, float | None]:
    """(milliseconds, GiB of extra memory) of one call after one for warm-up."""
    for last in (False, True):
        if call.reset is not None:
            call.reset()
        if last and device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            timing = interleaved({"": function}, device, 1, warmup=0)[""]
            # interleaved() holds the buffer that flushes the L2 cache: it is no part of the call
            peak = torch.cuda.max_memory_allocated(device) - before - L2_FLUSH_BYTES
            return timing.median_ms, max(peak, 0) / 2**30
        function()
    return interleaved({"": function}, device, 1, warmup=0)[""].median_ms, None


class RowRun:
    """Measures one row: its inputs, its providers' calls, and what they should give."""

    def __init__(self, row: Row, dtype: torch.dtype, device: torch.device, ceilings: Ceilings, rounds: int) -> None:
        self.row, self.dtype, self.device, self.ceilings, self.rounds = row, dtype, device, ceilings, rounds
        self.goals = row.goal_ms if device.type == "cuda" and GOAL_CARD in torch.cuda.get_device_name(device) else {}
        self.seconds: dict[str, float] = {}
        """What the row took: its inputs and what they should give, each provider's set-up and check, the timing."""
        self.calls: dict[str, Call] = {}
        self.status: dict[str, str] = {}
        self.inputs: dict[str, Any] = {}
        self.own: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {}
        """Provider -> the same values in memory that only it reads, and the outputs' gradients: what one leaves in L2
        helps nobody else, and what several read is not there more often than what one does."""

    def run(self, makers: dict[str, Maker]) -> list[Result]:
        """All directions of the row. Whatever a provider raises is its status; what the row's own set-up raises (no
        memory for its inputs) is that of every provider."""
        started = time.monotonic()
        try:
            self.inputs = make_inputs(self.row, self.dtype, self.device)
            self.upstream = make_upstream(self.row, self.inputs)
            expected = None if self.row.op == "adamw" else expect(self.row, self.inputs, self.upstream)
        except Exception as error:
            self.status = dict.fromkeys(makers, f"failed: {describe(error)}")
            return [self._result(direction) for direction in self.row.directions]
        started = self._took("inputs, expected", started)
        for name, maker in makers.items():
            self._set_up(name, maker, expected)
            started = self._took(name, started)
        del expected
        results = [self._direction(direction) for direction in self.row.directions]
        self._took("timing", started)
        return results

    def given(self, name: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """A provider's inputs and the gradients of its outputs."""
        if self.row.op not in KEEPS_IN_L2:
            return self.inputs, self.upstream
        if name not in self.own:
            inputs = make_inputs(self.row, self.dtype, self.device)
            self.own[name] = inputs, make_upstream(self.row, inputs)
        return self.own[name]

    def _took(self, part: str, started: float) -> float:
        """Notes what a part of the row took on the host; gives the time at which the next one begins."""
        now = time.monotonic()
        self.seconds[part] = now - started
        return now

    def _set_up(self, name: str, maker: Maker, expected: list[Expected] | None) -> None:
        """Makes a provider's call and checks what it gives. A peer that is wrong is timed and marked, ours is not."""
        try:
            # A step changes the parameters: what the next one should give is known only now.
            wanted = expect(self.row, self.inputs, self.upstream) if expected is None else expected
            inputs, upstream = self.given(name)
            call = maker(inputs)
            results = run_call(call, upstream)
        except NotOfferedError as error:
            self.status[name] = f"not timed: {error}"
            return
        except Exception as error:
            self.status[name] = f"failed: {describe(error)}"
            return
        finally:
            if name in self.status:
                self.own.pop(name, None)  # its memory is for the others
        try:
            (check_ours if is_ours(name) else check_peer)(results, wanted, self.dtype)
            self.status[name] = "ok"
        except AssertionError as error:
            self.status[name] = f"{'failed' if is_ours(name) else 'wrong'}: {' '.join(str(error).split())}"
            if is_ours(name):
                return
        except Exception as error:
            self.status[name] = f"failed: not checked, {describe(error)}"
            return
        self.calls[name] = call

    def _result(self, direction: str) -> Result:
        moved, flops = work(self.row, self.dtype, direction)
        goal = self.goals.get(direction)
        dtype = str(self.dtype).removeprefix("torch.")
        odd = self.row in ODD_ROWS
        result = Result(self.row.op, self.row.label, direction, dtype, moved, flops, goal, self.row.near, odd)
        result.goal_peer = GOAL_PEERS.get(self.row.name, {}).get(direction) if goal else None
        result.providers = {name: Measurement(status) for name, status in self.status.items()}
        return result

    def _direction(self, direction: str) -> Result:
        result = self._result(direction)
        functions: dict[str, Callable[[], Any]] = {}
        short: dict[str, Sequence[torch.Tensor]] = {}
        total = 0.0
        for name, call in self.calls.items():
            measurement = result.providers[name]
            if direction == BACKWARD and not call.keeps_graph:
                measurement.status = "not timed: its backward pass overwrites what a second one needs"
                continue
            try:
                upstream = call.upstream(self.given(name)[1])
                function = function_of(call, direction, upstream)
                ms, measurement.extra_gib = _once(call, function, self.device)
            except Exception as error:
                measurement.status = f"failed: {describe(error)}"
                continue
            functions[name] = function
            total += ms
            if ms < GRAPH_BELOW_MS:
                short[name] = upstream
        least = LOADED_ROUNDS if result.flops > LOADED_OPERATIONS else MIN_ROUNDS
        result.rounds = max(min(self.rounds, int(ROUNDS_MS / max(total, 1e-3))), least)
        self._time(result, functions)
        if self.device.type == "cuda":
            functions.clear()
            self._time_graphs(result, direction, short)
        return result

    def _resets(self, names: Any) -> dict[str, Callable[[], None]]:
        return {n: self.calls[n].reset for n in names if n in self.calls and self.calls[n].reset is not None}

    def _copy(self, result: Result) -> dict[str, Callable[[], Any]]:
        """A copy that moves as many bytes as a row that memory bounds; none where there is no room for it."""
        if result.flops or result.bytes > LARGEST_COPY:
            return {}
        try:
            # No random numbers: a peer's capture that failed leaves PyTorch's generator unusable.
            source = torch.arange(-(-result.bytes // 8), dtype=torch.int32, device=self.device)
            return {COPY: partial(torch.empty_like(source).copy_, source)}
        except torch.OutOfMemoryError:
            return {}

    def _time(self, result: Result, functions: dict[str, Callable[[], Any]]) -> None:
        named = functions.keys()
        functions = functions | self._copy(result)
        options: dict[str, Any] = {"resets": self._resets(functions), "warmup": 1}
        try:
            if result.flops > LOADED_OPERATIONS:
                functions[PRODUCT] = product_of(self.device)
                options["before"] = load_of(functions[PRODUCT], self.ceilings.matmul)
            # Or a backward pass of 0.1 ms on the GPU reads as the 0.3 to 0.5 ms that autograd takes on the host.
            timings = interleaved(functions, self.device, result.rounds, hide_launch=True, **options)
        except Exception as error:  # all ran alone a moment ago; which one it was cannot be told
            for name in named:
                result.providers[name].status = f"failed: while timed in turn, {describe(error)}"
            return
        copy = timings.pop(COPY, None)
        result.copy_ms = copy and copy.median_ms
        product = timings.pop(PRODUCT, None)
        result.product_tflops = product and PRODUCT_OPERATIONS / product.median_ms / 1e9
        products = result.product_tflops * 1e12 if result.product_tflops else self.ceilings.matmul
        for name, timing in timings.items():
            m = result.providers[name]
            m.ms, m.low_ms, m.high_ms = timing.median_ms, timing.low_ms, timing.high_ms
            m.gb_s = result.bytes / timing.median_ms / 1e6
            m.tflops = result.flops / timing.median_ms / 1e9 if result.flops else None
            ceiling, rate = (products, (m.tflops or 0.0) * 1e12) if result.flops else (self.ceilings.copy, m.gb_s * 1e9)
            m.share = rate / ceiling if ceiling else None

    def _time_graphs(self, result: Result, direction: str, short: dict[str, Sequence[torch.Tensor]]) -> None:
        graphs: dict[str, Callable[[], None]] = {}
        for name, upstream in short.items():
            call = self.calls[name]
            try:
                graphs[name] = _captured(partial(function_of, call, direction, upstream), call.reset)
            except Exception as error:
                result.providers[name].graph_note = f"not captured: {describe(error)}"
        try:
            timings = interleaved(graphs, self.device, result.rounds, resets=self._resets(graphs), warmup=1)
        except Exception as error:  # a graph that captured and does not replay costs the row its graph times only
            for name in graphs:
                result.providers[name].graph_note = f"not replayed: {describe(error)}"
            return
        for name, timing in timings.items():
            result.providers[name].graph_ms = timing.median_ms


def configure_compile() -> None:
    """Settings of torch.compile that a comparison needs."""
    functorch_config.donated_buffer = False  # a compiled backward pass that is timed again needs its buffers
    # Processes that compile beforehand share the GPU: which variant of a kernel is fastest is not for them to remember.
    inductor_config.autotune_local_cache = False
    # No pool of processes in each process that compiles, nor beside what is timed.
    inductor_config.compile_threads = 1


def release(device: torch.device) -> None:
    """Gives back what a row held, and forgets what was compiled for it."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
