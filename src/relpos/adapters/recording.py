"""Programs that are recorded from a retrofitted model: they are the published ones.

A program that `torch.jit.trace`, `torch.fx` or `torch.export` records runs elsewhere, at other sizes, and often without
relpos. So nothing of relpos is in it: while a call of a retrofitted module is recorded, its own library's code computes
it. `torch.jit.script` reads source code instead, and finds that of the published methods. `torch.compile` records too,
but for calls of the same process; what it compiles is relpos's.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from relpos.core.private import asked_while_tracing, exporting, symbolically_traced


@asked_while_tracing
def recorded() -> bool:
    """Whether a program is being recorded from the call under way."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return traced or symbolically_traced() or exporting()


def unless_recorded(swapped: Any, name: str, published: FunctionType) -> FunctionType:
    """The method of a class's bases, and the published one of this name for what is recorded.

    It has the published one's source and names, for those who read them: torch.jit.script compiles what it finds there,
    and `Trainer` leaves out arguments that are not named.
    """
    # Its globals are those of the published method, so that all it needs is bound here. A lambda, because shape checks
    # put another function around a `def`, whose code would not know those globals.
    own = recorded
    method = lambda self, *args, **kwargs: (  # noqa: E731
        published(self, *args, **kwargs)
        if own() and not self.also_recorded
        else getattr(super(swapped, self), name)(*args, **kwargs)
    )
    made = FunctionType(method.__code__, published.__globals__, name, None, method.__closure__)
    made.__doc__, made.__wrapped__ = published.__doc__, published  # type: ignore[attr-defined]
    return made
