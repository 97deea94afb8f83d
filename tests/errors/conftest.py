"""Wrong calls must fail by the library's own checks, so the shape checks that other tests run under are off here."""

from __future__ import annotations

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture(autouse=True)
def no_shape_checks() -> Iterator[None]:
    """Switch jaxtyping's hook off at run time, and on again."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
