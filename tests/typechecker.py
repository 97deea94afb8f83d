"""beartype as jaxtyping's import hook wants it: one method at a time, where `Self` has no class to mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import beartype

_CHECK = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its annotations enforced; those that say `Self` are left alone."""
    annotations = getattr(function, "__annotations__", {})
    for name in [name for name, annotation in annotations.items() if annotation in ("Self", Self)]:
        del annotations[name]
    return _CHECK(function)
