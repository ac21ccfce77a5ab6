"""The cases that sanitize.py runs under compute-sanitizer: one small call of each kernel, forward and backward.

    python benchmarks/sanitize_cases.py rms_norm swiglu

runs them in this process, with a line before and after each (`START`, `DONE`, ...), between which the tool's own lines
belong to the case. With `--compile` before the names their kernels are compiled, into Triton's cache on disk, and not
launched: one that hangs does so under the tool, where it is looked for. Sizes are off the block borders, so that masks
are at work, and small: the tools slow a kernel down by tens to thousands of times.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if importlib.util.find_spec("fuselm") is None:  # run as a script in a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from timing import describe, tensors_of
from tune_compile import compile_only

from fuselm.kernels._triton import device_profile, jit, tl
from fuselm.kernels.adamw import AdamW
from fuselm.kernels.attention import dispatch
from fuselm.kernels.cross_entropy_ring import ring_refusal
from fuselm.kernels.specs.registry import SPECS

START, DONE, RAISED, LEFT_OUT = "case", "done", "raised", "left out"
COMPILE = "--compile"
CONTROL = "control: a read out of bounds"
SETTLE_S = 0.2  # in which the tool prints what it found, before the next case begins
SPEC_OF = {spec.name: spec for spec in SPECS}


class NotHereError(Exception):
    """This card does not run the kernel."""


@dataclass(frozen=True)
class SanitizerCase:
    """One case.

    Attributes:
        name: for the table.
        run: launches the kernels on the device; raises NotHereError where the card has none of that kind.
    """

    name: str
    run: Callable[[torch.device], None]


def _run_spec(
    op: str, case: Mapping[str, Any], device: torch.device, *, options: Mapping[str, Any] | None = None
) -> None:
    spec = SPEC_OF[op]
    generator = torch.Generator(device=device).manual_seed(0)
    inputs = spec.make_inputs(case, torch.bfloat16, device, generator)
    outputs = tensors_of(spec.function(**inputs, **(options or {}), backend="triton"))
    leaves = [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    outputs = [o for o in outputs if o.requires_grad]
    torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs])


def _run_decode(device: torch.device) -> None:
    """The forward pass alone: the backward one is plain PyTorch."""
    case = {"batch": 3, "heads": 8, "kv_heads": 2, "head_dim": 64, "keys": 300, "lengths": [300, 1, 130]}
    generator = torch.Generator(device=device).manual_seed(0)
    spec = SPEC_OF["decode_attention"]
    with torch.no_grad():
        spec.function(**spec.make_inputs(case, torch.bfloat16, device, generator), backend="triton")


def _run_attention(hopper: bool, case: Mapping[str, Any], device: torch.device, *, deterministic: bool = False) -> None:
    with dispatch.prefer_hopper(hopper):
        if hopper:
            refusal = dispatch.hopper_refusal(device, dtype=torch.bfloat16, head_dim=case["head_dim"])
            if refusal is not None:
                raise NotHereError(refusal)
        _run_spec("attention", case, device, options={"deterministic": deterministic})


def _run_cross_entropy_hopper(rows: int, vocab: int, device: torch.device) -> None:
    some = torch.empty((1, 64, vocab), dtype=torch.bfloat16, device=device)
    refusal = ring_refusal(some, some, device_profile(device), smoothing=False, softcap=False)
    if refusal is not None:
        raise NotHereError(refusal)
    _run_spec("cross_entropy", {"rows": (rows,), "vocab": vocab, "z_loss": 1e-4}, device)


def _run_adamw(param_dtype: torch.dtype, options: Mapping[str, Any], device: torch.device) -> None:
    generator = torch.Generator(device=device).manual_seed(0)
    params = []
    for shape in ((33, 65), (257,), (1,)):
        draw = partial(torch.randn, shape, device=device, dtype=param_dtype, generator=generator)
        params.append(torch.nn.Parameter(draw()))
        params[-1].grad = draw()
    optimizer = AdamW(params, lr=1e-3, max_grad_norm=1.0, backend="triton", **options)
    for _ in range(2):
        optimizer.step()


@jit
def _read_beyond_kernel(x_ptr, out_ptr, beyond, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(out_ptr + offsets, tl.load(x_ptr + beyond + offsets))


def _run_control(device: torch.device) -> None:
    """What memcheck must find, or its other results say nothing: a read of 128 values behind a tensor's end."""
    x, out = torch.ones(128, device=device), torch.empty(128, device=device)
    _read_beyond_kernel[(1,)](x, out, 2**16, SIZE=128)


