"""What an option is given: nothing, or a number beyond all use, is one clear line and exit code 2, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relpos.cli import VERBS, main

HUGE = "1" + 30 * "0"
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
        ("compare --task", "--task"),
        ("compare --out", "--out"),
        ("compare --device", "--device"),
        ("compare --images", "--images"),
        ("train --position none --out", "--out"),
        ("train --out x --position", "--position"),
        ("show none --out", "--out"),
        ("show none --head-dim", "--head-dim"),
        ("show", "position"),
        ("bench --repeats", "--repeats"),
        ("bench --cases", "--cases"),
        ("list", "kind"),
    ],
)
def test_an_empty_value(typed: str, option: str, empty: str, capsys: Captured) -> None:
    said = line([*typed.split(), empty], capsys)
    assert said.startswith("expected ")
    assert f" for {option}; got {empty!r}. See relpos {typed.split()[0]} --help" in said


def test_an_empty_value_after_an_equals_sign(capsys: Captured) -> None:
    assert line(["compare", "--seeds="], capsys) == (
        "expected a whole number for --seeds; got ''. See relpos compare --help."
    )
    assert line(["compare", "--out="], capsys) == "expected a value for --out; got ''. See relpos compare --help."


def test_an_empty_word_after_a_flag(capsys: Captured) -> None:
    assert line(["compare", "--quick", ""], capsys) == (
        "expected options of relpos compare; got ''. See relpos compare --help."
    )


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
    option = typed.split()[-1]
    for number in (HUGE, "99999999999999999999", "9" * 4000):
        shown = number if len(number) < 40 else "a number of 4,000 digits"
        said = line([*typed.split(), number], capsys)
        assert said == f"expected at most {most} for {option}; got {shown}. Choose a smaller one."
    assert line([*typed.split(), "9" * 5000], capsys) == (
        f"expected at most {most} for {option}; got a number of 5,000 digits. Choose a smaller one."
    )


def test_numbers_far_below_zero(capsys: Captured) -> None:
    said = line(["train", "--position", "none", "--out", "x", "--seed", f"-{HUGE}"], capsys)
    assert said == f"expected at least -9,223,372,036,854,775,807 for --seed; got -{HUGE}. Choose a larger one."


def test_every_whole_number_has_a_limit() -> None:
    """A new option cannot be forgotten."""
    import importlib

    class Options(list[Any]):
        def add_argument(self, *names: str, **how: Any) -> None:
            if how.get("type") in (int, int | None):
                self.append(how.get("dest") or names[0].removeprefix("--").replace("-", "_"))

    for verb in VERBS:
        module = importlib.import_module(f"relpos.cli.{verb}_verb")
        options = Options()
        module.add_arguments(options)
        assert set(options) == set(getattr(module, "LIMITS", {})), verb


@pytest.mark.parametrize("typed", ["--image-size", "--patch"])
def test_a_huge_image(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jsonargparse import Namespace

    from relpos.cli.task_choice import _options

    given = {"task": None, "images": "x", "image_size": None, "patch": None, "bad_images": None, "text": None}
    given |= {"max_pixels": None, "rotate": False, typed.removeprefix("--").replace("-", "_"): "80x80000000"}
    with pytest.raises(ValueError, match=rf"expected at most 4,096 pixels a side for {typed}; got '80x80000000'\."):
        _options(Namespace(**given))
