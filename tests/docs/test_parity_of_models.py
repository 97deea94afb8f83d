"""docs/parity-models.md: made by a run of the tests, with a row for every model that takes published weights."""

import ast
from pathlib import Path

import parity

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "parity-models.md"
AGAIN = "run: python -m pytest tests/models/test_published_weights.py --parity docs/parity-models.md"


def models() -> set[str]:
    """The names of what the tests compare, read from their source."""
    tree = ast.parse((ROOT / "tests" / "models" / "test_published_weights.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PAIRS":
            found: set[str] = {key.value for key in node.value.keys}  # type: ignore[attr-defined]
            return found
    raise AssertionError("the tests have no PAIRS")


def test_every_model_has_its_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(parity.HEAD_OF_MODELS), AGAIN
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert {row[0] for row in rows} == models(), AGAIN
    for row in rows:
        assert all(row[2:7]), f"{row[0]} was not compared in both dtypes; {AGAIN}"
