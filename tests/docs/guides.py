"""The guides' pages and the code in them."""

import re
from collections.abc import Iterator
from pathlib import Path

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
