"""Who may touch which slot when, in the kernels of rms_norm_ring_kernels.py: their own code on the model of
protocol.py, in which a slot holds the number of its first row."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fuselm.kernels import rms_norm_ring_kernels as kernels
from fuselm.kernels.attention import hopper_common as common

from .protocol import VALUE, Change, Language, Machine, Number, as_python, faults

ROWS = 4
FORMS = [(residual, by_tma) for residual in (False, True) for by_tma in (False, True)]
# tiles, programs, slots
SHAPES = ((1, 1, 3), (2, 1, 1), (5, 1, 2), (9, 2, 3), (10, 4, 3), (11, 3, 6), (13, 1, 4))


class _Rows:
    """The rows of all programs. Besides what the model checks: what leaves for a row was made of that row's inputs, and
    every row leaves once."""

    def __init__(self, seed: int, tiles: int, residual: bool, by_tma: bool, change: Change | None) -> None:
        self.seed, self.tiles, self.residual, self.by_tma, self.change = seed, tiles, residual, by_tma, change
        self.written: list[tuple[str, int]] = []

    def _load_tile(self, slots: Any, others: Any, slot: int, residual: bool, layout: Any) -> int:
        name, row, *_ = slots.index(slot).load()
        assert name == "x" and (not residual or others.index(slot).load() == ("residual", row, 0, 0))
        return row

    def _write_tile(self, h: int, y: int, h_ptr: Any, y_ptr: Any, row: int, *_: Any) -> None:
        assert h == y == row
        self.written += [("y", row), *([("h", row)] if self.residual else [])]

    def _start(self, program: int, programs: int) -> tuple[Machine, Any, dict[str, Any]]:
        machine = Machine(self.seed)

        def tma_store(desc: Any, place: list[int], slot: Number) -> None:
            assert slot.holds == place[0]
            machine.tma_store(desc, place, slot)
            self.written.append((desc.name, place[0]))
            machine.pause()

        names = machine.names | {
            "gl": Language(program_id=lambda axis: program, num_programs=lambda axis: programs),
            "ring": lambda desc, count: machine.numbers(count),
            "tma_store": tma_store,
            "places": lambda *_: (0, VALUE, VALUE),
            "load_weight": lambda *_: VALUE,
            "load_tile": self._load_tile,
            "rstd_of": lambda *_: VALUE,
            "scaled": lambda h, *_: h,
            "write_tile": self._write_tile,
        }
        block = SimpleNamespace(nbytes=16)
        inputs = {f"{name}_desc": SimpleNamespace(name=name, block_type=block) for name in ("x", "residual", "h", "y")}
        return machine, as_python((kernels,), names, self.change), inputs

    def ring(self, programs: int, slots: int, runs: bool) -> None:
        for program in range(programs):
            machine, python, desc = self._start(program, programs)
            shared = dict(
                slots=machine.numbers(slots), others=machine.numbers(slots), full=machine.barriers(slots),
                empty=machine.barriers(slots), tiles=self.tiles, HAS_RESIDUAL=self.residual, RUNS=runs, ROWS=ROWS,
                SLOTS=slots,
            )  # fmt: skip
            pointers = dict.fromkeys(("weight_ptr", "h_ptr", "y_ptr", "rstd_ptr", "eps", "offset"), VALUE)
            sizes = dict(
                rows=self.tiles * ROWS, HAS_WEIGHT=True, N=64, BY_TMA=self.by_tma, EVICTION="", LINES=1, LAYOUT=VALUE
            )
            outputs = {name: desc[name] for name in ("h_desc", "y_desc")} | {"BEHIND": min(slots - 1, 2)}
            machine.run(
                partial(python._bring, x_desc=desc["x_desc"], residual_desc=desc["residual_desc"], **shared),
                partial(python._consume, **outputs, **shared, **pointers, **sizes),
            )
        self._end()

    def burst(self, slots: int) -> None:
        programs = -(-self.tiles // slots)
        for program in range(programs):
            machine, python, desc = self._start(program, programs)
            machine.run(
                partial(
                    python.rms_norm_burst_kernel, **desc, weight_ptr=VALUE, h_ptr=VALUE, y_ptr=VALUE, rstd_ptr=VALUE,
                    rows=self.tiles * ROWS, tiles=self.tiles, eps=VALUE, offset=VALUE, HAS_RESIDUAL=self.residual,
                    HAS_WEIGHT=True, N=64, BY_TMA=self.by_tma, EVICTION="", ROWS=ROWS, LINES=1, SLOTS=slots,
                    LAYOUT=VALUE,
                )
            )  # fmt: skip
        self._end()

    def _end(self) -> None:
        outputs = ("h", "y") if self.residual else ("y",)
        expected = [(name, tile * ROWS) for name in outputs for tile in range(self.tiles)]
        assert sorted(self.written) == expected, "a row does not leave once"


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize(("residual", "by_tma"), FORMS)
def test_ring(residual, by_tma, runs):
    for tiles, programs, slots in SHAPES:
        for seed in range(4):
            _Rows(seed, tiles, residual, by_tma, None).ring(programs, slots, runs)


@pytest.mark.parametrize(("residual", "by_tma"), FORMS)
def test_burst(residual, by_tma):
    for tiles, _, slots in SHAPES:
        _Rows(0, tiles, residual, by_tma, None).burst(slots)


# The fence in the burst kernel itself is for its barriers, which TMA sees: they begin initialised here.
FAULTS = {
    name: change
    for name, change in faults((common, kernels)).items()
    if not (name.startswith("rms_norm_burst_kernel") and "fence" in name)
}


@pytest.mark.parametrize("change", FAULTS.values(), ids=FAULTS)
def test_the_model_finds(change):
    with pytest.raises(AssertionError):
        for seed in range(10):
            for residual, by_tma in FORMS:
                _Rows(seed, 7, residual, by_tma, change).ring(1, 3, False)
                _Rows(seed, 7, residual, by_tma, change).burst(3)
