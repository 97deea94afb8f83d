"""All mechanisms' suites together: what one of them leaves to others is tested there."""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from pathlib import Path
from typing import Any

from conformance.suite import LibrarySuite
from relpos.core import Terms
from relpos.testing import MechanismSuite
from relpos.testing.calls import terms_of_case
from relpos.testing.cases import CASES

SUITES: set[type[MechanismSuite]] = {
    one
    for path in Path(__file__).parent.glob("test_*.py")
    if path.stem != Path(__file__).stem
    for name, one in vars(importlib.import_module(path.stem)).items()
    if name.startswith("Test") and isinstance(one, type) and issubclass(one, MechanismSuite)
}


def test_every_test_meets_every_case() -> None:
    """Though one suite shows it few."""
    met, fit = defaultdict(set), defaultdict(set)
    for suite in (kind() for kind in SUITES):
        for name, test in inspect.getmembers(type(suite), inspect.isfunction):
            parameters = inspect.signature(test).parameters
            if name.startswith("test_") and name not in suite.undeclared() and "case" in parameters:
                met[name] |= {str(case) for case in suite.share(name)}
                fit[name] |= {str(case) for case in suite.fitting(name)}
    assert len(SUITES) > 70
    assert len(met) > 8
    for name in met:
        assert met[name] >= fit[name] & {str(case) for case in CASES}, name  # a suite may have some of its own


def kinds(suite: type[LibrarySuite]) -> set[tuple[Any, ...]]:
    """The kinds of its terms: of vectors the side, of rotations whether they grow, of all whether they learn."""
    found: set[tuple[Any, ...]] = set()
    own = suite()
    for case in own.cases()[::3]:
        mechanism = own.made(case)
        terms: Terms = terms_of_case(mechanism, case.queries, case.keys)
        learns = any(one.requires_grad for one in mechanism.parameters())
        for term in terms:
            kind = type(term).__name__, getattr(term, "side", None), getattr(term, "magnitude", None) is None
            found.add((*kind, learns))
    return found


def test_every_kind_of_term_has_a_whole_suite() -> None:
    """A suite that leaves the tests of terms to another has no kind of term that no whole suite has."""
    found = {suite: kinds(suite) for suite in SUITES if issubclass(suite, LibrarySuite)}
    whole = set().union(*(own for suite, own in found.items() if not suite.alike))
    for suite, own in found.items():
        assert own <= whole, f"no other suite has the terms of {suite.__name__}: it is not alike"
