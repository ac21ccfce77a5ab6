"""No op copies or fills a whole tensor outside of its operators, forward or backward: as `out[0]` did once, whose
gradient is written into zeros of a batch of one. On a GPU that costs what reading and writing the tensor once more
costs."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuselm.kernels.specs.registry import SPECS

LITTLE = 64  # elements: numbers for a few rows, not a tensor
# Its backward pass multiplies the gradients by the upstream one in a kernel that is no operator, of which the
# interpreter's own steps show here, and rounds a dW that was summed in fp32.
ALLOWED = {"linear_cross_entropy": ("aten::set_", "aten::copy_", "aten::_to_copy")}


class _Passes(TorchDispatchMode):
    """Names of the operators whose result is a new tensor of more than a few elements, or that write to one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view and "empty" not in func.name():
            tensors = results if isinstance(results, tuple | list) else [results]
            if any(isinstance(x, torch.Tensor) and x.numel() > LITTLE for x in tensors):
                self.names.append(func.name())
        return results


@pytest.mark.parametrize(
    ("spec", "case"),
    [pytest.param(spec, case, id=f"{spec.name}-{i}") for spec in SPECS for i, case in enumerate(spec.test_cases)],
)
def test_no_pass_beside_the_kernels(spec, case, device, generator):
    inputs = spec.make_inputs(case, torch.bfloat16, device, generator)
    leaves = [x for x in inputs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    with _Passes() as forward:
        outputs = spec.function(**inputs, backend="triton")
    outputs = [o for o in ([outputs] if isinstance(outputs, torch.Tensor) else outputs) if o.requires_grad]
    gradients = [torch.randn(o.shape, device=device).to(o.dtype) for o in outputs]
    with _Passes() as backward:
        torch.autograd.grad(outputs, leaves, gradients)
    allowed = ALLOWED.get(spec.name, ())
    assert not forward.names and not [name for name in backward.names if not name.startswith(allowed)]
