"""A suite that leaves the tests of terms to another has no kind of term that no whole suite has."""

from __future__ import annotations

import importlib
from pathlib import Path

from conformance.suite import LibrarySuite
from relpos.core import Terms

SUITES = {
    one
    for path in Path(__file__).parent.glob("test_*.py")
    if path.stem != Path(__file__).stem
    for name, one in vars(importlib.import_module(path.stem)).items()
    if name.startswith("Test") and isinstance(one, type) and issubclass(one, LibrarySuite)
}


def kinds(suite: type[LibrarySuite]) -> set[tuple[object, ...]]:
    """The kinds of its terms: of vectors the side, of rotations whether they grow, of all whether they learn."""
    found: set[tuple[object, ...]] = set()
    own = suite()
    for case in own.cases()[::3]:
        mechanism = own.made(case)
        terms: Terms = mechanism.terms(case.queries, case.keys)
        learns = any(one.requires_grad for one in mechanism.parameters())
        for term in terms:
            kind = type(term).__name__, getattr(term, "side", None), getattr(term, "magnitude", None) is None
            found.add((*kind, learns))
    return found


def test_every_kind_of_term_has_a_whole_suite() -> None:
    whole = set().union(*(kinds(suite) for suite in SUITES if not suite.alike))
    assert len(SUITES) > 70
    for suite in SUITES:
        assert kinds(suite) <= whole, f"no other suite has the terms of {suite.__name__}: it is not alike"
