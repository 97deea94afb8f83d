"""What each test costs: seconds of the processor, those of the processes that it starts among them. Not of the clock,
which a busy machine stretches. A plugin of pytest; `scripts/test_times` prints what it writes.

    python -m pytest --times=FILE

A fixture that several tests share counts to the test that asks first.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaded import Loaded

_NAME = "processor seconds"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FILE", help="write the processor seconds of each test into this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--times"):
        config.pluginmanager.register(_Times(config), "relpos times")


class _Times:
    """Measures in the process that runs a test, and adds up in the one that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.file = Path(config.rootpath, config.getoption("--times"))
        self.reports = not hasattr(config, "workerinput")
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.began = _seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        now = _seconds()
        report.user_properties = [(_NAME, now - self.began)]
        self.began = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += dict(report.user_properties).get(_NAME, 0.0)

    def pytest_sessionfinish(self) -> None:
        if self.reports:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.seconds, indent=0))


def _seconds() -> float:
    """Of this process and of those that it has waited for, or that are said to it."""
    return sum(os.times()[:4]) + Loaded.seconds
