"""Models of other libraries compile as one graph, and compute the same."""

from pathlib import Path

import pytest
from compiled import steps

from loaded import Loaded


@pytest.mark.traced
@pytest.mark.slow
def test_models_compile_as_one_graph(loaded: Loaded) -> None:
    done = loaded.run(Path(__file__).with_name("compiled.py"), needs=["compiler", "models"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"ok {name}" for name, _ in steps()]
