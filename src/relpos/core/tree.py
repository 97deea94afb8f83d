"""Frozen data classes as pytrees: tensors and trees of tensors are children, plain values are structure.

A field declared with `static()` is structure: it is compared, never mapped. All others are children. So `to(device)`,
`torch.func` and `torch.export` find the tensors in terms, lines and masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core.cache import state_of
from relpos.core.checks import fail, shape_of

T = TypeVar("T")


CLASSES: dict[str, type] = {}
"""Every registered class by its class name, which packed calls store."""
OWN: dict[type, tuple[str, ...]] = {}
"""The fields of the classes that relpos itself registers."""


def static(**arguments: Any) -> Any:
    """A data-class field that is structure, not a child; arguments as `dataclasses.field` takes them."""
    return dataclasses.field(metadata={"static": True}, **arguments)


def register(name: str) -> Callable[[type[T]], type[T]]:
    """Register a frozen data class as a pytree node.

    Args:
        name: its name in files, such as those of `torch.export`. It stays when the class moves.
    """

    def decorate(cls: type[T]) -> type[T]:
        known = CLASSES.setdefault(cls.__name__, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            came = f"{cls.__name__}, which {known.__module__} already has"
            fail("a tree class with a unique name", came, "Give it another name.")
        CLASSES[cls.__name__] = cls
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        children = [field.name for field in fields if not field.metadata.get("static")]
        structure = [field.name for field in fields if field.metadata.get("static")]
        if name.startswith("relpos."):
            OWN[cls] = tuple(field.name for field in fields)

        def flatten(node: T) -> tuple[list[Any], tuple[Any, ...]]:
            return [getattr(node, one) for one in children], tuple(getattr(node, one) for one in structure)

        def unflatten(values: Any, context: Iterable[Any]) -> T:  # a list, when read from a file
            node = object.__new__(cls)  # a tree may hold anything while it is mapped, so nothing is checked here
            for one, value in [*zip(children, values, strict=True), *zip(structure, context, strict=True)]:
                object.__setattr__(node, one, value)
            return node

        pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=name)
        return cls

    return decorate


def unchecked(cls: type[T], **fields: Any) -> T:
    """A frozen data class instance from all its fields, without checks."""
    instance = object.__new__(cls)
    for name, value in fields.items():  # Dynamo of torch 2.10 and 2.11 cannot trace instance.__dict__.update(fields)
        object.__setattr__(instance, name, value)
    return instance


def changed(node: T, **fields: Any) -> T:
    """A frozen data class with other values in some fields, like `dataclasses.replace`, without checks. The cache of
    the old object is not taken along."""
    return unchecked(type(node), **(fields_of(node) | fields))


def fields_of(node: Any) -> dict[str, Any]:
    """The fields of a data class by name. Not `vars`, which Dynamo of torch 2.10 and 2.11 cannot trace, and which also
    holds the cache."""
    return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}


class Movable:
    """Base of trees that `to` takes to another device."""

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)

    def to(self, device: torch.device | str) -> Self:
        """The same with every tensor on `device`. A tensor that is used twice is moved once and stays shared."""
        if not isinstance(device, torch.device | str):
            fail("a device", shape_of(device), "Terms, lines and masks keep their dtypes.")
        moved: dict[Tensor, Tensor] = {}

        def move(x: Tensor) -> Tensor:
            if x not in moved:
                moved[x] = x.to(device)
            return moved[x]

        tree: Self = pytree.tree_map_only(Tensor, move, self)
        return tree
