"""What Triton's front end silently gets wrong, looked for in the sources of all kernels."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import fuselm

KERNELS = Path(fuselm.__file__).parent / "kernels"
SOURCES = sorted(KERNELS.rglob("*.py"))


def copies(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """(a, b) of each plain `a = b` in a statement, also those within tuples."""
    if not isinstance(statement, ast.Assign):
        return
    for target in statement.targets:
        parts = [(target, statement.value)]
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            parts = list(zip(target.elts, statement.value.elts, strict=False))
        for left, right in parts:
            if isinstance(left, ast.Name) and isinstance(right, ast.Name):
                yield left.id, right.id


def targets(statement: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    """What a statement assigns to."""
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target]


def shared_names(function: ast.FunctionDef) -> list[str]:
    """Loops that give a variable the value of another one which it already has when they start.

    Triton carries a variable through a loop only if its value at the end of the body is another than at the start. Of
    `a = b` before a loop and `a = b; b = f(b)` in it, `a` is at the end of the body what it was at the start: b's first
    value. It stays that in every pass; in Python, and in Triton's interpreter, it follows b. Variables that the loop
    also gives something else are carried.
    """
    found = []
    for loop in (node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)):
        before = [s for s in ast.walk(function) if isinstance(s, ast.Assign) and s.lineno < loop.lineno]
        aliases = {pair for s in before for pair in copies(s)}
        inside = [s for s in ast.walk(loop) if isinstance(s, ast.Assign | ast.AugAssign)]
        pairs = [(s.lineno, *pair) for s in inside for pair in copies(s)]
        for line, a, b in pairs:
            others = sum(
                any(isinstance(n, ast.Name) and n.id == a for t in targets(s) for n in ast.walk(t)) for s in inside
            )
            if others == [pair[1] for pair in pairs].count(a) and ((a, b) in aliases or (b, a) in aliases):
                found.append(f"{function.name}:{line}: {a} = {b}")
    return found


def functions(source: str) -> Iterator[ast.FunctionDef]:
    """The jitted functions of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            yield node


def test_there_are_kernels_to_look_at() -> None:
    assert sum(len(list(functions(path.read_text()))) for path in SOURCES) > 40


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(KERNELS)))
def test_no_loop_copies_a_variable_that_is_a_copy_already(path: Path) -> None:
    assert [line for function in functions(path.read_text()) for line in shared_names(function)] == []


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("a = b\nfor i in range(n):\n    a = b\n    b = b + i", True),
        ("b = a\nfor i in range(n):\n    if i:\n        a = b\n    b = b + i", True),
        ("a, c = b, b\nfor i in range(n):\n    c, a = a, b\n    b = b + i", True),
        ("a = b + 0\nfor i in range(n):\n    a = b\n    b = b + i", False),
        ("a = b\nfor i in range(n):\n    a = b + i\n    b = b + i", False),
        ("a = b\nfor i in range(n):\n    a += 1\n    if a == i:\n        a = b", False),
        ("for i in range(n):\n    a = b\n    b = a + i", False),
    ],
)
def test_the_check_sees_such_loops(body: str, wrong: bool) -> None:
    (function,) = functions("@jit\ndef kernel(b, n):\n" + textwrap.indent(body, "    "))
    assert bool(shared_names(function)) == wrong
