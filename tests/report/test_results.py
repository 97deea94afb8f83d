"""results.json as dataclasses: read, written, described, and saying clearly why it cannot be read."""

import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from relpos.report.standings import Contender, contenders, outcomes
from relpos.results import SCHEMA_VERSION, ResultsError, load_results, plain, read

ROOT = Path(__file__).parents[2]


def test_reads_a_file_or_its_folder_and_writes_the_same(make: Any, tmp_path: Path) -> None:
    results = make(("none", "learned"), seeds=1)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    found = load_results(path)
    assert found == load_results(tmp_path) == read(results) == read(plain(found))
    written = plain(found)
    for record, asked in zip(written["records"], results["records"], strict=True):
        said = {name: value for name, value in asked.items() if value not in ({}, [])}
        assert record["metrics"] == asked["metrics"]
        assert set(record) == set(said), "nothing is lost, and nothing stands there that was not said"
    assert "choices" not in written["settings"], "an optional field that holds nothing is left out"


def test_the_page_of_the_schema_is_what_the_dataclasses_say() -> None:
    written = runpy.run_path(str(ROOT / "recipes" / "results_page.py"))["schema_page"]()
    assert (ROOT / "docs" / "results.md").read_text() == written, "run python recipes/results_page.py"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no results at .*results.json"),
        ("{", "is not JSON"),
        ("[]", "expected a JSON object, got list"),
        ("", "is not JSON"),
        ('{"schema_version": NaN}', r"is not JSON \(NaN is no number\): repeat"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        (
            '{"schema_version": 1}',
            "written by an older version of relpos: .* got 1; compare in a new folder: relpos compare --out NEW",
        ),
        ('{"schema_version": 99}', "was written by another version of relpos: expected schema_version 2, got 99; read"),
        ('{"schema_version": 2, "settings": {}}', "missing costs, environment, mechanisms, records, task"),
    ],
)
def test_errors_say_what_was_expected(content: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ResultsError, match=words):
        load_results(path)
    assert SCHEMA_VERSION == 2


def test_outcomes_are_shares_of_trials(make: Any) -> None:
    results = read(make(("none",), seeds=2))
    by_seed = outcomes(results, Contender("none"), results.task.probes[0])
    assert sorted(by_seed) == [0, 1]
    assert by_seed[1].mean() == pytest.approx(results.records[1].metrics[0].accuracy)


def test_contenders_come_with_their_rules_in_order(make: Any) -> None:
    results = read(make())
    probe = next(probe for probe in results.task.probes if probe.id == "canvas/20/zoomed")
    assert [entry.label for entry in contenders(results, probe)] == [
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
