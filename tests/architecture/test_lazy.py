"""`import relpos` in a fresh process loads no optional part: Triton, matplotlib, the command's libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from source import ROOT

OPTIONAL = {
    "PIL", "accelerate", "beartype", "jinja2", "jsonargparse", "matplotlib", "rich", "scipy", "sklearn", "timm",
    "torchvision", "transformers", "triton",
}  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    """The modules in memory after a statement in a fresh process."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def by_torch() -> set[str]:
    return loaded_by("import torch")


def test_import_relpos_loads_no_optional_part(by_torch: set[str]) -> None:
    added = {name.split(".")[0] for name in loaded_by("import relpos") - by_torch}
    assert not added & OPTIONAL, f"import relpos loads {', '.join(sorted(added & OPTIONAL))}"


def test_import_relpos_loads_no_part_that_only_the_command_needs() -> None:
    parts = {name.split(".")[1] for name in loaded_by("import relpos") if name.startswith("relpos.")}
    assert parts == {"attention", "compat", "core", "layers", "models", "optim", "patterns", "position"}


def test_the_command_starts_without_what_its_verbs_need(by_torch: set[str]) -> None:
    added = {name.split(".")[0] for name in loaded_by("import relpos.cli") - by_torch}
    assert not added & OPTIONAL, f"import relpos.cli loads {', '.join(sorted(added & OPTIONAL))}"
