"""The arrows of the house, walked in the source: who may import whom, wherever in a file the import stands."""

import ast
import sys

import pytest
from source import SOURCE, imports, imports_of, modules, part, tree

BELOW_LAYERS = {"core", "position", "patterns", "engines"}
BELOW_MODELS = BELOW_LAYERS | {"layers"}
BELOW_TRAIN = BELOW_MODELS | {"models", "optim", "data", "parallel"}
BELOW_COMPARE = BELOW_TRAIN | {"train", "files"}

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "files": {"core"},
    "position": {"core"},
    "patterns": {"core"},
    "engines": {"core"},
    "parallel": BELOW_LAYERS | {"layers"},
    "layers": BELOW_LAYERS,
    "models": BELOW_MODELS | {"files", "version"},
    "optim": {"core", "position"},
    "data": {"core", "files", "results"},  # results for the dataclasses that describe a task
    "train": BELOW_TRAIN | {"files"},
    "results": set(),
    "version": set(),
    "comparison": BELOW_COMPARE | {"adapters", "results", "version"},
    "comparison, as it is called": BELOW_COMPARE | {"adapters", "comparison", "report", "results"},
    "report.drawing": {"core", "position", "engines", "files", "results"},
    "report": {"files", "results", "report.drawing"},
    "bench": BELOW_LAYERS
    | {"layers", "adapters", "files", "comparison", "report.drawing", ""},  # compare for memory, workers and the folder
    "__main__": set(),
    "cli": BELOW_COMPARE
    | {"adapters", "bench", "comparison", "comparison, as it is called", "report", "report.drawing", "results"}
    | {"version", ""},
    "adapters": BELOW_TRAIN,
    "compat": BELOW_TRAIN,
    "testing": BELOW_LAYERS,  # and nothing but the root imports it
    "": BELOW_MODELS
    | {"models", "optim", "adapters", "compat", "version"}
    | {"comparison, as it is called", "parallel", "report.drawing", "testing"},  # these when asked for
}
"""Part to the parts below it that it may import, besides itself."""

CORE_MAY_IMPORT = {"torch", "jaxtyping", "numpy", "relpos_command.visible"}


def wrong_arrows(module: str) -> list[str]:
    """What a module imports against the direction of the house, each as a line that names the arrow."""
    own = part(module)
    allowed = MAY_IMPORT.get(own, set()) | {own}
    return [
        f"{module}:{one.line} imports {one.target}: the arrow {own or 'relpos'} -> {part(one.target) or 'relpos'} runs "
        f"the wrong way; {own or 'relpos'} may import {', '.join(sorted(name or 'relpos' for name in allowed))}"
        for one in imports(module)
        if one.target.split(".")[0] == "relpos" and part(one.target) not in allowed
    ]


def test_every_part_is_there() -> None:
    """Of a new one, say here what it may import."""
    assert {part(module) for module in modules()} == set(MAY_IMPORT)


def test_arrows_run_one_way() -> None:
    wrong = [arrow for module in modules() for arrow in wrong_arrows(module)]
    assert not wrong, "\n".join(wrong)


def test_the_oracle_imports_nothing_of_what_it_judges() -> None:
    outside = {one.target.split(".")[0] for one in imports("relpos.testing.oracle")} - sys.stdlib_module_names
    assert outside == {"torch"}


def test_core_needs_torch_and_little_else() -> None:
    for module in (name for name in modules() if part(name) == "core"):
        targets = [one.target for one in imports(module)]
        outside = {name if name.startswith("relpos_command") else name.split(".")[0] for name in targets}
        outside -= {"relpos", *sys.stdlib_module_names}
        assert outside <= CORE_MAY_IMPORT, f"{module} imports {outside - CORE_MAY_IMPORT}"


def test_how_names_are_shown_imports_nothing_so_that_all_may_import_it() -> None:
    source = ast.parse((SOURCE.parent / "relpos_command" / "visible.py").read_text(encoding="utf-8"))
    assert {one.target for one in imports_of(source, "visible", False, frozenset())} == {"__future__", "re"}


def test_report_knows_results_alone() -> None:
    known = ("report", "files", "results", "report.drawing")
    for module in (name for name in modules() if part(name) == "report"):
        outside = [one for one in imports(module) if one.target.split(".")[0] in ("torch", "relpos", "jaxtyping")]
        foreign = [one for one in outside if one.target.split(".")[0] != "relpos" or part(one.target) not in known]
        foreign += [one for one in outside if one.target.endswith("drawing.mechanism_data")]  # which asks mechanisms
        assert not foreign, f"{module} imports {', '.join(f'{one.target} (line {one.line})' for one in foreign)}"


def engines() -> list[str]:
    """The engines: the modules, or packages with a module `engine`, that hold a subclass of `Engine`."""
    found = []
    for name in modules():
        if part(name) != "engines":
            continue
        bases = [base for node in tree(name).body if isinstance(node, ast.ClassDef) for base in node.bases]
        if any(isinstance(base, ast.Name) and base.id == "Engine" for base in bases):
            found.append(name.removesuffix(".engine"))
    return found


def test_engines_never_import_one_another() -> None:
    found = engines()
    assert {name.rpartition(".")[2] for name in found} == {"triton", "streaming", "sdpa", "flex", "reference"}
    for engine in found:
        for one in imports(engine):
            for other in found:
                inside = one.target == other or one.target.startswith(other + ".")
                assert not inside or other == engine, f"{engine}:{one.line} imports the engine {other}"


CHOOSERS = ("relpos.engines.api", "relpos.engines.selection")


def test_only_what_chooses_imports_engines() -> None:
    found = engines()
    for name in modules():
        if name in found or name in CHOOSERS or any(name.startswith(engine + ".") for engine in found):
            continue
        for one in imports(name):
            assert one.target not in found, (
                f"{name}:{one.line} imports the engine {one.target}; selection chooses engines"
            )


@pytest.mark.parametrize(
    ("source", "module", "seen"),
    [
        (
            "def f():\n    if True:\n        from relpos import engines\n        import relpos.report.page as p\n",
            "relpos.core.x",
            [("relpos.engines", 3), ("relpos.report.page", 4)],
        ),
        ("from ..engines import api", "relpos.core.x", [("relpos.engines.api", 1)]),
        ("from . import lines", "relpos.core", [("relpos.core.lines", 1)]),
        ('import importlib\nimportlib.import_module("relpos.cli")', "x", [("importlib", 1), ("relpos.cli", 2)]),
    ],
    ids=["inside functions", "relative", "of a package", "dynamic"],
)
def test_imports_are_seen(source: str, module: str, seen: list[tuple[str, int]]) -> None:
    known = frozenset({"relpos.engines", "relpos.engines.api", "relpos.core.lines"})
    found = imports_of(ast.parse(source), module, module == "relpos.core", known)
    assert [(one.target, one.line) for one in found] == seen
