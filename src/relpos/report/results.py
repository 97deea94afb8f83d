"""Reading `results.json`: the file itself, and the few questions that every part of the report asks of it.

The schema is `docs/results.md`. Everything here returns plain values in the order the file has them; no statistics.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1
SECTIONS = ("settings", "environment", "task", "mechanisms", "records", "costs")
LISTS = ("mechanisms", "records", "costs")
BYTES_AT_MOST = 2**30

DIVERGED = "diverged"
"""What stands in place of a figure where every run diverged."""

Results = Mapping[str, Any]
Outcomes = dict[int, NDArray[np.float64]]
"""Seed to the share of each test image's trials that was classified right, or the bits per byte of each block."""


class ResultsError(ValueError):
    """A results file that cannot be reported on; the message says what was expected and what to do."""


def load_results(path: str | Path) -> dict[str, Any]:
    """Read `results.json`, or the one in a folder.

    Raises `ResultsError` where the file is missing, is not JSON, or has another schema. What is inside the entries of
    its sections is not checked.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "results.json"
    if not path.exists():
        message = f"no results at {path}: expected the results.json that `relpos compare --out DIR` writes"
        raise ResultsError(message)
    if not path.is_file():  # of a pipe there may be no end
        raise ResultsError(f"expected a regular file for {path}, got something else: name the results.json itself")
    if (size := path.stat().st_size) > BYTES_AT_MOST:
        raise ResultsError(f"expected at most {BYTES_AT_MOST:,} bytes in {path}, got {size:,}: name another file")
    try:
        results = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:  # of the JSON, its UTF-8, numbers of thousands of digits, brackets
        message = f"{path} is not JSON ({error}): run `relpos compare` again with the same --out to gather it anew"
        raise ResultsError(message) from None
    check_results(results, name=str(path))
    assert isinstance(results, dict)
    return results


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def check_results(results: object, *, name: str = "results") -> None:
    """Raise `ResultsError` unless `results` is a mapping of the schema this code reads, with every section in it."""
    if not isinstance(results, Mapping):
        raise ResultsError(f"{name}: expected a JSON object, got {type(results).__name__}")
    version = results.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ResultsError(
            f"{name}: expected schema_version {SCHEMA_VERSION}, got {version!r}: "
            "read it with the version of relpos that wrote it"
        )
    missing = [section for section in SECTIONS if section not in results]
    if missing:
        raise ResultsError(f"{name}: expected the sections {', '.join(SECTIONS)}; missing: {', '.join(missing)}")
    for section in SECTIONS:
        content, is_list = results[section], section in LISTS
        if not isinstance(content, list if is_list else Mapping):
            wanted = "a list" if is_list else "an object"
            raise ResultsError(f"{name}: expected the section {section} to be {wanted}, got {type(content).__name__}")
        odd = [entry for entry in content if not isinstance(entry, Mapping)] if is_list else []
        if odd:
            came = f"{type(odd[0]).__name__} in it"
            raise ResultsError(f"{name}: expected the section {section} to be a list of objects, got {came}")


@dataclass(frozen=True, order=True)
class Contender:
    """A mechanism under one growth rule: what is compared on one probe.

    Each rule competes for itself. Choosing a mechanism's best rule by its test accuracy, and then comparing that
    accuracy, would favour whoever has more rules to choose from.
    """

    position: str
    growth: str | None = None

    @property
    def label(self) -> str:
        """The position, and the growth rule where there is one."""
        return self.position if self.growth is None else f"{self.position} ({self.growth})"


def positions(results: Results) -> list[str]:
    """The names of what is compared, in the order they were asked for."""
    return [mechanism["name"] for mechanism in results["mechanisms"]]


def what(results: Results) -> str:
    """What is compared: "position", "attention", "norm" or "optimizer"."""
    return str(results["settings"].get("what", "position"))


def name_of(entry: Mapping[str, Any]) -> str:
    """Whose record or cost it is: the choice's where there is one, else the mechanism's."""
    return str(entry["choice"] if "choice" in entry else entry["position"])


def runs(results: Results, position: str, variant: str = "recipe") -> list[Mapping[str, Any]]:
    """The finished training runs of one mechanism or choice, by seed, without those that diverged."""
    return [record for record in _records(results, position, variant) if "diverged" not in record]


def diverged(results: Results, position: str, variant: str = "recipe") -> list[Mapping[str, Any]]:
    """The training runs of one mechanism or choice that diverged, by seed."""
    return [record for record in _records(results, position, variant) if "diverged" in record]


def _records(results: Results, position: str, variant: str) -> list[Mapping[str, Any]]:
    found = [record for record in results["records"] if name_of(record) == position and record["variant"] == variant]
    return sorted(found, key=lambda record: int(record["seed"]))


def probes(results: Results, group: str) -> list[Mapping[str, Any]]:
    """The probes of one group, in the order they are shown."""
    return [probe for probe in results["task"]["probes"] if probe["group"] == group]


def largest_shift(results: Results) -> Mapping[str, Any] | None:
    """The probe with the largest translation, or None where the task has none."""
    return max(probes(results, "shift"), key=lambda probe: float(probe["x"]), default=None)


def largest_canvas(results: Results, variant: str = "anywhere") -> Mapping[str, Any] | None:
    """The probe on the largest canvas with the digit placed as `variant` says, or None where the task has none."""
    found = [probe for probe in probes(results, "canvas") if probe["variant"] == variant]
    return max(found, key=lambda probe: float(probe["x"]), default=None)


def far_probe(results: Results) -> Mapping[str, Any] | None:
    """What is farthest from training and says most: the largest shift, or the longest text."""
    return largest_shift(results) or longest(results)


def longest(results: Results) -> Mapping[str, Any] | None:
    """The probe with the longest text, or None where the task has none."""
    return max(probes(results, "length"), key=lambda probe: float(probe["x"]), default=None)


def contenders(results: Results, probe: str, variant: str = "recipe") -> list[Contender]:
    """Everyone with a figure on this probe, mechanisms in their order, their growth rules in theirs."""
    found: list[Contender] = []
    for position in positions(results):
        for run in runs(results, position, variant):
            for metric in run["metrics"]:
                contender = Contender(position, metric["growth"])
                if metric["probe"] == probe and _is_measured(metric) and contender not in found:
                    found.append(contender)
    return found


def outcomes(results: Results, contender: Contender, probe: str, variant: str = "recipe") -> Outcomes:
    """Each seed's outcomes on one probe; empty where this contender was not measured on it."""
    found: Outcomes = {}
    for run in runs(results, contender.position, variant):
        for metric in run["metrics"]:
            same = metric["probe"] == probe and metric["growth"] == contender.growth
            if same and _is_measured(metric):
                found[int(run["seed"])] = _each(metric)
    return found


