"""Comparisons in tests run on one thread: no figure is taken here, and threads that wait for a core spin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import calls
import pytest

from loaded import Loaded
from warm import warm_python

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come; this one has its threads already


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> calls.Compared:
    """A comparison that tests read."""
    return calls.on_digits(tmp_path_factory.mktemp("digits") / "out")


@pytest.fixture(scope="session")
def warm(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python for workers and jobs, whose processes have their libraries."""
    pytest.importorskip("distributed")
    pytest.importorskip("submitit")
    with warm_python(loaded, tmp_path_factory.mktemp("warm")) as program:
        yield program
