"""The page of a made-up comparison with everything on it, built once."""

from collections.abc import Callable
from typing import Any

import pytest
from image_results import ELEVEN, make_results, set_share

from chromium_page import visit as visit
from relpos.report.page import build_page


@pytest.fixture(scope="session")
def make() -> Callable[..., dict[str, Any]]:
    return make_results


@pytest.fixture(scope="session")
def share() -> Callable[..., None]:
    return set_share


@pytest.fixture(scope="session")
def whole() -> dict[str, Any]:
    """Eleven mechanisms, probes that only some tasks have, images that were left out. To be read alone."""
    probe = {"id": "rotation/90", "group": "rotation", "label": "rotated 90 degrees", "variant": None, "x": 90}
    probe |= {"image_size": [16, 16], "trials": 4, "description": "Turned by a quarter."}
    results = make_results(ELEVEN, seeds=2, images=90)
    results["task"]["probes"].append(probe)
    results["task"]["skipped"] = [{"path": f"class/{n}.png", "reason": "cannot be read"} for n in range(20)]
    for record in results["records"]:
        test = next(metric for metric in record["metrics"] if metric["probe"] == "test")
        record["metrics"].append({**test, "probe": "rotation/90"})
    return results


@pytest.fixture(scope="session")
def page(whole: dict[str, Any]) -> str:
    return build_page(whole)