def _dense(length: int, head_dim: int, heads: tuple[int, int], **options: Any) -> dict[str, Any]:
    return {"lengths": (length, length), "head_dim": head_dim, "heads": heads, **options}


def _packed(head_dim: int) -> dict[str, Any]:
    """Documents of 70, 0 and 129 queries and keys, and 11 tokens of no document."""
    return _dense(210, head_dim, (4, 2), documents_q=(0, 70, 70, 199))


_ROPE = {"lead": (2, 19), "heads": 4, "kv_heads": 2, "head_dim": 64}
_SPEC_CASES: Mapping[str, Mapping[str, Any]] = {
    "rms_norm": {"rows": (33,), "n": 257},
    "add_rms_norm": {"rows": (33,), "n": 257},
    "rope": {**_ROPE, "packed_qkv": True},
    "rope_qkv": _ROPE,
    "qk_norm_rope": _ROPE,
    "swiglu": {"rows": (33,), "ffn": 257},
    "cross_entropy": {"rows": (9,), "vocab": 4099, "z_loss": 1e-4, "label_smoothing": 0.1},
    "linear_cross_entropy": {"rows": (70,), "vocab": 1000, "dim": 64, "chunk_size": 32},
}
_ANYWHERE = {"rows": (300,), "n": 8193}  # more rows than programs
_BUDGET = {"rows": (70,), "vocab": 1000, "dim": 64, "memory_budget": 40000}
CASES: tuple[SanitizerCase, ...] = (
    *(SanitizerCase(op, partial(_run_spec, op, case)) for op, case in _SPEC_CASES.items()),
    SanitizerCase("rms_norm, rows that start anywhere", partial(_run_spec, "rms_norm", _ANYWHERE)),
    SanitizerCase("add_rms_norm, rows that start anywhere", partial(_run_spec, "add_rms_norm", _ANYWHERE)),
    # In blocks of columns, in the memory of dW and in the buffer.
    SanitizerCase("linear_cross_entropy, memory_budget", partial(_run_spec, "linear_cross_entropy", _BUDGET)),
    # More rows than several programs share, and as many as refill all slots of shared memory.
    SanitizerCase("cross_entropy Hopper", partial(_run_cross_entropy_hopper, 300, 41024)),
    SanitizerCase("cross_entropy Hopper, rows within lines", partial(_run_cross_entropy_hopper, 320, 41025)),
    SanitizerCase("cross_entropy Hopper, one group", partial(_run_cross_entropy_hopper, 140, 128256)),
    SanitizerCase("adamw fp32", partial(_run_adamw, torch.float32, {})),
    SanitizerCase("adamw bf16, master weights", partial(_run_adamw, torch.bfloat16, {"master_weights": True})),
    SanitizerCase("decode_attention", _run_decode),
    SanitizerCase("attention portable", partial(_run_attention, False, _dense(130, 64, (4, 2)))),
    SanitizerCase("attention portable, documents", partial(_run_attention, False, _packed(64))),
    SanitizerCase("attention Hopper", partial(_run_attention, True, _dense(300, 128, (4, 2)))),
    SanitizerCase("attention Hopper, head_dim 64", partial(_run_attention, True, _dense(300, 64, (4, 2)))),
    SanitizerCase("attention Hopper, documents", partial(_run_attention, True, _packed(128))),
    SanitizerCase("attention Hopper, window", partial(_run_attention, True, _dense(300, 128, (4, 2), window=100))),
    SanitizerCase(
        "attention Hopper, deterministic",
        partial(_run_attention, True, _dense(300, 128, (4, 2)), deterministic=True),
    ),
    SanitizerCase(CONTROL, _run_control),
)


def main(names: list[str]) -> int:
    """Runs the named cases, or compiles them where `COMPILE` is the first name.

    The exit status is 3 where the CUDA context is lost, so that the next ones say nothing.
    """
    compiling = names[:1] == [COMPILE]
    settle_s = 0.0 if compiling else SETTLE_S
    device = torch.device("cuda")
    torch.zeros(1, device=device)  # a tool that refuses the machine says so now, before the first case
    torch.cuda.synchronize(device)
    time.sleep(settle_s)
    for case in [case for case in CASES if case.name in names]:
        print(f"{START} {case.name}", flush=True)
        try:
            with compile_only() if compiling else contextlib.nullcontext():
                case.run(device)
            torch.cuda.synchronize(device)
            outcome = f"{DONE} {case.name}"
        except NotHereError as error:
            outcome = f"{LEFT_OUT} {case.name}: {error}"
        except Exception as error:
            outcome = f"{RAISED} {case.name}: {describe(error)}"
        time.sleep(settle_s)
        print(outcome, flush=True)
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
