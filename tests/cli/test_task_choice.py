"""The data that a comparison or a run is given: folders of images, and what their results are called."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from photographs import make_folder
from relpos.cli.task_choice import choose_task
from relpos.comparison import ComparisonSettings, default_folder
from relpos_command.option_groups import DataOptions


@pytest.mark.parametrize(
    ("folder", "named"), [("/a/my photos (2)", "my-photos-2-"), ("/a/cats", "cats"), ("/", "images"), ("/é", "é")]
)
def test_results_are_named_after_the_folder(folder: str, named: str) -> None:
    settings = ComparisonSettings("images", ("none",), 1, {"images": folder, "contents": "a"})
    found = default_folder(settings)
    assert re.fullmatch(rf"runs/{re.escape(named)}-[0-9a-f]{{8}}", found.as_posix())
    changed = ComparisonSettings("images", ("none",), 1, {"images": folder, "contents": "b"})
    assert default_folder(changed) != found, "other images, other results"
    assert default_folder(ComparisonSettings("digits", ("none",), 1)).name.startswith("digits-")


@pytest.mark.parametrize("terminal", [True, False])
def test_reading_shows_how_far_it_is_on_a_terminal(terminal: bool, tmp_path: Path) -> None:
    typed = DataOptions(data=str(make_folder(tmp_path, 4)))
    file = io.StringIO()
    task = choose_task(typed, Console(file=file, force_terminal=terminal, width=300))
    printed = file.getvalue()
    assert ("reading images" in printed) is terminal
    assert ("12/12" in printed) is terminal
    assert task.description in " ".join(printed.split())
