"""Every mechanism that a guide defines passes the suite that the guides promise; CONTRIBUTING.md's has
tests/position/test_toy.py. What a page defines is read from it as printed, without its calls."""

import ast
import re
from pathlib import Path
from typing import Any

import torch
from guides import DOCS, meant

import relpos
from relpos.testing import oracle

ROOT = DOCS.parent


def defined(page: Path) -> dict[str, Any]:
    """The imports, functions and classes of a page."""
    kinds = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef
    tree = ast.parse(meant(page))
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    names: dict[str, Any] = {"__name__": f"guide_{page.stem}"}
    exec(compile(tree, page.name, "exec"), names)
    return names


OWN = defined(DOCS / "guides" / "own-mechanism.md")
TestLogDistance: Any = OWN["TestLogDistance"]  # the guide's own test of its first mechanism


class TestRotateAndDecay(TestLogDistance):
    """The guide's second mechanism, by the loops of its first and of the rotation."""

    translation_invariant = False  # a prefix is not turned

    def build(self, site: relpos.Site) -> relpos.Mechanism:
        mechanism = OWN["RotateAndDecay"](site.num_heads, site.head_dim)
        torch.nn.init.uniform_(mechanism.decay.slope, 0.5, 1.5)
        return mechanism  # type: ignore[no-any-return]

    def oracle_bias(self, mechanism: Any, queries: Any, keys: Any) -> torch.Tensor:
        return super().oracle_bias(mechanism.decay, queries, keys)  # type: ignore[no-any-return]

    def oracle_attention(
        self, mechanism: Any, q: Any, k: Any, v: Any, queries: Any, keys: Any, allowed: Any
    ) -> torch.Tensor:
        q, k = (
            oracle.rotated(x, oracle.places(side), 1, q.shape[-1] // 2, 10000.0, "half")
            for x, side in ((q, queries), (k, keys))
        )
        return super().oracle_attention(mechanism, q, k, v, queries, keys, allowed)  # type: ignore[no-any-return]


def test_every_mechanism_and_every_suite_of_a_page_is_run() -> None:
    site = relpos.Site(num_heads=2, head_dim=4, embed_dim=8, queries=relpos.Sequence(3))
    run = {type(suite().build(site)).__name__ for suite in (TestLogDistance, TestRotateAndDecay)}
    found = set()
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for node in ast.walk(ast.parse(meant(page))):
            if isinstance(node, ast.ClassDef) and re.search("Mechanism|Bias", " ".join(map(ast.unparse, node.bases))):
                found.add(node.name)
    assert found == {*run, "TestLogDistance"}
