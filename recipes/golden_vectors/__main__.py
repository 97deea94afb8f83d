"""Write src/relpos/golden_vectors.json: small exact cases that any implementation of positions can be tested with.

    python recipes/golden_vectors            # a few seconds, once transformers and timm are loaded
    python recipes/golden_vectors --check    # fails if the file differs

Nothing here comes from relpos, which is tested against the file. Real numbers are computed by mpmath with 50 digits
from the formulas of the papers, then rounded to float64. Integers (buckets, rows of tables) come from published code.
Where transformers or timm computes the same numbers in float32, the script compares them and stops at a difference.

Parameters are whole numbers or sums of few powers of two, so that reading them rounds nothing. docs/golden-vectors.md
describes the file.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from formulas import Case
from mpmath import mpf
from outputs import outputs
from rotations import multi_axis, rotations
from tables import integers

OUT = Path(__file__).parents[2] / "src" / "relpos" / "golden_vectors.json"


def rounded(tree: Any) -> Any:
    """The same with float64 for mpmath's numbers."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [rounded(value) for value in tree]
    return float(tree) if isinstance(tree, mpf) else tree


def written() -> str:
    """The file: one case a line."""
    cases: list[Case] = [*rotations(), *multi_axis(), *integers()]
    cases += outputs({case["name"]: case for case in cases})
    head = {
        "format": 1,
        "offset": "query - key",
        "made_with": {name: version(name) for name in ("mpmath", "transformers", "timm")},
    }
    lines = ",\n".join(json.dumps(rounded(case), separators=(",", ":")) for case in cases)
    return f'{json.dumps(head)[:-1]}, "cases": [\n{lines}\n]}}\n'


def stored() -> str:
    """The file as it is, with the versions of the libraries that are installed."""
    text = OUT.read_text(encoding="utf-8")
    for name, old in json.loads(text)["made_with"].items():
        for form in (f"{name} %s", f'"{name}": "%s"'):
            text = text.replace(form % old, form % version(name))
    return text


if __name__ == "__main__":
    text = written()
    if "--check" not in sys.argv:
        OUT.write_text(text, encoding="utf-8")
    elif stored() != text:
        raise SystemExit(f"{OUT.name} is not what this script writes; run python recipes/golden_vectors")
