"""`relpos.compare("swin", ...)`: which positions it takes by default, larger images, its page, and its command."""

from pathlib import Path
from typing import Any

import pytest
import torch
from calls import Compared, compare

from photographs import make_folder
from relpos.cli import main
from relpos.comparison.settings import grown, growth
from relpos.data import find_task
from relpos.report.command import command_line
from relpos.train import build_swin


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """A comparison of the positions it takes where none are named."""
    top = tmp_path_factory.mktemp("swin")
    photographs = make_folder(top / "photos", count=5)
    return compare(top / "out", "swin", photographs, steps=2, quick=True, image_size=32, patch=4)


@pytest.mark.slow
def test_its_own_position_comes_first_and_is_not_trained_twice(found: Compared) -> None:
    result, lines = found
    assert result.results.names == ["own", "none", "learned", "t5", "rotary_2d", "learned+relative_2d"]
    assert "Left out relative_2d: it is Swin's own position within windows." in lines
    own = result.results.mechanism("own")
    assert own.summary == "A table of offsets within each window (relative_2d)."
    counts = {run.position: run.parameters.position for run in result.results.records}
    assert counts["own"] == 49 * (2 + 4), "a table of 7 x 7 offsets a stage, of 2 and of 4 heads"
    assert counts["none"] == 0


@pytest.mark.slow
def test_larger_images_have_more_windows(found: Compared) -> None:
    for run in found[0].results.records:
        rules = {metric.growth for metric in run.metrics if metric.probe.startswith("canvas/")}
        assert rules == ({"interpolated"} if run.position.startswith("learned") else {"as is"})
        assert all(metric.accuracy is not None for metric in run.metrics)


@pytest.mark.slow
def test_its_page_and_its_command_name_it(found: Compared) -> None:
    result = found[0]
    assert result.results.settings.model == "swin"
    assert "Swin Transformer" in result.page.read_text(encoding="utf-8")
    command = command_line(result.results)
    assert command.startswith("relpos compare --data ")
    assert " --model swin --positions own,none," in command
    assert "own" in str(result.table())


def test_a_newcomer_is_told_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """By the help, the README, the guide and the page of the command: what it is, for which data, what it compares."""
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "swin, for images: relpos's Swin Transformer, first with its own position" in told
    assert "Default: relpos's vision Transformer; for text its language model" in told
    root = Path(__file__).parents[2]
    for page in ("README.md", "docs/guides/compare.md", "docs/command.md"):
        assert "--model swin" in (root / page).read_text("utf-8"), page
    images = (root / "docs" / "command.md").read_text("utf-8").partition("**Your own images**")[2].partition("\n\n")[0]
    assert "`--model swin`" in images


@pytest.mark.parametrize("position", ["own", "none", "learned", "sinusoidal_2d+relative_2d", "rotary_2d"])
def test_a_grown_model_says_of_the_trained_size_what_it_said(position: str) -> None:
    task = find_task("digits")
    model: Any = build_swin(position, task).eval()
    assert [window.sizes for window in model.windows] == [(4, 4), (4, 4)]
    larger: Any = torch.randn(2, 1, 24, 24)
    for rule in growth(model):
        other = grown(model, (24, 24), rule)
        assert other(larger).shape == (2, 10)
        if position != "learned":
            same = torch.randn(2, 1, 16, 16)
            torch.testing.assert_close(other(same), model(same))


def test_text_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected images for a Swin Transformer; got the task 'text'\. Leave the"):
        compare(tmp_path / "out", "swin", "text")
