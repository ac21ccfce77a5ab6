"""Who may touch which shared memory when: a model on which kernels of Gluon run as Python.

The kernel's own functions run, a thread for each partition, on barriers, copies and buffers of this module
(`as_python`). Whatever may happen in another order does, by the draw of a seed: one partition runs at a time, up to its
next barrier or copy, and a copy arrives at any time after it was asked for. Every access is checked against what its
partition knows to be over, which it has from its own deeds and from barriers. The accesses are bits of an int, and so
is what somebody knows.

Partitions are taken as one: what their warps do to one another is not seen, but for a fence, which counts from the next
barrier of all threads on. Times, values and layouts are not in the model.
"""

from __future__ import annotations

import ast
import functools
import inspect
import random
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from fuselm.kernels.attention.hopper_common import python_function


class Value:
    """Stands for every value that decides nothing."""

    def _same(self, *_: Any, **__: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def __bool__(self) -> bool:
        return False

    __call__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = (
        __rtruediv__
    ) = _same
    __and__ = __or__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = _same
    __hash__ = None  # pyright: ignore[reportAssignmentType]


VALUE = Value()


class Language:
    """gluon.language for one program: `given`, what decides something, and Value for all else."""

    def __init__(self, **given: Any) -> None:
        self.given = {"program_id": lambda axis: 0, "num_programs": lambda axis: 1, "static_range": range} | given

    def __getattr__(self, name: str) -> Any:
        return self.given.get(name, VALUE)

    def cast(self, value: Any, dtype: Any) -> Any:
        return value

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return VALUE if isinstance(condition, Value) else a if condition else b


class Ring:
    """What a kernel takes by `index`."""

    dtype = VALUE

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def index(self, place: int) -> Any:
        assert 0 <= place < len(self.items), f"no place {place}"
        return self.items[place]


class Barrier:
    """A phase ends when `arrivals` have arrived and all bytes that they announced have come."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.phase = self.nbytes = 0
        self.known = 0  # what who waited for the last phase knows to be over
        self.coming = 0  # and for this one

    def arrive(self, known: int, count: int = 1, nbytes: int = 0) -> None:
        assert self.pending >= count, "more arrive than the barrier counts"
        self.pending -= count
        self.receive(known, -nbytes)

    def receive(self, known: int, nbytes: int) -> None:
        self.coming |= known
        self.nbytes -= nbytes
        if self.pending == 0 and self.nbytes == 0:
            self.phase, self.pending, self.known = self.phase + 1, self.arrivals, self.coming


class NamedBarrier:
    """A round ends when `threads` threads have arrived."""

    def __init__(self) -> None:
        self.rounds = 0  # that have ended
        self.here: set[int] = set()  # partitions that have arrived in this one
        self.threads = self.coming = self.known = 0

    def arrive(self, me: int, mine: int, threads: int, known: int) -> None:
        assert me not in self.here, "arrives twice in a round"
        self.here.add(me)
        self.threads, self.coming = self.threads + mine, self.coming | known
        assert self.threads <= threads, "more threads arrive than the barrier counts"
        if self.threads == threads:
            self.rounds, self.known = self.rounds + 1, self.coming
            self.here, self.threads, self.coming = set(), 0, 0


class Buffer:
    """A piece of shared memory. `holds`: what the last to write it says that it is."""

    dtype = VALUE

    def __init__(self, machine: Machine) -> None:
        self.machine, self.holds = machine, None
        self.loading = False
        self.write = self.reads = self.generic = 0  # the last write, the reads of it, and which of these are generic

    def permute(self, *_: Any) -> Buffer:
        return self

    slice = _reinterpret = permute

    def _see(self, accesses: int, by_copy: bool, what: str) -> None:
        known = self.machine.me().known
        assert not self.loading and not accesses & ~known, f"{what} too soon"
        # The generic proxy's accesses are before the async one's where a fence says so; the other way round, the end of
        # a copy or a product says it.
        assert not by_copy or not accesses & self.generic & ~self.machine.fenced, f"{what} without a proxy fence"

    def fill(self, holds: Any, by_copy: bool = False) -> int:
        """Writes it, by TMA or by the partition's own threads. Returns the access."""
        self._see(self.write | self.reads, by_copy, "overwritten")
        self.holds, self.reads, self.generic, self.loading = holds, 0, 0, by_copy
        self.write = self.machine.access()
        if not by_copy:
            self.generic = self.write
            self.machine.me().known |= self.write
        return self.write

    def read(self, by_copy: bool = False) -> int:
        """Reads it, by TMA or a product, which go on after this, or by the partition's own threads."""
        assert self.write, "read before anything was written"
        self._see(self.write, by_copy, "read")
        read = self.machine.access()
        self.reads |= read
        if not by_copy:
            self.generic |= read
            self.machine.me().known |= read
        return read

    def load(self, layout: Any = None) -> Any:
        self.read()
        return VALUE

    def store(self, value: Any) -> None:
        self.fill(None)


class Number(Buffer):
    """An int in shared memory."""

    def store(self, value: Any) -> None:
        self.fill(value)

    def load(self, layout: Any = None) -> Any:
        self.read()
        return self.holds


class Partition(threading.Thread):
    """Runs when it has the turn.

    Attributes:
        threads: how many it has.
        known: accesses that it knows to be over.
        at: for the test: what it is at.
    """

    def __init__(self, machine: Machine, function: Callable[[], Any], threads: int) -> None:
        super().__init__(daemon=True)
        self.threads = threads
        self.machine, self.function, self.turn = machine, function, threading.Semaphore(0)
        self.known = self.fence = 0
        self.ready: Callable[[], bool] = lambda: True
        self.under_way: dict[str, list[int]] = {}
        self.at: Any = None
        self.over = False
        self.error: BaseException | None = None

    def run(self) -> None:
        self.turn.acquire()
        try:
            if not self.machine.stopped:
                self.function()
        except BaseException as error:
            self.error = error
        self.over = True
        self.machine.done.release()


class _Stopped(BaseException):
    pass


class Machine:
    """One program. `names` are those of Gluon's functions that the model has."""

    def __init__(self, seed: int) -> None:
        self.random, self.stopped, self.done = random.Random(seed), False, threading.Semaphore(0)
        self.copies: list[tuple[Buffer, Barrier, int]] = []
        self.named = [NamedBarrier() for _ in range(16)]
        self.accesses = 0  # so far
        self.fenced = 0  # accesses of the generic proxy that those of the async one may follow
        self.names: dict[str, Any] = {
            "mbarrier": SimpleNamespace(wait=self.wait, arrive=self.arrive, expect=self.expect),
            "tma": SimpleNamespace(store_wait=self.store_wait),
            "tma_load": self.tma_load,
            "tma_store": self.tma_store,
            "meet": self.meet,
            "fence_async_shared": self.fence,
            "thread_barrier": self.gather,
            "warpgroup_mma_wait": self.wait_products,
            "barrier_ring": self.barriers,
            "plan_ring": lambda numbers: self.numbers(2 * numbers),
            "note": self.note,
            "noted": lambda plan, slot, index: plan.index(2 * index + slot).load(),
            "matrix": lambda buffer: buffer,
        }

    def buffers(self, count: int) -> Ring:
        return Ring([Buffer(self) for _ in range(count)])

    def numbers(self, count: int) -> Ring:
        return Ring([Number(self) for _ in range(count)])

    def note(self, plan: Ring, slot: int, index: int, value: Any) -> None:
        """The plan's later numbers are lost: the lanes of a warp write to a place each."""
        plan.index(2 * index + slot).store(value)
        for place in plan.items[2 * index + slot + 2 :: 2]:
            place.holds = None

    def barriers(self, count: int, arrivals: int = 1) -> Ring:
        return Ring([Barrier(arrivals) for _ in range(count)])

    def me(self) -> Partition:
        partition = threading.current_thread()
        assert isinstance(partition, Partition)
        return partition

    def access(self) -> int:
        self.accesses += 1
        return 1 << self.accesses

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets others run; this partition does not before `ready`."""
        me = self.me()
        me.ready = ready
        self.done.release()
        me.turn.acquire()
        if self.stopped:
            raise _Stopped

    # Barriers and fences

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.pause(lambda: barrier.phase & 1 != parity)
        self.me().known |= barrier.known

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.gather()
        barrier.arrive(self.me().known, count)
        self.pause()

    def expect(self, barrier: Barrier, nbytes: int) -> None:
        barrier.arrive(self.me().known, nbytes=nbytes)

    def meet(self, odd: int, first: int, threads: int, wait: bool) -> None:
        self.gather()
        assert odd in (0, 1)
        me, barrier = self.me(), self.named[first + odd]
        ended = barrier.rounds
        barrier.arrive(id(me), me.threads, threads, me.known)
        self.pause(lambda: barrier.rounds > ended or not wait)
        if wait:
            me.known |= barrier.known

    def fence(self) -> None:
        self.me().fence |= self.me().known

    def gather(self) -> None:
        self.fenced |= self.me().fence

    # Copies and products

    def copy(self, buffer: Buffer, barrier: Barrier, holds: Any, nbytes: int) -> int:
        """To `buffer`; arrives at any time after the next pause. Returns the access."""
        self.copies.append((buffer, barrier, nbytes))
        return buffer.fill(holds, by_copy=True)

    def tma_load(self, desc: Any, place: Sequence[int], barrier: Barrier, buffer: Buffer) -> None:
        self.copy(buffer, barrier, (desc.name, *place), desc.block_type.nbytes)
        self.pause()

    def tma_store(self, desc: Any, place: Sequence[int], buffer: Buffer) -> None:
        self.start("stores", buffer)

    def store_wait(self, left: int) -> None:
        self.finish("stores", left)

    def wait_products(self, left: int, deps: Sequence[Any]) -> Any:
        self.finish("products", left)
        return deps if len(deps) > 1 else deps[0]

    def start(self, kind: str, *buffers: Buffer) -> None:
        """What reads `buffers` and is over when this partition has waited for it."""
        reads = sum(buffer.read(by_copy=True) for buffer in buffers)
        self.me().under_way.setdefault(kind, []).append(reads)

    def finish(self, kind: str, left: int) -> None:
        under_way = self.me().under_way.setdefault(kind, [])
        while len(under_way) > left:
            self.me().known |= under_way.pop(0)

    # The run

    def run(self, *functions: Callable[[], Any]) -> None:
        """Every partition to its end: warpgroups, and a warp that loads, the last of several.

        Raises:
            AssertionError: an access is not allowed, all wait for one another, or somebody has not been waited for.
        """
        threads = [128] * (len(functions) - 1) + [32]
        partitions = [Partition(self, function, n) for function, n in zip(functions, threads, strict=True)]
        for partition in partitions:
            partition.start()
        try:
            self._steps(partitions)
        finally:
            self.stopped = True
            for partition in partitions:
                partition.turn.release()
                partition.join()
        assert not any(barrier.here for barrier in self.named), "somebody has arrived whom nobody waits for"
        assert not self.copies, "copies arrive after the end"
        assert not any(any(p.under_way.values()) for p in partitions), "stores or products go on after the end"

    def _steps(self, partitions: list[Partition]) -> None:
        while not all(partition.over for partition in partitions):
            able = [partition for partition in partitions if not partition.over and partition.ready()]
            assert able or self.copies, "all wait for one another"
            choice = self.random.randrange(len(able) + len(self.copies))
            if choice >= len(able):
                buffer, barrier, nbytes = self.copies.pop(choice - len(able))
                buffer.loading = False
                barrier.receive(buffer.write, nbytes)
                continue
            able[choice].turn.release()
            self.done.acquire()
            error = able[choice].error
            if error is not None:
                raise error


# --- Kernels as Python -------------------------------------------------------------------------------------------

Change = tuple[str, str, str]  # function, text, other text


def _text(function: Any) -> tuple[str, int]:
    """A function's source without its decorators, and the number of its first line."""
    lines, number = inspect.getsourcelines(function)
    first = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def "))
    return textwrap.dedent("".join(lines[first:])), number + first


@functools.cache
def _code(function: Any, change: Change | None) -> CodeType:
    text, number = _text(function)
    if change is not None:
        assert text.count(change[1]) == 1, f"{change[1]!r} is not once in {change[0]}"
        text = text.replace(*change[1:])
    tree = ast.parse("from __future__ import annotations\n" + text)  # annotations name types of Gluon
    return compile(ast.increment_lineno(tree, number - 2), inspect.getsourcefile(function) or "kernel", "exec")


def as_python(
    modules: Sequence[ModuleType], replaced: Mapping[str, Any], change: Change | None = None
) -> SimpleNamespace:
    """The names of `modules` in one namespace, jitted functions as Python functions of it.

    Args:
        modules: a kernel's, those that it imports from first.
        replaced: what stands for these names, in all functions.
        change: (function, text, other text): its source has the text, once, and runs with the other: to see whether the
            model finds the fault.
    """
    scope: dict[str, Any] = {}
    for module in modules:
        scope |= vars(module)
    scope |= replaced
    for name, function in list(scope.items()):
        if name not in replaced and hasattr(function, "fn"):
            exec(_code(python_function(function), change if change and change[0] == name else None), scope)
    return SimpleNamespace(**{name: value for name, value in scope.items() if not name.startswith("__")})


ORDERING = ("mbarrier.wait", "mbarrier.arrive", "mbarrier.expect", "fence_async_shared", "tma.store_wait", "meet")


def faults(modules: Sequence[ModuleType], calls: Sequence[str] = ORDERING) -> dict[str, Change]:
    """What `modules` do for the order of things, undone: each of these calls left out, each wait for the other phase.
    Of a good model, each is found by some seed of some shape."""
    found: dict[str, Change] = {}
    for module in modules:
        for name, function in vars(module).items():
            python = python_function(function)
            if not hasattr(function, "fn") or python.__module__ != module.__name__:
                continue
            text, _ = _text(python)
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.Expr) or ast.unparse(getattr(node.value, "func", node)) not in calls:
                    continue
                old = ast.unparse(node)
                others = {"left out": "pass"}
                if old.startswith("mbarrier.wait"):
                    others["for the other phase"] = old.removesuffix(")") + " ^ 1)"
                if old.startswith("meet("):
                    others["at the other barrier"] = old.replace("meet(", "meet(1 - ", 1)
                lines = text.splitlines(keepends=True)
                begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
                end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
                for what, other in others.items():
                    found[f"{name}:{node.lineno} {old} {what}"] = (name, text, text[:begin] + other + text[end:])
    return found
