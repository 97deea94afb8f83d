"""Mechanisms of the user's file and of other packages: known by a name, told apart by their content."""

import pickle
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import relpos
from relpos.cli import main
from relpos.comparison import Comparison, ComparisonSettings, OtherSettingsError
from relpos.comparison.request import checked
from relpos.data import find_task
from relpos.position import find, presets
from relpos.position.base import outside, preset
from relpos_command.requests import CompareRequest

CODE = '''"""Mine."""
import torch
import relpos


class TwoSlope(relpos.OffsetBias):
    """One slope to the left, another to the right."""

    def __init__(self, num_heads):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.ones(2, num_heads))

    @classmethod
    def from_site(cls, site):
        return cls(site.num_heads)

    def bias(self, offsets):
        distance = offsets.axes[:, 0].to(self.slope.dtype)
        return -self.slope[0, :, None] * distance.clamp(min=0) - self.slope[1, :, None] * (-distance).clamp(min=0)


def build(site):
    return TwoSlope(site.num_heads)


def wrong(site):
    return site.number_of_heads


def other(site):
    return 3
'''


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(outside, "_FILES", {})
    monkeypatch.setattr(preset, "OUTSIDE", {})
    monkeypatch.setattr(outside, "OUTSIDE", preset.OUTSIDE)
    outside._from_packages.cache_clear()
    yield
    outside._from_packages.cache_clear()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def test_a_file_s_class_and_function_are_found_by_name(file: Path) -> None:
    found = relpos.position.from_file("mine.py:TwoSlope")
    assert (found.name, found.family, found.token_axes) == ("mine.TwoSlope", "bias", (1, 2))
    assert found.summary == "One slope to the left, another to the right."
    assert outside.with_files("learned + mine.py:build~none") == "learned+mine.build~none"
    made = relpos.create_position("learned+mine.build", num_heads=2, head_dim=4, queries=relpos.Grid(3, 3))
    assert [type(part).__name__ for part in made.parts()] == ["LearnedPositionEmbedding", "TwoSlope"]
    q = torch.randn(1, 2, 9, 4)
    assert relpos.attention(q, q, q, position=made.parts()[1], queries=relpos.Grid(3, 3)).shape == q.shape


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("mine.py:Three", "expected a mechanism Three in .*mine.py; got none"),
        ("other.py:A", "expected FILE.py:NAME of a file that is there"),
        ("mine.py:torch", "expected a mechanism at mine.py:torch; got module"),
        ("mine.py:wrong", "expected mine.py:wrong to be built for a relpos.Site; got AttributeError"),
        ("mine.py:other", "expected a mechanism from mine.py:other; got int 3"),
        ("sub/mine.py:build", "expected one mechanism named mine.build; got .*mine.py and .*sub/mine.py"),
    ],
)
def test_mistakes_take_one_line(file: Path, typed: str, message: str) -> None:
    (file.parent / "sub").mkdir()
    (file.parent / "sub" / "mine.py").write_text(CODE)
    relpos.position.from_file("mine.py:build")
    with pytest.raises(ValueError, match=message):
        relpos.create_position(outside.with_files(typed), num_heads=2, head_dim=4, queries=relpos.Sequence(3))


def test_no_file_runs_that_the_user_did_not_name(file: Path) -> None:
    file.write_text(f"import pathlib\n\npathlib.Path({str(file.parent / 'ran')!r}).touch()\n" + CODE)
    for call in (find, lambda name: relpos.LanguageModel(8, embed_dim=8, depth=1, num_heads=2, position=name)):
        with pytest.raises(ValueError, match=r"Only the command and relpos\.compare run a file"):
            call("mine.py:build")
    assert not (file.parent / "ran").exists()
    outside.with_files("mine.py:build")
    assert (file.parent / "ran").exists()


def test_another_process_knows_it_after_unpickling(file: Path) -> None:
    relpos.position.from_file("mine.py:build")
    packed = pickle.dumps(outside.files_in(("learned+mine.build", "t5")))
    file.unlink()  # the content travels
    outside._FILES.clear()
    preset.OUTSIDE.clear()
    with pytest.raises(ValueError, match=r"mine\.build"):
        find("mine.build")
    pickle.loads(packed)
    assert find("mine.build").source.startswith("mine.py:build, sha256 ")


def comparison(folder: Path) -> Comparison:
    request, procedure = checked(CompareRequest(positions=("t5", "mine.py:TwoSlope"), steps=1, quick=True))
    task = find_task("digits")
    return Comparison(ComparisonSettings.make(task, request, procedure), task, folder, procedure)


def test_a_changed_file_is_another_comparison(file: Path, tmp_path: Path) -> None:
    begun = comparison(tmp_path / "run")
    assert begun.settings.names == ("t5", "mine.TwoSlope")
    assert begun.settings.given == {"mine.TwoSlope": "mine.py:TwoSlope"}
    assert comparison(tmp_path / "run").settings == begun.settings
    file.write_text(CODE.replace("torch.ones(2", "torch.zeros(2"))
    with pytest.raises(OtherSettingsError, match=r"sources\.mine\.TwoSlope was 'mine\.py:TwoSlope, sha256 "):
        comparison(tmp_path / "run")


def test_a_package_offers_a_mechanism(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(name: str, loaded: Any) -> SimpleNamespace:
        package = SimpleNamespace(name="theirs", version="1.2")
        return SimpleNamespace(name=name, value="theirs:A", dist=package, load=lambda: loaded())

    build = relpos.position.from_file("mine.py:build").build
    offered = [entry("theirs_two", lambda: build), entry("broken", lambda: 1 / 0), entry("t5", lambda: build)]
    monkeypatch.setattr(metadata, "entry_points", lambda group: offered if group == "relpos.positions" else [])
    with pytest.warns(UserWarning, match="left out the position (broken|t5) of theirs 1.2") as told:
        known = presets()
    assert len(told) == 2
    assert known["theirs_two"].source == "theirs 1.2"
    assert outside.sources_of(("none", "learned+theirs_two")) == {"theirs_two": "theirs 1.2"}
    assert known["t5"].source != "theirs 1.2"


@pytest.mark.slow
def test_show_draws_it(file: Path) -> None:
    main(["show", "mine.py:TwoSlope", "--length", "5", "--out", "it.png"])
    assert Path("it.png").stat().st_size > 1000
