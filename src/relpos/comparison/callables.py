"""A person's own functions: found in a file, named in results, and told apart by their code."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from relpos.core.checks import fail, shape_of

_SERVED_LATER = ("timm:", "hf:")


@dataclass(frozen=True)
class FunctionInFile:
    """`FILE.py:NAME`, called as the function is; any process finds it by its file.

    Raises:
        ValueError: there is no such file, it cannot be imported, or it has no such function.
    """

    path: Path
    name: str

    def __post_init__(self) -> None:
        if not self.path.is_file():
            fail("FILE.py:NAME of a file that is there", f"{self.path}, which is not", "Name another.")
        if not callable(self._function):
            fail(f"a function {self.name} in {self.path}", shape_of(self._function), "Name a function of that file.")

    @cached_property
    def _function(self) -> Any:
        folder = str(self.path.parent)
        if folder not in sys.path:  # the file may import what stands beside it
            sys.path.append(folder)
        digest = hashlib.sha256(str(self.path).encode()).hexdigest()[:8]
        name = f"_relpos_{self.path.stem}_{digest}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.path)
            if spec is None or spec.loader is None:
                fail("a file of Python, FILE.py:NAME", str(self.path), "Name one that ends in .py.")
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except Exception as error:
                del sys.modules[name]
                said = f"{type(error).__name__}: {error}"
                raise ValueError(f"expected {self.path} to be imported; got {said}. Mend the file.") from error
        found = getattr(sys.modules[name], self.name, None)
        if found is None:
            fail(f"a function {self.name} in {self.path}", "none", "Name one that the file has.")
        return found

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __getstate__(self) -> dict[str, Any]:
        """Without the function, which another process finds itself."""
        return {"path": self.path, "name": self.name}


def find_function(given: object, call: str) -> Callable[..., Any] | None:
    """A person's function, or None where none is given.

    Args:
        given: None, the function, or `"FILE.py:NAME"`.
        call: how it is called: "build(position, task)".

    Raises:
        ValueError: it is something else, or cannot be found.
    """
    if given is None:
        return None
    expected, name = f"{call} as a function or FILE.py:NAME", call.partition("(")[0]
    remedy = f"Pass the function itself, or FILE.py:{name}."
    if isinstance(given, str):
        file, colon, name = given.rpartition(":")
        if not colon or not file.endswith(".py") or not name.isidentifier():
            fail(expected, repr(given), remedy)
        return FunctionInFile(Path(file).expanduser().resolve(), name)
    if not callable(given) or isinstance(given, torch.nn.Module):  # one module would be trained on and on
        fail(expected, shape_of(given), remedy)
    return given


def find_build(model: object) -> Callable[..., Any] | None:
    """What builds the models of `model=`: None for those of relpos, else as `find_function`."""
    if isinstance(model, str) and model.startswith(_SERVED_LATER):
        # The seam: here a build is to be made of a model of timm or transformers and of its position's replacement.
        remedy = "Pass build(position, task) -> nn.Module, or FILE.py:build, that builds it."
        fail("a model as a function or FILE.py:build", f"{model}, which is not served yet", remedy)
    return find_function(model, "build(position, task)")


def described(function: Callable[..., Any] | None) -> str | None:
    """A function in words, with a fingerprint of its code and of the plain values that it closes over."""
    if function is None:
        return None
    if isinstance(function, FunctionInFile):
        digest = hashlib.sha256(function.path.read_bytes()).hexdigest()[:12]
        return f"{function.path.name}:{function.name}, sha256 {digest}"
    name = getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")
    return f"{name}, sha256 {hashlib.sha256(_code(function).encode()).hexdigest()[:12]}"


def _code(function: Callable[..., Any]) -> str:
    """The source of a function, or its byte code, and the plain values among its defaults and what it closes over."""
    if isinstance(function, partial):
        return f"{_code(function.func)}\0{_plain([*function.args, *function.keywords.values()])}"
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        source = repr(type(function)) if code is None else f"{code.co_code!r} {code.co_names} {_plain(code.co_consts)}"
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    kept = [*cells, *(getattr(function, "__defaults__", None) or ())]
    return f"{source}\0{_plain(kept)}"


def _plain(values: Any) -> str:
    return repr([value for value in values if isinstance(value, bool | int | float | str)])
