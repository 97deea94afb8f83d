"""Wrong calls must fail by the library's own checks, so the shape checks that other tests run under are off here."""

import pytest


@pytest.fixture(autouse=True)
def no_shape_checks(unchecked: None) -> None:
    """Switch jaxtyping's hook off at run time, and on again."""
