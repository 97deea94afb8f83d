"""`docs/yours.ipynb` runs from its first cell to its last and shows what its text says."""

import json
from pathlib import Path

import pytest
from notebooks import cells_run

import relpos

NOTEBOOK = Path(__file__).parents[2] / "docs" / "yours.ipynb"


@pytest.mark.slow
@pytest.mark.site
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)  # the notebook leaves for another folder
    ran = list(cells_run(json.loads(NOTEBOOK.read_text(encoding="utf-8"))))
    values = [value for _, _, value in ran if value is not None]
    mechanism, table, advice, best = values
    assert isinstance(mechanism, relpos.RelativePositionBias)
    assert "<svg" in str(mechanism._repr_html_())  # type: ignore[misc]
    assert "relative_2d" in str(table)
    assert str(advice).startswith("('It works: 2 of 2 trained")
    assert best == "learned"
    printed = "".join(text for _, text, _ in ran)
    assert "timm:vit_tiny_patch16_224 at the size of the data, with random weights." in printed
    assert printed.count("All runs use this process, because the model or the data cannot be sent to another: ") == 2
    assert "VisionTransformer" in printed
