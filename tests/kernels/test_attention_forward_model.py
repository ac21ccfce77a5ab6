"""What a consumer of hopper_forward.py computes: its own code, run as Python on torch tensors, its PTX on a small
interpreter. Barriers are modelled as far as they say which block lies in which slot. No GPU runs here, and Triton's
interpreter does not run Gluon."""

from __future__ import annotations

import itertools
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fuselm.kernels.attention import hopper_common as common
from fuselm.kernels.attention import hopper_forward, hopper_softmax
from fuselm.kernels.launch.attention_hopper import HopperForwardLaunch

from .protocol import as_python

LOG2E = common.LOG2E


class _Tensor(torch.Tensor):
    """A tensor that has Gluon's `type.layout`, casts of bits, and halves of a last dimension of 2."""

    type: Any = SimpleNamespace(layout=None)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> _Tensor:
        return self.view(dtype) if bitcast else super().to(dtype)

    def split(self) -> tuple[_Tensor, _Tensor]:
        assert self.shape[-1] == 2
        return self[..., 0], self[..., 1]

    def store(self, value: torch.Tensor) -> None:
        self.copy_(value)


def _tensor(x: torch.Tensor) -> _Tensor:
    return x.as_subclass(_Tensor)


# --- PTX ---------------------------------------------------------------------------------------------------------


def _number(word: str, registers: dict[str, Any]) -> Any:
    if word.startswith("0f"):
        return np.array([int(word[2:], 16)], np.uint32).view(np.float32)
    if word[0].isdigit():
        return np.array([int(word, 0)], np.uint32)
    return registers[word]


