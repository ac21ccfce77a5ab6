"""torch.compile's caches on disk never give back what another version of the ops has compiled."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fuselm
from fuselm.kernels.compile_key import sources_tag
from fuselm.kernels.specs.registry import SPECS

config: Any = torch.compiler.config
PACKAGE = Path(fuselm.__file__).resolve().parent

# An op of ours whose backward takes one argument more in its second version, and another power.
TOY = """
from typing import Any
import torch
from torch import Tensor
from fuselm.kernels._triton import select_backend

@torch.library.custom_op("fuselm::toy_forward", mutates_args=())
def _forward(x: Tensor) -> Tensor:
    return x**POWER
@_forward.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)
@torch.library.custom_op("fuselm::toy_backward", mutates_args=())
def _toy_backward(grad: Tensor, x: TensorPARAMETER) -> Tensor:
    return POWER * grad * x ** (POWER - 1)
@_toy_backward.register_fake
def _(grad: Tensor, x: TensorPARAMETER) -> Tensor:
    return x.new_empty(x.shape)
def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return _toy_backward(grad, *ctx.saved_tensorsARGUMENT)
_forward.register_autograd(_backward, setup_context=_setup)
def toy(x: Tensor) -> Tensor:
    select_backend("auto", x.device)
    return _forward(x)
"""
FIRST = TOY.replace("POWER", "2").replace("PARAMETER", "").replace("ARGUMENT", "")
SECOND = TOY.replace("POWER", "3").replace("PARAMETER", ", factor: float").replace("ARGUMENT", ", 1.0")

# Each run is a fork that imports fuselm from another folder, with the key or without. What Inductor does once a process
# (some seconds) is done before.
PROCESS = """
import json, os, sys, torch
from torch._dynamo.utils import counters

torch.compile(torch.mm)(torch.ones(2, 2), torch.ones(2, 2))
counters.clear()

def compiled(folder, keyed):
    sys.path.insert(0, folder)
    from fuselm.kernels import _triton, compile_key
    if not keyed:
        _triton.key_compile_caches = lambda: None
        torch.compiler.config.cache_key_tag = ""
    from fuselm.kernels.toy import toy
    x = torch.full((3,), 5.0, requires_grad=True)
    try:
        y = torch.compile(toy, fullgraph=True)(x)
        y.backward(torch.ones(3))
    except Exception as error:
        return type(error).__name__, 0, 0
    return [y[0].item(), x.grad[0].item()], *(counters["aot_autograd"][f"autograd_cache_{x}"] for x in ("hit", "miss"))

for folder, keyed in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        print(json.dumps(compiled(folder, keyed)), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_an_entry_of_another_version_is_not_taken(tmp_path):
    """And one of the same version is; without the key the old one is taken, and fails or is wrong."""
    folders = {}
    for name, toy in (("first", FIRST), ("second", SECOND)):
        package = tmp_path / name / "fuselm"
        shutil.copytree(PACKAGE / "kernels", package / "kernels", ignore=shutil.ignore_patterns("__pycache__", "specs"))
        shutil.copy(PACKAGE / "__init__.py", package)
        (package / "kernels" / "toy.py").write_text(toy)
        folders[name] = str(package.parent)
    runs = [(name, True) for name in ("first", "first", "second")] + [("first", False), ("second", False)]
    process = subprocess.run(
        [sys.executable, "-c", PROCESS, json.dumps([(folders[name], keyed) for name, keyed in runs])],
        env=os.environ
        | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        | {"CUDA_VISIBLE_DEVICES": ""},  # a GPU's context would not outlive a fork
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    results = [json.loads(line) for line in process.stdout.splitlines()]
    square, cube = [25.0, 10.0], [125.0, 75.0]
    assert results[:3] == [[square, 0, 1], [square, 1, 0], [cube, 0, 1]], process.stderr
    assert results[3] == [square, 0, 1]
    assert results[4][0] != cube, "the key is not needed: this test does not see what it is there for"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_op_is_compiled_under_the_key(spec, device, generator):
    """Whatever the user has set by then, which stays in it."""
    keys = []

    def backend(graph, _):
        keys.append(config.cache_key_tag)
        return graph

    inputs = spec.make_inputs(spec.test_cases[0], torch.float32, device, generator)
    torch.compiler.reset()
    with torch.no_grad(), config.patch(cache_key_tag="mine"):
        torch.compile(spec.function, fullgraph=True, backend=backend)(**inputs, backend="triton")
    assert keys == [f"mine+{sources_tag()}"]


def test_a_thread_of_its_own_compiles_under_the_key():
    """Since torch 2.12 it does not see what its starter's thread has set."""
    keys = []

    def backend(graph, _):
        keys.append(config.cache_key_tag)
        return graph

    torch.compiler.reset()
    thread = threading.Thread(target=torch.compile(fuselm.swiglu, backend=backend), args=(torch.ones(2, 8),))
    thread.start()
    thread.join()
    assert keys and all(sources_tag() in key for key in keys)
