"""What each test costs: seconds of the processor, those of the processes that it starts among them. Not of the clock,
which a busy machine stretches; and of one machine, for the same tests took 440 to 603 on another within a day: every
half minute a loop is timed, and what follows is counted as where that loop takes `LOOP` seconds. A plugin of pytest;
`scripts/test_times` prints what it writes.

    python -m pytest --times=FILE

A fixture that several tests share counts to the test that asks first.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from loaded import Loaded

_NAME = "processor seconds"
LOOP = 0.061
"""Where the suite of e658dab took two workers 1,736 s (docs/log.md); by calculation, from a second machine, on which
that suite took 2,991 s and the loop 0.106."""
_EVERY = 30.0


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
        self.paced, self.pace = _seconds(), LOOP / _loop()
        self.began = _seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        now = _seconds()
        report.user_properties = [(_NAME, (now - self.began) * self.pace)]
        self.began = now
        if now > self.paced + _EVERY:
            self.pace, self.paced = LOOP / _loop(), now
            self.began = _seconds()
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


def _loop() -> float:
    """Seconds of a million steps of Python."""
    began, found = time.process_time(), 0
    for number in range(1_000_000):
        found += number * number % 7
    return time.process_time() - began
