"""The user's own functions: found in a file, named in results, distinguished by their code."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from relpos.adapters.library_models import PREFIXES, LibraryModel
from relpos.comparison.fingerprints import Fingerprint
from relpos.core.checks import fail, shape_of
from relpos.core.user_file import load_name, read_source, split_file
from relpos.train import build_swin

SWIN = "swin"
"""The name of relpos's Swin Transformer; relpos's version identifies its code."""


@dataclass(frozen=True)
class FunctionInFile:
    """The function `FILE.py:NAME`. Every process runs the file as it was when this object was made.

    Attributes:
        source: the file's content then; modules beside it that it imports are not included.

    Raises:
        ValueError: the file does not exist, cannot be imported, or has no such function.
    """

    path: Path
    name: str
    source: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", read_source(self.path))
        if not callable(self._function):
            fail(f"a function {self.name} in {self.path}", shape_of(self._function), "Name a function of that file.")

    @cached_property
    def _function(self) -> Any:
        return load_name(self.path, self.name, self.source)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the function; another process loads it again."""
        return {"path": self.path, "name": self.name, "source": self.source}


def find_function(given: object, call: str, others: str = "") -> Callable[..., Any] | None:
    """The user's function, or None if none is given.

    Args:
        given: None, the function, or `"FILE.py:NAME"`.
        call: its signature, such as "build(position, task)". others: other accepted values, for the message.

    Raises:
        ValueError: `given` is something else, or cannot be found.
    """
    if given is None:
        return None
    expected, name = f"{others}{call} as a function or FILE.py:NAME", call.partition("(")[0]
    remedy = f"Pass the function itself, or FILE.py:{name}."
    if isinstance(given, str):
        found = split_file(given)
        if found is None:
            fail(expected, repr(given), remedy)
        return FunctionInFile(*found)
    if not callable(given) or isinstance(given, torch.nn.Module):  # every run would train the same module
        fail(expected, shape_of(given), remedy)
    return given


def find_build(model: object) -> Callable[..., Any] | None:
    """The function that builds the models of `model=`: None for relpos's own, else as in `find_function`."""
    if model == SWIN:
        return build_swin
    if isinstance(model, str) and model.startswith(PREFIXES):
        return LibraryModel(model)
    if isinstance(model, str) and split_file(model) is None and ":" in model:
        kind, _, name = model.partition(":")
        if near := difflib.get_close_matches(f"{kind}:", PREFIXES, n=1, cutoff=0.5):
            fail(
                "swin, timm:NAME, torchvision:NAME, hf:FOLDER, or FILE.py:build",
                repr(model),
                f"Did you mean {near[0] + name!r}?",
            )
    return find_function(model, "build(position, task)", "swin, timm:NAME, torchvision:NAME, hf:FOLDER, or ")


def described(function: Callable[..., Any] | None) -> str | None:
    """A function's name with a fingerprint: other code, or other values in it, is another comparison.

    For a function in a file, the fingerprint covers that file, but not the modules it imports from beside it. For
    others it covers their file, if any, and their code and values (`Fingerprint`). If a value cannot be inspected, a
    random number makes the text differ each time, so that no result is mistaken for another's.
    """
    if function is None:
        return None
    if isinstance(function, LibraryModel):
        return function.described()
    if function is build_swin:
        return SWIN
    if isinstance(function, FunctionInFile):
        digest = hashlib.sha256(function.source).hexdigest()
        return f"{function.path.name}:{function.name}, sha256 {digest[:12]}"
    inner = function.func if isinstance(function, partial) else function
    name = getattr(inner, "__qualname__", type(inner).__qualname__).replace("<locals>.", "")
    path, own = _file(inner), Fingerprint(function)
    digest = hashlib.sha256((path.read_bytes() if path else b"") + own.hex.encode()).hexdigest()
    drawn = f", {_NEW}{own.unknown[0]}: {secrets.token_hex(4)}" if own.unknown else ""
    return f"{name}, sha256 {digest[:12]}{drawn}"


_NEW = "new each time for its "


def not_told_apart(words: str | None) -> str | None:
    """The type that `described` could not inspect, from its text; None if it could."""
    _, found, rest = (words or "").partition(_NEW)
    return rest.rpartition(":")[0] if found else None


def _file(function: object) -> Path | None:
    """The file that defines a function or class; None in a notebook or at a prompt."""
    try:
        path = Path(inspect.getsourcefile(function) or "")  # type: ignore[arg-type]
    except TypeError:
        return None
    return path if path.is_file() else None
