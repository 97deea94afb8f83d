"""The shape checks are only as good as the annotations: one that does not resolve is skipped without a word."""

import dataclasses
import importlib
import inspect
import pkgutil
import typing

import jaxtyping
import pytest
import torch

import relpos

PACKAGES = ("core", "position", "engines", "layers", "models")


def modules() -> list[str]:
    names = []
    for package in PACKAGES:
        path = importlib.import_module(f"relpos.{package}").__path__
        names += [f"relpos.{package}.{info.name}" for info in pkgutil.iter_modules(path)]
    return names


def test_annotations_resolve() -> None:
    for name in modules():
        module = importlib.import_module(name)
        for owner in vars(module).values():
            if getattr(owner, "__module__", None) != name or not (inspect.isclass(owner) or inspect.isfunction(owner)):
                continue
            members = [owner, *(vars(owner).values() if inspect.isclass(owner) else ())]
            for member in members:
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if dataclasses.is_dataclass(function) or inspect.isfunction(function):
                    typing.get_type_hints(function, globalns=vars(module), include_extras=True)


def test_a_wrong_shape_is_caught() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        relpos.core.expand(torch.zeros(2, 3, 5), relpos.lines(relpos.Sequence(3)))
    with pytest.raises(jaxtyping.TypeCheckError):
        relpos.LowRank(torch.zeros(2, 3, 5), torch.zeros(3, 3, 5))
    with pytest.raises(jaxtyping.TypeCheckError):
        relpos.attention(*[torch.zeros(1, 2, 3, 4)] * 3, scale="large")


@pytest.mark.usefixtures("unchecked")
def test_the_checks_can_be_left_out() -> None:
    with pytest.raises(ValueError, match="expected"):
        relpos.attention(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))


def test_data_classes_are_frozen() -> None:
    for term in (relpos.Lines, relpos.Mask, relpos.Terms, relpos.LineBias, relpos.Grid, relpos.Sequence):
        assert term.__dataclass_params__.frozen  # type: ignore[attr-defined]
    with pytest.raises(dataclasses.FrozenInstanceError):
        relpos.Sequence(3).length = 4  # type: ignore[misc]
