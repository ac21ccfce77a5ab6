"""Triton's interpreter without what it does again and again: kernel tests spend half of their time there otherwise."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any


def speed_up() -> None:
    """Patch the interpreter, once a process; nothing where it is not switched on or has become another.

    A call of a jit'd helper inside a kernel replaces the functions of triton.language, which the kernel's own call has
    replaced already: here it does so only for a module that has not been. And each integer sum and product is computed
    again in int64, for an assertion on overflow that only Triton's debug mode makes.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    module: Any = interpreter
    if not hasattr(module, "_patch_lang") or getattr(module, "_sped_up", False):
        return
    module._sped_up = True
    patch_lang, patched = module._patch_lang, set()

    class Nothing:
        def restore(self) -> None:
            pass

    nothing = Nothing()

    def patch_once(function: Any) -> Any:
        names = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core}
        if names and names <= patched:
            return nothing
        scope = patch_lang(function)
        patched.update(names)
        restore = scope.restore

        def restore_all() -> None:
            restore()
            patched.clear()

        scope.restore = restore_all
        return scope

    module._patch_lang = patch_once
    builder = module.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    if hasattr(module, "_get_np_dtype"):
        numpy_type = functools.cache(module._get_np_dtype)
        address = numpy_type(tl.uint64)

        def numpy_type_of(dtype: Any) -> Any:
            scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
            return address if isinstance(scalar, tl.pointer_type) else numpy_type(scalar)

        module._get_np_dtype = numpy_type_of
