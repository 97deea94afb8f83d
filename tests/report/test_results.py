"""Reading results.json, and saying clearly why it cannot be read."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from relpos.report.results import Contender, ResultsError, contenders, load_results, outcomes


def test_reads_a_file_or_its_folder(make: Any, tmp_path: Path) -> None:
    results = make(("none",), seeds=1)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    assert load_results(path) == load_results(tmp_path) == results


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no results at .*results.json"),
        ("{", "is not JSON"),
        ("[]", "expected a JSON object, got list"),
        ("", "is not JSON"),
        ('{"schema_version": NaN}', r"is not JSON \(NaN is no number\): run"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        (
            '{"schema_version": 1, "settings": [], "environment": {}, "task": {}, "mechanisms": [], "records": [], '
            '"costs": []}',
            "expected the section settings to be an object, got list",
        ),
        (
            '{"schema_version": 1, "settings": {}, "environment": {}, "task": {}, "mechanisms": {}, "records": [], '
            '"costs": []}',
            "expected the section mechanisms to be a list, got dict",
        ),
        (
            '{"schema_version": 1, "settings": {}, "environment": {}, "task": {}, "mechanisms": [], "records": [3], '
            '"costs": []}',
            "expected the section records to be a list of objects, got int in it",
        ),
        ('{"schema_version": 99}', "expected schema_version 1, got 99"),
        ('{"schema_version": 1, "settings": {}}', "missing: environment, task"),
    ],
)
def test_errors_say_what_was_expected(content: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ResultsError, match=words):
        load_results(path)


def test_outcomes_are_shares_of_trials(make: Any) -> None:
    results = make(("none",), seeds=2)
    by_seed = outcomes(results, Contender("none"), "test")
    metric = results["records"][1]["metrics"][0]
    assert sorted(by_seed) == [0, 1]
    assert by_seed[1].mean() == pytest.approx(metric["accuracy"])


def test_contenders_come_with_their_rules_in_order(make: Any) -> None:
    found = contenders(make(), "canvas/20/zoomed")
    assert [entry.label for entry in found] == [
        "none (as is)",
        "learned (interpolated)",
        "relative_2d (interpolated)",
        "relative_2d (clipped)",
    ]


def test_what_is_no_file_of_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ResultsError, match=r"results\.json is not JSON \('utf-8' codec"):
        load_results(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ResultsError, match=r"expected a regular file for .*results\.json, got something else: name"):
        load_results(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ResultsError, match="expected a regular file"):
        load_results(tmp_path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(50_000_000_000)
    with pytest.raises(ResultsError, match=r"expected at most [\d,]+ bytes in .*results\.json, got 50,000,000,000: "):
        load_results(path)
