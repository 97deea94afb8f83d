"""Models compile whole, and are exported with sizes left open; so they give what eager gives."""

from pathlib import Path

import compile_models
import export_models
import pytest

from loaded import Loaded

RUNS = {"compile_models": [*compile_models.CASES, *compile_models.ALONE], "export_models": export_models.RUNS}


@pytest.mark.traced
@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_models(script: str, loaded: Loaded) -> None:
    """In a process of its own, without the shape checks."""
    result = loaded.run(Path(__file__).with_name(f"{script}.py"), needs=["compiler", "models"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") == len(RUNS[script])
