"""Mixed precision on one device: fp32 parameters, and a copy of each in the dtype that the model computes in.

On one device FSDP2 has nothing to shard, yet casts every parameter in each pass and moves every gradient through a
buffer. Here the copies stay, the optimizer writes them with the parameters, and it reads the gradients where the
backward pass leaves them. The arithmetic is FSDP2's on one rank: gradients in the copy's dtype, their sum over
micro-batches in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


class ComputeCopies:
    """Copies of a model's parameters that stand in for them from a forward pass to the optimizer step.

    Outside that the model holds its fp32 parameters: state dicts, names and checkpoints know of no copies. A parameter
    that was written from outside (a checkpoint was loaded) is copied again before the next forward pass.

    Args:
        model: on its device, with its values. Parameters that are shared between modules share their copy.
        dtype: of the copies.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.of: dict[torch.Tensor, nn.Parameter] = {}
        self._slots: list[tuple[nn.Module, str, nn.Parameter]] = []
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter not in self.of:
                    copy = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                    if copy.requires_grad:
                        copy.register_post_accumulate_grad_hook(self._keep_sum)
                    self.of[parameter] = copy
                self._slots.append((module, name, parameter))
        self._parameter_of = {copy: parameter for parameter, copy in self.of.items()}
        self._versions = {parameter: parameter._version for parameter in self.of}
        self._summing = False
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self.active = False
        model.register_forward_pre_hook(lambda *_: self.enter())

    def enter(self) -> None:
        """Put the copies into the model; nothing if they are there."""
        if self.active:
            return
        self.refresh()
        for module, name, parameter in self._slots:
            module._parameters[name] = self.of[parameter]
        self.active = True

    def leave(self) -> None:
        """Put the fp32 parameters back into the model."""
        for module, name, parameter in self._slots:
            module._parameters[name] = parameter
        self.active = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters that PyTorch has written since; the optimizer's kernels write both and need none."""
        stale = [p for p, version in self._versions.items() if p._version != version]
        if stale:
            torch._foreach_copy_([self.of[p] for p in stale], stale)  # pyright: ignore[reportPrivateImportUsage]
            self._versions.update({p: p._version for p in stale})

    def sum_gradients(self) -> None:
        """From now to the end of the step, add up gradients in fp32, in the parameters' `grad`."""
        dropped = [total for parameter, total in self._sums.items() if parameter.grad is None]
        if dropped:
            torch._foreach_zero_(dropped)  # pyright: ignore[reportPrivateImportUsage]
        for parameter, total in self._sums.items():
            if parameter.grad is not None and parameter.grad is not total:
                total.copy_(parameter.grad)
            parameter.grad = total
        self._summing = True

    def fix_sums(self) -> None:
        """Keep the memory in which gradients are added up from step to step, for a CUDA graph that writes there."""
        for parameter in self.of:
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._sums[parameter] = parameter.grad

    @property
    def summing(self) -> bool:
        """Whether gradients of this step are added up in fp32."""
        return self._summing

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Have a step of `optimizer` take the copies out of the model first and drop their gradients afterwards."""

        optimizer.register_step_pre_hook(lambda *_: self.leave())
        optimizer.register_step_post_hook(lambda *_: self.drop_gradients())

    def drop_gradients(self) -> None:
        """Forget the gradients of the copies; the next step begins."""
        self._summing = False
        for copy in self.of.values():
            copy.grad = None

    @torch.no_grad()
    def _keep_sum(self, copy: torch.Tensor) -> None:
        if not self._summing or copy.grad is None:
            return
        parameter = self._parameter_of[copy]  # pyright: ignore[reportArgumentType]
        if parameter.grad is None:
            parameter.grad = copy.grad.to(parameter.dtype)
        else:
            parameter.grad.add_(copy.grad)
        copy.grad = None


def copies_of(model: nn.Module) -> ComputeCopies | None:
    """The copies that were made for this model, if there are any."""
    return getattr(model, "compute_copies", None)


def take_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Each parameter's name and gradient after a backward pass; gradients are dropped as they are taken."""
    copies = copies_of(model)
    if copies is not None:
        copies.leave()
    for name, parameter in model.named_parameters():
        grad, parameter.grad = parameter.grad, None
        copy = None if copies is None else copies.of[parameter]
        yield name, grad if copy is None or copy.grad is None else copy.grad
    if copies is not None:
        copies.drop_gradients()
