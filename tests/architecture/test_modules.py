"""No module has the name of a function that stands beside it.

`import relpos.engines.api as x` asks each package for an attribute of the next name: a function there would be taken
for the package.
"""

import ast
import importlib
from collections import defaultdict

from source import ROOT, imports, modules, tree

import relpos


def test_every_module_is_what_its_package_has_under_its_name() -> None:
    shadowed = []
    for name in modules():
        package, _, own = name.rpartition(".")
        if not package or own.startswith("__"):
            continue
        defined = _names_in(package)
        if own in defined:
            shadowed.append(name)
    assert not shadowed, f"a function has the name of its module: {', '.join(shadowed)}"


def _names_in(package: str) -> set[str]:
    """What a package's __init__ binds, its submodules apart."""
    found: set[str] = set()
    for node in ast.walk(tree(package)):
        if isinstance(node, ast.ImportFrom) and not (node.level == 0 and node.module == package):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


def test_public_names_are_no_modules() -> None:
    for name in relpos.__all__:
        try:
            importlib.import_module(f"relpos.{name}")
        except ModuleNotFoundError:
            continue
        raise AssertionError(f"relpos.{name} is a module and a public name")


def test_imports_have_no_circle() -> None:
    """Those inside functions and for types alone count too; a package's own imports of its modules are its contents."""
    graph = {
        name: {one.target for one in imports(name) if one.target in modules() and one.target != name}
        for name in modules()
    }
    done: set[str] = set()

    def walk(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a circle: {' -> '.join((*way[way.index(name) :], name))}"
        if name not in done:
            for other in graph[name]:
                walk(other, (*way, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def _types_of(source: ast.Module) -> set[str]:
    """The classes at the top of a module, and the aliases of types; not constants, nor type variables of one letter."""
    found = {node.name for node in source.body if isinstance(node, ast.ClassDef)}
    for node in source.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        found |= {one.id for one in targets if isinstance(one, ast.Name)}
    names = {name.lstrip("_") for name in found}
    return {name for name in names if name[:1].isupper() and not name.isupper()}


def test_no_two_types_have_one_name() -> None:
    defined = defaultdict(list)
    command = (ROOT / "src" / "relpos_command").glob("*.py")
    sources = {name: tree(name) for name in modules()} | {str(path): ast.parse(path.read_text()) for path in command}
    for name, source in sources.items():
        for own in _types_of(source):
            defined[own].append(name)
    assert not {name: where for name, where in defined.items() if len(where) > 1}


def test_aliases_are_types() -> None:
    source = "class Ab: ...\n_Bc = tuple[int]\nDe: TypeAlias = int\nT = TypeVar('T')\nFEW = 3\n_kept = {}\n"
    assert _types_of(ast.parse(source)) == {"Ab", "Bc", "De"}
