"""The guides' pages and the code in them.

python tests/docs/guides.py PAGE        raises unless its code does what the page says
"""

import contextlib
import doctest
import io
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "guides").glob("*.md"))
ERROR = re.compile(r"(\w+Error): (.*)", flags=re.DOTALL)
"""What stands below a block that is there for its error."""
_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", flags=re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """The line at which each block of code begins, the code, and what stands below it as printed."""
    text = page.read_text("utf-8")
    for block in _BLOCK.finditer(text):
        yield text[: block.start()].count("\n") + 1, block.group(1), block.group(2) or ""


def meant(page: Path) -> str:
    """The code of a page as one module, without the blocks that are there for their error."""
    return "\n".join(code for _, code, shown in blocks(page) if not ERROR.match(shown))


def check(page: Path) -> None:
    """Run its blocks from top to bottom; raise unless each prints, or ends with, what stands below it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    same = doctest.OutputChecker().check_output
    for line, code, shown in blocks(page):
        where = f"{page.name}:{line}"
        printed = _run(code, names, where)
        assert ERROR.match(shown) or not ERROR.match(printed), f"{where} ends with {printed}"
        if shown:
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert same(shown, printed, flags), f"{where} shows\n{shown}\nand prints\n{printed}"


def _run(code: str, names: dict[str, Any], where: str) -> str:
    """What a block prints, or the line of the error that ends it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, where, "exec"), names)
        except Exception as error:
            printed.write(f"{type(error).__name__}: {error}\n")
    return printed.getvalue()


if __name__ == "__main__":
    import torch

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)  # by the compiler, of its own
    torch.set_num_threads(1)
    torch.manual_seed(0)
    check(Path(sys.argv[1]))
