"""The example of CONTRIBUTING.md, as printed: one file and one test make a mechanism."""

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import relpos.position
from relpos import VisionTransformer
from relpos.position import presets

CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
SOURCE, TEST = re.findall(r"```python\n(.*?)```", CONTRIBUTING.read_text(encoding="utf-8"), flags=re.DOTALL)


def _as_module(name: str, source: str) -> dict[str, object]:
    module = type(sys)(name)
    sys.modules[name] = module
    exec(compile(source, f"CONTRIBUTING.md:{name}", "exec"), module.__dict__)
    return module.__dict__


_as_module("relpos.position.log_distance", SOURCE)
TestLogDistance: Any = _as_module("test_log_distance", TEST)["TestLogDistance"]


def test_the_file_alone_makes_it_a_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "log_distance" not in presets()
    (tmp_path / "log_distance.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.setattr(relpos.position, "__path__", [*relpos.position.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "relpos.position.log_distance")
    importlib.invalidate_caches()
    assert "log_distance" in presets()
    model = VisionTransformer(16, 4, 1, 10, embed_dim=8, depth=1, num_heads=2, position="learned+log_distance")
    assert model(torch.randn(2, 1, 16, 16)).shape == (2, 10)
