"""Rows that begin within a line of 64 logits, in cross_entropy_ring_groups.py: its own code as Python on torch tensors,
several programs at once on the model of protocol.py. Gluon runs in no interpreter.

Memory is read by a copy at any time while it is under way, an element of a line now, another later; in place, other
programs write their rows meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuselm.kernels import cross_entropy_math as arithmetic
from fuselm.kernels import cross_entropy_ring_groups as groups
from fuselm.kernels import cross_entropy_ring_kernels as kernels
from fuselm.kernels._triton import tl

from .protocol import Buffer, Change, Machine, Ring, as_python

TILE = 2
CHUNK = TILE * 64
IGNORED = -100


class _Tensor(torch.Tensor):
    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.view(dtype) if bitcast else super().to(dtype)


def _tensor(x: Any) -> _Tensor:
    return torch.as_tensor(x).as_subclass(_Tensor)


class _Memory:
    """A tensor's elements, and how often each was written in a vector or at an end of a row, and alone after that."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values.view(-1)
        self.written, self.corrected = (torch.zeros(values.numel(), dtype=torch.int64) for _ in range(2))


class _Pointer:
    dtype: Any = SimpleNamespace(element_ty=torch.float32)

    def __init__(self, memory: _Memory, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, other: Any) -> _Pointer:
        return _Pointer(self.memory, self.at + other)


def _load(pointer: _Pointer, mask: Any = True, other: float = 0.0) -> Any:
    at = torch.as_tensor(pointer.at)
    mask = torch.as_tensor(mask).expand(at.shape)
    values = torch.full(at.shape, other, dtype=pointer.memory.values.dtype)
    values[mask] = pointer.memory.values[at[mask]]
    return _tensor(values)


def _store(pointer: _Pointer, value: Any, mask: Any = True, eviction_policy: str = "") -> None:
    at = torch.as_tensor(pointer.at)
    if eviction_policy:  # whole vectors, from multiples of 16 bytes on
        assert at.shape == (TILE, 8, 8) and not (at[..., 0] % 8).any()
        assert mask is True or mask.shape == (TILE, 8, 1)
    mask = torch.as_tensor(mask).expand(at.shape)
    memory, places = pointer.memory, at[mask]
    assert not places.numel() or 0 <= places.min() <= places.max() < memory.values.numel()
    memory.values[places] = torch.as_tensor(value).expand(at.shape)[mask]
    if at.dim():
        memory.written[places] += 1
    else:
        memory.corrected[places] += memory.written[places]


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, int):
        assert dtype != torch.int32 or -(2**31) <= x < 2**31
        return x
    return x.to(dtype)


def _language(program: int, programs: int) -> SimpleNamespace:
    """What of gluon.language and triton.language the functions use."""
    return SimpleNamespace(
        program_id=lambda axis: program, num_programs=lambda axis: programs, load=_load, store=_store, cast=_cast,
        int32=torch.int32, int64=torch.int64, float32=torch.float32, float64=torch.float64, constexpr=Any,
        BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, abs=torch.abs, log=torch.log, exp2=torch.exp2,
        arange=lambda begin, end, layout=None: _tensor(torch.arange(begin, end)), maximum=torch.maximum,
        full=lambda shape, value, dtype, layout: _tensor(value).to(dtype).expand(shape), full_like=torch.full_like,
        expand_dims=lambda x, axis: x.unsqueeze(axis), max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis) if x.shape[axis] > 1 else x.squeeze(axis),  # a bit pattern stays what it is
        fma=lambda x, y, z: (x.double() * y + z).float(),
        where=lambda c, a, b: torch.where(_tensor(c), a, b),
    )  # fmt: skip


class _Slot(Buffer):
    """Logits that a copy has read, each when it began or when it arrived."""

    def begin(self, source: torch.Tensor) -> None:
        self.source, self.early = source, source.clone()
        self.at_once = torch.tensor([self.machine.random.random() < 0.5 for _ in range(TILE * 64)])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "loading" and self.__dict__.get("loading") and not value:
            held = torch.zeros(CHUNK)  # beyond the last line TMA writes zeros
            held[: len(self.source)] = torch.where(self.at_once[: len(self.source)], self.early, self.source)
            self.logits = _tensor(held.view(TILE, 8, 8))
        super().__setattr__(name, value)


