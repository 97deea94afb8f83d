"""Programs that are recorded from a retrofitted model: they are the published ones.

A program that `torch.jit.trace`, `torch.fx` or `torch.export` records runs elsewhere, at other sizes, and often without
relpos. So nothing of relpos is in it: while a call of a retrofitted module is recorded its own library's code computes
it. `torch.jit.script` reads source code instead, by a module's class: `AsPublished` is that, until the module is used
again. `torch.compile` records too, but for calls of the same process; what it compiles is relpos's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from relpos.core.private import asked_while_tracing, exporting, symbolically_traced

_CLASS = "_relpos_class"


@asked_while_tracing
def recorded() -> bool:
    """Whether a program is being recorded from the call under way."""
    traced: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return traced or symbolically_traced() or exporting()


class AsPublished(nn.Module):
    """In front of a module's published class from when it is scripted to when it is used again."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module as it was before it was scripted."""
        used_again(self)
        return self(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        used_again(self)
        return self.__reduce_ex__(protocol)


@cache
def _as_published(published: Any) -> type[nn.Module]:
    names = {name: getattr(published, name) for name in ("__module__", "__qualname__", "__doc__")}
    names["__annotations__"] = dict(
        vars(published).get("__annotations__", {})
    )  # read of a class alone, as properties are
    names |= {name: one for name, one in vars(published).items() if isinstance(one, property)}
    return type(published.__name__, (AsPublished, published), names)


def scripted(module: nn.Module, published: Any) -> nn.Module:
    """Let `torch.jit.script`, which is about to read a module, find its published class.

    It is the module itself: a copy would take its place in the model, for good.
    """
    module.__dict__[_CLASS] = type(module)
    module.__class__ = _as_published(published)
    return module


def used_again(module: nn.Module) -> None:
    """Give a module the class that it had before it was scripted."""
    if isinstance(module, AsPublished):
        module.__class__ = module.__dict__.pop(_CLASS)
