"""What an option is given: nothing, or a number beyond its bounds, is one clear line at once; its default is told."""

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from relpos import comparison, train
from relpos.cli import VERBS, show_verb
from relpos_command import option_groups, requests
from relpos_command.option import add_options, flag_of
from relpos_command.parsing import parse

FAST_CASES = 4  # of each of its tests, in the fast part

Refused = Callable[..., str]
REQUIRED = {
    "train": "--position none --out x", "list": "data", "retrofit": "hf:x", "report": "x", "bundle": "x y.zip",
    "vectors": "x.json",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Any) -> None:
        raise AssertionError("it begins before it looks at what it was given")

    for verb in VERBS:
        monkeypatch.setattr(f"relpos.cli.{verb}_verb.run", run)


def options_of(verb: str) -> dict[str, dict[str, Any]]:
    """How each option of a verb is made."""
    found: dict[str, dict[str, Any]] = {}

    class Options:
        def add_argument(self, name: str, **how: Any) -> None:
            found[name] = how

    add_options(VERBS[verb].request, Options())  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_no_option_takes_an_empty_value(verb: str, refused: Refused) -> None:
    before: list[str] = []  # of what has no flag
    for option, how in options_of(verb).items():
        if how.get("action") == "store_true":
            continue
        required = REQUIRED.get(verb, "").split() if option.startswith("--") else []
        said = refused([verb, *required, option, ""] if option.startswith("--") else [verb, *before, ""])
        before += [] if option.startswith("--") else ["x"]
        assert re.match(rf"argument {option}: (expected |invalid choice: ).*''", said, re.IGNORECASE)
        assert said.endswith(f" See relpos {verb} --help.")


@pytest.mark.parametrize("given", [["--seeds", " "], ["--seeds="], ["--out", " "], ["--out="]])
def test_blanks_and_nothing_after_an_equals_sign_are_empty_values(given: list[str], refused: Refused) -> None:
    option, shown = given[0].removesuffix("="), repr(" ") if len(given) == 2 else repr("")
    what = {"--seeds": "a whole number", "--out": "a value"}[option]
    assert (
        refused(["compare", *given]) == f"argument {option}: expected {what}; got {shown}. See relpos compare --help."
    )


def test_an_empty_word_after_a_flag(refused: Refused) -> None:
    assert refused(["compare", "--quick", ""]).startswith("unrecognized arguments:")


@pytest.mark.parametrize(
    ("typed", "least", "most"),
    [
        ("compare --seeds", 1, "1,000"),
        ("compare --steps", 1, "10,000,000"),
        ("compare --batch-size", 1, "1,000,000"),
        ("compare --max-pixels", 1, "1,000,000,000,000"),
        ("train --position none --out x --steps", 1, "10,000,000"),
        ("train --position none --out x --threads", 1, "1,024"),
        ("train --position none --out x --seed", 0, "9,223,372,036,854,775,807"),
        ("bench --repeats", 1, "1,000"),
        ("bench --threads", 1, "1,024"),
        ("show none --heads", "-256", "256"),
        ("show none --head-dim", "-1,024", "1,024"),
        ("show none --seed", "-9,223,372,036,854,775,807", "9,223,372,036,854,775,807"),
        ("show none --length", "-1,000,000,000", "1,000,000,000"),
        ("show none --query", "-1,000,000,000", "1,000,000,000"),
    ],
)
def test_a_number_out_of_bounds(typed: str, least: int | str, most: str, refused: Refused) -> None:
    verb, option = typed.split()[0], typed.split()[-1]
    given = {
        "9" * count: repr("9" * count) if count < 40 else f"a number of {count:,} digits" for count in (20, 31, 5000)
    }
    given |= {} if isinstance(least, str) else {str(least - 1): repr(str(least - 1))}
    for number, shown in given.items():
        wanted = f"argument {option}: expected a whole number from {least} to {most}; got {shown}."
        assert refused([*typed.split(), number]) == f"{wanted} See relpos {verb} --help."


def test_names_that_stand_in_the_options_are_the_librarys() -> None:
    assert requests.OPTIMIZERS == train.OPTIMIZERS
    assert tuple(train.PRECISIONS) == option_groups.PRECISIONS
    assert requests.WHATS == comparison.WHATS


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_every_default(verb: str) -> None:
    words = REQUIRED.get(verb, "").split()
    request = parse([verb, *words]).request
    shown = {option: how["help"] for option, how in options_of(verb).items()}
    for one in fields(request):
        value, option = getattr(request, one.name), flag_of(type(request), one.name)
        if value is not None and not isinstance(value, bool) and option not in words and option.startswith("--"):
            assert shown[option].endswith(f"Default: {value}"), option


@pytest.mark.parametrize("name", ["HEADS", "HEAD_DIM", "SEED", "LENGTH"])
def test_defaults_that_the_help_of_show_names_are_its_own(name: str) -> None:
    how = options_of("show")[f"--{name.lower().replace('_', '-')}"]
    assert how["help"].endswith(f"Default: {getattr(show_verb, name)}")
    assert "default" not in how, "it can be told from what was not asked for"
