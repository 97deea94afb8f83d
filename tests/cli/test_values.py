"""What an option is given: nothing, or a number beyond all use, is one clear line and exit code 2, at once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from relpos.cli import VERBS, main

Captured = pytest.CaptureFixture[str]


def line(typed: list[str], capsys: Captured) -> str:
    with pytest.raises(SystemExit) as caught:
        main(typed)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert len(printed.err) < 300
    return printed.err.removeprefix("relpos: error: ").rstrip("\n")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def run(_: Any) -> None:
        raise AssertionError("it begins before it looks at what it was given")

    for verb in VERBS:
        monkeypatch.setattr(f"relpos.cli.{verb}_verb.run", run)


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize(
    ("typed", "option"),
    [
        ("compare --seeds", "--seeds"),
        ("compare --steps", "--steps"),
        ("compare --data", "--data"),
        ("compare --out", "--out"),
        ("compare --device", "--device"),
        ("compare --set", "--set"),
        ("train --position none --out", "--out"),
        ("train --out x --position", "--position"),
        ("show none --out", "--out"),
        ("show none --head-dim", "--head-dim"),
        ("show", "position"),
        ("bench --repeats", "--repeats"),
        ("bench --cases", "--cases"),
        ("list", "KIND"),
    ],
)
def test_an_empty_value(typed: str, option: str, empty: str, capsys: Captured) -> None:
    said = line([*typed.split(), empty], capsys)
    assert re.match(rf"argument {option}: (expected |invalid choice: )", said)
    assert repr(empty) in said
    assert said.endswith(f" See relpos {typed.split()[0]} --help.")


def test_an_empty_value_after_an_equals_sign(capsys: Captured) -> None:
    assert line(["compare", "--seeds="], capsys) == (
        "argument --seeds: expected a whole number; got ''. See relpos compare --help."
    )
    assert line(["compare", "--out="], capsys) == "argument --out: expected a value; got ''. See relpos compare --help."


def test_an_empty_word_after_a_flag(capsys: Captured) -> None:
    assert line(["compare", "--quick", ""], capsys).startswith("unrecognized arguments:")


@pytest.mark.parametrize(
    ("typed", "most"),
    [
        ("compare --seeds", "1,000"),
        ("compare --steps", "10,000,000"),
        ("train --position none --out x --steps", "10,000,000"),
        ("train --position none --out x --threads", "1,024"),
        ("train --position none --out x --seed", "9,223,372,036,854,775,807"),
        ("bench --repeats", "1,000"),
        ("bench --threads", "1,024"),
        ("show none --heads", "256"),
        ("show none --head-dim", "1,024"),
        ("show none --seed", "9,223,372,036,854,775,807"),
        ("show none --length", "1,000,000,000"),
        ("show none --query", "1,000,000,000"),
    ],
)
def test_a_huge_number(typed: str, most: str, capsys: Captured) -> None:
    verb, option = typed.split()[0], typed.split()[-1]
    for digits in (20, 31, 4000, 5000):
        shown = "9" * digits if digits < 40 else f"one of {digits:,} digits"
        said = line([*typed.split(), "9" * digits], capsys)
        wanted = (
            rf"argument {option}: expected a whole number from [-\d,]+ to {most}; got '?{shown}'?\. See relpos {verb}"
        )
        assert re.fullmatch(rf"{wanted} --help\.", said)


def test_numbers_below_the_smallest(capsys: Captured) -> None:
    said = line(["train", "--position", "none", "--out", "x", "--seed", "-1"], capsys)
    assert "--seed: expected a whole number from 0 to 9,223,372,036,854,775,807; got '-1'." in said


def test_names_that_stand_in_the_options_are_the_librarys() -> None:
    from relpos import comparison, train
    from relpos_command import options

    assert options.OPTIMIZERS == train.OPTIMIZERS
    assert tuple(train.PRECISIONS) == options.PRECISIONS
    assert options.WHATS == comparison.WHATS


def test_defaults_that_help_names_are_those_of_show() -> None:
    from relpos.cli import show_verb
    from relpos_command.parsing import parse

    help_of = {name: said for name, said in _helps("show").items() if "Default: " in said}
    for option, value in (("--heads", show_verb.HEADS), ("--head-dim", show_verb.HEAD_DIM), ("--seed", show_verb.SEED)):
        assert help_of[option].endswith(f"Default: {value}")
    assert help_of["--length"].endswith(f"Default: {show_verb.LENGTH}")
    assert parse(["show", "none"]).arguments.heads is None


def test_help_names_every_default() -> None:
    from relpos_command.options import VERBS
    from relpos_command.parsing import parse

    for verb in VERBS:
        words = {"train": ["--position", "none", "--out", "x"], "list": ["data"], "retrofit": ["hf:x"]}.get(verb, [])
        values = parse([verb, *words]).arguments.as_dict()
        for option, said in _helps(verb).items():
            value = values[option.removeprefix("--").replace("-", "_")]
            if value not in (None, False) and option not in words and option.startswith("--"):
                assert said.endswith(f"Default: {value}"), option


def _helps(verb: str) -> dict[str, str]:
    """What the help says of each option."""
    from relpos_command.options import VERBS

    found: dict[str, str] = {}

    class Options:
        def add_argument(self, name: str, **how: Any) -> None:
            found[name] = how["help"]

    VERBS[verb].add_options(Options())  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("typed", ["--image-size", "--patch"])
def test_a_huge_image(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jsonargparse import Namespace

    from relpos.cli.task_choice import image_options

    given = {"image_size": None, "patch": None, "bad_images": None}
    given |= {"max_pixels": None, "rotate": False, typed.removeprefix("--").replace("-", "_"): "80x80000000"}
    with pytest.raises(ValueError, match=rf"expected at most 4,096 pixels per side for {typed}; got '80x80000000'\."):
        image_options(Namespace(**given))
