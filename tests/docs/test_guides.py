"""The guides: the code of each page runs from top to bottom, and prints or raises what stands below it."""

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import guides
import pytest
import torch
from guides import PAGES

from loaded import Loaded

APART = {"compare": "train", "compile": "compiler", "retrofit": "models"}
"""What those need that train, compile, and import transformers: they run in a process that has it already."""


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun would say to one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("unchecked", "timm", "_one_process")
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in APART], ids=lambda page: page.stem)
def test_the_code_of_a_guide_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guides.check(page)


@pytest.mark.slow
@pytest.mark.parametrize(("stem", "needs"), APART.items())
def test_the_code_of_a_long_guide_does_what_it_says(
    stem: str, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: Loaded
) -> None:
    (page,) = (page for page in PAGES if page.stem == stem)
    monkeypatch.chdir(tmp_path)
    done = loaded.run(guides.__file__, page, needs=[needs])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_is_short_and_ends_with_what_goes_wrong(page: Path) -> None:
    text = page.read_text("utf-8")
    assert 40 <= len(text.splitlines()) <= 160
    last = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)[-1]
    assert last == "What goes wrong" or page.stem == "choosing"
