"""docs/retrofit.md is what scripts/retrofit_page writes, and has a row for every class that is served or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from relpos.adapters.kinds import refused_classes, replaced_classes

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
def test_the_page_is_what_its_script_writes() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "retrofit_page"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_class_has_a_row() -> None:
    page = (ROOT / "docs" / "retrofit.md").read_text("utf-8")
    for path in (*replaced_classes(), *refused_classes()):
        assert f"`{path.rpartition('.')[2]}`" in page, path
