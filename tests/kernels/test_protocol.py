"""What the model of protocol.py allows and what not, on programs of a few lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from .protocol import Machine


def _play(seed: int, without: str = "") -> None:
    """One writes a slot five times, of which a copy leaves; another reads it, itself and by a product."""
    machine = Machine(seed)
    slot, number = machine.buffers(1).index(0), machine.numbers(1).index(0)
    full, empty = machine.barriers(2).items
    numbers = []

    def unless(line: str, function, *args) -> None:
        if line != without:
            function(*args)

    def write() -> None:
        for turn in range(5):
            unless("wait empty", machine.wait, empty, turn & 1 ^ 1)
            unless("write slot", slot.store, None)
            unless("note", number.store, turn)
            unless("fence", machine.fence)
            unless("gather", machine.gather)
            machine.start("stores", slot)
            unless("finish", machine.store_wait, 0)
            unless("arrive full", machine.arrive, full)

    def read() -> None:
        for turn in range(5):
            unless("wait full", machine.wait, full, turn & 1)
            numbers.append(number.load())
            slot.load()
            machine.start("products", slot)
            unless("finish product", machine.wait_products, 0, (1,))
            unless("arrive empty", machine.arrive, empty)

    machine.run(write, read)
    assert numbers == list(range(5))


def _load(seed: int, without: str = "") -> None:
    """One has a slot loaded five times, another reads it."""
    machine = Machine(seed)
    slot = machine.buffers(1).index(0)
    full, empty = machine.barriers(2).items
    desc = SimpleNamespace(name="x", block_type=SimpleNamespace(nbytes=8))
    seen = []

    def bring() -> None:
        for turn in range(5):
            machine.wait(empty, turn & 1 ^ 1)
            machine.expect(full, 16 if without == "second load" else 8)
            machine.tma_load(desc, [turn, 0], full, slot)

    def read() -> None:
        for turn in range(5):
            machine.wait(full, turn & 1)
            slot.load()
            seen.append(slot.holds)
            if without != "fence too":
                machine.fence()
            machine.arrive(empty, 2 if without == "one arrival" else 1)

    machine.run(bring, read)
    assert seen == [("x", turn, 0) for turn in range(5)]


def test_right_programs_pass():
    for seed in range(20):
        _play(seed)
        _load(seed)


@pytest.mark.parametrize(
    ("without", "error"),
    [
        ("wait empty", "overwritten too soon"),
        ("fence", "read without a proxy fence"),
        ("gather", "read without a proxy fence"),
        ("finish", "overwritten too soon|go on after the end"),
        ("arrive full", "all wait"),
        ("wait full", "read before anything|read too soon"),
        ("finish product", "overwritten too soon|go on after the end"),
        ("arrive empty", "all wait"),
    ],
)
def test_a_fault_is_found(without, error):
    with pytest.raises(AssertionError, match=error):
        for seed in range(20):
            _play(seed, without)


@pytest.mark.parametrize(
    ("without", "error"),
    [("fence too", "overwritten without a proxy fence"), ("second load", "all wait"), ("one arrival", "more arrive")],
)
def test_a_fault_of_copies_is_found(without, error):
    with pytest.raises(AssertionError, match=error):
        for seed in range(20):
            _load(seed, without)
