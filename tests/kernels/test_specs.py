"""What must hold of every op, over all KernelSpecs: values and gradients within the error budget, any upstream
gradient, no input written to, every output element written, compilation with and ahead of time."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

from fuselm.kernels._triton import HAVE_TRITON
from fuselm.kernels.numerics import check_budget
from fuselm.kernels.specs.base import KernelSpec
from fuselm.kernels.specs.registry import SPECS

from ..forked import Program

TRITON_VERSION = [int(part) for part in importlib.metadata.version("triton").split(".")[:2]] if HAVE_TRITON else [0, 0]
# Bytes of spill stores and loads. 64 for most, of which attention's backward kernel on Hopper takes up to 48; one
# portable kernel was seen with 80 under 3.6, which 3.8 keeps at 56.
SPILLS = 64
KNOWN_SPILLS_BEFORE_3_8 = {"_attention_key_value_kernel": 80}
WORKER = Path(__file__).with_name("aot_worker.py")


def test_triton_is_there():
    assert HAVE_TRITON, "kernel tests need triton; without it nothing here would be tested"


def _cases(kind: str) -> list:
    return [
        pytest.param(spec, case, dtype, id=f"{spec.name}-{i}-{str(dtype)[6:]}")
        for spec in SPECS
        for i, case in enumerate(getattr(spec, kind))
        for dtype in (spec.dtypes if kind == "test_cases" else (torch.bfloat16,))
    ]


def _tensors(outputs) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _cast(inputs: dict, dtype: torch.dtype | None) -> dict:
    """Fresh leaves with the same values; floating ones in `dtype` if one is given."""
    fresh = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            copy = value.detach().to(dtype or value.dtype, copy=True)
            fresh[name] = copy.requires_grad_(value.requires_grad)
        else:
            fresh[name] = value
    return fresh


def _run(function, inputs: dict, cotangents: list[torch.Tensor] | None, **options):
    """Outputs and gradients; cotangents are drawn when none are given."""
    outputs = _tensors(function(**inputs, **options))
    differentiable = [o for o in outputs if o.requires_grad]
    if cotangents is None:
        g = torch.Generator(device=outputs[0].device).manual_seed(1)
        cotangents = [torch.randn(o.shape, generator=g, device=o.device).to(o.dtype) for o in differentiable]
    leaves = {n: t for n, t in inputs.items() if isinstance(t, torch.Tensor) and t.requires_grad}
    grads = torch.autograd.grad(
        differentiable, list(leaves.values()), [c.to(o.dtype) for c, o in zip(cotangents, differentiable, strict=True)]
    )
    return outputs, dict(zip(leaves, grads, strict=True)), cotangents


def _check_case(spec: KernelSpec, case, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> None:
    inputs = spec.make_inputs(case, dtype, device, generator)
    before = _cast(inputs, None)
    outputs, grads, cotangents = _run(spec.function, inputs, None, backend="triton")
    exact, exact_grads, _ = _run(spec.plain, _cast(inputs, torch.float64), [c.double() for c in cotangents])
    plain, plain_grads, _ = _run(spec.plain, _cast(inputs, None), cotangents)
    assert len(outputs) >= len(exact) > 0
    for i, (ours, e, p) in enumerate(zip(outputs, exact, plain, strict=False)):
        check_budget(ours, e, p, name=f"output {i}", dtype=dtype)
    assert grads.keys() == exact_grads.keys() and grads
    for name, grad in grads.items():
        assert grad.dtype == inputs[name].dtype and grad.shape == inputs[name].shape
        check_budget(grad, exact_grads[name], plain_grads[name], name=f"gradient of {name}", dtype=dtype)
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, inputs[name]), f"{name} was written to"


@pytest.mark.parametrize(("spec", "case", "dtype"), _cases("test_cases"))
def test_values_and_gradients(spec, case, dtype, device, generator):
    _check_case(spec, case, dtype, device, generator)


@pytest.mark.gpu
@pytest.mark.parametrize(("spec", "case", "dtype"), _cases("gpu_cases"))
def test_values_and_gradients_on_a_gpu(spec, case, dtype, device, generator):
    _check_case(spec, case, dtype, device, generator)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_reference_is_the_formula(spec, generator, device):
    """In fp64 our reference and the plain formula, written apart, agree to rounding."""
    inputs = spec.make_inputs(spec.test_cases[0], torch.float64, device, generator)
    ours, grads, cotangents = _run(spec.function, inputs, None, backend="reference")
    plain, plain_grads, _ = _run(spec.plain, _cast(inputs, None), cotangents)
    for a, b in zip(ours, plain, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, check_dtype=False)
    for name in grads:
        torch.testing.assert_close(grads[name], plain_grads[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layout", ["expanded", "every second", "transposed"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_upstream_gradient_of_any_strides(spec, layout, device, generator):
    """A gradient that is a view gives the same bits as its contiguous copy, and is not written to."""
    inputs = spec.make_inputs(spec.test_cases[0], torch.float32, device, generator)
    outputs = [o for o in _tensors(spec.function(**inputs, backend="triton")) if o.requires_grad]
    views = []
    for o in outputs:
        if layout == "expanded":
            view = torch.tensor(0.5, device=device).expand(o.shape)
        elif layout == "every second":
            view = torch.randn((*o.shape[:-1], 2 * o.shape[-1]) if o.dim() else (2,), device=device)[..., ::2]
            view = view if o.dim() else view[0]
        else:
            view = (
                torch.randn(o.shape[::-1], device=device).permute(*range(o.dim() - 1, -1, -1))
                if o.dim()
                else torch.ones((), device=device)
            )
        views.append(view.to(o.dtype))
    leaves = [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    copies = [v.contiguous() for v in views]
    got = torch.autograd.grad(outputs, leaves, views, retain_graph=True)
    want = torch.autograd.grad(outputs, leaves, copies)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    for view, copy in zip(views, copies, strict=True):
        assert torch.equal(view, copy)


def _relaid(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values as a new leaf in other memory: every second element of a longer row, or columns first."""
    if layout == "columns first" and x.dim() > 1:
        return x.detach().mT.contiguous().mT.requires_grad_(x.requires_grad)
    wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype, device=x.device)
    wide[..., ::2] = x.detach()
    wide[..., 1::2] = float("nan") if x.is_floating_point() else 1
    return wide[..., ::2].requires_grad_(x.requires_grad)


