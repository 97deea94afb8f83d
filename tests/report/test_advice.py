"""What the page opens with, for every outcome that a comparison can have."""

import itertools
import re
from typing import Any

import pytest
from choice_results import make as make_choices
from image_results import ACCURACY, ELEVEN, diverge, make_results, set_share
from text_results import make_text

from relpos.comparison import workers
from relpos.report.advice import Advice, advise, listed
from relpos.report.curves import overview
from relpos.report.verdict import MOST_AT_ONCE, USUAL_STEPS
from relpos.results import read
from relpos.train import ImageRecipe, TextRecipe


def of(tree: dict[str, Any]) -> Advice:
    return advise(read(tree))


def test_two_winners_are_two_choices_and_the_ranking_flips(make: Any, share: Any) -> None:
    results = make(("none", "learned", "relative_2d"))
    share(results, "learned", "test", (0.99, 0.98, 0.99))
    found = of(results)
    assert found.lines[0].startswith("Choose relative_2d (")
    assert found.lines[0].endswith("at +3 pixels) if objects move.")
    assert found.lines[1].startswith("Choose learned (98.")
    assert found.lines[1].endswith("on the test images) if they never do.")
    assert found.named == ("relative_2d", "learned")
    assert found.lines[2].startswith("Rankings flip under shift: learned, the best on the test images, scores ")
    assert found.lines[2].endswith("points below relative_2d at +3 pixels.")


def test_one_that_is_tied_with_the_best_everywhere_is_the_choice(make: Any) -> None:
    found = of(make(("none", "relative_2d", "rotary_2d", "t5")))
    assert found.lines[0].startswith("Choose relative_2d: ") or found.lines[0].startswith("Choose rotary_2d: ")
    assert ", tied with r" in found.lines[0]
    assert (
        "least among those tied with the best: its training step takes 1.26 times that of none at 4,096 tokens."
        in found.lines[1]
    )
    assert set(found.named) == {"relative_2d", "rotary_2d"}


def test_times_whose_quartiles_overlap_name_nobody_who_costs_least(make: Any) -> None:
    given = make(("none", "relative_2d", "rotary_2d", "t5"))
    for entry in given["costs"]:
        if entry.get("position") == "rotary_2d":
            entry["step_ms"]["high"] = 1e6
            entry["step_ms"]["low"] = 1e-3
    assert not any("costs" in line or "training step takes" in line for line in of(given).lines)


def test_two_seeds_are_called_few(make: Any) -> None:
    def said(seeds: int) -> bool:
        return any(one.startswith("Two seeds are few") for one in of(make(("none", "t5"), seeds=seeds)).cautions)

    assert [said(seeds) for seeds in (1, 2, 3)] == [False, True, False]


def test_the_winners_cost_is_told_where_nobody_is_tied_with_it(make: Any) -> None:
    found = of(make(("none", "learned+relative_2d", "relative_2d"), accuracy={"learned+relative_2d": LOW}))
    assert found.lines[1] == "Its training step takes 1.40 times that of none at 4,096 tokens."


def test_a_ratio_that_timings_cannot_tell_from_one_is_no_saving(make: Any) -> None:
    given = make(("none", "relative_2d", "rotary_2d", "t5"))
    for entry in given["costs"]:
        if entry.get("position") == "rotary_2d":
            entry["ratio"] = 0.95
    assert of(given).lines[1].endswith("its training step takes about as long as that of none at 4,096 tokens.")


LOW = {"test": 0.5, "shift/1": 0.4, "shift/2": 0.3, "shift/3": 0.2, "canvas": {"interpolated": 0.2, "clipped": 0.2}}


def test_one_seed_decides_nothing(make: Any) -> None:
    found = of(make(("none", "relative_2d"), seeds=1))
    assert found.lines[0] == "Undecided after one seed."
    assert re.match(
        r"So far relative_2d is ahead on the test images \(94\.\d%, by \d+\.\d points, \d+ to \d+\)", found.lines[1]
    ), found.lines[1]
    both = of(make(("none", "relative_2d", "learned"), seeds=1)).lines[1]
    assert both.startswith("So far learned and relative_2d are tied on the test images (up to 9")
    assert ", relative_2d is ahead at +3 pixels (8" in both
    assert not any("flip" in note for note in of(make(("none", "relative_2d", "learned"), seeds=1)).notes)
    half = make(("none", "relative_2d"))
    half["records"] = [record for record in half["records"] if record["seed"] == 0]
    assert of(half).lines[0] == "Undecided while only one seed has finished."


