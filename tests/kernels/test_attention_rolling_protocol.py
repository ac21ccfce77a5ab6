"""Who may touch which buffer when, in hopper_backward_rolling.py: its own code, run as Python on a model of barriers,
TMA and warpgroup products in which everything that may happen in another order does, and every access is checked."""

from __future__ import annotations

import inspect
import random
import textwrap
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fuselm.kernels.attention import hopper_backward_rolling as rolling
from fuselm.kernels.attention import hopper_common as common
from fuselm.kernels.attention import hopper_dq
from fuselm.kernels.attention.hopper_common import python_function


class _Value:
    """Stands for every value that decides nothing."""

    def _same(self, *_: Any, **__: Any) -> _Value:
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    __call__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __neg__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = _same


class _Dq(_Value):
    """dS·K: what the two dS and the two halves of the keys were."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts: Any = parts

    def _same(self, *_: Any, **__: Any) -> _Dq:
        return self

    __mul__ = _same


class _Rows(_Value):
    """Numbers of rows from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __radd__(self, number: int) -> _Rows:
        return _Rows(number + self.first)


class _Pointer:
    """`at` elements into a tensor that a consumer stores to."""

    def __init__(self, name: str, at: int = 0) -> None:
        self.name, self.at = name, at

    def __add__(self, elements: int) -> _Pointer:
        return _Pointer(self.name, self.at + elements)


class _Barrier:
    """`known`: what a thread knows to be over that waited for it."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.phase = self.bytes = 0
        self.known: frozenset[object] = frozenset()

    def turn_over(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals


class _Buffer:
    """Shared memory that a copy, or a consumer, fills and products read."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.loading = machine, False
        self.holds: Any = None
        self.write: object = None
        self.reads: list[object] = []

    def permute(self, _order: Any) -> _Buffer:
        return self

    def slice(self, *_: Any) -> _Buffer:
        return self

    def fill(self, holds: Any) -> None:
        assert not self.loading and all(read in self.machine.me().known for read in self.reads), "overwritten too soon"
        self.holds, self.write, self.reads = holds, object(), []

    def read(self) -> object:
        assert not self.loading and self.write in self.machine.me().known, "read before it is there"
        self.reads.append(token := object())
        return token

    def load(self, _layout: Any) -> _Value:
        self.machine.me().known |= {self.read()}
        return _Value()

    def store(self, _value: Any) -> None:
        me = self.machine.me()
        self.fill(me.at)
        me.known |= {self.write}


class _Ring:
    dtype = None

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def index(self, place: int) -> Any:
        assert 0 <= place < len(self.items)
        return self.items[place]


