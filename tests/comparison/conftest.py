"""Comparisons in tests run on one thread: no figure is taken here, and threads that wait for a core spin."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # for the processes to come; this one has its threads already
