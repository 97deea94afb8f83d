"""Models compile whole, and are exported with sizes left open; so they give what eager gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import compile_models
import export_models
import pytest

from patience import PATIENCE

RUNS = {"compile_models": [*compile_models.CASES, *compile_models.ALONE], "export_models": export_models.RUNS}


@pytest.mark.traced
@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_models(script: str) -> None:
    """In a process of its own, without the shape checks."""
    command = [sys.executable, str(Path(__file__).with_name(f"{script}.py"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") == len(RUNS[script])
