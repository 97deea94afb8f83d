"""A bundle to share: what is in it, and that neither data nor who made it are."""

import getpass
import json
import re
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_results import make_text

from relpos.cli import main
from relpos.report import bundle
from relpos.report.bundle import bundled
from relpos.results import read

Captured = pytest.CaptureFixture[str]
HOST, USER = "tower-of-ann.example.org", "annlee"
PRIVATE = ("/home", "tower", USER, "secret", "ann lee", "C:\\", "holiday.png")


@pytest.fixture(autouse=True)
def _of_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setattr(getpass, "getuser", lambda: USER)


@pytest.fixture
def _no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that do not look at it: it is most of the time."""
    monkeypatch.setattr(bundle, "build_page", lambda results: "")


def private(make: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """A comparison that tells where it was made, at every place that can hold text of a person's own."""
    results = make(("none", "relative_2d"), seeds=1, images=10)
    folder = "/home/ann lee/secret/photos"
    options = {"images": folder, "contents": "0f"}
    own = {"model": "hf:/home/annlee/secret/vit, transformers 5.1, sha256 0123456789ab"}
    results["settings"] |= {"task": "images", "task_options": options, **own, "given": {"model": f"hf:{folder}"}}
    results["settings"]["sources"] = {"mine.Two": "mine.py:Two, sha256 0123456789ab"}
    results["task"] |= {"description": f"Images of C:\\Users\\{USER}\\photos on {HOST}."}
    results["task"] |= {"skipped": [{"path": "a/holiday.png", "reason": "a/holiday.png cannot be read"}]}
    results["task"] |= {"ignored": ["a/holiday.png.txt"]}
    for record in results["records"]:
        record["settings"] |= {"task_options": options, **own}
    return results


@pytest.mark.slow
def test_the_archive_tells_nothing_of_the_person_or_the_machine(make: Any, tmp_path: Path, capsys: Captured) -> None:
    results = private(make)
    assert all(word in json.dumps(results).replace("\\\\", "\\") for word in PRIVATE), "else nothing is tested"
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    out = tmp_path / "shared.zip"
    main(["bundle", str(tmp_path), str(out)])
    assert "README.txt, report.html, results.json, numbers.csv" in " ".join(capsys.readouterr().out.split())
    with zipfile.ZipFile(out) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
        assert {info.date_time[0] for info in archive.infolist()} == {1980}, "no hour of the day"
    for name, text in texts.items():
        for word in (*PRIVATE, str(tmp_path), HOST):
            assert word not in text.replace("\\\\", "\\"), (name, word)
    clean = read(json.loads(texts["results.json"]))
    assert (clean.settings.task_options["images"], clean.settings.given["model"]) == ("photos", "hf:photos")
    assert all(run.attention is None for run in clean.records)
    assert "relpos compare --data photos" in texts["README.txt"]
    assert "Send beside it, for the program and the command:\n  mine.Two: mine.py:Two, sha256" in texts["README.txt"]
    assert f"torch: {results['environment']['torch']}" in texts["README.txt"]


@pytest.mark.usefixtures("_no_page")
def test_a_file_is_replaced_only_when_asked(make: Any, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "results.json").write_text(json.dumps(make(("none",), seeds=1, images=4)), encoding="utf-8")
    out = tmp_path / "x.zip"
    out.write_text("mine")
    for typed, says in ((str(out), "or add --overwrite"), (f"{out}.pdf", r"expected OUT to end in \.zip")):
        with pytest.raises(SystemExit):
            main(["bundle", str(tmp_path), typed])
        assert re.search(says, capsys.readouterr().err)
    assert out.read_text() == "mine"
    main(["bundle", str(tmp_path), str(out), "--overwrite"])
    assert zipfile.is_zipfile(out)


@pytest.mark.slow
def test_samples_are_there_only_when_asked_for_and_a_program_compiles(request: pytest.FixtureRequest) -> None:
    results = make_text(("none", "t5"), seeds=1)
    prompt = results["records"][0]["sample"]["prompt"]
    without = bundled(results)
    request.getfixturevalue("_no_page")
    with_samples = bundled(results, samples=True)
    assert prompt in with_samples["results.json"]
    assert prompt not in "".join(without.values())
    compile(without["train.py"], "train.py", "exec")


@pytest.mark.slow
def test_a_tokenizer_keeps_no_folder() -> None:
    results = make_text(("none", "t5"), seeds=1)
    options = {"text": "/home/x/secret/a.txt", "tokenizer": "hf:its/secret/words", "documents": "packed", "tokens": "0"}
    results["settings"]["task_options"] = options
    results["task"] |= {"tokenizer": "hf:words", "vocabulary": 1001, "documents": "packed", "bytes_per_token": 2.5}
    files = bundled(results)
    assert "secret" not in "".join(files.values())
    assert "--data a.txt --tokenizer hf:words --documents packed" in files["README.txt"]
    assert "vocab_size=1001" in files["train.py"]
    compile(files["train.py"], "train.py", "exec")


@pytest.mark.usefixtures("_no_page")
def test_a_user_with_the_name_of_a_mechanism_changes_no_name(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "learned")
    assert read(json.loads(bundled(make(("learned",), seeds=1, images=4))["results.json"])).names == ["learned"]