def test_a_quick_run_says_that_it_works_and_ranks_nothing(make: Any) -> None:
    found = of(make(quick=True))
    assert found.lines[0] == "It works: 3 of 3 trained, measured and drawn."
    assert not found.named
    assert not found.notes
    assert not any(name in " ".join(found.lines) for name in ("relative_2d", "learned"))


def test_position_may_not_matter(make: Any, share: Any) -> None:
    def alike(images: int) -> Advice:
        results = make(("none", "rotary_2d"), images=images)
        for name, probe in itertools.product(("none", "rotary_2d"), ("test", "shift/3")):
            share(results, name, probe, (0.9, 0.9, 0.9))
        return of(results)

    found = alike(400)
    assert found.lines[0].startswith("Position does not matter on these data: every mechanism is tied with none ")
    assert found.lines[1].startswith("Another position would gain at most 0.7 points.")
    few = alike(30).lines
    assert few[0].startswith("Undecided: none is tied with the best "), "30 images leave more open"
    assert few[0].endswith("but a gain of up to 9.5 points is possible.")


def test_nothing_above_chance(make: Any) -> None:
    at = {"test": 0.1, "shift/1": 0.1, "shift/2": 0.1, "shift/3": 0.1, "canvas": {"as is": 0.1}}
    found = of(make(("none", "rotary_2d"), accuracy={"none": at, "rotary_2d": at}))
    assert found.lines[0].startswith("Undecided: nothing is better than chance (10.0%) on the test images: the ")
    assert found.lines[1] == "Train longer (--steps), or check the labels."


def test_too_few_images_to_tell_from_chance(make: Any, share: Any) -> None:
    results = make(("none", "rotary_2d"), seeds=2, images=6)
    for name in ("none", "rotary_2d"):
        share(results, name, "test", (0.5, 1.0))
    found = of(results)
    assert found.lines[0].startswith("Undecided: ")
    assert found.lines[0].endswith(" (75.0%) on the test images, but its interval includes chance (10.0%).")
    assert found.lines[1] == "More seeds would tell, more test data, or longer training."


def test_a_shift_at_chance_is_no_reason_to_choose(make: Any) -> None:
    lost = {"shift/3": 0.1}
    both = {name: {**ACCURACY[name], **lost} for name in ("none", "relative_2d")}
    found = of(make(("none", "relative_2d"), accuracy=both))
    assert found.lines[0] == "Choose relative_2d: 95.0% on the test images."
    assert "pixels" not in found.lines[0]


THREE = {"relative_2d": (0.47, 0.48), "rotary_2d": (0.475, 0.478), "t5": (0.472, 0.475)}


def weak(make: Any, **changes: Any) -> dict[str, Any]:
    """Two seeds of 60 steps, all three as good as each other, three classes."""
    results: dict[str, Any] = make(tuple(THREE), seeds=2, plain=False)
    for (name, reached), probe in itertools.product(THREE.items(), ("test", "shift/3")):
        set_share(results, name, probe, reached)
    results["settings"]["recipe"]["steps"] = 60
    results["task"] |= {"classes": ["cat", "dog", "bird"], **changes}
    for record in results["records"]:
        record["settings"] = {"recipe": {**record["settings"]["recipe"], "steps": 60}}
    return results


def test_where_all_are_tied_nobody_is_chosen(make: Any) -> None:
    found = of(weak(make))
    assert found.lines[0].startswith("Undecided: all 3 are tied on the test images and at +3 pixels (r")
    assert found.named == ()
    assert found.verdict.choose == ()
    assert not found.verdict.decided
    assert found.verdict.command == (
        "relpos compare --data digits --positions relative_2d,rotary_2d,t5 --seeds 5 --steps 400 --device cpu "
        "--precision float32"
    )
    # rotary_2d learns nothing, so it has no runs without the position learning rate; 8.5 s for 60 steps, two at once
    runs = 5 * (3 + 2)
    assert found.verdict.seconds == pytest.approx(8.5 / 60 * 400 * runs / 2)
    assert found.verdict.lead == "To decide, run (about 12 minutes of training, by the times of this run):"
    assert not any(word in f"{found.verdict}" for word in ("Choose", "DIR"))


