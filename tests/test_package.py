"""The package as users get it: lazy import, life without triton, a wheel in a fresh environment."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

import fuselm

ROOT = Path(__file__).resolve().parents[1]


def _python(code: str, *, python: str = sys.executable, env: dict | None = None, cwd: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")} | (env or {})
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


LAZY = """
import sys, time, fuselm
print("torch" in sys.modules, "triton" in sys.modules)
import torch
before, taken = "triton" in sys.modules, []
for _ in range(3):
    for name in [name for name in sys.modules if name.partition(".")[0] == "fuselm"]:
        del sys.modules[name]
    started = time.perf_counter()
    import fuselm
    taken.append(time.perf_counter() - started)
print("triton" in sys.modules and not before, min(taken))
"""


def test_import_is_lazy_and_cheap():
    """`import fuselm` brings neither torch nor triton, and takes under 0.1 s beyond torch's own import (best of
    three)."""
    *loaded, seconds = _python(LAZY).split()
    assert loaded == ["False"] * 3
    assert float(seconds) < 0.1


def test_every_public_name_loads_and_is_listed():
    assert set(fuselm.__all__) == {"__version__", *fuselm._PUBLIC}
    for name in fuselm.__all__:
        assert getattr(fuselm, name) is not None and name in dir(fuselm)
    with pytest.raises(AttributeError, match="no attribute 'rmsnorm'"):
        _ = fuselm.rmsnorm


WITHOUT_TRITON = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else find_spec(name, *a)
import importlib, pathlib, torch, fuselm, fuselm.env
from fuselm.kernels._triton import HAVE_TRITON
assert not HAVE_TRITON
for path in sorted(pathlib.Path(fuselm.__file__).parent.joinpath("kernels").rglob("*.py")):
    if path.stem != "aot":  # it compiles, and says that it needs Triton
        parts = path.relative_to(pathlib.Path(fuselm.__file__).parent).with_suffix("").parts
        importlib.import_module(".".join(("fuselm", *parts)).removesuffix(".__init__"))
x = torch.randn(2, 8, requires_grad=True)
fuselm.rms_norm(x).sum().backward()
config = fuselm.LlamaConfig.from_preset("debug")
tokens = torch.randint(0, 1024, (2, 16))
loss = fuselm.Llama(config)(tokens, tokens.roll(-1, 1), reduction="mean")
loss.backward()
print(round(loss.item(), 1))
try:
    fuselm.rms_norm(x, backend="triton")
except RuntimeError as error:
    print(error)
"""


def test_without_triton_the_references_run_and_asking_by_name_says_what_to_install():
    lines = _python(WITHOUT_TRITON).splitlines()
    assert 6.8 <= float(lines[0]) <= 7.1  # ln(1024) = 6.93
    assert "pip install triton" in lines[1]


