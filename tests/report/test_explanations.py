"""Explanations are said only where the figures show what they explain."""

from typing import Any

from relpos.report.explanations import explain_results

LEVEL = {"shift/1": 0.5, "shift/2": 0.5, "canvas": {"as is": 0.5, "interpolated": 0.5, "clipped": 0.5}}


def told(results: Any) -> dict[str, str]:
    return {explanation.title: explanation.text for explanation in explain_results(results)}


def figures(test: float, shift: float) -> dict[str, Any]:
    return {**LEVEL, "test": test, "shift/3": shift}


def test_alibi_that_ties_with_none_is_explained(make: Any) -> None:
    found = told(make(("none", "alibi", "relative_2d"), accuracy={"alibi": figures(0.547, 0.53)}))
    text = found["Why alibi is close to none"]
    assert text.startswith("On the test images alibi cannot be told apart from none: ")
    assert "knows no direction" in text
    assert "relative_2d, is ahead of alibi by " in text


def test_alibi_that_is_ahead_or_behind_is_told_so(make: Any) -> None:
    ahead = told(make(("none", "alibi"), accuracy={"alibi": figures(0.8, 0.8)}))
    assert "alibi is ahead of none by " in ahead["Why alibi is not none"]
    behind = told(make(("none", "alibi"), accuracy={"alibi": figures(0.3, 0.3)}))
    assert "alibi is behind none by " in behind["Why alibi is not none"]


def test_none_is_a_bag_only_where_it_keeps_its_accuracy(make: Any) -> None:
    assert "Why none hardly minds a shift" in told(make(("none",), images=900))
    assert "Why none hardly minds a shift" not in told(make(("none",), accuracy={"none": figures(0.5, 0.2)}))


def test_absolute_positions_fall_or_stand(make: Any) -> None:
    fallen = told(make(("learned", "sinusoidal_2d")))["Why absolute positions fall when images move"]
    assert "learned falls by " in fallen
    assert "; sinusoidal_2d falls by " in fallen
    assert "and moved, it comes with others." in fallen
    stood = told(make(("learned",), accuracy={"learned": figures(0.9, 0.95)}))
    assert "Why absolute positions fall when images move" not in stood
    assert "learned rises by " in stood["Absolute positions that stood the shift"]


def test_reading_order_behind_level_and_ahead(make: Any) -> None:
    names = ("relative_1d", "relative_2d")
    behind = told(make(names))["Why reading order is not enough"]
    assert behind.startswith("relative_1d is behind relative_2d by ")
    assert " at +3 pixels." in behind
    results = make(names)
    both = [record for record in results["records"] if record["variant"] == "recipe"]
    for seed in range(3):
        one, two = (record for record in both if record["seed"] == seed)
        one["metrics"] = two["metrics"]
    assert "No difference is seen: " in told(results)["Reading order was enough here"]
    ahead = told(make(names, accuracy={"relative_1d": figures(0.99, 0.99)}))
    assert "Why reading order is not enough" not in ahead
    assert "relative_1d is ahead of relative_2d by " in ahead["Where reading order came out ahead"]


def test_hybrids_take_over_a_weakness_only_where_they_do(make: Any) -> None:
    names = ("learned", "relative_2d", "learned+relative_2d")
    weak = told(make(names))["Why learned+relative_2d moves worse than relative_2d"]
    assert "is behind relative_2d by " in weak
    strong = told(make(names, accuracy={"learned+relative_2d": figures(0.95, 0.98)}))
    assert "the opposite of what is feared" in strong["learned+relative_2d moves better than relative_2d"]


def test_rotation_and_bias_say_what_the_sum_adds(make: Any) -> None:
    names = ("relative_2d", "rotary_2d", "rotary_2d+relative_2d")
    title = "What rotary_2d+relative_2d adds"
    high = told(make(names, accuracy={names[2]: figures(0.999, 0.9)}))[title]
    assert "The two say different things" in high
    low = told(make(names, accuracy={names[2]: figures(0.6, 0.9)}))[title]
    assert "does not have to help" in low


def test_quick_runs_and_single_seeds_explain_nothing(make: Any) -> None:
    eleven = make.__globals__["ELEVEN"]
    assert told(make(eleven, quick=True)) == {}
    assert told(make(eleven, seeds=1)) == {}
    assert told({**make(eleven), "records": []}) == {}
