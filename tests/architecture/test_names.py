"""Public names: exported, sorted, documented; files short; a test for every mechanism."""

import ast
import importlib
import inspect
from types import ModuleType
from typing import Any

from source import ROOT, SOURCE, modules, part, tree

import relpos
from relpos.position import FromStates, Mechanism, OffsetBias
from relpos.position.base.sum import Sum
from relpos.position.base.table_bias import TableBias

MOST_LINES = 400


def test_exported_names_are_sorted_and_there() -> None:
    assert relpos.__all__ == sorted(relpos.__all__)
    assert len(relpos.__all__) == len(set(relpos.__all__))
    for name in relpos.__all__:
        assert hasattr(relpos, name), f"relpos.__all__ has {name}, relpos has not"


def test_everything_public_at_the_root_is_exported() -> None:
    public = {
        name for name, value in vars(relpos).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public | {"ComparisonResult", "compare"} == set(relpos.__all__), "the two are imported when asked for"


def test_exported_names_have_a_docstring_of_their_own() -> None:
    for name in relpos.__all__:
        document = getattr(relpos, name).__doc__ or ""
        assert document.strip(), f"relpos.{name} has no docstring"
        assert not document.startswith(f"{name}("), f"relpos.{name} has the docstring that dataclasses make up"


def undocumented(module: ModuleType) -> list[str]:
    """Public functions, classes, methods and properties defined in a module that say nothing, inherited or not."""

    def says_nothing(value: Any) -> bool:
        document = inspect.getdoc(value)
        return not (document and document.strip())

    found = []
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) and says_nothing(value):
            found.append(name)
        if not inspect.isclass(value):
            continue
        if says_nothing(value) or (value.__doc__ or "").startswith(f"{name}("):
            found.append(name)
        for inner in vars(value):
            member = inspect.getattr_static(value, inner)
            is_code = isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
            if is_code and not inner.startswith("_") and says_nothing(getattr(value, inner)):
                found.append(f"{name}.{inner}")
    return found


def test_public_code_has_docstrings() -> None:
    for module in (name for name in modules() if not name.endswith("__main__")):
        loaded = importlib.import_module(module)
        assert inspect.getdoc(loaded), f"{module} does not say what it is"
        assert not undocumented(loaded), f"{module}: no docstring on {', '.join(undocumented(loaded))}"


def test_files_hold_one_concept() -> None:
    long = {
        str(path.relative_to(SOURCE)): count
        for path in SOURCE.rglob("*")
        if path.suffix in (".py", ".js", ".css", ".j2") and "vendor" not in path.parts
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    }
    assert not long, f"over {MOST_LINES} lines: {long}"


def mechanism_modules() -> list[str]:
    """The modules of relpos.position that define a mechanism for use."""
    found = []
    for name in modules():
        if part(name) != "position":
            continue
        for value in vars(importlib.import_module(name)).values():
            if not inspect.isclass(value) or value.__module__ != name:
                continue
            if issubclass(value, Mechanism) and value not in (Mechanism, FromStates, OffsetBias, TableBias, Sum):
                found.append(name.split(".")[-1])
                break
    return found


def test_there_are_mechanisms() -> None:
    assert {"none", "learned", "relative"} <= set(mechanism_modules())


def test_every_mechanism_has_a_test_file_and_is_offered_by_name() -> None:
    for name in mechanism_modules():
        path = ROOT / "tests" / "position" / f"test_{name}.py"
        assert path.is_file(), f"position/{name}.py has no tests/position/test_{name}.py"
        offered = importlib.import_module(f"relpos.position.{name}").PRESETS
        assert offered, name
        for preset in offered:
            assert preset.summary.count(".") >= 2, f"{preset.name}: two sentences, what it is and what to expect"
            assert preset.source, preset.name
            assert set(preset.token_axes) <= {0, 1, 2, 3}, preset.name


def test_arguments_are_handed_on_by_name() -> None:
    """Not by matching names of local variables, of which a wrong one is lost without a word."""
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                by_self = node.func.id == "vars" and any(isinstance(x, ast.Name) and x.id == "self" for x in node.args)
                assert node.func.id != "locals", f"locals() in {module}, line {node.lineno}"
                assert not by_self, f"vars(self) in {module}, line {node.lineno}"


MOST_PARAMETERS = 8
OF_OTHERS = {"relpos.adapters.common.interface": "_attention", "relpos.position.fire": "_rule"}
"""Transformers' signature, and that of a row rule, whose tensors are its parameters."""


PUBLIC = {*relpos.__all__, *relpos.parallel.__all__, "from_hf", "from_wds"}


def test_no_function_has_many_parameters() -> None:
    """But for public ones and constructors, which name each thing a user may say, kernels, and nodes of autograd."""
    found = set()
    for module in modules():
        if module.startswith("relpos.engines.triton"):
            continue
        for node in ast.walk(tree(module)):
            if not isinstance(node, ast.FunctionDef) or node.name == "__init__" or node.name in PUBLIC:
                continue
            given = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if given[:1] == ["ctx"] or node.name in ("forward", "linear_attention"):
                continue
            if len([name for name in given if name not in ("self", "cls")]) > MOST_PARAMETERS:
                found.add((module, node.name))
    assert found == set(OF_OTHERS.items())