def test_at_chance_nobody_is_chosen(make: Any) -> None:
    low = weak(make)
    for record in low["records"]:
        record["validation"] = 0.31
    found = of(low)
    assert found.lines[0].endswith("but on the validation data it is not better than chance (33.3%).")
    assert " --steps 400 " in (found.verdict.command or "")
    found = of(weak(make, largest_class=0.48))
    assert found.lines[0].startswith("Undecided: nothing is better than chance (48.0%) on the test images")
    assert not found.verdict.decided


def test_a_verdict_that_is_decided_has_no_command(make: Any) -> None:
    found = of(make(("none", "relative_2d")))
    assert found.verdict.decided
    assert found.verdict.choose == ("relative_2d",)
    assert found.verdict.command is None


def test_a_quick_run_is_undecided_and_asks_for_a_whole_one(make: Any) -> None:
    found = of(make(quick=True))
    assert not found.verdict.decided
    assert " --seeds 3 --steps 400 " in (found.verdict.command or "")
    assert "--quick" not in (found.verdict.command or "")


def test_the_usual_steps_and_processes_are_those_of_the_recipes_and_workers() -> None:
    images, text = ImageRecipe().steps, TextRecipe().steps
    assert {"images": images, "other": images, "text": text} == USUAL_STEPS
    assert workers.MOST_AT_ONCE == MOST_AT_ONCE


def test_less_than_two_is_no_comparison(make: Any) -> None:
    assert of(make(("none",))).lines[0].startswith("Only none was measured: 54.")
    begun = make()
    begun["records"] = []
    found = of(begun)
    assert found.lines == ("There is nothing to compare yet.",)
    assert found.cautions == ("Unfinished: 9 of the requested training runs are missing.",)


def test_what_diverged_is_said_and_the_rest_compared(make: Any) -> None:
    found = of(diverge(make(), "learned"))
    assert found.lines[0].startswith("Choose relative_2d")
    assert found.cautions == (
        "learned diverged in 6 of its 6 runs: with seed 0 the loss was nan at step 12, at the learning rate 3.0e-03; "
        "it has no figure.",
    )
    some = of(diverge(make(), "learned", seeds=(1,)))
    assert some.cautions[0].endswith("its figures are only from the others.")
    assert some.cautions[1] == "Seed 1 is left out on the test images: not all runs have finished."
    every = of(diverge(make(), "none", "learned", "relative_2d"))
    assert every.lines == ("Every training run diverged.",)


def test_what_the_position_learning_rate_does_is_noted(make: Any) -> None:
    found = of(make(("none", "relative_2d")))
    assert found.notes[-2].startswith("Without the 10x position learning rate, on the test images: relative_2d scores ")
    assert found.notes[-2].endswith(" points below the figure with it.")


def test_text_has_bits_and_lengths() -> None:
    found = of(make_text(("none", "learned", "t5", "alibi", "rotary_1d")))
    assert found.lines[0].startswith("Choose t5")
    assert "bits" in found.lines[0]
    assert "2,048 bytes" in found.lines[0]
    assert not any("%" in line for line in found.lines)
    apart = {"alibi": {None: (2.56,), "as is": (2.3, 2.2, 2.1)}, "t5": {None: (2.1,), "as is": (2.5, 2.8, 3.0)}}
    found = of(make_text(("none", "t5", "alibi"), bits=apart))
    assert found.lines[0].startswith("Choose alibi (2.1")
    assert found.lines[0].endswith("if inputs grow beyond 256 bytes.")
    assert found.lines[2].startswith("Rankings flip under length: t5, the best at 256 bytes, needs ")


@pytest.mark.parametrize(
    ("names", "words"),
    [(["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c"), (list("abcdef"), "a, b and 4 more")],
)
def test_lists_are_cut_at_three(names: list[str], words: str) -> None:
    assert listed(names, 3) == words


@pytest.mark.parametrize("tree", [make_results(ELEVEN), make_results(), make_text(), make_choices()])
def test_sentences_and_the_picture_have_cost_at_one_number_of_tokens(tree: dict[str, Any]) -> None:
    results = read(tree)
    advice = advise(results)
    spoken = " ".join([*advice.lines, *(chart.across for chart in overview(results, advice).values())])
    assert len(set(re.findall(r"at ([\d,]+) tokens", spoken))) == 1