def _is_measured(metric: Mapping[str, Any]) -> bool:
    return "reason" not in metric


def _each(metric: Mapping[str, Any]) -> NDArray[np.float64]:
    """The outcome of each unit: shares of an image's trials, or bits per byte of a block."""
    if "values" in metric:
        return np.asarray(metric["values"], dtype=np.float64)
    return np.asarray(metric["correct"], dtype=np.float64) / float(metric["trials"])


def unmeasured(results: Results, probe: str) -> dict[Contender, str]:
    """Who has no figure on this probe in any of its runs, and the reason given."""
    measured = set(contenders(results, probe))
    found: dict[Contender, str] = {}
    for position in positions(results):
        finished = runs(results, position)
        if not finished:
            found[Contender(position)] = DIVERGED if diverged(results, position) else "no finished run"
        for run in finished:
            for metric in run["metrics"]:
                contender = Contender(position, metric["growth"])
                if metric["probe"] == probe and not _is_measured(metric) and contender not in measured:
                    found[contender] = metric.get("reason") or "not measured"
        known = any(contender.position == position for contender in [*measured, *found])
        if not known:
            found[Contender(position)] = "not measured"
    return found


def token_counts(results: Results) -> list[int]:
    """The numbers of tokens at which cost was asked for, ascending."""
    return sorted({int(cost["tokens"]) for cost in results["costs"]})


def cost(results: Results, position: str, tokens: int) -> Mapping[str, Any] | None:
    """The cost entry of one mechanism at one number of tokens."""
    for entry in results["costs"]:
        if name_of(entry) == position and entry["tokens"] == tokens:
            return dict(entry)
    return None
