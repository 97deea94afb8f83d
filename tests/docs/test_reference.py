"""The reference: every public name has an example that runs, says what its arguments are, and stands on one page."""

import doctest
import inspect
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import relpos
from relpos.adapters.common.libraries import imported

PAGES = sorted((Path(__file__).parents[2] / "docs" / "reference").glob("*.md"))
BESIDE = (
    "core.Offsets",
    "core.axis_lines",
    "models.RotaryChoice",
    "position.find",
    "position.from_file",
    "position.presets",
)
"""Public names that are not at the root, beside the patterns."""
NAMES = sorted([*relpos.__all__, *(f"patterns.{name}" for name in relpos.patterns.__all__), *BESIDE])

OF_PYTORCH = {"AdamW": "the class and its docstring are PyTorch's"}
NOT_RUN = {
    "ComparisonResult": "comes of a comparison",
    "compare": "trains models; docs/guides/compare.md runs it",
    "position.from_file": "needs a file; tests/comparison/test_own_mechanism.py has some",
}
SLOW = {"retrofit"}  # it imports transformers


def found(name: str) -> Any:
    return operator.attrgetter(name)(relpos)


def example(name: str) -> doctest.DocTest:
    document = inspect.getdoc(found(name)) or ""
    _, _, text = document.partition("\nExamples:\n")
    return doctest.DocTestParser().get_doctest(text, {"relpos": relpos, "torch": torch}, name, None, None)


def test_every_public_name_has_a_short_example() -> None:
    for name in (name for name in NAMES if name not in OF_PYTORCH):
        steps = example(name).examples
        assert 1 <= len(steps) <= 7, f"relpos.{name} has an example of {len(steps)} steps; give it one of 2 to 6"
        skipped = [step for step in steps if step.options.get(doctest.SKIP)]
        assert len(skipped) == (len(steps) if name in NOT_RUN else 0), name
        shown = any(step.want for step in steps) or name in {"Sophia", *NOT_RUN}
        assert shown, f"that of relpos.{name} shows no result"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in NAMES
        if name not in OF_PYTORCH and name not in NOT_RUN
    ],
)
def test_examples_show_what_they_print(name: str) -> None:
    if name in SLOW:
        imported("transformers")
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(example(name), out=said.append)
    assert runner.failures == 0, "".join(said)


def entries(name: str) -> set[str]:
    """The names that the Args and Attributes of a docstring explain, each by a line of its own."""
    document = inspect.getdoc(found(name)) or ""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", document + "\n", flags=re.MULTILINE)
    return set(re.findall(r"^    (\w+):", "".join(sections), flags=re.MULTILINE))


BUILT_BY_RELPOS = ("ComparisonResult", "Explanation", "core.Offsets")


def test_every_argument_is_explained() -> None:
    for name in (name for name in NAMES if name not in {*OF_PYTORCH, *BUILT_BY_RELPOS} and callable(found(name))):
        value, options = found(name), inspect.Parameter.VAR_KEYWORD
        arguments = {one.name for one in inspect.signature(value).parameters.values() if one.kind != options}
        told = inspect.getdoc(value) or ""
        unsaid = {one for one in arguments - entries(name) if f"`{one}`" not in told}
        assert not unsaid, f"relpos.{name} does not say what {', '.join(sorted(unsaid))} is"


def directives() -> list[str]:
    return [name for page in PAGES for name in re.findall(r"^::: relpos\.([\w.]+)", page.read_text("utf-8"), re.M)]


def test_every_public_name_is_on_one_page_of_the_reference() -> None:
    assert sorted(directives()) == NAMES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_a_table_of_its_names(page: Path) -> None:
    text = page.read_text("utf-8")
    rows = re.findall(r"^\| \[`([\w.]+)`\]\(#relpos\.([\w.]+)\) \| (.*) \|$", text, flags=re.MULTILINE)
    shown = re.findall(r"^::: relpos\.([\w.]+)", text, flags=re.MULTILINE)
    assert [anchor for _, anchor, _ in rows] == shown
    for name, anchor, said in rows:
        assert name == anchor
        summary = " ".join((inspect.getdoc(found(name)) or "").split("\n\n")[0].split())
        right = said.replace("\\|", "|") == summary or name in OF_PYTORCH
        assert right, f"docs/reference/{page.name}: let the row of {name} say what its docstring does: {summary}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_makes_an_object_is_shown_with_its_class(page: Path) -> None:
    """`Mask.of`, `Mask.causal`, ...; `from_site` is for those who add a mechanism: CONTRIBUTING.md has it."""
    for name, listed in re.findall(
        r"^::: relpos\.([\w.]+)\n    options:\n      members: \[(.*)\]$", page.read_text("utf-8"), re.M
    ):
        own = {one for one, held in vars(found(name)).items() if isinstance(held, classmethod) and one[0] != "_"}
        missing = own - {"from_site"} - set(listed.split(", "))
        assert not missing, f"docs/reference/{page.name} shows no {name}.{', '.join(sorted(missing))}"
        for member in listed.split(", "):
            assert hasattr(found(name), member), f"docs/reference/{page.name} shows {name}.{member}, which is not there"
