"""Who may touch which buffer when, in hopper_backward_rolling.py: its own kernel on the model of protocol.py, which has
names of blocks in the place of their values. Every product must read the blocks that belong together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fuselm.kernels.attention import hopper_backward_rolling as rolling
from fuselm.kernels.attention import hopper_common as common
from fuselm.kernels.attention import hopper_dq
from fuselm.kernels.attention.hopper_common import python_function

from .protocol import VALUE, Buffer, Change, Language, Machine, Ring, Value, as_python, faults

Block = tuple[Any, ...]  # tensor, batch, row, head, column


class _Sum(Value):
    """Products added up: the blocks that each has read."""

    def __init__(self, blocks: tuple[Block, ...]) -> None:
        self.blocks = blocks


class _Rows(Value):
    """Numbers of rows from `first` on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __radd__(self, number: int) -> _Rows:
        return _Rows(number + self.first)


class _Pointer:
    """`at` elements into a gradient."""

    def __init__(self, name: str, at: int = 0) -> None:
        self.name, self.at = name, at

    def __add__(self, elements: int) -> _Pointer:
        return _Pointer(self.name, self.at + elements)


class _Scores(Buffer):
    """dS: of the keys and queries whose scores its writer computed last; of None before it has computed any."""

    def store(self, value: Any) -> None:
        self.fill(("ds", *(self.machine.me().at or (None, None))))


class _Gradient(Buffer):
    """dK or dV on its way out."""

    def store(self, value: Any) -> None:
        self.fill(_blocks(value))


def _blocks(value: Any) -> tuple[Block, ...]:
    return value.blocks if isinstance(value, _Sum) else ()


