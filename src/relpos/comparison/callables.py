"""A person's own functions: found in a file, named in results, and told apart by their code."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from relpos.adapters.library_models import PREFIXES, LibraryModel
from relpos.core.checks import fail, shape_of
from relpos.train import build_swin


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
    if model == "swin":
        return build_swin
    if isinstance(model, str) and model.startswith(PREFIXES):
        return LibraryModel(model)
    return find_function(model, "build(position, task)")


def described(function: Callable[..., Any] | None) -> str | None:
    """A function in words, with a fingerprint: other code is another comparison.

    Of a function in a file it is the file's. Of others it is the byte code, with that of the functions and classes of
    the same module that it uses and the plain values that it closes over.
    """
    if function is None:
        return None
    if isinstance(function, LibraryModel):
        return function.described()
    if isinstance(function, FunctionInFile):
        name = f"{function.path.name}:{function.name}"
        path: Path | None = function.path
    else:
        inner = function.func if isinstance(function, partial) else function
        name = getattr(inner, "__qualname__", type(inner).__qualname__).replace("<locals>.", "")
        path = _file(inner)
    digest = hashlib.sha256(path.read_bytes() if path else b"")
    if not isinstance(function, FunctionInFile):
        digest.update("\0".join(_code(function, set())).encode())
    return f"{name}, sha256 {digest.hexdigest()[:12]}"


def _file(function: object) -> Path | None:
    """The file that a function or class stands in; None for one of a notebook or a prompt."""
    try:
        path = Path(inspect.getsourcefile(function) or "")  # type: ignore[arg-type]
    except TypeError:
        return None
    return path if path.is_file() else None


def _code(held: Any, seen: set[int]) -> Iterator[str]:
    """The code of functions and classes and the plain values that they use, of a module's own alone."""
    if id(held) in seen:
        return
    seen.add(id(held))
    if isinstance(held, bool | int | float | str):
        yield repr(held)
    elif isinstance(held, partial):
        for inner in (held.func, *held.args, *held.keywords.values()):
            yield from _code(inner, seen)
    elif isinstance(held, type):
        for inner in vars(held).values():
            yield from _code(inner, seen)
    elif isinstance(held, CodeType):
        yield f"{held.co_code!r}{held.co_names}"
        for inner in held.co_consts:
            yield from _code(inner, seen)
    elif isinstance(held, FunctionType):
        yield from _code(held.__code__, seen)
        cells = [cell.cell_contents for cell in held.__closure__ or ()]
        used = [held.__globals__.get(name) for name in held.__code__.co_names]
        own = [one for one in used if getattr(one, "__module__", held.__module__) == held.__module__]
        for inner in (*cells, *(held.__defaults__ or ()), *own):
            yield from _code(inner, seen)
    elif getattr(type(held), "__module__", "") == "__main__":  # an object that is called
        yield from _code(type(held), seen)
