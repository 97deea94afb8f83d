"""The source of relpos as text and syntax: what the tests of its architecture read. Nothing here imports relpos."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "relpos"


@dataclass(frozen=True)
class Import:
    """One import statement's target, as a dotted name, and where it stands."""

    target: str
    line: int


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    """The syntax of a module."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


def imports_of(source: ast.Module, module: str, is_package: bool, known: frozenset[str]) -> Iterator[Import]:
    """All imports in a module: at its top, inside functions, and under TYPE_CHECKING.

    `from a import b` is an import of `a.b` where that is a module, else of `a`. Also counted is
    `importlib.import_module("a.b")` with a literal name.
    """
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield Import(whole if whole in known else base, node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(first.value, node.lineno)


@cache
def imports(module: str) -> tuple[Import, ...]:
    """All imports of a module of relpos."""
    is_package = modules()[module].name == "__init__.py"
    return tuple(imports_of(tree(module), module, is_package, frozenset(modules())))


PARTS_INSIDE = {
    "relpos.report.drawing": "report.drawing",
    "relpos.comparison.entry": "comparison, as it is called",
    "relpos.comparison.display": "comparison, as it is called",
    "relpos.comparison.result": "comparison, as it is called",
}
"""What is a part of its own inside another: drawing knows no results, and workers of a comparison load no report."""


def part(module: str) -> str:
    """The part of the house a module of relpos belongs to: `core`, `engines`, ...; "" for the root."""
    for name, inside in PARTS_INSIDE.items():
        if module == name or module.startswith(name + "."):
            return inside
    names = module.split(".")
    return names[1] if len(names) > 1 else ""
