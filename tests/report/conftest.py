"""Made-up comparisons as fixtures."""

from collections.abc import Callable

import image_results
import pytest

from chromium_page import visit as visit


@pytest.fixture(scope="session")
def make() -> Callable[..., dict[str, object]]:
    return image_results.make_results


@pytest.fixture(scope="session")
def share() -> Callable[..., None]:
    return image_results.set_share
