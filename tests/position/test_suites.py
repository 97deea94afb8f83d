"""All mechanisms' suites together: each of their tests meets every case that fits it, though one suite shows it few."""

from __future__ import annotations

import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from relpos.testing import MechanismSuite


def every_suite(base: type[MechanismSuite] = MechanismSuite) -> Iterator[type[MechanismSuite]]:
    for suite in base.__subclasses__():
        yield suite
        yield from every_suite(suite)


def test_every_test_meets_every_case() -> None:
    for path in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(path.stem)
    met, fit = defaultdict(set), defaultdict(set)
    for suite in (kind() for kind in every_suite() if kind.__name__.startswith("Test")):
        for name, test in inspect.getmembers(type(suite), inspect.isfunction):
            if (
                name.startswith("test_")
                and name not in suite.undeclared()
                and "case" in inspect.signature(test).parameters
            ):
                met[name] |= {str(case) for case in suite.share(name)}
                fit[name] |= {str(case) for case in suite.fitting(name)}
    assert len(met) > 8
    for name in met:
        assert met[name] == fit[name], name
