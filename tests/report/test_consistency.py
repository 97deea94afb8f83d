"""Values of a results.json that do not fit together: each is named where it stands."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from choice_results import make as make_choices
from image_results import make_results
from text_results import make_text

from relpos.report.advice import advise
from relpos.results import ResultsError, read

FAST_CASES = 14  # of each of its tests, in the fast part

Tree = dict[str, Any]
Change = Callable[[Tree], object]

IMAGES: list[tuple[Change, str]] = [
    (lambda t: t.update(settings=[]), r"settings: expected an object, got \[\]"),
    (lambda t: t.update(mechanisms={}), r"mechanisms: expected a list, got {}"),
    (lambda t: t.update(records=[3]), r"records\[0\]: expected an object, got 3"),
    (lambda t: t["task"].update(kind="sound"), r"task\.kind: expected images or text or other, got 'sound'"),
    (lambda t: t["records"][1].pop("seed"), r"records\[1\]: missing seed"),
    (lambda t: t["records"][0].update(sed=1), r"records\[0\]: unknown sed"),
    (lambda t: t["records"][0]["curve"].update(loss=["x"]), r"loss: expected a list of numbers up to 1e60, got 'x'"),
    (lambda t: t["records"][0].pop("settings"), r"records\[0\]: missing settings"),
    (lambda t: t["records"][0].update(settings={}), r"records\[0\]\.settings: missing recipe"),
    (lambda t: t["records"][0]["settings"].update(recipe={}), r"records\[0\]\.settings\.recipe: missing attention, "),
    (lambda t: t["settings"].update(recipe={}), r"settings\.recipe: missing attention, batch_size, "),
    (lambda t: t["settings"]["recipe"].update(class_token=None), r"settings\.recipe: missing class_token"),
    (lambda t: t["settings"].update(what="bogus"), r"settings\.what: expected position or .* or optimizer, got 'bog"),
    (lambda t: t["settings"].update(what="norm"), r"settings\.choices: expected at least one name, got none"),
    (lambda t: t["settings"].update(seeds=0), r"settings\.seeds: expected at least 1, got 0"),
    (lambda t: t["settings"].update(positions=[]), r"settings\.positions: expected at least one name, got none"),
    (lambda t: t["mechanisms"].pop(), r"mechanisms: expected one for each of settings\.positions, none, learned, rel"),
    (lambda t: t["mechanisms"].append(t["mechanisms"][0]), r"mechanisms: .* got none, learned, relative_2d, none$"),
    (lambda t: t["settings"]["positions"].append("none"), r"settings\.positions: expected each name once, got 'none'"),
    (lambda t: t["task"].update(probes=[]), r"task\.probes: expected at least one, got none"),
    (lambda t: t["task"]["probes"].append(t["task"]["probes"][0]), r"task\.probes: expected each id once, got 'test'"),
    (lambda t: t["task"].pop("classes"), r"task\.classes: expected at least one, got none"),
    (lambda t: t["task"].pop("image_size"), r"task\.image_size: expected \[rows, columns\] of at least 1, got None"),
    (lambda t: t["task"].update(patch_size=[2]), r"task\.patch_size: expected \[rows, columns\] of at .* got \[2\]"),
    (lambda t: t["task"].pop("channels"), r"task\.channels: expected at least 1, got None"),
    (lambda t: t["task"].update(skipped=[{"path": "a"}]), r"task\.skipped\[0\]: expected path and reason, got path"),
    (lambda t: t["task"]["sizes"].pop("test"), r"task\.sizes: missing test"),
    (lambda t: t["records"].append(t["records"][0]), r"records: expected each id once, got 'none--x10--seed0' twice"),
    (lambda t: t["records"][1].update(seed=0), r"records: expected each run once, got 'none, recipe, seed 0' twice"),
    (lambda t: t["records"][0].update(position="t5"), r"records\[0\]: expected a run of none, .*, got 't5'"),
    (lambda t: t["costs"][0].update(position="t5"), r"costs\[0\]: expected the cost of none, .*, got 't5'"),
    (lambda t: t["costs"][0].pop("step_ms"), r"costs\[0\]: expected step_ms, or a reason; got neither"),
    (lambda t: t["costs"][0].update(ratio=0), r"costs\[0\]\.ratio: expected a number above 0, got 0"),
    (lambda t: t["costs"].append(t["costs"][0]), r"costs: expected each entry once, got 'none at 64 tokens' twice"),
    (lambda t: t["records"][0]["curve"]["loss"].pop(), r"records\[0\]\.curve: .* step, loss, rate, got 40, 39, 40"),
    (lambda t: metric(t).update(probe="shift/9"), r"metrics\[0\]\.probe: expected the id of a probe, got 'shift/9'"),
    (lambda t: metric(t).update(accuracy=None), r"metrics\[0\]: expected accuracy, .* or a reason; got no accuracy"),
    (lambda t: metric(t).update(values=[1.0]), r"metrics\[0\]: expected what images have, got values"),
    (lambda t: metric(t)["correct"].pop(), r"records\.\S+\.metrics\.test\.correct: expected 359 as in none\S+, got"),
    (lambda t: metric(t).update(correct=[5] * 360), r"metrics\[0\]\.correct: expected numbers from 0 to 4, got 5"),
    (lambda t: learned(t, 4).pop("grid"), r"learned\[0\]\.grid: expected one or two sizes of at least 1, got None"),
    (lambda t: learned(t, 4).update(similarity=[[1]]), r"similarity: expected nested lists of numbers, 64 x 64, got"),
    (lambda t: learned(t, -1).pop("values"), r"learned\[0\]\.values: expected nested lists .* any x 15 x 15, got None"),
    (lambda t: learned(t, -1).pop("offsets"), r"learned\[0\]\.offsets: expected one for each of .* got 0 for 2"),
    (lambda t: learned(t, -1).pop("axes"), r"learned\[0\]\.offsets: expected one for each of .* got 2 for None"),
    (lambda t: look(t).update(query=[8, 0]), r"attention\.query: expected a patch of the grid \[8, 8\], got \[8, 0\]"),
    (lambda t: look(t).update(maps=[]), r"attention\.maps: expected nested lists of numbers, 3 x any x any x 8 x 8"),
    (lambda t: look(t).update(grid=[8, 7]), r"attention\.image: expected pixels that a grid of \[8, 7\] divides, got"),
]  # fmt: skip


def metric(tree: Tree) -> Tree:
    return tree["records"][0]["metrics"][0]


def learned(tree: Tree, run: int) -> Tree:
    return tree["records"][run]["learned"][0]


def look(tree: Tree) -> Tree:
    return tree["records"][0]["attention"]


TEXT: list[tuple[Change, str]] = [
    (lambda t: t["task"].pop("length"), r"task\.length: expected at least 1, got None"),
    (lambda t: t["task"]["probes"][1].pop("length"), r"task\.probes\[1\]\.length: expected at least 1, got None"),
    (lambda t: t["settings"]["recipe"].pop("mlp"), r"settings\.recipe: missing mlp"),
    (lambda t: metric(t).pop("values"), r"metrics\[0\]: expected bits_per_byte, values, or a reason; got no val"),
    (lambda t: metric(t)["by_place"].pop(), r"metrics\.test\.by_place: expected 31 as in none\S+, got 32"),
]
CHOICES: list[tuple[Change, str]] = [
    (lambda t: t["records"][0].pop("choice"), r"records\[0\]: expected a run of full, local, linear, got 'rotary_2d'"),
]
MAKE = {"images": cache(make_results), "text": cache(make_text), "choices": cache(make_choices)}
EVERY = [
    pytest.param(kind, change, words, id=f"{kind}: {words[:40]}")
    for kind, table in (("images", IMAGES), ("text", TEXT), ("choices", CHOICES))
    for change, words in table
]


@pytest.mark.parametrize(("kind", "change", "words"), EVERY)
def test_what_does_not_fit_together_is_one_line(kind: str, change: Change, words: str) -> None:
    tree = deepcopy(MAKE[kind](seeds=2))  # runs share their recipe
    change(tree)
    with pytest.raises(ResultsError, match=r"^results\.[^\n]*" + words):
        read(tree)


def test_brackets_thousands_deep_are_one_line() -> None:
    tree = make_results(seeds=1)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    tree["settings"]["task_options"] = {"images": deep}
    with pytest.raises(ResultsError, match="few nested brackets"):
        read(tree)


def test_times_without_the_ratio_to_none_are_not_compared() -> None:
    tree = make_results(("learned", "t5"), seeds=3)
    for cost in tree["costs"]:
        cost["ratio"] = 1.0 if cost["tokens"] == 64 else None
    lines = advise(read(tree)).lines
    assert not any("1,024" in line or "4,096" in line for line in lines)
