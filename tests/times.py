"""What each test costs: seconds of the processor, those of the processes that it starts among them. Not of the clock,
which a busy machine stretches; and of one machine, for the same tests took 440 to 603 on another within a day: every
half minute a loop is timed, and what follows is counted as where that loop takes `LOOP` seconds. A plugin of pytest;
`scripts/test_times` prints what it writes.

    python -m pytest --times=FILE

A fixture that several tests share counts to the test that asks first. What a worker does once for all tests has its
own rows: the collection, and modules that are imported while tests run, by whichever is the first.
"""

import importlib._bootstrap
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loaded import Loaded

_NAME = "processor seconds"
LOOP = 0.061
"""Where the suite of e658dab took two workers 1,736 s (docs/log.md); by calculation, from a second machine, on which
that suite took 2,991 s and the loop 0.106."""
_EVERY = 30.0
ONCE = ("collection", "imports")
"""What no test is charged with."""


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
        self.once = dict.fromkeys(ONCE, 0.0)
        self.began = 0.0  # of the processor, since the process began

    def pytest_collection_finish(self) -> None:
        self._spent("collection")
        _note_imports(self)

    def _spent(self, name: str) -> None:
        now = _seconds()
        self.once[name] += now - self.began
        self.began = now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        now = _seconds()
        spent = self.once | {_NAME: now - self.began - self.once["imports"]}
        report.user_properties = [(name, seconds * self.pace) for name, seconds in spent.items()]
        self.once = dict.fromkeys(ONCE, 0.0)
        self.began = now
        if now > self.paced + _EVERY:
            self.pace, self.paced = LOOP / _loop(), now
            self.began = _seconds()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties:
            self.seconds[report.nodeid if name == _NAME else name] += seconds

    def pytest_sessionfinish(self) -> None:
        if self.reports:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.seconds, indent=0))


def _note_imports(times: _Times) -> None:
    """Of modules that no one has imported yet; those that they import count with them."""
    load, within = importlib._bootstrap._find_and_load, False

    def noted(name: str, by: Any) -> Any:
        nonlocal within
        if within or threading.current_thread() is not threading.main_thread():
            return load(name, by)
        began, within = _seconds(), True
        try:
            return load(name, by)
        finally:
            within = False
            times.once["imports"] += _seconds() - began

    importlib._bootstrap._find_and_load = noted


def _seconds() -> float:
    """Of this process and of those that it has waited for, or that are said to it."""
    return sum(os.times()[:4]) + Loaded.seconds


def _loop() -> float:
    """Seconds of a million steps of Python."""
    began, found = time.process_time(), 0
    for number in range(1_000_000):
        found += number * number % 7
    return time.process_time() - began
