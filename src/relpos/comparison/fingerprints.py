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

    def __init__(self, held: Any) -> None:
        self.unknown: list[str] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # holds the object, so that its id is not reused
        digest = hashlib.sha256()
        for part in self._parts(held):
            digest.update(b"%d:" % len(part) + part)
        self.hex = digest.hexdigest()

    def _parts(self, held: Any) -> Iterator[bytes]:
        """An object's content as bytes, in a fixed order; an object met before gives its number."""
        kind = type(held)
        yield _name(kind).encode()
        if kind in _PLAIN:
            yield repr(held).encode()
        elif kind is tuple:  # no number: equal constants may be one object or two
            yield from self._all(held)
        elif kind in (set, frozenset):
            inner = [Fingerprint(one) for one in held]
            self.unknown += [name for one in inner for name in one.unknown]
            yield from sorted(one.hex.encode() for one in inner)
        elif kind is CodeType:
            yield held.co_code
            counts = (held.co_argcount, held.co_posonlyargcount, held.co_kwonlyargcount, held.co_flags)
            names = (held.co_names, held.co_varnames, held.co_freevars, held.co_cellvars)
            yield from self._all((*counts, *names, held.co_consts))
        elif id(held) in self._seen:
            yield b"%d" % self._seen[id(held)][0]
        else:
            self._seen[id(held)] = (len(self._seen), held)
            yield from self._looked_into(held)

    def _all(self, held: Iterable[Any]) -> Iterator[bytes]:
        inner = list(held)
        yield b"%d" % len(inner)
        for one in inner:
            yield from self._parts(one)

    def _looked_into(self, held: Any) -> Iterator[bytes]:
        match held:
            case list() if type(held) is list:
                yield from self._all(held)
            case dict() | MappingProxyType() if type(held) in (dict, MappingProxyType):
                yield from self._all(x for pair in held.items() for x in pair)
            case Tensor():
                yield from self._tensor(held)
            case partial():
                yield from self._all((held.func, held.args, held.keywords))
            case MethodType():
                yield from self._all((held.__func__, held.__self__))
            case ModuleType():
                yield held.__name__.encode()
                file = Path(getattr(held, "__file__", None) or "")
                if not _is_library(held.__name__) and file.is_file():
                    yield file.read_bytes()
            case BuiltinFunctionType():
                yield _name(held).encode()
                if not isinstance(held.__self__, ModuleType):
                    yield from self._parts(held.__self__)
            case FunctionType():
                yield from self._function(held)
            case type():
                yield _name(held).encode()
                if not _is_library(held.__module__):
                    yield from self._all((held.__bases__, {k: x for k, x in vars(held).items() if k not in _NOT_CODE}))
            case property():
                yield from self._all((held.fget, held.fset, held.fdel))
            case staticmethod() | classmethod():
                yield from self._parts(held.__func__)
            case cached_property():
                yield from self._parts(held.func)
            case _ if isinstance(held, _BY_NAME):
                yield held.__name__.encode()
            case _:
                yield from self._object(held)

    def _function(self, held: FunctionType) -> Iterator[bytes]:
        yield _name(held).encode()
        if _is_library(held.__module__):
            if held.__closure__:  # a library's closure differs by its values
                yield from self._all(_cells(held))
            return
        yield from self._parts(held.__code__)
        yield from self._all((held.__defaults__, held.__kwdefaults__, vars(held)))
        yield from self._all(_cells(held))
        for name in sorted(_names(held.__code__)):
            if name in held.__globals__:
                yield name.encode()
                yield from self._parts(held.__globals__[name])

    def _tensor(self, held: Tensor) -> Iterator[bytes]:
        yield from self._all((tuple(held.shape), str(held.dtype), held.requires_grad))
        if held.is_meta:
            return
        try:
            plain = held.detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        except (RuntimeError, NotImplementedError, TypeError):
            self.unknown.append(_name(type(held)))

    def _object(self, held: Any) -> Iterator[bytes]:
        """An object's state as pickle sees it, one level at a time."""
        yield from self._parts(type(held))
        try:
            made = held.__reduce_ex__(2)
        except Exception:  # the user's objects may raise anything
            self.unknown.append(_name(type(held)))
            return
        if isinstance(made, str):
            yield made.encode()
            return
        yield from self._all(list(one) if isinstance(one, Iterator) else one for one in made)
        if hasattr(held, "__wrapped__"):  # a cache around a function
            yield from self._parts(held.__wrapped__)
        if hasattr(held, "__dict__") and not _is_library(type(held).__module__):
            yield from self._parts(dict(vars(held)))  # also attributes that pickle omits


def _name(held: Any) -> str:
    return f"{getattr(held, '__module__', '')}.{getattr(held, '__qualname__', type(held).__qualname__)}"


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