class _Thread(threading.Thread):
    """A partition: runs when it has the turn, and knows what is over by its own deeds and by barriers."""

    def __init__(self, machine: Machine, function: Any) -> None:
        super().__init__(daemon=True)
        self.machine, self.function, self.turn = machine, function, threading.Semaphore(0)
        self.known: frozenset[object] = frozenset()
        self.ready: Any = lambda: True
        self.products: list[list[object]] = []  # reads of those that are under way
        self.at: Any = None  # keys and queries of the last scores
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
    """Runs the producer and two consumers of one program over `lengths` (queries, keys), in an order drawn from a seed.

    Every tile of keys counts as (head, first key), every block of queries as its row in the padded arrays.
    """

    def __init__(
        self,
        seed: int,
        lengths: tuple[int, int],
        heads: int,
        group: int,
        head_dim: int,
        window: int = 0,
        produce: Any = None,
    ) -> None:
        self.random, self.stopped, self.done = random.Random(seed), False, threading.Semaphore(0)
        self.threads: list[_Thread] = []
        self.copies: list[tuple[_Buffer, _Barrier, int]] = []
        self.counter = 0
        self.added: list[tuple[int, Any, Any]] = []  # consumer, keys, row of dQ
        self.stored: list[tuple[str, int, int]] = []
        queries, keys = lengths
        self.heads, self.head_dim, self.block_m = heads, head_dim, 8192 // head_dim
        self.tiles, self.query_tiles = -(-keys // 128), -(-queries // self.block_m)
        problem = (queries, keys, heads, group, heads, 2, self.tiles, self.query_tiles, window)

        def ring(count: int) -> _Ring:
            return _Ring([_Buffer(self) for _ in range(count)])

        def barriers(count: int, arrivals: int) -> _Ring:
            return _Ring([_Barrier(arrivals) for _ in range(count)])

        self.plan = [_Buffer(self) for _ in range(32)]
        buffers: Any = (*(ring(n) for n in (2, 2, 4, 4, 2, 2, 4, 4)), self.plan)
        self.ds: _Ring = buffers[6]
        shared = tuple(barriers(*x) for x in ((2, 1), (2, 2), (4, 1), (2, 1), (2, 2), (2, 1), (2, 2)))
        self.scope = {**vars(rolling), **self._stubs()}
        self.scope["multiply_dq"] = self._python(hopper_dq.multiply_dq)
        self.scope |= {name: self._python(getattr(rolling, name)) for name in ("_not_before", "_produce", "_consume")}
        descs = [SimpleNamespace(name=n, dtype=None, block_type=SimpleNamespace(nbytes=1)) for n in "qkvolmKV"]
        q, k, v, do, lse2, delta, dk, dv = descs
        outputs = (0, dk, dv) if head_dim == 64 else (0, _Pointer(dk.name), _Pointer(dv.name))
        masks = {"PACKED": False, "CAUSAL": True, "WINDOW": window > 0, "BLOCK_M": self.block_m}
        produce = self.scope["_produce"] if produce is None else self._python(produce)
        consume = self.scope["_consume"]
        self.threads.append(
            _Thread(self, lambda: produce(buffers, shared, problem, q, k, v, do, lse2, delta, 0, 0, **masks))
        )
        for me in range(2):
            self.threads.append(
                _Thread(
                    self,
                    lambda me=me: consume(
                        buffers, shared, problem, outputs, 1.0, 1.0, ME=me, HEAD_DIM=head_dim, **masks
                    ),
                )
            )

    def _python(self, function: Any) -> Any:
        """The function with this machine's names in the place of its module's."""
        source = function if isinstance(function, str) else inspect.getsource(python_function(function))
        scope = self.scope
        exec(compile(textwrap.dedent(source[source.index("def ") :]), "kernel", "exec"), scope)
        return scope[source[source.index("def ") + 4 : source.index("(")]]

    def _stubs(self) -> dict[str, Any]:
        value = _Value()
        gl = SimpleNamespace(
            program_id=lambda _axis: 0,
            static_range=range,
            where=lambda condition, a, b: value if isinstance(condition, _Value) else a if condition else b,
            atomic_add=self.ticket,
            exp2=lambda _x: value,
            arange=lambda *_: _Rows(0),
            cast=lambda number, _dtype: number,
            # What decides something goes through inline assembly unchanged.
            inline_asm_elementwise=lambda _asm, _constraints, args, **_: args[0] if isinstance(args[0], int) else value,
            **dict.fromkeys(("zeros", "convert_layout", "full"), value),
            **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"), value),
            **dict.fromkeys(("float32", "int32", "int64")),
        )
        plain = ("tile_and_head", "query_blocks", "place_of")
        return {name: python_function(getattr(common, name)) for name in plain} | {
            "gl": gl,
            "mbarrier": SimpleNamespace(wait=self.wait, arrive=self.arrive, expect=self.expect),
            "tma": SimpleNamespace(store_wait=lambda _n: None),
            "tma_load": lambda desc, place, barrier, buffer: self.copy(buffer, barrier, (desc.name, place[0]), 0),
            "load_rows": self.load_rows,
            "store_rows": self.store_rows,
            "note": self.note,
            "noted": self.noted,
            "matrix": lambda buffer: buffer,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_products,
            "fence_async_shared": lambda: None,
            "add_dq": self.add_dq,
            "_store_registers": self.store_registers,
            "STAGES": 2,
        }

    def me(self) -> _Thread:
        thread = threading.current_thread()
        assert isinstance(thread, _Thread)
        return thread

    def _until(self, ready: Any) -> None:
        me = self.me()
        me.ready = ready
        self.done.release()
        me.turn.acquire()
        if self.stopped:
            raise _Stopped

    # What the kernel calls

    def wait(self, barrier: _Barrier, parity: int) -> None:
        self._until(lambda: barrier.phase & 1 != parity)
        self.me().known |= barrier.known

    def arrive(self, barrier: _Barrier, count: int) -> None:
        assert count == 1 and barrier.pending > 0, "one arrival too many"
        barrier.known |= self.me().known
        barrier.pending -= 1
        barrier.turn_over()
        self._until(lambda: True)

    def expect(self, barrier: _Barrier, nbytes: int) -> None:
        assert barrier.bytes == 0 and barrier.pending == 1, "expected before the copy before it is over"
        barrier.bytes += 2 if nbytes == 2 else 3 if nbytes > 3 else nbytes  # copies that will come
        barrier.pending -= 1
        barrier.known |= self.me().known

    def copy(self, buffer: _Buffer, barrier: _Barrier, holds: Any, _size: int) -> None:
        buffer.fill(holds)
        buffer.loading = True
        self.copies.append((buffer, barrier, 1))
        self._until(lambda: True)

    def load_rows(self, desc: Any, batch: int, _begin: int, _rows: int, row: int, head: int, barrier: Any, buffer: Any,
                  _packed: bool) -> None:  # fmt: skip
        self.copy(buffer, barrier, (desc.name, batch, head, row), 0)

    def store_rows(self, desc: Any, _batch: int, _begin: int, _rows: int, row: int, head: int, _source: Any,
                   _packed: bool) -> None:  # fmt: skip
        self.stored.append((desc.name, head, row))

    def store_registers(self, pointer: _Pointer, _value: Any, row: _Rows, _rows: int, stride: int, _: Any) -> None:
        """Tells batch, head and row of a (batch, rows, heads, head_dim) tensor from the address."""
        heads_so_far, rest = divmod(pointer.at + row.first * stride, self.head_dim)
        assert rest == 0 and stride == self.heads * self.head_dim
        row_at, head = divmod(heads_so_far, self.heads)
        self.stored.append((pointer.name, head, row_at))

    def note(self, plan: list[_Buffer], slot: int, index: int, value: int) -> None:
        plan[16 * slot + index].fill(value)
        self.me().known |= {plan[16 * slot + index].write}

    def noted(self, plan: list[_Buffer], slot: int, index: int) -> int:
        plan[16 * slot + index].load(None)
        value = plan[16 * slot + index].holds
        assert isinstance(value, int)
        return value

    def multiply(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        me, operands = self.me(), [x for x in (a, b) if isinstance(x, _Buffer)]
        me.products.append([x.read() for x in operands])
        held = tuple(x.holds for x in operands)
        if any(a is x for x in self.ds.items):
            return _Dq((*(acc.parts if isinstance(acc, _Dq) else ()), *held))
        if len(operands) == 2 and held[0][0] == "k":  # scores
            me.at = held
        return _Value()

    def wait_products(self, left: int, deps: Any) -> Any:
        me = self.me()
        over, me.products = me.products[: len(me.products) - left], me.products[len(me.products) - left :]
        me.known |= {token for reads in over for token in reads}
        return deps if len(deps) > 1 else deps[0]

    def add_dq(self, _pointer: Any, dq: _Dq, row: int, me: int, _head_dim: int) -> None:
        if dq.parts[0] is None:  # the zeros before the first block
            return
        ds_0, keys_0, ds_1, keys_1 = dq.parts
        for ds, keys in ((ds_0, keys_0), (ds_1, keys_1)):
            assert ds[0] == keys, f"dS of keys {ds[0]} is multiplied by keys {keys}"
        _, batch, head, first = ds_0[1]
        assert ds_0[1] == ds_1[1]
        assert row == (batch + head) * self.query_tiles * self.block_m + first, "dQ goes to another block"
        self.added.append((me, keys_0, row))

    def ticket(self, _pointer: Any, _one: int, sem: str) -> int:
        self.counter += 1
        return self.counter - 1

    def run(self) -> None:
        for thread in self.threads:
            thread.start()
        try:
            while not all(thread.over for thread in self.threads):
                able = [t for t in self.threads if not t.over and t.ready()]
                choice = self.random.randrange(len(able) + len(self.copies)) if able or self.copies else None
                assert choice is not None, "everybody waits"
                if choice < len(able):
                    able[choice].turn.release()
                    self.done.acquire()
                    error = able[choice].error
                    if error is not None:
                        raise error
                else:
                    buffer, barrier, size = self.copies.pop(choice - len(able))
                    buffer.loading = False
                    barrier.known |= {buffer.write}
                    barrier.bytes -= size
                    barrier.turn_over()
        finally:
            self.stopped = True
            for thread in self.threads:
                thread.turn.release()
            for thread in self.threads:
                thread.join(10)


SHAPES = [  # with the window, most tiles of keys have no queries
    ((128, 128), 5, 1, 0),
    ((64, 64), 5, 1, 0),
    ((1024, 1024), 2, 1, 0),
    ((300, 300), 3, 2, 0),
    ((128, 500), 3, 1, 0),
    ((500, 130), 3, 2, 0),
    ((70, 500), 3, 2, 33),
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("lengths", "heads", "group", "window"), SHAPES)
def test_protocol(lengths, heads, group, window, head_dim):
    """dQ of every pair of blocks is added once by each consumer, from the right keys; dK and dV are stored once."""
    for seed in range(4):
        machine = Machine(seed, lengths, heads, group, head_dim, window)
        machine.run()
        wanted = []
        for tile in range(machine.tiles):
            begin, _, _, count = python_function(common.query_blocks)(
                tile * 128, lengths[1], lengths[0], window,
                CAUSAL=True, WINDOW=window > 0, ROWS=128, BLOCK_M=machine.block_m,
            )  # fmt: skip
            wanted += [
                (
                    me,
                    ("k", 0, kv_head, tile * 128),
                    ((kv_head * group + member) * machine.query_tiles + block) * machine.block_m,
                )
                for kv_head in range(heads)
                for member in range(group)
                for block in range(begin, begin + count)
                for me in range(2)
            ]
        assert sorted(machine.added) == sorted(wanted)
        places = [(name, h, t * 128 + 64 * c) for name in "KV" for h in range(heads) for t in range(machine.tiles)
                  for c in range(2)]  # fmt: skip
        assert sorted(machine.stored) == sorted(places)


@pytest.mark.parametrize(
    "change",
    [
        ("if (used > 1) & (done - passed < 3):", "if used < 0:"),
        ("mbarrier.wait(q_empty.index(slot), phase ^ 1)", "pass"),
        ("mbarrier.wait(plan_empty.index(slot), number // 2 & 1 ^ 1)", "pass"),
    ],
)
def test_model_misses_a_wait(change):
    """Without one of the producer's waits, something is overwritten before it has been used."""
    source = inspect.getsource(python_function(rolling._produce))
    assert change[0] in source
    with pytest.raises(AssertionError):
        for seed in range(30):
            for length in (128, 640):
                Machine(seed, (length, length), 5, 1, 64, produce=source.replace(*change)).run()
