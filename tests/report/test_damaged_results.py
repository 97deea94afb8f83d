"""Results with anything missing, blank or altered: one clear line, or a page, a table and a program."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
from choice_results import make as make_choices
from image_results import make_results
from rich.console import Console
from text_results import make_text

from relpos.report.page import build_page
from relpos.report.reproduce import reproduce
from relpos.report.terminal import render_terminal
from relpos.results import ResultsError, read

OTHERS: tuple[Any, ...] = (
    None, True, 0, -1, 1, 3, 10**30, 0.5, 1e-300, 1e300, float("nan"), "", "text", "\udcff", "a\nb", [], [1], [[1]],
    [1, 2, 3], {}, {"a": 1},
)  # fmt: skip
Path = tuple[str | int, ...]


def small(kind: str) -> dict[str, Any]:
    """A results tree whose page is made in an instant."""
    if kind == "choices":
        tree = make_choices(seeds=2)
    elif kind == "text":
        tree = make_text(("none", "rotary_1d", "t5"), seeds=2)
    else:
        tree = make_results(("learned", "relative_2d"), seeds=2, plain=False, images=12)
    for record in tree["records"]:
        for metric in record["metrics"]:
            if "correct" in metric:
                metric["correct"] = metric["correct"][:12]
        if record.get("attention"):
            record["attention"] |= {key: record["attention"][key][:1] for key in ("image", "label", "predicted")}
            record["attention"]["maps"] = [[layer[:1] for layer in record["attention"]["maps"][0][:1]]]
        for one in record.get("learned", []):  # a head, or four patches
            four = {"grid": [2, 2], "similarity": [row[:4] for row in one.get("similarity", [])[:4]]}
            one |= {"values": one["values"][:1]} if one["kind"] == "bias" else four
    return tree


def paths(tree: Any, here: Path = ()) -> Iterator[Path]:
    """Everything in a tree; of long lists the first and the last."""
    if here:
        yield here
    if isinstance(tree, dict):
        for name, one in tree.items():
            yield from paths(one, (*here, name))
    elif isinstance(tree, list):
        for index in sorted({0, len(tree) - 1} if tree else set()):
            yield from paths(tree[index], (*here, index))


def at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def alterations(value: Any) -> list[tuple[str, Any]]:
    """What else may stand in place of a value."""
    found = [("is", other) for other in OTHERS] + [("is gone", None)]
    if isinstance(value, list) and value:
        found += [("is", value[:-1]), ("is", [*value, value[0]]), ("is", [None, *value[1:]]), ("is", [])]
    if isinstance(value, dict):
        found += [("is", {**value, "more": 1}), ("is", dict.fromkeys(value))]
    if isinstance(value, int | float) and not isinstance(value, bool):
        found += [("is", -value), ("is", value + 1), ("is", value * 1000)]
    return found


def altered(tree: dict[str, Any], path: Path, what: str, other: Any) -> dict[str, Any]:
    """The tree with something else at a path; nothing of the tree itself is changed."""
    changed = copy.copy(tree)
    inside: Any = changed
    for key in path[:-1]:
        inside[key] = copy.copy(inside[key])
        inside = inside[key]
    if what == "is gone":
        del inside[path[-1]]
    else:
        inside[path[-1]] = other
    return changed


def use(tree: dict[str, Any], *, page: bool) -> bool:
    """Whether a tree can be read; what can be read must serve the terminal, the program and the page."""
    said = ""
    try:
        results = read(tree)
    except ResultsError as error:
        said = str(error)
    assert "\n" not in said
    if said:
        return False
    for width in (30, 112):
        Console(width=width, quiet=True).print(render_terminal(results, width=width))
    for name in results.names:
        if results.runs(name):
            compile(reproduce(results, name), "reproduce.py", "exec")
    if page:
        build_page(results).encode()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "text", "choices"])
def test_damage_is_one_line_or_does_no_harm(kind: str) -> None:
    draw, whole = random.Random(kind), small(kind)
    assert use(whole, page=True)
    every = list(paths(whole))
    chosen = [(path, *draw.choice(alterations(at(whole, path)))) for path in draw.sample(every, 60)]
    chosen += [(path, "is gone", None) for path in every if len(path) < 3]
    kept = [one for one in chosen if use(altered(whole, *one), page=False)]
    assert 0 < len(kept) < len(chosen)
    for one in draw.sample(kept, 2):
        assert use(altered(whole, *one), page=True), one
