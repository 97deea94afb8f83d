"""The kinds of position, and for each the classes that have it.

Each kind has a file. It names classes of other libraries and imports none: a module matches if the full name of its
class is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted


@dataclass(frozen=True)
class Replaced:
    """A class of another library that relpos can compute.

    Attributes:
        architecture: the library's name for it, such as "t5".
        path: full name of the class, such as "transformers.models.t5.modeling_t5.T5Attention"; written as "T5Attention"
            where it is in transformers' file of the architecture.
        mixin: the class put in front of it.
        reads: methods of the class, functions of its file, and full names of functions elsewhere that the mixin
            overrides or depends on. Their source has a fingerprint; any other source is refused.
        unfit: returns why a module of this class cannot be served (a setting), or None.
        tokens: returns the number of tokens if the module fixes it (a window); None if each call decides.
    """

    architecture: str
    path: str
    mixin: type[Retrofitted]
    reads: tuple[str, ...] = ("forward",)
    unfit: Callable[[Any], str | None] | None = None
    tokens: Callable[[Any], int | None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _full(self.architecture, self.path))


@dataclass(frozen=True)
class Verified:
    """A class whose modules are run as published and by relpos to compare them. It is a replaced class or contains one.

    Attributes:
        path: full name of the class.
        run: calls a module (published or relpos's) on random inputs and returns all outputs that must agree. Every call
            draws the same inputs. Masks are made here, with the library's own functions.
        tables: suffixes of the names of parameters that hold position. They are perturbed first: some start at zero,
            which would hide errors.
        exact: largest difference allowed in float64, relative to the largest value; 1e-6 if the library rounds a bias
            to float32.
        without: children that the copies do not need, such as the layers of an encoder that makes a bias for them.
        first: lists of children; the copies need only the first of each.
    """

    path: str
    run: Callable[[Any, RandomInputs], tuple[Tensor, ...]]
    tables: tuple[str, ...]
    exact: float = 1e-10
    without: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """A class whose relative position is left as it is, and why; architecture and path as in `Replaced`."""

    architecture: str
    path: str
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _full(self.architecture, self.path))


@dataclass(frozen=True)
class PositionKind:
    """A kind of position and its classes.

    Attributes:
        name: one or two words, such as "T5 buckets".
        library: import name, such as "transformers".
        switches: whether the modules' `config` selects the attention function; it is then switched to ours.
    """

    name: str
    library: str
    replaced: tuple[Replaced, ...]
    verified: tuple[Verified, ...]
    refused: tuple[Refused, ...] = ()
    switches: bool = False


_MODULES = (
    "t5",
    "boxes",
    "udop",
    "disentangled",
    "decomposed",
    "multiscale",
    "monai_attention",
    "slopes",
    "transformer_xl",
    "parakeet",
    "espnet",
    "nemo",
    "speechbrain",
    "shaw",
    "granite",
    "phi4_audio",
    "gated_bias",
    "inkling",
    "deepseek",
    "windows",
    "shifted_windows",
    "beit",
    "rel_pos",
    "maxvit",
    "distances",
)


@cache
def kinds() -> tuple[PositionKind, ...]:
    """All kinds, in the order of `docs/retrofit.md`."""
    return tuple(kind for module in _MODULES for kind in import_module(f"relpos.adapters.retrofits.{module}").KINDS)


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


def _full(architecture: str, path: str) -> str:
    return path if "." in path else class_path(architecture, path)


def path_of(kind: type[nn.Module]) -> str:
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
