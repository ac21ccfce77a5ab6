"""When an eager call may launch its kernel without passing through PyTorch's dispatcher.

A custom op costs the host 15 to 30 microseconds a call, as long as a small kernel runs. Eager calls on plain tensors
therefore go to a `torch.autograd.Function` or straight to the launch; everything that has to see the op itself
(torch.compile, fake tensors, selective checkpointing and other dispatch modes, torch.func) gets the op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NOTHING = contextlib.nullcontext()
_PLAIN = (Tensor, torch.nn.Parameter)


def _unknown() -> int:
    return 1


# Private names, so each may go: an absent one reads as "something is active", and the op is called.
_dispatch_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", _unknown)
_functorch: Any = getattr(torch._C, "_functorch", None)
_functorch_level: Callable[[], Any] = getattr(_functorch, "peek_interpreter_stack", _unknown)


def may_skip_dispatcher(*tensors: Tensor | None) -> bool:
    """True where nothing but autograd would look at the op: no tracing, no mode, no transform, no tensor subclass."""
    if torch.compiler.is_compiling() or _dispatch_modes() or _functorch_level() is not None:
        return False
    return all(x is None or type(x) in _PLAIN for x in tensors)


def needs_grad(*tensors: Tensor | None) -> bool:
    """True where autograd must record a call on these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def launch_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the device of `x` the current one, on which Triton launches; costs nothing where it is that already."""
    if not x.is_cuda or x.get_device() == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(x.get_device())


class RepeatedLaunch:
    """Launches of one kernel that differ only in what Triton does not compile anew for.

    The first goes through the JIT, which looks at every argument; the others go to the kernel that it compiled, and
    cost the host a fraction. So the caller answers for the arguments: tensors keep their dtypes and whether they start
    on a 16-byte border, ints that change are in `do_not_specialize` and fit 32 bits, the current device stays.

    Args:
        kernel: a triton.jit function whose constexpr parameters come last.
        num_warps: of its launches.
        constants: its constexpr parameters, in their order.
    """

    def __init__(self, kernel: Any, num_warps: int, **constants: Any) -> None:
        self._kernel, self._num_warps, self._constants = kernel, num_warps, constants
        self._values = tuple(constants.values())
        self._compiled: Any = None

    def __call__(self, programs: int, *arguments: Any) -> None:
        if self._compiled is not None:
            self._compiled[(programs, 1, 1)](*arguments, *self._values)
            return
        compiled = self._kernel[(programs,)](*arguments, **self._constants, num_warps=self._num_warps)
        if arguments[0].is_cuda:  # not in the interpreter, nor when compiling ahead of time
            self._compiled = compiled


def check_writable(name: str, x: Tensor) -> None:
    """Refuses inplace=True where the memory of `x`, the argument `name`, is not the caller's to give away.

    Raises:
        ValueError: `x` is a leaf that autograd watches, or a view of one, or its elements share memory.
    """
    base = x if x._base is None else x._base
    if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
        raise ValueError(
            f"{name} is a leaf that requires a gradient, or a view of one, and inplace=True would write over its "
            "values: pass inplace=False"
        )
    reach = 0  # of the elements that smaller strides span
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and strides {x.stride()}, so elements share memory: inplace=True "
                "cannot write each of them; pass inplace=False"
            )
        reach += (size - 1) * stride if size > 1 else 0
