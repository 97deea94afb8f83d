"""Triton's interpreter as the tests use it where there is no GPU: in half of its time, and beside numpy 2.4."""

import dataclasses
import functools
import importlib
import importlib.metadata
from typing import Any

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


def _let_it_index(interpreter: Any) -> None:
    """The interpreter of Triton 3.6, that of torch 2.10, calls int() on arrays of one number; numpy 2.4 forbids it."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