def test_env_report_names_every_op_and_the_reason():
    done = subprocess.run(
        [sys.executable, "-m", "fuselm.env"], capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stderr
    for word in ("torch", "rms_norm", "linear_cross_entropy", "attention", "AdamW", fuselm.__version__):
        assert word in done.stdout


@pytest.fixture(scope="module")
def wheel_python(tmp_path_factory) -> str:
    """A fresh environment with fuselm's wheel, and this environment's dependencies behind it."""
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy: a build folder left in the checkout would smuggle deleted modules into the wheel.
    ignored = shutil.ignore_patterns(".venv", ".git", "runs", "build", "*.egg-info", "__pycache__", ".*_cache")
    source = shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=ignored)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run([*build, str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = folder.glob("fuselm-*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = str(folder / "venv" / "bin" / "python")
    site = Path(_python("import sysconfig; print(sysconfig.get_paths()['purelib'])", python=python).strip())
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    # Dependencies come from this environment, but not its editable fuselm: a path hook listed after the wheel's own
    # files.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


SCRIPTS = ["pretrain", "prepare-data", "sample", "checkpoints", "watch", "finetune", "chat"]
EVERYTHING = """
import contextlib, hashlib, importlib, importlib.metadata, io, json, pathlib, sys
import fuselm
root = pathlib.Path(fuselm.__file__).parent
names = sorted(".".join(("fuselm", *p.relative_to(root).with_suffix("").parts)) for p in root.rglob("*.py"))
for name in names:
    importlib.import_module(name.removesuffix(".__init__"))
corpus = importlib.import_module("fuselm.train.corpus")
text = next(iter(importlib.import_module("fuselm.train.sources").FileSource(corpus.BUNDLED_TEXT).documents(0, 0)))
found = {"modules": len(names), "root": str(root), "text": str(corpus.BUNDLED_TEXT), "document": len(str(text))}
found["digest"], found["scripts"] = hashlib.sha256(corpus.BUNDLED_TEXT.read_bytes()).hexdigest(), {}
for entry in importlib.metadata.distribution("fuselm").entry_points:
    sys.argv, said, code = [entry.name, "--help"], io.StringIO(), 0
    with contextlib.redirect_stdout(said):
        try:
            code = entry.load()()
        except SystemExit as end:
            code = end.code
    found["scripts"][entry.name] = [code or 0, "usage" in said.getvalue().lower()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(wheel_python, tmp_path_factory) -> dict[str, Any]:
    """What one process with the wheel finds."""
    lines = _python(EVERYTHING, python=wheel_python, cwd=tmp_path_factory.mktemp("elsewhere")).splitlines()
    return json.loads(lines[-1])


def test_every_module_of_the_wheel_imports(wheel_python, found):
    assert Path(found["root"]).is_relative_to(Path(wheel_python).parents[1])  # the wheel, not this checkout
    rooms = [p for room in ("kernels", "model", "train") for p in (ROOT / room).rglob("*.py")]
    assert found["modules"] == len(rooms) + len(list((ROOT / "src/fuselm").glob("*.py")))


def test_the_wheel_carries_the_bundled_text(found):
    assert Path(found["text"]).is_relative_to(found["root"]) and found["document"] > 0
    text = ROOT / "train" / "corpus" / Path(found["text"]).name
    assert found["digest"] == hashlib.sha256(text.read_bytes()).hexdigest()


def test_console_scripts_of_the_wheel(wheel_python, found, tmp_path):
    """What each script calls; then one of the scripts themselves, which pip writes all alike."""
    names = [f"fuselm-{name}" for name in SCRIPTS]
    assert found["scripts"] == {name: [0, True] for name in names}
    scripts = [Path(wheel_python).parent / name for name in names]
    assert all(os.access(script, os.X_OK) for script in scripts)
    done = subprocess.run([scripts[-1], "--help"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0 and "usage" in done.stdout.lower(), done.stderr


def test_beside_hugging_face_kernels(tmp_path):
    """A top-level package `kernels` on the path is neither shadowed nor harmed, from the repository's root too."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("WHO = 'hugging face'\n")
    code = (
        "import kernels, torch, fuselm; print(kernels.WHO, fuselm.rms_norm(torch.ones(1, 4)).shape[1],"
        "fuselm.rms_norm.__module__)"
    )
    for path in (f"{tmp_path}{os.pathsep}{ROOT / 'src'}", f"{ROOT / 'src'}{os.pathsep}{tmp_path}"):
        out = _python(code, env={"PYTHONPATH": path}, cwd=ROOT)
        assert out.split() == ["hugging", "face", "4", "fuselm.kernels.rms_norm"]


FORKS = """
import os, runpy, torch
for path in PATHS:
    if not (child := os.fork()):
        sys.path.insert(0, os.path.dirname(path))
        sys.argv = [os.path.basename(path), "--help"]
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    print(path, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_scripts_run_from_a_clone_without_an_install(tmp_path):
    """The entry files find the package beside them when fuselm is not installed."""
    paths = [str(ROOT / "train" / script) for script in ("pretrain.py", "prepare_data.py", "sample.py")]
    code = _with_site(f"PATHS = {paths!r}") + FORKS
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=180)
    ends = [line for line in done.stdout.splitlines() if line.startswith(str(ROOT / "train"))]
    assert done.returncode == 0 and ends == [f"{path} 0" for path in paths], done.stderr[-2000:]
    assert done.stdout.lower().count("usage: ") == len(paths)


def _with_site(code: str) -> str:
    """Puts this environment's packages on the path without its .pth files, which hold the editable install."""
    return f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r}); " + code
