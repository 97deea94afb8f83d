"""Comparisons in tests run on one thread: no figure is taken here, and threads that wait for a core spin."""

from __future__ import annotations

import os

import calls
import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come; this one has its threads already


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> calls.Compared:
    """A comparison that tests read."""
    return calls.on_digits(tmp_path_factory.mktemp("digits") / "out")
