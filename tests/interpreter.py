"""Triton's interpreter as the tests use it where there is no GPU: in a sixth of its time, and beside numpy 2.4."""

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
from typing import Any

import numpy as np
import torch


@functools.cache
def prepare() -> None:
    """Before a kernel is run; once a process.

    It looks in 64 bits for an overflow of each sum and product of whole numbers, a third of its time, and says nothing
    of what it finds unless it is told to debug.
    """
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return
    if torch.cuda.is_available():
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    if tuple(int(part) for part in version.split(".")[:2]) <= (3, 6):
        _let_it_index(interpreter)
    _patch_once(interpreter)
    _make_types_once(interpreter)
    _look_up_once(interpreter)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _patch_once(interpreter: Any) -> None:
    """`triton.language` is replaced by what interprets it when a kernel is launched, and for each kind of module that
    the functions which it calls are from; not anew in every call, which looks at each name: a quarter of the time."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    launches: list[set[int]] = []

    def patched(fn: Any) -> Any:
        if launches and id(fn.__globals__) in launches[-1]:
            return None  # asked for by a call within a kernel, which does nothing with it
        scope = patch(fn)
        if launches:
            launches[-1].add(id(fn.__globals__))
        return scope

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(set())
        try:
            return launch(executor, *args, **kwargs)
        finally:
            launches.pop()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patched, launched


def _make_types_once(interpreter: Any) -> None:
    """A type of blocks is one object for all blocks of its elements and shape, and a block takes from it what it says
    of its shape; half of the time went into objects that say the same. None of them is ever changed."""
    core: Any = importlib.import_module("triton.language.core")
    make_type, make_tensor, equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    types: dict[tuple[Any, ...], Any] = {}

    def new(cls: Any, element: Any, shape: Any) -> Any:
        key = id(element), *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if key not in types:
            types[key] = object.__new__(cls)  # it will hold the element, whose number then stays its own
        return types[key]

    def init_type(self: Any, element: Any, shape: Any) -> None:
        if not self.__dict__:
            make_type(self, element, shape)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if "of_tensors" not in type.__dict__:
            make_tensor(self, handle, type)
            type.of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        self.__dict__.update(type.of_tensors, handle=handle)

    core.block_type.__new__, core.block_type.__init__, core.tensor.__init__ = new, init_type, init_tensor
    core.block_type.__hash__ = core.pointer_type.__hash__ = object.__hash__
    core.block_type.to_ir = lambda self, builder: self  # the interpreter's own makes an equal type
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _look_up_once(interpreter: Any) -> None:
    """What is the same in every call: numpy's types, what is replaced in `triton.language`, and to which types two
    operands are brought."""
    core: Any = importlib.import_module("triton.language.core")
    semantic = type(interpreter.interpreter_semantic)
    numpy_type, handle = interpreter._get_np_dtype, interpreter.TensorHandle
    broadcast, check = semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl
    numpy_types: dict[str, Any] = {}
    builtins: dict[Any, list[tuple[str, Any]]] = {}
    broadcasts: dict[tuple[Any, Any], list[Any]] = {}

    def numpy_type_once(type: Any) -> Any:
        if type.name not in numpy_types:
            numpy_types[type.name] = numpy_type(type)
        return numpy_types[type.name]

    def replace_builtins(package: Any, builder: Any, scope: Any) -> None:
        if package not in builtins:
            builtins[package] = [one for one in inspect.getmembers(package) if core.is_builtin(one[1])]
        for name, member in builtins[package]:
            if getattr(package, name) is member:
                scope.set_attr(package, name, interpreted(getattr(member, "__wrapped__", member)))

    def interpreted(builtin: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return builtin(*args, **options)

        return call

    def broadcast_once(self: Any, left: Any, right: Any) -> Any:
        key, both = (left.type, right.type), (left, right)
        if key not in broadcasts:
            ended = zip(both, broadcast(self, left, right), strict=True)
            broadcasts[key] = [None if one is of else one.type for of, one in ended]
        return [of if type is None else spread(of, type) for of, type in zip(both, broadcasts[key], strict=True)]

    def spread(one: Any, type: Any) -> Any:
        data = np.broadcast_to(one.handle.data, tuple(type.shape))
        return core.tensor(handle(data, one.handle.dtype.scalar), type)

    def check_once(self: Any, left: Any, right: Any, *options: Any, **named: Any) -> Any:
        """Operands of one type stay as they are; division, alone in giving a third option or a name, may widen them."""
        tensors = isinstance(left, core.tensor) and isinstance(right, core.tensor)
        if tensors and left.type is right.type and not left.dtype.is_ptr() and len(options) < 3 and not named:
            return left, right
        return check(self, left, right, *options, **named)

    interpreter._get_np_dtype, interpreter._patch_builtin = numpy_type_once, replace_builtins
    semantic.broadcast_impl_value, semantic.binary_op_type_checking_impl = broadcast_once, check_once


def _let_it_index(interpreter: Any) -> None:
    """The interpreter of Triton 3.6, that of torch 2.10, calls int() on arrays of one number; numpy 2.4 forbids it."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
