"""Triton's interpreter without what it does again and again: kernel tests spend most of their time there otherwise."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

CONSTANTS_KEPT = 1024  # operands made of Python's numbers, a type of the other operand


def speed_up() -> None:
    """Patch the interpreter, once a process; nothing where it is not switched on or has become another.

    A call of a jit'd helper inside a kernel replaces the functions of triton.language, which the kernel's own call has
    replaced already: here it does so only for a module that has not been. And each integer sum and product is computed
    again in int64, for an assertion on overflow that only Triton's debug mode makes. The functions below do the rest.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        import triton.language as tl
        from triton.language import semantic
        from triton.runtime import interpreter
    except ImportError:
        return
    module: Any = interpreter
    if not hasattr(module, "_patch_lang") or getattr(module, "_sped_up", False):
        return
    module._sped_up = True
    patch_lang, patched = module._patch_lang, set()
    languages: dict[Any, set[str]] = {}

    class Nothing:
        def restore(self) -> None:
            pass

    nothing = Nothing()

    def patch_once(function: Any) -> Any:
        names = languages.get(function)
        if names is None:
            names = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core}
            languages[function] = names
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
    if not hasattr(semantic, "TritonSemantic") or not hasattr(module, "interpreter_semantic"):
        return
    _make_types_once(tl.core)
    _check_operands_once(semantic.TritonSemantic, tl.core)
    _call_builtins_directly(module, tl.core)
    _look_at_sizes_once(module, tl.core)


def _make_types_once(core: Any) -> None:
    """One object for each type of a block, which then knows what its tensors have in common; equal ones are found so
    by identity."""
    block_type, pointer_type, dtype, constexpr, tensor = (
        core.block_type, core.pointer_type, core.dtype, core.constexpr, core.tensor
    )  # fmt: skip
    known: dict[Any, Any] = {}
    make_block, make_tensor = block_type.__init__, tensor.__init__

    def key_of(ty: Any) -> Any:
        """Equal for equal types; None for one that is not known here."""
        if type(ty) is dtype:
            return ty.name
        inner = key_of(ty.element_ty) if type(ty) is pointer_type else None
        return None if inner is None else (inner, ty.address_space, ty.const)

    def new_block(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:
        key = key_of(element_ty)
        sizes = [size.value if type(size) is constexpr else size for size in shape]
        if cls is not block_type or key is None or any(type(size) is not int for size in sizes):
            return object.__new__(cls)
        key = (key, *sizes)
        block = known.get(key)
        if block is None:
            block = object.__new__(cls)
            make_block(block, element_ty, shape)
            block._sizes = sizes
            known[key] = block
        return block

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if "_sizes" not in self.__dict__:
            make_block(self, element_ty, shape)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        common = type.__dict__.get("_common")
        if common is None:
            make_tensor(self, handle, type)
            type._common = {k: v for k, v in self.__dict__.items() if k not in ("handle", "type")}
            return
        self.__dict__.update(common)
        self.handle, self.type = handle, type

    def with_element(self: Any, scalar_ty: Any) -> Any:
        if type(scalar_ty) is not dtype or type(self) is not block_type:
            return with_element_ty(self, scalar_ty)
        others = self.__dict__.setdefault("_with", {})
        other = others.get(scalar_ty.name)
        if other is None:
            other = others[scalar_ty.name] = with_element_ty(self, scalar_ty)
        return other

    def same_or(equal: Any) -> Any:
        return lambda self, other: self is other or equal(self, other)

    def equal_names(self: Any, other: Any) -> Any:
        return self.name == other.name if type(other) is dtype is type(self) else unequal_kinds(self, other)

    def unwrap(value: Any) -> Any:
        return value if type(value) in plain else unwrap_if_constexpr(value)

    with_element_ty, unequal_kinds, unwrap_if_constexpr = (
        block_type.with_element_ty, dtype.__eq__, core._unwrap_if_constexpr
    )  # fmt: skip
    plain = {int, float, bool, str, type(None), dtype, block_type, tensor}
    block_type.__new__, block_type.__init__, tensor.__init__ = new_block, init_block, init_tensor
    block_type.with_element_ty, dtype.__eq__, core._unwrap_if_constexpr = with_element, equal_names, unwrap
    for cls in (pointer_type, block_type):
        cls.__eq__ = same_or(cls.__eq__)


def _check_operands_once(semantic: Any, core: Any) -> None:
    """Two operands of one type are what an operator takes as they are, and a number becomes the same operand of the
    same type each time."""
    tensor, dtype = core.tensor, core.dtype
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    numbers = (int, float, bool)

    def check_operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        left, right = type(lhs), type(rhs)
        options = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if left is tensor and right is tensor:
            a, b = lhs.dtype, rhs.dtype
            if type(a) is dtype is type(b) and a.name == b.name and (not div_or_mod or a.name in ("fp32", "int32")):
                return (lhs, rhs) if lhs.type is rhs.type else self.broadcast_impl_value(lhs, rhs)
        elif left is tensor and right in numbers:
            constants = lhs.type.__dict__.setdefault("_right", {})
            number = constants.get((right, rhs, options))
            if number is not None:
                return lhs, number
            both = check(self, lhs, rhs, *options)
            if both[0] is lhs and len(constants) < CONSTANTS_KEPT:
                constants[right, rhs, options] = both[1]
            return both
        elif right is tensor and left in numbers:
            constants = rhs.type.__dict__.setdefault("_left", {})
            number = constants.get((left, lhs, options))
            if number is not None:
                return number, rhs
            both = check(self, lhs, rhs, *options)
            if both[1] is rhs and len(constants) < CONSTANTS_KEPT:
                constants[left, lhs, options] = both[0]
            return both
        return check(self, lhs, rhs, *options)

    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type.__dict__.get("_sizes"), rhs.type.__dict__.get("_sizes")
        return (lhs, rhs) if left is not None and left == right else broadcast(self, lhs, rhs)

    def cast_unless_same(self: Any, input: Any, dst_ty: Any, *options: Any, **named: Any) -> Any:
        same = input.dtype is dst_ty and type(dst_ty) is dtype
        return input if same else cast(self, input, dst_ty, *options, **named)

    cast = semantic.cast
    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = check_operands, broadcast_values
    semantic.cast = cast_unless_same


def _call_builtins_directly(module: Any, core: Any) -> None:
    """A function of triton.language gets the interpreter's semantics without a call and two dictionaries between."""
    semantic, guard = module.interpreter_semantic, core.builtin(lambda: None).__code__
    direct: dict[Any, Any] = {}

    def of(member: Any) -> Any:
        function = member.__wrapped__ if getattr(member, "__code__", None) is guard else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if member not in direct:
            direct[member] = of(member)
        scope.set_attr(obj, name, direct[member])

    module._patch_attr = patch_attr


def _look_at_sizes_once(module: Any, core: Any) -> None:
    """That numpy's elements are no larger than Triton's is known of a type that was seen with as large ones."""
    handle = module.TensorHandle
    check = handle.__post_init__
    largest: dict[str, int] = {}

    def check_unless_seen(self: Any) -> None:
        size, ty = self.data.itemsize, self.dtype
        if type(ty) is not core.dtype:
            check(self)
        elif size > largest.get(ty.name, 0):
            check(self)
            largest[ty.name] = size

    handle.__post_init__ = check_unless_seen
