"""Fingerprints of the user's own functions and objects, from their code and values."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_BY_NAME = (GetSetDescriptorType, MemberDescriptorType)
_NOT_CODE = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slotnames__", "_abc_impl",
    "__firstlineno__", "__static_attributes__",
}  # fmt: skip
"""Class attributes that do not affect behaviour."""


class Fingerprint:
    """The SHA-256 of an object's content, the same in any process.

    For functions and classes it covers the byte code, the constants, and the functions, classes and values of the
    module that they use. For tensors and arrays it covers shape, dtype and bytes, for other objects their state.
    Functions, classes and modules of installed libraries count by name.

    Attributes:
        hex: the digest.
        unknown: types of objects that cannot be inspected (an open file, a lock); two of them may differ.
    """

    def __init__(self, value: Any) -> None:
        self.unknown: list[str] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # holds the object, so that its id is not reused
        digest = hashlib.sha256()
        for part in self._parts(value):
            digest.update(b"%d:" % len(part) + part)
        self.hex = digest.hexdigest()

    def _parts(self, value: Any) -> Iterator[bytes]:
        """An object's content as bytes, in a fixed order; an object met before gives its number."""
        kind = type(value)
        yield _name(kind).encode()
        if kind in _PLAIN:
            yield repr(value).encode()
        elif kind is tuple:  # no number: equal constants may be one object or two
            yield from self._all(value)
        elif kind in (set, frozenset):
            inner = [Fingerprint(x) for x in value]
            self.unknown += [name for one in inner for name in one.unknown]
            yield from sorted(one.hex.encode() for one in inner)
        elif kind is CodeType:
            yield value.co_code
            counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
            yield from self._all((*counts, *names, value.co_consts))
        elif id(value) in self._seen:
            yield b"%d" % self._seen[id(value)][0]
        else:
            self._seen[id(value)] = (len(self._seen), value)
            yield from self._inspected(value)

    def _all(self, values: Iterable[Any]) -> Iterator[bytes]:
        inner = list(values)
        yield b"%d" % len(inner)
        for value in inner:
            yield from self._parts(value)

    def _inspected(self, value: Any) -> Iterator[bytes]:
        match value:
            case list() if type(value) is list:
                yield from self._all(value)
            case dict() | MappingProxyType() if type(value) in (dict, MappingProxyType):
                yield from self._all(x for pair in value.items() for x in pair)
            case Tensor():
                yield from self._tensor(value)
            case partial():
                yield from self._all((value.func, value.args, value.keywords))
            case MethodType():
                yield from self._all((value.__func__, value.__self__))
            case ModuleType():
                yield value.__name__.encode()
                file = Path(getattr(value, "__file__", None) or "")
                if not _is_library(value.__name__) and file.is_file():
                    yield file.read_bytes()
            case BuiltinFunctionType():
                yield _name(value).encode()
                if not isinstance(value.__self__, ModuleType):
                    yield from self._parts(value.__self__)
            case FunctionType():
                yield from self._function(value)
            case type():
                yield _name(value).encode()
                if not _is_library(value.__module__):
                    yield from self._all(
                        (value.__bases__, {k: x for k, x in vars(value).items() if k not in _NOT_CODE})
                    )
            case property():
                yield from self._all((value.fget, value.fset, value.fdel))
            case staticmethod() | classmethod():
                yield from self._parts(value.__func__)
            case cached_property():
                yield from self._parts(value.func)
            case _ if isinstance(value, _BY_NAME):
                yield value.__name__.encode()
            case _:
                yield from self._object(value)

    def _function(self, value: FunctionType) -> Iterator[bytes]:
        yield _name(value).encode()
        if _is_library(value.__module__):
            if value.__closure__:  # a library's closure differs by its values
                yield from self._all(_cells(value))
            return
        yield from self._parts(value.__code__)
        yield from self._all((value.__defaults__, value.__kwdefaults__, vars(value)))
        yield from self._all(_cells(value))
        for name in sorted(_names(value.__code__)):
            if name in value.__globals__:
                yield name.encode()
                yield from self._parts(value.__globals__[name])

    def _tensor(self, value: Tensor) -> Iterator[bytes]:
        yield from self._all((tuple(value.shape), str(value.dtype), value.requires_grad))
        if value.is_meta:
            return
        try:
            plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        except (RuntimeError, NotImplementedError, TypeError):
            self.unknown.append(_name(type(value)))

    def _object(self, value: Any) -> Iterator[bytes]:
        """An object's state as pickle sees it, one level at a time."""
        yield from self._parts(type(value))
        try:
            reduced = value.__reduce_ex__(2)
        except Exception:  # the user's objects may raise anything
            self.unknown.append(_name(type(value)))
            return
        if isinstance(reduced, str):
            yield reduced.encode()
            return
        yield from self._all(list(x) if isinstance(x, Iterator) else x for x in reduced)
        if hasattr(value, "__wrapped__"):  # a cache around a function
            yield from self._parts(value.__wrapped__)
        if hasattr(value, "__dict__") and not _is_library(type(value).__module__):
            yield from self._parts(dict(vars(value)))  # also attributes that pickle omits


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _names(code: CodeType) -> set[str]:
    """The names that a code object uses, nested functions included."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return {*code.co_names}.union(*inner)


def _cells(function: FunctionType) -> list[Any]:
    """The values of a function's closure; None for a variable without a value yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(None)
    return found


def _is_library(module: str | None) -> bool:
    """Whether a module belongs to Python, relpos or an installed package, whose version identifies it."""
    top = (module or "").partition(".")[0]
    if top == "__main__" or not top:
        return False
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top in sys.stdlib_module_names or top == "relpos" or not {*Path(file).parts}.isdisjoint(_INSTALLED)


_INSTALLED = ("site-packages", "dist-packages")
