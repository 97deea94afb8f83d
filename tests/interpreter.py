"""Triton's interpreter as the tests use it where there is no GPU: in half of its time, and beside numpy 2.4."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def prepare(*, sanitized: bool = False) -> None:
    """Before a kernel is run; `sanitized` as in `overflow_is_an_error` from then on."""
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
    _sanitize(interpreter, sanitized)


@contextmanager
def overflow_is_an_error() -> Iterator[None]:
    """In here, a sum or product of whole numbers that does not fit: the interpreter looks after each, in 64 bits, which
    is a third of its time."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    _sanitize(interpreter, True)
    yield
    _sanitize(interpreter, False)


def _sanitize(interpreter: Any, asked: bool) -> None:
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=asked)


def _patch_once(interpreter: Any) -> None:
    """`triton.language` is replaced by what interprets it when a kernel is launched, and not anew whenever it calls a
    function, which looks at each of its names: a quarter of the time."""
    language: Any = importlib.import_module("triton.language")
    patch, replaced = interpreter._patch_lang, set()
    names: dict[int, set[str]] = {}

    def langs_of(fn: Any) -> set[str]:
        known = fn.__globals__
        if id(known) not in names:
            found = {"tl": language, "core": language.core}
            names[id(known)] = {name for name, lang in found.items() if any(one is lang for one in known.values())}
        return names[id(known)]

    def patched(fn: Any) -> Any:
        langs = langs_of(fn)
        if langs <= replaced:  # within a kernel
            return None
        outer, scope = not replaced, patch(fn)
        replaced.update(langs)
        if outer:
            restore = scope.restore

            def restored() -> None:
                replaced.clear()
                restore()

            scope.restore = restored
        return scope

    interpreter._patch_lang = patched


def _let_it_index(interpreter: Any) -> None:
    """The interpreter of Triton 3.6, that of torch 2.10, calls int() on arrays of one number; numpy 2.4 forbids it."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