@pytest.mark.parametrize("layout", ["every second", "columns first"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_inputs_of_any_strides(spec, layout, device, generator):
    """Every tensor given, weights, tables and indices among them, may be a view: the results are those of a copy."""
    for case in spec.test_cases[:1] + spec.test_cases[-1:]:
        inputs = spec.make_inputs(case, torch.float32, device, generator)
        views = {n: _relaid(t, layout) if isinstance(t, torch.Tensor) and t.dim() else t for n, t in inputs.items()}
        want, want_grads, cotangents = _run(spec.function, inputs, None, backend="triton")
        got, grads, _ = _run(spec.function, views, cotangents, backend="triton")
        for a, b in zip((*got, *grads.values()), (*want, *want_grads.values()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # a matrix product may sum in another order


@pytest.mark.gpu2
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_tensors_of_a_gpu_that_is_not_the_current_one(spec):
    results = []
    for index in (0, 1):
        device = torch.device("cuda", index)
        inputs = spec.make_inputs(spec.test_cases[0], torch.float32, device, torch.Generator(device).manual_seed(0))
        outputs, grads, _ = _run(spec.function, inputs, None, backend="triton")
        results.append([t.cpu() for t in (*outputs, *grads.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_every_output_element_is_written(spec, device, generator, monkeypatch):
    """torch.empty hands out NaN: an element that no kernel writes shows as one."""

    def poisoned(make):
        def wrapped(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() and not x.is_meta else x

        return wrapped

    inputs = spec.make_inputs(spec.test_cases[0], torch.float32, device, generator)
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    outputs, grads, _ = _run(spec.function, inputs, None, backend="triton")
    for x in (*outputs, *grads.values()):
        assert not x.isnan().any()


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_backward_twice_gives_the_same_gradients(spec, device, generator):
    inputs = spec.make_inputs(spec.test_cases[0], torch.float32, device, generator)
    outputs = [o for o in _tensors(spec.function(**inputs, backend="triton")) if o.requires_grad]
    leaves = [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    cotangents = [torch.full_like(o, 0.5) for o in outputs]
    first = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(outputs, leaves, cotangents)
    for a, b in zip(kept, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_frozen_inputs_get_no_gradient(spec, device, generator):
    """Freezing each input in turn leaves the others' gradients as they were; under no_grad the values are the same."""
    inputs = spec.make_inputs(spec.test_cases[0], torch.float32, device, generator)
    _, grads, cotangents = _run(spec.function, inputs, None, backend="triton")
    with torch.no_grad():
        free = _tensors(spec.function(**inputs, backend="triton"))
    for a, b in zip(free, _tensors(spec.function(**inputs, backend="triton")), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-6)
    for frozen in grads if len(grads) > 1 else ():
        partly = {n: t.detach() if n == frozen else t for n, t in inputs.items()}
        _, rest, _ = _run(spec.function, partly, cotangents, backend="triton")
        for name, grad in rest.items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_meta_tensors_give_shapes(spec, device, generator):
    inputs = spec.make_inputs(spec.test_cases[0], torch.float32, device, generator)
    outputs, grads, _ = _run(spec.function, inputs, None, backend="reference")
    on_meta = {n: t.detach().to("meta").requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t
               for n, t in inputs.items()}  # fmt: skip
    cotangents = [torch.ones_like(t) for t in _tensors(spec.function(**on_meta)) if t.requires_grad]
    there, there_grads, _ = _run(spec.function, on_meta, cotangents)
    assert [(t.shape, t.dtype) for t in there] == [(t.shape, t.dtype) for t in outputs]
    assert {n: t.shape for n, t in there_grads.items()} == {n: t.shape for n, t in grads.items()}


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_compiles_whole_and_equals_eager(spec, device, generator):
    inputs = spec.make_inputs(spec.test_cases[0], torch.float32, device, generator)
    eager, grads, cotangents = _run(spec.function, inputs, None)
    torch.compiler.reset()
    compiled = torch.compile(spec.function, fullgraph=True)
    outputs, compiled_grads, _ = _run(compiled, inputs, cotangents)
    for a, b in zip(outputs, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for name in grads:
        torch.testing.assert_close(compiled_grads[name], grads[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_compiles_ahead_of_time(arch, server):
    """Every launch at realistic sizes compiles for each architecture of its spec, with no serialised wgmma and no
    spills beyond what the spec's kernels are known to need."""
    program = Program(server, [str(WORKER), str(arch)])
    code, (out, err) = program.wait(540), program.communicate()
    assert code == 0, err[-4000:]
    report = json.loads(out.splitlines()[-1])
    expected = {spec.name for spec in SPECS if arch in spec.architectures}
    assert set(report) == expected
    for name, kernels in report.items():
        assert len(kernels) >= 2, f"{name}: forward and backward should both have compiled, got {kernels}"
        for kernel in kernels:
            assert not kernel["warnings"], kernel
            known = KNOWN_SPILLS_BEFORE_3_8 if TRITON_VERSION < [3, 8] else {}
            assert kernel["spill_bytes"] <= known.get(kernel["name"], SPILLS), kernel
