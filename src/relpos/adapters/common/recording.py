"""A program recorded from a retrofitted model is the published one.

A program recorded by `torch.jit.trace`, `torch.fx` or `torch.export` runs elsewhere, at other sizes, and often without
relpos. So it contains nothing of relpos: during recording, a retrofitted module runs its own library's code.
`torch.jit.script` reads source code instead, and finds the published methods. `torch.compile` also records, but for
calls in the same process; it compiles relpos's code.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from relpos.core.private import constant_while_tracing, exporting, symbolically_traced


@constant_while_tracing
def recorded() -> bool:
    """Whether a program is being recorded from the current call."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return traced or symbolically_traced() or exporting()


def unless_recorded(swapped: Any, name: str, published: FunctionType) -> FunctionType:
    """A method that calls the bases' method of this name, or the published one while a program is recorded.

    It shows the published method's source and argument names: torch.jit.script compiles that source, and `Trainer`
    drops arguments that the signature does not name.
    """
    # Its globals are those of the published method, so everything it needs is bound here. A lambda, because shape
    # checks wrap a `def` in another function, whose code would lack those globals.
    own = recorded
    method = lambda self, *args, **kwargs: (  # noqa: E731
        published(self, *args, **kwargs)
        if own() and not self.also_recorded
        else getattr(super(swapped, self), name)(*args, **kwargs)
    )
    made = FunctionType(method.__code__, published.__globals__, name, None, method.__closure__)
    made.__doc__, made.__wrapped__ = published.__doc__, published  # type: ignore[attr-defined]
    return made
