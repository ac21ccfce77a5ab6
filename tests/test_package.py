"""The package as users get it: lazy import, life without triton, a wheel in a fresh environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

import pytest

import fuselm

ROOT = Path(__file__).resolve().parents[1]


def _python(code: str, *, python: str = sys.executable, env: dict | None = None, cwd: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")} | (env or {})
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_import_is_lazy_and_cheap():
    """`import fuselm` brings neither torch nor triton, and takes under 0.1 s beyond torch's own import (best of
    up to three)."""
    code = (
        "import sys, time, torch; t = time.perf_counter(); import fuselm; print(time.perf_counter() - t);"
        "print('triton' in sys.modules and not triton_before)"
    ).replace("t = time", "triton_before = 'triton' in sys.modules; t = time")
    taken: list[float] = []
    while len(taken) < 3 and min(taken, default=1.0) >= 0.1:
        seconds, loaded = _python(code).split()
        assert loaded == "False"
        taken.append(float(seconds))
    assert min(taken) < 0.1
    assert _python("import sys, fuselm; print('torch' in sys.modules)").strip() == "False"


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


EVERY_MODULE = """
import importlib, pkgutil, pathlib, fuselm
root = pathlib.Path(fuselm.__file__).parent
names = sorted(".".join(("fuselm", *p.relative_to(root).with_suffix("").parts)) for p in root.rglob("*.py"))
names = [n.removesuffix(".__init__") for n in names]
for name in names:
    importlib.import_module(name)
print(len(names), root)
"""


def test_every_module_of_the_wheel_imports(wheel_python, tmp_path):
    count, root = _python(EVERY_MODULE, python=wheel_python, cwd=tmp_path).split()
    assert Path(root).is_relative_to(Path(wheel_python).parents[1])  # the wheel, not this checkout
    rooms = [p for room in ("kernels", "model", "train") for p in (ROOT / room).rglob("*.py")]
    assert int(count) == len(rooms) + len(list((ROOT / "src/fuselm").glob("*.py")))


def test_the_wheel_carries_the_bundled_text(wheel_python, tmp_path):
    code = (
        "from fuselm.train.corpus import prepare_bundled; from pathlib import Path; "
        "p = prepare_bundled(Path('plays'), vocab_size=300); print(p.is_dir(), len(list(p.iterdir())) > 1)"
    )
    assert _python(code, python=wheel_python, cwd=tmp_path).split()[-2:] == ["True", "True"]


SCRIPTS = ["pretrain", "prepare-data", "sample", "checkpoints", "watch", "finetune", "chat"]


EVERY_HELP = """
import contextlib, importlib.metadata, io, sys
for entry in importlib.metadata.distribution("fuselm").entry_points:
    sys.argv, said, code = [entry.name, "--help"], io.StringIO(), 0
    with contextlib.redirect_stdout(said):
        try:
            code = entry.load()()
        except SystemExit as end:
            code = end.code
    print(entry.name, code or 0, "usage" in said.getvalue().lower())
"""


def test_console_scripts_of_the_wheel(wheel_python, tmp_path):
    """What each script calls, in one process; then one of the scripts themselves, which pip writes all alike."""
    names = [f"fuselm-{name}" for name in SCRIPTS]
    lines = _python(EVERY_HELP, python=wheel_python, cwd=tmp_path).splitlines()
    assert sorted(lines) == sorted(f"{name} 0 True" for name in names)
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


def test_scripts_run_from_a_clone_without_an_install(tmp_path):
    """The entry files find the package beside them when fuselm is not installed."""
    for script in ("pretrain.py", "prepare_data.py", "sample.py"):
        started = time.monotonic()
        path = ROOT / "train" / script
        code = (
            f"import runpy, sys; sys.path.insert(0, {str(path.parent)!r}); sys.argv = [{script!r}, '--help'];"
            f"runpy.run_path({str(path)!r}, run_name='__main__')"
        )
        done = subprocess.run(
            [sys.executable, "-S", "-c", _with_site(code)], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0 and "usage" in done.stdout.lower(), done.stderr[-2000:]
        assert time.monotonic() - started < 60


def _with_site(code: str) -> str:
    """Puts this environment's packages on the path without its .pth files, which hold the editable install."""
    return f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r}); " + code