def _as(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.view(dtype)


def _run_line(line: str, registers: dict[str, Any]) -> None:
    guarded = re.match(r"@(\w+) (.*)", line)
    if guarded:
        assert not registers[guarded[1]].any(), f"{line}: it is never to run"
        return
    name, *words = re.split(r"[ ,]+", line)
    target, *sources = words
    operation, *_, kind = name.split(".")
    values = [_number(word, registers) for word in sources]
    numbers = {"f32": np.float32, "s32": np.int32}
    f = [_as(x, numbers[kind]) for x in values[:2]] if operation == "setp" else values
    if name in ("setp.gt.f32", "setp.gt.s32"):
        result = f[0] > f[1]
    elif name == "setp.gt.or.s32":
        result = (f[0] > f[1]) | values[2]
    elif name == "sub.rn.f32":
        result = values[0] - values[1]
    elif name == "vote.sync.any.pred":
        result = np.array([values[0].any()])
    elif name == "selp.b32":
        result = np.where(values[2], values[0], values[1])
    elif name == "mov.b32":
        result = values[0]
    else:
        raise AssertionError(f"not in this interpreter: {line}")
    registers[target] = result


def _by_thread(x: np.ndarray, pack: int) -> np.ndarray:
    """A thread's elements side by side: of a [64, 4] tensor rows 8 apart, of others neighbours in a row."""
    if x.shape == (64, 4):
        x = x.reshape(4, 2, 8, 4).transpose(0, 2, 3, 1)
    return x.reshape(-1, pack)


def _by_tensor(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return x.reshape(4, 8, 4, 2).transpose(0, 3, 1, 2).reshape(shape) if shape == (64, 4) else x.reshape(shape)


class _Ptx:
    """Runs inline assembly for all threads at once; registers declared outside braces are kept."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def __call__(self, text: str, constraints: str, args: list, *, dtype: Any, is_pure: bool, pack: int) -> Any:
        outputs = constraints.count("=")
        assert outputs == pack and constraints.count(",") + 1 == pack * (1 + len(args))
        if isinstance(args[0], torch.Tensor):
            args = list(torch.broadcast_tensors(*(torch.as_tensor(x, dtype=args[0].dtype) for x in args)))
        shape = args[0].shape if isinstance(args[0], torch.Tensor) else ()
        registers = dict(self.kept)
        for number, x in enumerate(args):
            flat = np.array([x]) if shape == () else _by_thread(x.detach().numpy(), pack)
            for i in range(pack):
                registers[f"${outputs + number * pack + i}"] = flat if shape == () else flat[:, i].copy()
        for line in re.split(r"[;\n{}]", text):
            if line.strip() and not line.strip().startswith(".reg"):
                _run_line(line.strip(), registers)
        if "surpassed" in registers:
            self.kept["surpassed"] = registers["surpassed"]
        if shape == ():
            return int(np.ravel(registers["$0"])[0])
        number = {torch.float32: np.float32, torch.int32: np.int32}[dtype]
        columns = [np.broadcast_to(_as(registers[f"${i}"], number), registers["$0"].shape) for i in range(outputs)]
        return _tensor(torch.from_numpy(_by_tensor(np.stack(columns, 1), tuple(shape))))


# --- Gluon -------------------------------------------------------------------------------------------------------


class _Pointer:
    def __init__(self, values: torch.Tensor, at: Any = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, other: Any) -> _Pointer:
        return _Pointer(self.values, self.at + other)


class _Slots:
    """Barriers of a ring; `waited` is called with a slot and the phase that a consumer waits for, `arrived` with the
    slot of one that it arrives at."""

    def __init__(self, waited: Any = lambda slot, phase: None, arrived: Any = lambda slot: None) -> None:
        self.waited, self.arrived = waited, arrived

    def index(self, slot: Any) -> tuple[_Slots, int]:
        return self, int(slot)


class _Model:
    """What consumer `me` does of tiles [(first query, queries, keys)], each of a sequence of its own."""

    def __init__(
        self, tiles: list, q: list, k: list, v: list, launch: HopperForwardLaunch, me: int = 0, **options: Any
    ) -> None:
        self.tiles, self.q, self.k, self.v, self.launch, self.me = tiles, q, k, v, launch, me
        self.block_n, self.stages = block_n, stages = launch.block_n, launch.stages
        self.causal, self.window, self.own_blocks = options["causal"], options["window"], options["own_blocks"]
        self.blocks: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
        self.loaded, self.freed, self.raised, self.step = dict.fromkeys("qkv", 0), dict.fromkeys("qkv", 0), 0, 0
        self.passed_over = 0
        self.turns: list[int] = []
        self.stored = 0
        head_dim = q[0].shape[1]
        self.rings = {name: _tensor(torch.full((stages, block_n, head_dim), math.nan)) for name in "kv"}
        self.q_buffers = _tensor(torch.full((launch.consumers * launch.query_buffers, 64, head_dim), math.nan))
        self.o_buffer = _tensor(torch.full((launch.consumers, 64, head_dim), math.nan))
        self.plan: list[list[torch.Tensor]] = [[], []]
        self.out = [torch.full((n, head_dim), math.nan) for _, n, _ in tiles]
        self.lse2 = torch.full((sum(n for _, n, _ in tiles),), math.nan)

    def announce(self, slot: int, phase: int) -> None:
        """The producer: the plan of the next tile, its queries, and its blocks of keys and values, the last first."""
        assert (slot, phase) == (self.step & 1, self.step // 2 & 1)
        if self.step == len(self.tiles):
            self.plan[slot] = [torch.tensor(0)]
            return
        first, rows, others = self.tiles[self.step]
        blocks = as_python((common,), {})
        problem = (rows, others, self.window)
        constants = (self.causal, self.window > 0)
        begin, full_begin, full_end, count = blocks.key_blocks(
            first, *problem, *constants, self.launch.block_m, self.block_n
        )
        start, last = sum(n for _, n, _ in self.tiles[: self.step]), begin + count - 1
        numbers = (count, 0, 0, first, rows, start, others, last)
        if not self.own_blocks:
            numbers += blocks.split_blocks(begin, full_begin, full_end, count)
        for c in range(self.launch.consumers if self.own_blocks else 0):
            skipped, *full, own = blocks.own_blocks(first + 64 * c, *problem, last, *constants, self.block_n)
            numbers += (*full, skipped, own)
        self.plan[slot] = [torch.tensor(x) for x in numbers]
        for i in range(count):
            at = (begin + count - 1 - i) * self.block_n
            for name, source in (("k", self.k), ("v", self.v)):
                block = torch.zeros(self.block_n, source[self.step].shape[1])
                part = source[self.step][at : at + self.block_n]
                block[: len(part)] = part
                self.blocks[name].append(block)
        self.step += 1

    def load_queries(self, slot: int, phase: int) -> None:
        tile, buffers = self.loaded["q"], self.launch.query_buffers
        assert tile < self.step
        assert (slot, phase) == (tile % buffers * self.launch.consumers + self.me, tile // buffers & 1)
        assert tile - self.freed["q"] < buffers, "the queries' buffer was not handed back"
        own = self.q[tile][self.tiles[tile][0] + 64 * self.me :][:64]
        self.q_buffers[slot] = 0
        self.q_buffers[slot, : len(own)] = own
        self.loaded["q"] += 1

    def hand_back_queries(self, slot: int) -> None:
        assert slot == self.freed["q"] % self.launch.query_buffers * self.launch.consumers + self.me
        self.q_buffers[slot] = math.nan
        self.freed["q"] += 1

    def load(self, name: str) -> Any:
        def waited(slot: int, phase: int) -> None:
            number = self.loaded[name]
            assert (slot, phase) == (number % self.stages, number // self.stages & 1), "it waits for another block"
            assert number - self.freed[name] < self.stages, "the slot was not handed back"
            self.rings[name][slot] = self.blocks[name][number]
            self.loaded[name] += 1

        return _Slots(waited)

    def hand_back(self, names: str, slot: int) -> None:
        for name in names:
            assert slot == self.freed[name] % self.stages
            if self.freed[name] == self.loaded[name]:  # a block that it did not wait for
                self.loaded[name] += 1
                self.passed_over += 1
            self.freed[name] += 1
            self.rings[name][slot] = math.nan

    def run(self, scale: float) -> None:
        ptx = _Ptx()
        gl = SimpleNamespace(
            program_id=lambda axis: 0, float32=torch.float32, int32=torch.int32, int64=torch.int64,
            bfloat16=torch.bfloat16, NVMMADistributedLayout=lambda *_: None, DotOperandLayout=lambda *_: None,
            SliceLayout=lambda *_: None, arange=lambda a, b, _: _tensor(torch.arange(a, b)),
            zeros=lambda shape, dtype, _=None: _tensor(torch.zeros(shape, dtype=dtype)),
            full=lambda shape, value, dtype, _: _tensor(torch.full(shape, value, dtype=dtype)),
            where=lambda c, a, b: torch.where(c, *(torch.as_tensor(x, dtype=torch.float32) for x in (a, b))),
            maximum=lambda a, b: torch.maximum(*map(torch.as_tensor, (a, b))),
            join=lambda a, b: torch.stack((a, b), -1),
            minimum=lambda a, b: torch.minimum(*map(torch.as_tensor, (a, b))),
            max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, log2=torch.log2,
            convert_layout=lambda x, *_, **__: x, inline_asm_elementwise=ptx, store=self.store,
            cast=lambda x, dtype: x.to(dtype),
        )  # fmt: skip
        barrier = SimpleNamespace(
            wait=lambda at, phase: at[0].waited(at[1], int(phase)),
            arrive=lambda at, count: at[0].arrived(at[1]),
        )
        names: dict[str, Any] = {
            "gl": gl, "mbarrier": barrier, "matrix": lambda x: x,
            "noted": lambda plan, slot, index: self.plan[int(slot)][index], "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": lambda n, deps: deps[0] if len(deps) == 1 else deps,
            "tma": SimpleNamespace(store_wait=lambda n: None), "fence_async_shared": lambda: None,
            "store_rows": self.store_rows, "take_turn": lambda me: self.turns.append(me),
            "give_turn": lambda other: self.turns.append(other), "packed": lambda p, dtype: p.to(dtype),
            "left_operand": lambda p, dtype, left: p,
        }  # fmt: skip
        softmax = as_python((hopper_softmax,), names)

        def counted(*args: Any) -> Any:
            self.raised += 1
            return softmax.raise_maximum(*args)

        def bounded(*args: Any) -> Any:
            p, sums = softmax.probabilities(*args)
            assert not p.isfinite().any() or p[p.isfinite()].max() <= 2.0**8 * (1.0 + 1e-4)  # fp16 holds this
            return p, sums

        python = as_python(
            (hopper_softmax, hopper_forward), names | {"raise_maximum": counted, "probabilities": bounded}
        )
        python.declare_surpassed()
        k_s, v_s = (
            SimpleNamespace(index=ring.__getitem__, dtype=torch.float32) for ring in (self.rings["k"], self.rings["v"])
        )
        q_s, o_s = (SimpleNamespace(index=lambda i, x=x: x[int(i)]) for x in (self.q_buffers, self.o_buffer))
        buffers = (q_s, k_s, v_s, o_s, self.plan)
        other, launch = _Slots(), self.launch
        free_k = other if launch.joint else _Slots(arrived=lambda slot: self.hand_back("k", slot))
        free_v = _Slots(arrived=lambda slot: self.hand_back("kv" if launch.joint else "v", slot))
        barriers = (
            _Slots(self.announce), other, _Slots(self.load_queries), _Slots(arrived=self.hand_back_queries),
            self.load("k"), free_k, self.load("v"), free_v,
        )  # fmt: skip
        python._consume(
            buffers, barriers, 0, 1, self.window, SimpleNamespace(dtype=torch.float32), _Pointer(self.lse2),
            scale * LOG2E, self.me, True, self.causal, self.window > 0, launch.consumers, self.block_n,
            self.q[0].shape[1], self.stages, launch.joint, launch.query_buffers, self.own_blocks,
        )  # fmt: skip
        steps = len(self.blocks["k"]) - len(self.tiles)
        begins = [0] if self.me == launch.consumers - 1 else []
        assert self.turns == begins + [self.me, (self.me + 1) % launch.consumers] * steps
        blocks = {name: len(blocks) for name, blocks in self.blocks.items()}
        assert self.freed == self.loaded == blocks | {"q": len(self.tiles)}

    @staticmethod
    def multiply(
        a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor, use_acc: bool = True, is_async: bool = True
    ) -> Any:
        return _tensor(a.float() @ b.float() + (acc if use_acc else 0.0))

    @staticmethod
    def store(pointer: _Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        pointer.values[pointer.at[mask]] = torch.Tensor(value)[mask]

    def store_rows(self, *arguments: Any) -> None:
        _desc, _batch, _begin, _rows, row, _head, o, _packed = arguments
        own = self.out[self.stored][int(row) : int(row) + 64]
        own.copy_(o[: len(own)])
        self.stored += 1


def _expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, window: int) -> tuple:
    scores = q.double() @ k.double().T * scale
    row, key = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))[None, :]
    if causal:
        scores = scores.masked_fill(key > row, -math.inf)
    if window:
        scores = scores.masked_fill(key <= row - window, -math.inf)
    return scores.softmax(1).nan_to_num(0.0) @ v.double(), scores.logsumexp(1)


def _rising(k: torch.Tensor) -> torch.Tensor:
    """Keys whose scores grow from block to block, as the last come first."""
    return k * torch.linspace(60.0, 1.0, len(k))[:, None]


LAUNCHES = {
    "2": HopperForwardLaunch(2, 128, 2, 0),
    "2 two tiles of queries": HopperForwardLaunch(2, 64, 3, 0, query_buffers=2),
    "3": HopperForwardLaunch(3, 128, 3, 0, query_buffers=2),
}
PROBLEMS = (  # causal, window, tiles
    (True, 0, [(0, 64, 64), (128, 192, 192), (64, 100, 400), (0, 64, 20), (256, 300, 300), (192, 384, 384)]),
    (False, 0, [(0, 40, 300), (0, 64, 128)]),
    (True, 150, [(448, 512, 512), (64, 128, 300), (0, 64, 64), (384, 576, 576)]),
)


@pytest.mark.parametrize("keys", ["even", "rising", "falling"])
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_a_consumer_computes_attention(launch, keys):
    generator = torch.Generator().manual_seed(3)
    passed_over = 0
    for (causal, window, tiles), me, own_blocks in itertools.product(PROBLEMS, range(launch.consumers), (True, False)):
        if not own_blocks and (window or launch.consumers == 3):
            continue
        q, k, v = ([torch.randn(tile[i], 16, generator=generator) for tile in tiles] for i in (1, 2, 2))
        if keys != "even":
            k = [_rising(x) if keys == "rising" else _rising(x.flip(0)).flip(0) for x in k]
        model = _Model(tiles, q, k, v, launch, me, causal=causal, window=window, own_blocks=own_blocks)
        model.run(0.25)
        start = 0
        for i, (first, rows, _) in enumerate(tiles):
            out, lse = _expected(q[i], k[i], v[i], 0.25, causal, window)
            own = slice(min(first + 64 * me, rows), min(first + 64 * me + 64, rows))
            assert torch.allclose(model.out[i][own].double(), out[own], rtol=2e-5, atol=2e-5)
            lse2 = model.lse2[start : start + rows][own].double() / LOG2E
            assert torch.allclose(lse2, lse[own], rtol=2e-5, atol=2e-5)
            start += rows
        passed_over += model.passed_over
        if keys == "even" and not causal:
            assert model.raised == 0
        elif keys == "rising" and me == 0:
            assert model.raised >= 2
    assert passed_over >= 4


def _softmax() -> SimpleNamespace:
    """Functions of hopper_softmax.py on tensors, outside of a kernel."""
    gl = SimpleNamespace(
        inline_asm_elementwise=_Ptx(), float32=torch.float32, int32=torch.int32, sum=lambda x, axis: x.sum(axis),
        program_id=lambda axis: 0, SliceLayout=lambda *_: None, convert_layout=lambda x, *_, **__: x,
        max=lambda x, axis: x.amax(axis), maximum=lambda a, b: torch.maximum(*map(torch.as_tensor, (a, b))),
    )  # fmt: skip
    return as_python((hopper_softmax,), {"gl": gl})


def test_a_score_above_its_own_rows_limit_is_found_in_every_place():
    """And with a limit below 0 every block is looked at; one below 0 counts as 0 where the limit is not."""
    softmax = _softmax()
    generator = torch.Generator().manual_seed(1)
    limits = torch.randperm(64, generator=generator).float() * 10

    def above(scores: torch.Tensor, limits: torch.Tensor, chains: int) -> bool:
        bits = softmax.thread_maxima_bits(_tensor(scores.clone()), 128, chains)
        exact = scores.reshape(64, 16, 4, 2).amax((1, 3)).clamp_min(0.0)
        assert bits.dtype == torch.int32 and torch.equal(torch.Tensor(bits.view(torch.float32)), exact)
        same, found = softmax.surpassed(bits, _tensor(limits))
        assert torch.equal(torch.Tensor(same), torch.Tensor(bits))
        return found

    for chains in (2, 4):
        below = limits[:, None] - 1000.0 * torch.rand(64, 128, generator=generator)
        below[:, 77] = limits
        assert not above(below, limits, chains)
        for row, column in itertools.product(range(0, 64, 3), range(128)):
            scores = below.clone()
            scores[row, column] = limits[row] + 0.5
            assert above(scores, limits, chains), (row, column)
        for row in range(64):
            negative = limits.clone()
            negative[row] = -3.0
            assert above(torch.full((64, 128), -1e30), negative, chains), row
        assert not above(torch.full((64, 128), -math.inf), limits, chains)


class _Fused:
    """A float32 whose products are rounded only where they are not subtracted: as the compiler fuses, or does not."""

    def __init__(self, value: np.ndarray, product: np.ndarray | None = None) -> None:
        self.value, self.product = np.asarray(value, np.float32), product

    def __mul__(self, other: _Fused) -> _Fused:
        exact = self.value.astype(np.float64) * other.value
        return _Fused(exact, exact)

    def __sub__(self, other: _Fused) -> _Fused:
        exact = self.value if self.product is None else self.product
        return _Fused(exact.astype(np.float64) - other.value)


@pytest.mark.parametrize("scale", [0.125, 0.08838835, 1.0 / 7, 3.0, 50.0])
def test_what_is_not_raised_stays_as_it_is(scale):
    """Rows of a warp in which another was raised, and rows that saw nothing: their factor is 1, however large the
    maximum is and whatever the compiler fuses."""
    softmax = as_python((hopper_softmax,), {"gl": SimpleNamespace(maximum=max, minimum=min)})
    log2_scale = np.float32(scale * LOG2E)
    floor = np.float32(softmax.floor_of(float(log2_scale)))
    maxima = np.append(np.random.default_rng(0).normal(0, 1e4, 200).astype(np.float32), floor)
    decays = []

    def exp2(x: _Fused) -> _Fused:
        decays.append(np.exp2(x.value))
        return _Fused(decays[-1])

    def rounded(text: str, _constraints: str, x: list[_Fused], **_: Any) -> _Fused:
        assert text == "sub.rn.f32 $0, $1, $2;"
        return _Fused(x[0].value - x[1].value)

    names = {
        "gl": SimpleNamespace(exp2=exp2, float32=None, inline_asm_elementwise=rounded),
        "row_maxima": lambda s, row_max, *_: row_max if s is None else s,
        "_by_row": lambda x, _: x,
    }
    raise_maximum = as_python((hopper_softmax,), names).raise_maximum
    ones = _Fused(np.ones_like(maxima))
    raise_maximum(_Fused(maxima), ones, None, _Fused(log2_scale), 128, None)
    assert np.array_equal(decays[-1], ones.value)
    raise_maximum(_Fused(maxima), ones, _Fused(maxima + 3.0 / log2_scale), _Fused(log2_scale), 128, None)
    assert np.allclose(decays[-1][:-1], 0.125, rtol=2e-3 * max(scale, 1.0))


def test_rows_that_saw_nothing_raise_the_maximum_whatever_comes():
    """Rows that see no key of the first block; scores far below 0, or that a tiny scale makes all alike, count. A large
    scale must not make their floor infinite."""
    k = torch.full((150, 16), 8.0) + torch.arange(150)[:, None] * 1e-3
    v = torch.randn(150, 16, generator=torch.Generator().manual_seed(0))
    for (scale, value), window in itertools.product(((1.0, -0.8), (1e-41, -8.0), (50.0, -0.016)), (0, 70)):
        q = torch.full((64, 16), value)
        model = _Model([(0, 64, 150)], [q], [k], [v], LAUNCHES["2"], causal=True, window=window, own_blocks=True)
        model.run(scale)
        out, lse = _expected(q, k, v, scale, True, window)
        assert torch.allclose(model.out[0].double(), out, rtol=1e-4, atol=1e-4)
        assert torch.allclose(model.lse2.double() / LOG2E, lse, rtol=1e-5)
