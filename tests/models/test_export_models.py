"""Models are exported with sizes left open, and give at other sizes what eager gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from export_models import RUNS

from patience import PATIENCE

SCRIPT = Path(__file__).with_name("export_models.py")


@pytest.mark.traced
@pytest.mark.slow
def test_models_are_exported() -> None:
    """In a process of its own, without the shape checks."""
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") == len(RUNS)
