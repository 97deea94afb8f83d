"""The golden vectors: the check on their page passes without relpos, and the file is what its script writes."""

import ast
import json
import sys
from pathlib import Path

import pytest
from guides import DOCS, blocks

from loaded import Loaded
from relpos.cli import main

ROOT = DOCS.parent
SCRIPT = ROOT / "recipes" / "golden_vectors"
((_, CHECK, PRINTED),) = blocks(DOCS / "golden-vectors.md")


@pytest.fixture
def vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file as the command writes it, in the working folder."""
    monkeypatch.chdir(tmp_path)
    main(["vectors", "vectors.json"])
    return tmp_path / "vectors.json"


@pytest.mark.usefixtures("vectors")
def test_the_check_of_the_page_passes(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    exec(CHECK, {})
    assert capsys.readouterr().out == PRINTED


def test_the_check_of_the_page_finds_a_wrong_number(vectors: Path) -> None:
    tree = json.loads(vectors.read_text("utf-8"))
    tree["cases"][0]["output"][3][2] += 1e-9
    vectors.write_text(json.dumps(tree), "utf-8")
    with pytest.raises(AssertionError, match="rope_half"):
        exec(CHECK, {})


def test_the_file_is_as_the_page_says(vectors: Path) -> None:
    text = vectors.read_text("utf-8")
    tree = json.loads(text)
    assert (tree["format"], tree["offset"]) == (1, "query - key")
    assert len(text) < 300_000
    names = [case["name"] for case in tree["cases"]]
    assert len(set(names)) == len(names)
    page = (DOCS / "golden-vectors.md").read_text("utf-8")
    for case in tree["cases"]:
        assert case["source"], case["name"]
        for field in case:
            assert f"`{field}`" in page or f"**{field.capitalize()}**" in page, f"the page does not explain {field}"


def test_the_script_and_the_check_use_nothing_of_relpos() -> None:
    found = set()
    for source in [CHECK, *(path.read_text("utf-8") for path in SCRIPT.glob("*.py"))]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    own = {path.stem for path in SCRIPT.glob("*.py")}
    library = set(sys.stdlib_module_names)
    assert found - own - library == {"mpmath", "numpy", "timm", "torch", "transformers"}


@pytest.mark.slow
def test_the_file_is_what_its_script_writes(loaded: Loaded) -> None:
    done = loaded.run(SCRIPT / "__main__.py", "--check", needs=["models"])
    assert done.returncode == 0, done.stderr