class _Program:
    """One program, which takes all tiles of keys, of batch 1."""

    def __init__(
        self,
        seed: int,
        head_dim: int,
        lengths: tuple[int, int],
        heads: int,
        group: int,
        window: int = 0,
        held: int = 0,
        change: Change | None = None,
    ) -> None:
        self.machine = machine = Machine(seed)
        self.head_dim, self.heads, self.group, self.block_m = head_dim, heads, group, 8192 // head_dim
        (self.queries, self.keys), self.window = lengths, window
        self.tiles, self.query_tiles = -(-self.keys // 128), -(-self.queries // self.block_m)
        self.taken = 0
        self.added: list[tuple[int, Block, int]] = []  # consumer, keys of the tile's first half, row of dQ
        self.stored: list[tuple[str, int, int, tuple[Block, ...]]] = []  # tensor, head, row, what was added up
        names = machine.names | {
            "gl": Language(
                atomic_add=self.take,
                arange=lambda *_: _Rows(0),
                allocate_shared_memory=lambda *_: Ring([_Scores(machine) for _ in range(4)]),
                # An int goes through inline assembly unchanged.
                inline_asm_elementwise=lambda _, form, args, **__: args[0] if isinstance(args[0], int) else VALUE,
                warp_specialize=lambda work, *_: machine.run(*(functools.partial(f, *args) for f, args in work)),
            ),
            "STAGES": 2,
            "READ": 8,
            "DS": 10,
            "ring": self.ring,
            "warpgroup_mma": self.multiply,
            "add_dq": self.add_dq,
            "tma_store": self.tma_store,
            "_store_registers": self.store_registers,
        }
        kernel = as_python((common, hopper_dq, rolling), names, change).hopper_backward_rolling_kernel
        rows = {"q": self.block_m, "k": 64, "v": 64, "do": self.block_m}
        sizes = {name: 2 * head_dim * count for name, count in rows.items()}
        sizes |= dict.fromkeys(("lse2", "delta"), 4 * self.block_m)
        descs = [SimpleNamespace(name=n, dtype=VALUE, block_type=SimpleNamespace(nbytes=s)) for n, s in sizes.items()]
        outputs = [SimpleNamespace(name=n) if head_dim == 64 else _Pointer(n) for n in ("dk", "dv")]
        self.run_kernel: Callable[[], Any] = lambda: kernel(
            *descs, VALUE, VALUE, *outputs, VALUE, *lengths, heads, group, heads, 2, self.tiles, self.query_tiles,
            window, 1.0, 1.0, PACKED=False, CAUSAL=True, WINDOW=window > 0, BLOCK_M=self.block_m, HEAD_DIM=head_dim,
            HELD=held,
        )  # fmt: skip

    # What the kernel calls

    def take(self, _counter: Any, _one: int, sem: str) -> int:
        self.taken += 1
        return self.taken - 1

    def ring(self, desc: Any, count: int) -> Ring:
        kind = _Gradient if desc.name == "dk" else Buffer
        return Ring([kind(self.machine) for _ in range(count)])

    def multiply(self, a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        operands = [x for x in (a, b) if isinstance(x, Buffer)]
        self.machine.start("products", *operands)
        held: tuple[Any, ...] = tuple(x.holds for x in operands)
        me = self.machine.me()
        tensors = [block[0] for block in held]
        if tensors == ["k", "q"]:
            me.at = held
        elif tensors in (["q"], ["do"], ["v", "do"]):
            assert held[-1][1:] == me.at[1][1:], f"{held[-1]} is multiplied in the pass of {me.at}"
            assert tensors[0] != "v" or held[0][1:] == me.at[0][1:], f"{held[0]} is multiplied in the pass of {me.at}"
        else:
            assert tensors == ["ds", "k"], tensors
        return _Sum((_blocks(acc) if use_acc else ()) + held)

    def add_dq(self, _pointer: Any, dq: _Sum, row: int, me: int, _head_dim: int) -> None:
        (_, *from_0), keys_0, (_, *from_1), keys_1 = dq.blocks
        if from_0 == from_1 == [None, None]:  # the zeros before the first block
            return
        assert from_0[1] == from_1[1] and keys_1[2] == keys_0[2] + 64
        assert [from_0[0], from_1[0]] == [keys_0, keys_1], f"dS of {from_0} and {from_1} by {keys_0} and {keys_1}"
        assert row == self.row_of(from_0[1]), "dQ goes to another block"
        self.added.append((me, keys_0, row))

    def row_of(self, block: Block) -> int:
        """Row of a block of queries in the padded arrays."""
        _, _, first, head, _ = block
        return head * self.query_tiles * self.block_m + first

    def tma_store(self, desc: Any, place: Sequence[int], buffer: Buffer) -> None:
        self.machine.start("stores", buffer)
        _, row, head, _ = place
        self.stored.append((desc.name, head, row, buffer.holds or ()))

    def store_registers(self, pointer: _Pointer, value: Any, row: _Rows, _rows: int, stride: int, _layout: Any) -> None:
        """Tells head and row of a (1, rows, heads, head_dim) tensor from the address."""
        assert stride == self.heads * self.head_dim
        place, column = divmod(pointer.at + row.first * stride, self.head_dim)
        assert column == 0
        row_number, head = divmod(place, self.heads)
        self.stored.append((pointer.name, head, row_number, _blocks(value)))

    def run(self) -> None:
        """Raises AssertionError where something is not as it should be."""
        self.run_kernel()
        added, stored = [], []
        for tile in range(self.tiles):
            begin, _, _, count = python_function(common.query_blocks)(
                tile * 128, self.keys, self.queries, self.window,
                CAUSAL=True, WINDOW=self.window > 0, ROWS=128, BLOCK_M=self.block_m,
            )  # fmt: skip
            for kv_head in range(self.heads):
                blocks = [
                    (0, block * self.block_m, kv_head * self.group + member, 0)
                    for member in range(self.group)
                    for block in range(begin, begin + count)
                ]
                keys = ("k", 0, tile * 128, kv_head, 0)
                added += [(me, keys, self.row_of(("q", *block))) for me in range(2) for block in blocks]
                for half in range(2):
                    place = (kv_head, tile * 128 + 64 * half)
                    stored.append(("dk", *place, tuple(("q", *block) for block in blocks)))
                    stored.append(("dv", *place, tuple(("do", *block) for block in blocks)))
        assert sorted(self.added) == sorted(added), "dQ is not added once by each consumer"
        assert sorted(self.stored) == sorted(stored), "dK and dV are not those of all blocks, stored once"


SHAPES = [  # lengths, heads, group, window, held; with the window, most tiles of keys have no queries
    ((64, 64), 5, 1, 0),
    ((128, 128), 5, 1, 0),
    ((1024, 1024), 2, 1, 0),
    ((300, 300), 3, 2, 0, 4),
    ((128, 500), 3, 1, 0),
    ((500, 130), 3, 2, 0),
    ((70, 500), 3, 2, 33),
    ((0, 300), 3, 1, 0),
]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_protocol(shape, head_dim):
    for seed in range(4):
        _Program(seed, head_dim, *shape).run()


FAULTS = faults((rolling,))


@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS)
def test_the_model_finds(change):
    with pytest.raises(AssertionError):
        for seed in range(30):
            for lengths, window in (((128, 128), 0), ((640, 640), 0), ((70, 500), 33), ((0, 300), 0)):
                for head_dim in (64, 128):
                    _Program(seed, head_dim, lengths, 5, 1, window, change=change).run()
