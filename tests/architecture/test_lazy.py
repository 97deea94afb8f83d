"""`import relpos` in a fresh process loads no optional part: Triton, matplotlib, the command's libraries."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from source import ROOT

from relpos_command.requests import VERBS

OPTIONAL = {
    "PIL", "accelerate", "beartype", "jinja2", "jsonargparse", "matplotlib", "pytest", "rich", "scipy",
    "sklearn", "timm", "torchvision", "transformers", "triton",
}  # fmt: skip


def told_by(statement: str, what: str) -> Any:
    """What an expression is after a statement in a fresh process."""
    code = f"import json, sys\n{statement}\nprint(json.dumps({what}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules in memory after each of three imports, one after another in one fresh process, and then after a run
    that ends once its data and its recipe are known; at last, the name of the suite."""
    statement = """
import contextlib, io
found = {}
for name in ("torch", "relpos", "relpos.cli"):
    __import__(name)
    found[name] = sorted(sys.modules)
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
    words = "train --position none --data text --accumulate 3 --out runs"
    sys.modules["relpos.cli"].main(words.split())
found["relpos train"], found["relpos train says"] = sorted(sys.modules), [said.getvalue()]
found["suite"] = [sys.modules["relpos"].testing.MechanismSuite.__name__]
"""
    return {name: set(modules) for name, modules in told_by(statement, "found").items()}


def test_import_relpos_loads_no_optional_part(loaded: dict[str, set[str]]) -> None:
    added = {name.split(".")[0] for name in loaded["relpos"] - loaded["torch"]}
    assert not added & OPTIONAL, f"import relpos loads {', '.join(sorted(added & OPTIONAL))}"


def test_import_relpos_loads_no_part_that_only_the_command_needs(loaded: dict[str, set[str]]) -> None:
    parts = {name.split(".")[1] for name in loaded["relpos"] if name.startswith("relpos.")}
    assert parts == {
        "adapters", "compat", "core", "engines", "files", "layers", "models", "optim", "patterns", "position",
        "version",
    }  # fmt: skip


def test_the_suite_is_there_when_asked_for_and_not_before(loaded: dict[str, set[str]]) -> None:
    assert not {"pytest", "relpos.testing"} & loaded["relpos train"]
    assert loaded["suite"] == {"MechanismSuite"}


def test_help_and_a_wrong_option_load_neither_torch_nor_relpos() -> None:
    calls = [[], ["--help"], ["compar"], *([verb, "--help"] for verb in VERBS), *([verb, "--optoin"] for verb in VERBS)]
    calls += [["compare", "--seeds", "x"], ["train", "--optimizer", "sgd"], ["list", "position"]]
    statement = f"""
import contextlib, os, relpos_command
for words in {calls!r}:
    sys.argv = ["relpos", *words]
    with contextlib.suppress(SystemExit), open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        relpos_command.main()
        raise AssertionError(words)
"""
    assert not {"torch", "relpos", "numpy", "rich"} & set(told_by(statement, "sorted(sys.modules)"))


def test_the_command_starts_without_what_its_verbs_need(loaded: dict[str, set[str]]) -> None:
    added = {name.split(".")[0] for name in loaded["relpos.cli"] - loaded["torch"]}
    assert not added & OPTIONAL, f"import relpos.cli loads {', '.join(sorted(added & OPTIONAL))}"


def test_training_loads_neither_the_report_nor_what_it_needs(loaded: dict[str, set[str]]) -> None:
    """Until the model card is written."""
    assert any("accumulated parts" in line for line in loaded["relpos train says"])
    assert not {"scipy", "sklearn", "matplotlib", "relpos.report"} & loaded["relpos train"]