class _Case:
    """Logits (rows, vocab) and all that cross_entropy takes with them."""

    def __init__(self, seed: int, rows: int, vocab: int, skip_ignored: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn((rows, vocab), generator=generator) * 3
        self.targets = torch.randint(0, vocab, (rows,), generator=generator)
        self.targets[1::5] = IGNORED
        self.targets[2], self.targets[3], self.targets[7] = vocab - 1, 0, vocab
        self.skip_ignored, self.z_loss = skip_ignored, 0.01
        if skip_ignored:
            self.logits[1::5] = float("nan")  # nothing of them is in other rows
        self.scale = torch.rand(rows, generator=generator) + 0.5
        self.grad_lse = torch.zeros(rows) if skip_ignored else torch.randn(rows, generator=generator)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss, lse and gradient in fp64."""
        logits = self.logits.double().requires_grad_()
        out = (self.targets < 0) | (self.targets >= logits.shape[1])
        lse = logits.logsumexp(1)
        loss = lse - logits.gather(1, self.targets.masked_fill(out, 0)[:, None])[:, 0] + self.z_loss * lse * lse
        ignored = self.targets == IGNORED
        total = (loss * self.scale)[~out].sum() + (lse * self.grad_lse)[~ignored if self.skip_ignored else ...].sum()
        (gradient,) = torch.autograd.grad(total, logits)
        loss, lse = loss.detach(), lse.detach()
        loss[ignored], loss[out & ~ignored], gradient[out & ~ignored] = 0.0, float("nan"), float("nan")
        if self.skip_ignored:
            lse[ignored], gradient[ignored] = 0.0, 0.0
        return loss, lse, gradient


def _run(case: _Case, programs: int, seed: int, inplace: bool, change: Change | None = None) -> None:
    """All programs, then what they wrote.

    Raises:
        AssertionError: something is not as it should be.
    """
    machine = Machine(seed)
    rows, vocab = case.logits.shape
    logits = _Memory(case.logits.clone())
    gradient = logits if inplace else _Memory(torch.full_like(case.logits, float("nan")))
    loss, lse, low = (_Memory(torch.full((rows,), float("nan"))) for _ in range(3))
    slots = -(-(vocab + 63) // CHUNK) + seed % 2

    def tma_load(desc: Any, place: list[int], barrier: Any, slot: _Slot) -> None:
        zero, line, _ = place
        assert zero == 0 and 0 <= line < logits.values.numel() // 64
        machine.copy(slot, barrier, None, desc.block_type.nbytes)
        slot.begin(logits.values[line * 64 : line * 64 + CHUNK])
        machine.pause()

    def load_chunk(slots: Ring, place: int, *_: Any) -> Any:
        slots.index(place).read()
        return slots.index(place).logits

    def work(program: int) -> list[Any]:
        numbers = {name: x.value for name, x in vars(arithmetic).items() if isinstance(x, tl.constexpr)}
        language = _language(program, programs)
        names = machine.names | numbers | {"gl": language, "tl": language, "_INTERPRET": False}
        names |= {"tma_load": tma_load, "load_chunk": load_chunk}
        python = as_python((arithmetic, kernels, groups), names, change)
        desc = SimpleNamespace(block_type=SimpleNamespace(nbytes=2 * CHUNK))
        mine = (Ring([_Slot(machine) for _ in range(slots)]), machine.barriers(slots), machine.barriers(slots))
        ahead = 2
        notes = (machine.numbers(4 * ahead), machine.barriers(ahead), machine.barriers(ahead))
        inputs = [_Pointer(x) for x in (logits, _Memory(case.targets), loss, lse, low)]
        factors = [_Pointer(_Memory(x)) for x in (case.scale, case.grad_lse)]
        flags = (case.skip_ignored, True, not case.skip_ignored)
        sizes = (TILE, slots, ahead, True, 4)
        return [
            lambda: python.bring_rows(*mine, desc, rows, vocab, TILE, slots, 0, True),
            lambda: python._read(
                *mine[:2], *notes, *inputs, *factors, 1, rows, vocab, vocab, IGNORED, case.z_loss, *flags, *sizes
            ),
            lambda: python._write(*mine, *notes, inputs[0], _Pointer(gradient), rows, vocab, vocab, *sizes),
        ]  # fmt: skip

    machine.run(*(partition for program in range(programs) for partition in work(program)))
    assert (gradient.written == 1).all(), "an element is not written once"
    in_range = (case.targets >= 0) & (case.targets < vocab)
    targets = torch.zeros((rows, vocab), dtype=torch.int64)
    targets[in_range, case.targets[in_range]] = 1
    assert torch.equal(gradient.corrected, targets.view(-1)), "an element is corrected that is no target"
    got = (loss.values, lse.values.double() + low.values, gradient.values.view(rows, vocab))
    for name, mine, want in zip(("loss", "lse", "gradient"), got, case.expected(), strict=True):
        torch.testing.assert_close(
            mine.double(), want, rtol=2e-5, atol=2e-6, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


# rows within a vector, a line, a chunk; rows of which some have a chunk more than others; whole chunks and an element
SHAPES = ((64, 3), (64, 9), (16, 44), (64, 63), (64, 65), (64, 127), (64, 129), (32, 194), (8, 392), (64, 385))


@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
def test_values(rows, vocab):
    for seed, inplace in ((0, True), (1, False)):
        _run(_Case(seed, rows, vocab, skip_ignored=inplace), 3, seed, inplace)
    if rows < 64:
        _run(_Case(2, rows, vocab, skip_ignored=False), 1, 2, True)


FAULTS = (
    ("_of_row", "places >= first", "places > first"),
    ("_of_row", "<= first + vocab", "< first + vocab"),
    ("_of_row", "<= first + vocab", "<= first + vocab + 1"),
    ("_of_row", "places >= first", "places >= first - 1"),
    ("_ends_of_row", "-first & 7", "-first & 3"),
    ("_ends_of_row", "column < vocab", "column <= vocab"),
    ("_sum_flat", "if chunks > 1", "if chunks > 2"),
    ("_write_flat", "if chunks > 1", "if chunks > 2"),
    ("_write_flat", "sink + TILE * 64", "sink"),
    ("flat_row", "begin >> 6", "begin + 63 >> 6"),
    ("flat_row", "first + vocab + TILE * 64 - 1", "vocab + TILE * 64 - 1"),
    ("flat_row", "first + vocab + TILE * 64 - 1", "vocab + 63 + TILE * 64 - 1"),
)


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: " ".join(change))
def test_the_model_finds(change):
    with pytest.raises((AssertionError, IndexError)):
        for rows, vocab in ((8, 392), (32, 194), (64, 127)):
            _run(_Case(0, rows, vocab, skip_ignored=True), 2, 0, True, change)


def test_places_beyond_2_to_the_31():
    python = as_python((kernels,), {"gl": _language(0, 1)})
    row, vocab = 2**20 - 1, 50257
    line, first, chunks = python.flat_row(row, vocab, 64)
    assert line * 64 + first == row * vocab and 0 <= first < 64 and chunks == 13
