"""What all tests of models of other libraries run under: timm imported, and what the libraries warn of themselves."""

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relpos.adapters.common import libraries

OF_THE_LIBRARIES = (
    "ignore::DeprecationWarning",
    "ignore:`is_gradient_checkpointing`:FutureWarning",
    "ignore:Support for mismatched key_padding_mask:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of this folder alone."""
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*OF_THE_LIBRARIES))


@pytest.fixture(autouse=True)
def _timm(timm: object) -> None:
    """timm is imported where torchvision is broken, too."""


@pytest.fixture(scope="package", autouse=True)
def _sources_read_once() -> Iterator[None]:
    """Of a class or function: each retrofit asks for those of all that it depends on, and Python reads files anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(libraries, "inspect", SimpleNamespace(getsource=functools.cache(inspect.getsource)))
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Queries and keys of what retrofitted layers call `relpos.attention` with."""
    from relpos.adapters.common import retrofitted

    seen: list[tuple[int, int]] = []
    right = retrofitted.attention

    def noted(q: Any, k: Any, v: Any, **call: Any) -> Any:
        seen.append((q.shape[2], k.shape[2]))
        return right(q, k, v, **call)

    monkeypatch.setattr(retrofitted, "attention", noted)
    return seen
