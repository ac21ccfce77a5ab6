"""The house's rules about imports and files, read from the sources."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "model", "train")
KERNEL_IMPORTS = {"torch", "triton", "einops"}


def _sources(*rooms: str) -> list[Path]:
    files = [p for room in rooms for p in sorted((ROOT / room).rglob("*.py"))]
    assert files
    return files


def _imports(path: Path) -> set[str]:
    """Dotted names of everything the file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def _third_party(names: set[str]) -> set[str]:
    return {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) - {"__future__", "fuselm"}


def _rooms_of(names: set[str]) -> set[str]:
    return {n.split(".")[1] for n in names if n.startswith("fuselm.") and n.count(".")} & set(ROOMS)


@pytest.mark.parametrize("path", _sources("kernels"), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_kernels_import_torch_triton_einops_and_themselves(path):
    names = _imports(path)
    assert _third_party(names) <= KERNEL_IMPORTS
    assert _rooms_of(names) <= {"kernels"}


@pytest.mark.parametrize("path", _sources("model"), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_model_imports_kernels_and_knows_no_processes(path):
    names = _imports(path)
    assert _rooms_of(names) <= {"kernels", "model"}
    assert not [n for n in names if n.startswith("torch.distributed")]
    assert "torch.distributed" not in path.read_text()


def test_specs_are_imported_by_tests_and_benchmarks_only():
    for path in _sources(*ROOMS):
        if "specs" not in path.parts:
            assert not [n for n in _imports(path) if n.startswith("fuselm.kernels.specs")], path


def test_only_triton_py_imports_triton_at_module_level():
    """Modules must import where triton is missing; elsewhere it may be imported inside functions only."""
    for path in _sources(*ROOMS):
        if path.name == "_triton.py":
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] == "triton"], path


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_no_regular_packages(room):
    """Hugging Face publishes a package called `kernels`; an __init__.py here would shadow it in the repository's
    root."""
    assert not (ROOT / room / "__init__.py").exists()
    link = ROOT / "src" / "fuselm" / room
    assert link.is_symlink() and link.resolve() == ROOT / room


def test_training_files_shadow_nothing():
    """torchrun puts train/ first on sys.path."""
    taken = set(sys.stdlib_module_names) | {"torch", "triton", "numpy", "einops", "tyro", "rich", "tokenizers"}
    taken |= {"matplotlib", "tensorboard", "safetensors", "data", "datasets", "model", "utils"}
    assert not {p.stem for p in (ROOT / "train").glob("*.py")} & taken


def test_files_stay_under_500_lines():
    for path in [p for room in (*ROOMS, "tests", "benchmarks", "src/fuselm") for p in (ROOT / room).glob("**/*.py")]:
        assert len(path.read_text().splitlines()) <= 500, path


def test_nothing_syncs_or_autotunes_in_kernels():
    for path in _sources("kernels"):
        tree = ast.parse(path.read_text())
        attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        # numerics.py is for tests; adamw.py reads learning rates that lie on the host.
        allowed = {"item"} if path.name in ("numerics.py", "adamw.py") else set()
        assert not attributes & ({"item", "autotune", "full_tensor"} - allowed), path


def test_the_longest_test_files_exist():
    """Those that tests/conftest.py has begin first."""
    tree = ast.parse((ROOT / "tests" / "conftest.py").read_text())
    named = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LONGEST"
    )
    assert set(named) <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
