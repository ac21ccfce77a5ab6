"""An argument that is no tensor is refused by name, in every op."""

from __future__ import annotations

import pytest
import torch

import fuselm
from fuselm.kernels.arguments import check_tensors
from fuselm.kernels.specs.registry import SPECS


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_what_is_no_tensor_is_refused_by_name(spec, backend, device, generator):
    inputs = spec.make_inputs(spec.test_cases[0], torch.float32, device, generator)
    tensors = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
    assert tensors
    for name in tensors:
        for wrong, text in (([1.0, 2.0], r"\[1.0, 2.0\], of type list"), (3, "3, of type int")):
            with pytest.raises(TypeError, match=rf"^{name} is {text}: expected a torch.Tensor"):
                spec.function(**inputs | {name: wrong}, backend=backend)


def test_none_is_refused_only_where_a_tensor_is_needed():
    check_tensors({"x": torch.ones(1)}, {"weight": None})
    with pytest.raises(TypeError, match=r"^x is None, of type NoneType: expected a torch.Tensor; torch.as_tensor"):
        check_tensors({"x": None}, {"weight": None})
    with pytest.raises(TypeError, match=r"^weight is 1.0, of type float: expected a torch.Tensor or None;"):
        fuselm.rms_norm(torch.ones(2, 3), 1.0)  # pyright: ignore[reportArgumentType]


def test_a_long_value_is_shortened():
    with pytest.raises(TypeError, match=r"^x is \[0, 1, 2, 3, 4, 5, \.\.\.\], of type list"):
        check_tensors({"x": list(range(10_000))})
