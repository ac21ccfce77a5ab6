"""Who may touch which buffer when, in hopper_forward.py: its own kernel on the model of protocol.py, which has names of
blocks in the place of their values. Every product must read the blocks that belong together."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fuselm.kernels.attention import hopper_common as common
from fuselm.kernels.attention import hopper_forward as forward
from fuselm.kernels.attention import hopper_softmax
from fuselm.kernels.launch.attention_hopper import HopperForwardLaunch

from .protocol import VALUE, Buffer, Change, Language, Machine, Partition, Ring, Value, as_python, faults

Block = tuple[Any, ...]  # tensor, batch, row, head, column


class _Products(Value):
    """Scores, P or the output: of which blocks."""

    def __init__(self, blocks: tuple[tuple[Block, ...], ...]) -> None:
        self.blocks = blocks


class _Output(Buffer):
    """A tile of the output on its way out."""

    def store(self, value: Any) -> None:
        self.fill(value.blocks)


class _Program:
    """One program, which takes all tiles of queries."""

    def __init__(
        self,
        seed: int,
        launch: HopperForwardLaunch,
        lengths: tuple[int, int],
        heads: int,
        group: int,
        window: int = 0,
        change: Change | None = None,
    ) -> None:
        self.machine = machine = Machine(seed)
        self.launch, self.heads, self.group, self.window = launch, heads, group, window
        self.queries, self.keys = lengths
        self.tiles = -(-self.queries // launch.block_m) + 1  # one behind the end, as documents have them
        self.turns = [0] * launch.consumers
        self.stored: list[tuple[int, int, tuple[tuple[Block, ...], ...]]] = []  # head, row, what was added up
        barrier = SimpleNamespace(**vars(machine.names["mbarrier"]))
        barrier.arrive = self.arrive
        names = machine.names | {
            "gl": Language(
                warp_specialize=lambda work, *_: machine.run(*(functools.partial(f, *args) for f, args in work)),
            ),
            "mbarrier": barrier,
            "ring": lambda desc, n: Ring([(_Output if desc.name == "o" else Buffer)(machine) for _ in range(n)]),
            "warpgroup_mma": self.multiply,
            "tma_store": self.tma_store,
            "take_turn": self.take_turn,
            "give_turn": self.give_turn,
            "declare_surpassed": lambda: None,
            "mask_scores": lambda s, *_: s,
            "probabilities": lambda s, *_: (s, VALUE),
            "add_sums": lambda *_: VALUE,
            "halves": lambda s: (s, s),
            "join_quarters": lambda p, *_: p,
            "thread_maxima_bits": lambda *_: VALUE,
            "surpassed": lambda *_: (VALUE, machine.random.random() < 0.5),
            "raise_maximum": lambda *_: (VALUE, VALUE, VALUE),
            "scale_rows": lambda acc, _: acc,
            "packed": lambda p, _: p,
            "left_operand": lambda p, *_: p,
        }
        kernel = as_python((common, hopper_softmax, forward), names, change)._hopper_forward_kernel
        sizes = {"q": 64, "k": launch.block_n, "v": launch.block_n, "o": 64}
        descs = [SimpleNamespace(name=n, dtype=VALUE, block_type=SimpleNamespace(nbytes=s)) for n, s in sizes.items()]
        self.run_kernel = lambda: kernel(
            *descs, VALUE, VALUE, *lengths, heads, group, heads, 2, self.tiles, window, 1.0,
            PACKED=False, CAUSAL=True, WINDOW=window > 0, CONSUMERS=launch.consumers, BLOCK_N=launch.block_n,
            HEAD_DIM=64, STAGES=launch.stages, JOINT=launch.joint, Q_BUFFERS=launch.query_buffers,
            PRODUCER_REGISTERS=24, CONSUMER_REGISTERS=240,
        )  # fmt: skip

    # What the kernel calls

    def arrive(self, barrier: Any, count: int = 1) -> None:
        if isinstance(threading.current_thread(), Partition):
            self.machine.arrive(barrier, count)
        else:  # before the partitions begin
            barrier.arrive(0, count)

    def take_turn(self, me: int) -> None:
        self.machine.pause(lambda: self.turns[me] > 0)
        self.turns[me] -= 1

    def give_turn(self, other: int) -> None:
        self.turns[other] += 1
        assert self.turns[other] == 1, "two warpgroups' worth of threads arrive before anybody waits"
        self.machine.pause()

    def multiply(self, a: Any, b: Buffer, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        if not use_acc:  # Q·Kᵀ
            self.machine.start("products", a, b)
            return _Products(((a.holds or (), b.holds or ()),))
        self.machine.start("products", b)
        (scores,) = a.blocks
        assert b.holds is not None and b.holds[1:] == scores[1][1:], f"P of {scores} by {b.holds}"
        return _Products((acc.blocks if isinstance(acc, _Products) else ()) + (scores,))

    def tma_store(self, desc: Any, place: Sequence[int], buffer: Buffer) -> None:
        self.machine.gather()  # Triton puts a barrier between what threads write and a copy of it
        self.machine.start("stores", buffer)
        _, row, head, _ = place
        self.stored.append((head, row, buffer.holds or ()))

    def own(self, row: int) -> list[int]:
        """Key blocks that some query of 64 from `row` on meets, the last first; of two consumers without a window those
        of the whole tile."""
        shift, rows = self.keys - self.queries, 64
        if self.launch.consumers == 2 and not self.window:
            rows = self.launch.block_m
            row = row // rows * rows
        met = set()
        for query in range(row, min(row + rows, self.queries)):
            begin = max(query + shift - self.window + 1, 0) if self.window else 0
            end = min(query + shift + 1, self.keys)
            if begin < end:
                met |= set(range(begin // self.launch.block_n, (end - 1) // self.launch.block_n + 1))
        return sorted(met, reverse=True)

    def run(self) -> None:
        """Raises AssertionError where something is not as it should be."""
        self.run_kernel()
        rows = range(0, self.tiles * self.launch.block_m, 64)
        places = [(head, row) for head in range(self.heads) for row in rows]
        assert sorted((head, row) for head, row, _ in self.stored) == places, "not every tile was stored once"
        for head, row, blocks in self.stored:
            own = self.own(row) or [blocks[0][1][2] // self.launch.block_n]  # one that all masks hide
            k = [("k", 0, block * self.launch.block_n, head // self.group, 0) for block in own]
            assert blocks == tuple((("q", 0, row, head, 0), block) for block in k), "the output is of other blocks"
        assert sum(self.turns) <= 1


LAUNCHES = [
    HopperForwardLaunch(2, 128, 2, 0),
    HopperForwardLaunch(2, 64, 3, 0, query_buffers=2),
    HopperForwardLaunch(3, 128, 3, 0, query_buffers=2),
    HopperForwardLaunch(3, 128, 3, 0),
]
SHAPES = [  # lengths, heads, group, window
    ((64, 64), 5, 1, 0),
    ((700, 700), 2, 2, 0),
    ((300, 900), 3, 1, 0),
    ((500, 130), 3, 3, 0),
    ((500, 800), 2, 1, 150),
]


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_protocol(shape, launch):
    for seed in range(3):
        _Program(seed, launch, *shape).run()


@pytest.mark.parametrize(("consumers", "query_buffers"), [(3, 1), (2, 2)])
def test_two_stages_too_few_are_refused_and_found(consumers, query_buffers):
    """A slot that was handed back by who passed a block over is overwritten while another consumer reads it."""
    with pytest.raises(ValueError, match="three stages"):
        HopperForwardLaunch(consumers, 128, 2, 0, query_buffers)
    launch = HopperForwardLaunch(consumers, 128, 3, 0, query_buffers)
    object.__setattr__(launch, "stages", 2)
    with pytest.raises(AssertionError, match="overwritten too soon"):
        for seed in range(60):
            _Program(seed, launch, (500, 800), 2, 1, 150).run()


FAULTS = faults((forward,))


@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS)
def test_the_model_finds(change):
    with pytest.raises(AssertionError):
        for seed in range(20):
            for launch in LAUNCHES:
                for lengths, window in (((64, 64), 0), ((320, 320), 0), ((300, 500), 150)):
                    _Program(seed, launch, lengths, 5, 1, window, change).run()
