"""The guides: the code of each page runs from top to bottom, and prints or raises what stands below it."""

import contextlib
import doctest
import io
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from guides import ERROR, PAGES, blocks

SLOW = {"compare", "compile", "retrofit"}
"""They train models, compile, and import transformers."""


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


def run(code: str, names: dict[str, Any], where: str) -> str:
    """What a block prints, or the line of the error that ends it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, where, "exec"), names)
        except Exception as error:
            printed.write(f"{type(error).__name__}: {error}\n")
    return printed.getvalue()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by the compiler, of its own
@pytest.mark.usefixtures("unchecked", "timm", "_one_process")
@pytest.mark.parametrize(
    "page", [pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page.stem in SLOW else []) for page in PAGES]
)
def test_the_code_of_a_guide_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem in SLOW:
        from relpos.adapters.common.libraries import imported

        imported("transformers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    same = doctest.OutputChecker().check_output
    for line, code, shown in blocks(page):
        where = f"{page.name}:{line}"
        printed = run(code, names, where)
        if ERROR.match(printed) and not ERROR.match(shown):
            pytest.fail(f"{where} ends with {printed}")
        if shown:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert same(shown, printed, flags), f"{where} shows\n{shown}\nand prints\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_is_short_and_ends_with_what_goes_wrong(page: Path) -> None:
    text = page.read_text("utf-8")
    assert 40 <= len(text.splitlines()) <= 160
    last = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)[-1]
    assert last == "What goes wrong" or page.stem == "choosing"
