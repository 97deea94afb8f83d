"""What a kind of position says of the architectures that have it, and the list of kinds.

A file a kind. It names classes of other libraries and imports none of them: a module is matched by the full name of its
class, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from relpos.adapters.random_inputs import RandomInputs
from relpos.adapters.retrofitted import Retrofitted


@dataclass(frozen=True)
class Replaced:
    """A class of another library that relpos computes.

    Attributes:
        architecture: as the library names it, "t5".
        path: the class, "transformers.models.t5.modeling_t5.T5Attention".
        mixin: what is put in front of it.
        reads: its methods, and functions of its file or (by their full names) of others, that the mixin overrides or
            stands on; their source has a fingerprint, and another source is refused.
        unfit: says why one module of this class cannot be served (a setting), or None.
        tokens: tokens of a module that has a fixed number, a window; None where a call decides.
    """

    architecture: str
    path: str
    mixin: type[Retrofitted]
    reads: tuple[str, ...] = ("forward",)
    unfit: Callable[[Any], str | None] | None = None
    tokens: Callable[[Any], int | None] | None = None


@dataclass(frozen=True)
class Verified:
    """A class whose modules are run as published and by relpos, side by side; it is, or holds, replaced ones.

    Attributes:
        path: the class.
        run: calls a module (either one) on what it draws, and returns all outputs that must agree. Every call draws
            the same, so masks are made here, by what the library makes them with.
        tables: ends of the names of parameters that hold position. They are perturbed first: some start at zero,
            where nothing could be seen.
        exact: largest difference in float64, of the largest value; 1e-6 where the library rounds a bias to float32.
        without: children that the copies do not need, such as the layers of an encoder that makes a bias for them.
        first: lists of children of which the copies need the first alone.
    """

    path: str
    run: Callable[[Any, RandomInputs], tuple[Tensor, ...]]
    tables: tuple[str, ...]
    exact: float = 1e-10
    without: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A class with a relative position that is left as it is, and why."""

    architecture: str
    path: str
    reason: str


@dataclass(frozen=True)
class PositionKind:
    """A kind of position.

    Attributes:
        name: one or two words, "T5 buckets".
        library: what is imported, "transformers" or "timm".
        switches: whether the modules' `config` selects the attention function, and is switched to ours.
    """

    name: str
    library: str
    replaced: tuple[Replaced, ...]
    verified: tuple[Verified, ...]
    refused: tuple[Refused, ...] = ()
    switches: bool = False


_FILES = (
    "t5",
    "boxes",
    "disentangled",
    "decomposed",
    "slopes",
    "transformer_xl",
    "parakeet",
    "shaw",
    "granite",
    "gated_bias",
    "windows",
    "beit",
    "rel_pos",
    "distances",
)


@cache
def kinds() -> tuple[PositionKind, ...]:
    """All kinds, in the order of the page."""
    return tuple(kind for file in _FILES for kind in import_module(f"relpos.adapters.{file}").KINDS)


@cache
def replaced_classes() -> dict[str, tuple[PositionKind, Replaced]]:
    """The classes that are replaced, by full name."""
    return {one.path: (kind, one) for kind in kinds() for one in kind.replaced}


@cache
def refused_classes() -> dict[str, tuple[PositionKind, Refused]]:
    """The classes that are refused, by full name."""
    return {one.path: (kind, one) for kind in kinds() for one in kind.refused}


@cache
def verified_classes() -> dict[str, Verified]:
    """The classes that are verified, by full name."""
    return {one.path: one for kind in kinds() for one in kind.verified}


def class_path(architecture: str, name: str) -> str:
    """The full name of a class of transformers."""
    return f"transformers.models.{architecture}.modeling_{architecture}.{name}"


def path_of(kind: type[nn.Module]) -> str:
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
