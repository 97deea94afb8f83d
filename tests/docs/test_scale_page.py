"""docs/scale.md has the figures that benchmarks measured, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_page_has_what_was_measured() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "scale_page"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
