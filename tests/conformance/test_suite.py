"""The suite's own promises: which tests a class is given, in which engines, and what it is told where it lacks one."""

import random

import pytest
import torch

import relpos
from relpos.testing import CASES, MechanismSuite, oracle
from relpos.testing.base import HiddenTest, SuiteBase
from relpos.testing.engines import INTERPRETED


class Parent(MechanismSuite):
    """Of grids alone, with a test of its own in place of one that it does not ask for."""

    axes = (2,)

    def test_translation(self, case: object) -> None:
        """Never asked for here."""
        raise AssertionError("the parent's")


class Child(Parent):
    """Of sequences too, and translation-invariant."""

    axes = (1, 2)
    translation_invariant = True


class Grandchild(Child):
    """Of grids again."""

    axes = (2,)
    translation_invariant = False

    def test_preset(self, case: object) -> None:
        """Calls what is hidden."""
        super().test_preset(case)  # type: ignore[arg-type]


def collected(suite: type[MechanismSuite]) -> set[str]:
    """The names under which pytest finds a test: those that can be called as they stand in the classes."""
    first = {name: vars(base)[name] for base in reversed(suite.__mro__) for name in vars(base)}
    return {name for name, test in first.items() if name.startswith("test_") and callable(test)}


def test_what_is_not_asked_for_is_not_collected() -> None:
    line = {"test_extend", "test_packed_is_separate", "test_decoding_is_the_full_pass"}
    assert not line & collected(Parent)
    assert line <= collected(Child)
    assert not line & collected(Grandchild)
    for suite in (Parent, Child, Grandchild):
        assert not suite.undeclared() & collected(suite)
        assert {"test_values_and_gradients", "test_under_patterns"} <= collected(suite)


def test_an_override_is_shown_where_a_subclass_asks_for_it() -> None:
    assert "test_translation" not in collected(Parent)
    assert "test_translation" in collected(Child)
    with pytest.raises(AssertionError, match="the parent's"):
        Child().test_translation(CASES[0])
    assert "test_translation" not in collected(Grandchild)


def test_a_hidden_test_can_be_called() -> None:
    assert isinstance(vars(Grandchild)["test_preset"], HiddenTest)
    with pytest.raises(AssertionError):  # no preset is named
        Grandchild().test_preset(CASES[0])


def test_engines_are_those_that_run_here() -> None:
    assert {"reference", "sdpa", "streaming"} <= set(Parent.engines())
    assert not set(INTERPRETED) & set(Parent.engines())
    assert set(Parent.engines()) <= set(relpos.backends())


def test_runs_are_the_same_in_every_process() -> None:
    random.seed(1)
    first = Child().runs()
    random.seed(2)
    assert first == Child().runs()
    assert {run.case for run in first if run.dtype == torch.float64} == set(Child().cases())


def test_what_a_suite_lacks_is_named() -> None:
    site = relpos.Site(num_heads=2, head_dim=4, embed_dim=8, queries=relpos.Grid(2, 2))
    with pytest.raises(NotImplementedError, match=r"Parent needs build\(self, site\)"):
        Parent().build(site)


def test_every_parameter_is_documented() -> None:
    declared = {name for name in vars(SuiteBase)["__annotations__"] if not name.startswith("_")}
    assert MechanismSuite.__doc__
    for name in declared:
        assert f"\n        {name}: " in MechanismSuite.__doc__, name


def test_places_of_the_oracle_are_those_of_the_coordinates() -> None:
    for case in CASES:
        for side in (case.queries, case.keys):
            if side is None:
                continue
            places = oracle.places(side)
            assert places[: side.prefix] == [None] * side.prefix
            assert [list(place) for place in places[side.prefix :] if place] == side.tokens().tolist()


class OfSlope(relpos.OffsetBias):
    """Falls with the distance, by slopes that are computed with as they are, or by `.float()`."""

    def __init__(self, heads: int, rounded: bool) -> None:
        super().__init__()
        self.slope, self.rounded = torch.nn.Parameter(torch.rand(heads)), rounded

    def bias(self, offsets: relpos.core.Offsets) -> torch.Tensor:
        slope = self.slope.float() if self.rounded else self.slope
        return -slope[:, None] * offsets.axes[:, 0].abs().to(slope.dtype)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("rounded", "test", "said"),
    [
        (True, "test_float64_is_not_rounded", r"relpos\.at_least_float32\(slope\).*not from slope\.float\(\)"),
        (False, "test_structure_survives_a_cast", r"relpos\.at_least_float32\(parameter\)"),
    ],
)
def test_a_failed_cast_names_what_to_compute_with(rounded: bool, test: str, said: str) -> None:
    class Suite(MechanismSuite):
        axes = (1,)

        def build(self, site: relpos.Site) -> relpos.Mechanism:
            return OfSlope(site.num_heads, rounded)

    with pytest.raises(AssertionError, match=said):
        getattr(Suite(), test)(CASES[1])
