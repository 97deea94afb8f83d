"""What holds in a `results.json` beyond its types: raises AssertionError where figures do not belong together."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from relpos.results import plain, read
from relpos.train import ImageRecipe, TextRecipe

SETTINGS = {
    "task", "task_options", "positions", "seeds", "quick", "device", "precision", "threads", "timing_threads", "recipe",
}  # fmt: skip


def finite(tree: Any, where: str = "results") -> None:
    """Plain values all the way down, and no number that JSON has not."""
    match tree:
        case dict():
            for key, value in tree.items():
                assert isinstance(key, str), where
                finite(value, f"{where}.{key}")
        case list():
            for place, value in enumerate(tree):
                finite(value, f"{where}[{place}]")
        case float():
            assert math.isfinite(tree), where
        case _:
            assert tree is None or isinstance(tree, str | int), f"{where} is a {type(tree).__name__}"


def shape(tree: Any) -> tuple[int, ...]:
    """The shape of nested lists of numbers, all of one length at each depth."""
    if not isinstance(tree, list):
        assert isinstance(tree, int | float)
        return ()
    inner = {shape(one) for one in tree}
    assert len(inner) == 1, "ragged"
    return (len(tree), *inner.pop())


def check(results: dict[str, Any]) -> None:
    """The whole file."""
    finite(results)
    assert plain(read(results)) == results, "as it was written"
    check_settings(results["settings"])
    check_task(results["task"])
    names = results["settings"]["positions"]
    assert [one["name"] for one in results["mechanisms"]] == names
    assert all(mechanism["family"] != "other" for mechanism in results["mechanisms"])
    growth = {one["name"]: one["growth"] for one in results["mechanisms"]}
    ids = [record["id"] for record in results["records"]]
    assert len(ids) == len(set(ids))
    for record in results["records"]:
        if "diverged" in record:
            check_diverged(record, results)
        else:
            check_record(record, results, growth[record["position"]])
    for cost in results["costs"]:
        check_cost(cost, names)


def check_settings(settings: dict[str, Any]) -> None:
    assert set(settings) | {"task_options"} == SETTINGS | {"what"} & set(settings)
    recipe = TextRecipe() if settings["task"] == "text" else ImageRecipe()
    assert settings["recipe"].keys() == asdict(recipe).keys(), "every number of the training recipe"


def check_task(task: dict[str, Any]) -> None:
    if task["kind"] == "text":
        check_text(task)
        return
    assert set(task["sizes"]) == {"train", "validation", "test"}
    assert all(set(one) == {"path", "reason"} for one in task.get("skipped", []))
    for probe in task["probes"]:
        assert probe["group"] in ("test", "shift", "canvas", "rotation")
        assert len(probe["image_size"]) == 2
    assert task["probes"][0]["image_size"] == task["image_size"]


def check_text(task: dict[str, Any]) -> None:
    assert set(task["sizes"]) == {"train", "validation", "test"}
    for probe in task["probes"]:
        assert probe["group"] == ("test" if probe["length"] == task["length"] else "length")
        assert probe["x"] == probe["length"]
    longest = max(probe["length"] for probe in task["probes"])
    assert task["blocks"] == (task["sizes"]["test"] - 1) // longest


def check_diverged(record: dict[str, Any], results: dict[str, Any]) -> None:
    """A run whose loss was no number: where that was, and no figure after it."""
    diverged, recipe = record["diverged"], results["settings"]["recipe"]
    assert 1 <= diverged["step"] <= recipe["steps"]
    assert diverged["what"] in ("loss", "gradient")
    assert diverged["value"] in ("nan", "inf", "-inf")
    assert record["metrics"] == []
    assert not {"validation", "learned", "attention", "sample"} & set(record)
    curve = record["curve"]
    assert all(map(math.isfinite, curve["loss"] + curve["validation"]))
    assert all(step <= diverged["step"] for step in curve["step"] + curve["validation_step"])


def check_record(record: dict[str, Any], results: dict[str, Any], growth: list[str]) -> None:
    text = results["task"]["kind"] == "text"
    recipe = results["settings"]["recipe"]
    usual = recipe["position_learning_rate_multiplier"]
    assert 0 <= record["seed"] < results["settings"]["seeds"]
    assert record["variant"] in ("recipe", "x1")
    assert record["position_learning_rate_multiplier"] == (usual if record["variant"] == "recipe" else 1)
    parameters = record["parameters"]
    assert parameters["total"] == sum(parameters["parts"].values())
    assert parameters["position"] == parameters["parts"].get("position", 0)
    if record["variant"] == "x1":
        assert parameters["position"] > 0, "no x 1 runs where position learns nothing"
    curve = record["curve"]
    assert len(curve["step"]) == len(curve["loss"]) == len(curve["rate"])
    assert len(curve["validation_step"]) == len(curve["validation"])
    assert curve["step"][-1] == curve["validation_step"][-1] == recipe["steps"]
    assert 0 <= record["validation"] <= (16 if text else 1)
    assert record["train_seconds"] > 0
    assert record["peak_memory_mib"] > 0
    own = record["settings"]
    assert set(own) == SETTINGS | {"position", "seed"}
    assert own["recipe"]["position_learning_rate_multiplier"] == record["position_learning_rate_multiplier"]
    if text:
        check_bits(record["metrics"], results["task"], growth)
        check_sample(record["sample"], growth)
        for entry in record.get("learned", []):
            check_learned(entry, recipe)
        return
    check_metrics(record["metrics"], results["task"], growth)
    for entry in record.get("learned", []):
        check_learned(entry, recipe)
    check_attention(record["attention"], results["task"], recipe)


def check_metrics(metrics: list[dict[str, Any]], task: dict[str, Any], growth: list[str]) -> None:
    expected = []
    for probe in task["probes"]:
        same = probe["image_size"] == task["image_size"]
        expected += [(probe["id"], rule) for rule in ([None] if same else growth or [None])]
    assert [(one["probe"], one["growth"]) for one in metrics] == expected
    trials = {probe["id"]: probe["trials"] for probe in task["probes"]}
    for one in metrics:
        if "reason" in one:
            assert set(one) == {"probe", "growth", "reason"}
            continue
        assert set(one) == {"probe", "growth", "accuracy", "trials", "correct"}
        assert one["trials"] == trials[one["probe"]]
        assert len(one["correct"]) == task["sizes"]["test"]
        assert all(isinstance(count, int) and 0 <= count <= one["trials"] for count in one["correct"])
        share = sum(one["correct"]) / (len(one["correct"]) * one["trials"])
        assert abs(one["accuracy"] - share) < 1e-5, "accuracy is what the counts say"


def check_bits(metrics: list[dict[str, Any]], task: dict[str, Any], growth: list[str]) -> None:
    expected = []
    for probe in task["probes"]:
        expected += [(probe["id"], rule) for rule in ([None] if probe["group"] == "test" else growth or [None])]
    assert [(one["probe"], one["growth"]) for one in metrics] == expected
    for one in metrics:
        if "reason" in one:
            assert set(one) == {"probe", "growth", "reason"}
            continue
        assert set(one) == {"probe", "growth", "bits_per_byte", "values", "by_place"}
        assert len(one["values"]) == task["blocks"]
        assert len(one["by_place"]) == 32
        for parts in (one["values"], one["by_place"]):
            assert abs(sum(parts) / len(parts) - one["bits_per_byte"]) < 1e-3


def check_sample(sample: dict[str, str], growth: list[str]) -> None:
    assert bool(sample["beyond"]) == bool(growth)


def check_learned(entry: dict[str, Any], recipe: dict[str, Any]) -> None:
    if entry["kind"] == "embedding":
        assert set(entry) == {"kind", "grid", "every", "similarity"}
        assert entry["every"] == 1 or len(entry["grid"]) == 1
        places = math.prod(entry["grid"])
        assert shape(entry["similarity"]) == (places, places)
        return
    assert set(entry) - {"prefix"} == {"kind", "layer", "axes", "along", "offsets", "values"}
    assert entry["layer"] == "shared" or isinstance(entry["layer"], int)
    assert entry["axes"] in (1, 2)
    spans = tuple(high - low + 1 for low, high in entry["offsets"])
    assert len(spans) == entry["axes"]
    assert shape(entry["values"]) == (recipe["num_heads"], *spans)
    assert "prefix" not in entry or shape(entry["prefix"]) == (recipe["num_heads"], 3)


def check_attention(attention: dict[str, Any], task: dict[str, Any], recipe: dict[str, Any]) -> None:
    images, rows, columns = shape(attention["image"])
    assert [rows, columns] == task["image_size"]
    assert len(attention["label"]) == len(attention["predicted"]) == images
    assert set(attention["label"]) | set(attention["predicted"]) <= set(task["classes"])
    assert all(0 <= grey <= 1 for image in attention["image"] for row in image for grey in row)
    assert shape(attention["maps"]) == (images, recipe["depth"], recipe["num_heads"], *attention["grid"])
    for image in attention["maps"]:
        for layer in image:
            for head in layer:
                assert abs(sum(map(sum, head)) - 1) < 0.01


def check_cost(cost: dict[str, Any], names: list[str]) -> None:
    if "step_ms" not in cost:
        assert cost["reason"]
        return
    assert cost["position"] in names
    assert 0 < cost["step_ms"]["low"] <= cost["step_ms"]["median"] <= cost["step_ms"]["high"]
    assert ("ratio" not in cost) == ("none" not in names)
    assert cost.get("peak_memory_mib", 0) >= 0
