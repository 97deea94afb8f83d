"""The command: what it lists and saves, and that a user's error is one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import relpos
import relpos.train
from relpos.cli import VERBS, list_verb, main
from relpos.position import presets
from relpos.train import load

SOURCE = Path(__file__).resolve().parents[2] / "src"
Captured = pytest.CaptureFixture[str]

USER_ERRORS: list[tuple[str, str]] = [
    # what is typed, what the line says
    ("", r"error: expected a verb; got none\. See relpos --help"),
    ("compar", r"invalid choice: 'compar' \(choose from 'compare', .*\)\. Did you mean compare\? See relpos --help"),
    ("frobnicate", r"invalid choice: 'frobnicate' \(choose from 'compare', .*'list'\)\. See relpos --help"),
    ("--version", r"unrecognized arguments: --version\. See relpos --help"),
    ("list", r"the following arguments are required: KIND\. See relpos list --help"),
    ("list position", r"KIND: invalid choice: 'position' \(choose from .*\)\. Did you mean positions\? See"),
    ("list positions extra", r"unrecognized arguments: extra\. See relpos list --help"),
    ("train --position none", r"the following arguments are required: --out\. See relpos train --help"),
    ("train --out OUT", r"the following arguments are required: --position\. See"),
    ("train --position relativ_2d --out OUT", r"among .*; got 'relativ_2d'\. Did you mean 'relative_2d'\?"),
    ("train --position none+lerned --out OUT", r"got 'lerned'\. Did you mean 'learned'\?"),
    (
        "train --position none --out OUT --data digit",
        r"data as a folder of images, .*, digits or text; got digit, which does not exist\. Did you mean digits\?",
    ),
    ("train --position none --out OUT --stepz 3", r"unrecognized arguments: --stepz 3\. Did you mean --steps\?"),
    ("train --position none --out OUT --steps x", r"argument --steps: expected a whole number; got 'x'\. See"),
    ("train --position none --out OUT --steps 2.5", r"argument --steps: expected a whole number; got '2\.5'\."),
    (
        "train --position none --out OUT --steps 0",
        r"argument --steps: expected a whole number from 1 to 10,000,000; got '0'\. See relpos train --help",
    ),
    ("train --position none --out OUT --threads 0", r"--threads: expected a whole number from 1 to 1,024; got '0'"),
    (
        "train --position none --out OUT --device gpu",
        r"expected a device \(auto, cpu, cuda, cuda:0\); got 'gpu'",
    ),
    (
        "train --position none --out OUT --optimizer sgd",
        r"--optimizer: invalid choice: 'sgd' \(choose from 'adamw', 'lion'",
    ),
    (
        "train --position none --out OUT --precision fp8",
        r"--precision: invalid choice: 'fp8' \(choose from 'float32', 'bf16-mixed', 'fp16-mixed'\)",
    ),
    ("compare --positions relativ_2d", r"among .*; got 'relativ_2d'\. Did you mean 'relative_2d'\?"),
    ("compare --positions ,", r"expected at least one position; got none\. Name some"),
    ("compare --positions", r"argument --positions: expected one argument\. See relpos compare --help"),
    ("compare --data digit", r"expected data as .*; got digit, which does not exist\. Did you mean digits\?"),
    ("compare --data DIR/gone", r"expected data as .*; got DIR/gone, which does not exist\. Name one of them\."),
    ("compare --task digits", r"unrecognized arguments: --task digits\."),
    (
        "compare --model timm:vit_tiny_patch16",
        r"a model of timm; got 'vit_tiny_patch16'\. Did you mean vit_tiny_patch16_",
    ),
    ("compare --model hf:DIR/gone", r"a folder with config\.json after hf:; got DIR/gone\. Save a model there"),
    (
        "compare --model vit.py",
        r"expected swin, timm:NAME, hf:FOLDER, or build\(position, task\) as a function .*; got 'vit\.py'\. Pass",
    ),
    ("compare --model gone.py:build", r"expected FILE\.py:NAME of a file that is there; got .*gone\.py, which is not"),
    ("compare --better lower", r"expected better beside evaluate; got better='lower' alone\. Leave it out"),
    ("compare --set weight_decay=0.1", r"expected --set recipe\.KEY=VALUE; got --set weight_decay=0\.1\. Write for"),
    ("compare --set recipe.weigth_decay=1", r"a field of the recipe among .*; got 'weigth_decay'\. Did you mean 'weig"),
    ("compare --set recipe.depth=x", r"expected the recipe's depth to be an integer of at least 1; got str 'x'"),
    ("compare --lr=-1", r"argument --lr: expected a number of at least 0; got '-1'"),
    ("compare --lr fast", r"argument --lr: expected a number of at least 0; got 'fast'"),
    ("compare --batch-size 0", r"--batch-size: expected a whole number from 1 to 1,000,000; got '0'"),
    ("compare --seeds 0", r"--seeds: expected a whole number from 1 to 1,000; got '0'"),
    ("compare --seeds x", r"--seeds: expected a whole number; got 'x'"),
    ("compare --quick yes", r"unrecognized arguments: yes\. See relpos compare --help"),
    ("compare --device gpu", r"expected a device \(auto, cpu, cuda, cuda:0\); got 'gpu'"),
    ("compare --device cuda", r"expected a device that this machine has; got 'cuda'\. .*use --device cpu"),
    (
        "compare --precision fp8",
        r"--precision: invalid choice: 'fp8' \(choose from 'float32', 'bf16-mixed', 'fp16-mixed'\)",
    ),
    (
        "compare --what norms",
        r"--what: invalid choice: 'norms' \(choose from .*\)\. Did you mean norm\? See relpos comp",
    ),
    ("compare --out OUT/thesis.tex", r"expected a folder for --out; .*thesis\.tex is a file\. Choose another --out"),
    ("compare --out OUT", r"expected an empty folder .*holds other files\. Choose another --out"),
]


@pytest.mark.parametrize(("typed", "says"), USER_ERRORS, ids=[typed or "nothing" for typed, _ in USER_ERRORS])
def test_a_users_error_is_one_line_and_exit_code_2(
    typed: str, says: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(SystemExit) as caught:
        main(typed.replace("OUT", str(out)).split())
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("relpos: error: ")
    assert printed.err.endswith("\n")
    assert len(printed.err.splitlines()) == 1
    assert re.search(says, printed.err), printed.err
    assert "Traceback" not in printed.err
    assert [path.name for path in out.iterdir()] == ["thesis.tex"], "nothing was written"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_process_exits_with_that_code_and_line() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "relpos.cli", "list", "--lng"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "relpos: error: unrecognized arguments: --lng. Did you mean --long? See relpos list --help.\n"
    )


@pytest.mark.parametrize("typed", ["compare --debug --data digit", "--debug compare --data digit"])
def test_debug_shows_where_a_users_error_was_found(typed: str) -> None:
    with pytest.raises(ValueError, match="expected data as a folder of images") as caught:
        main(typed.split())
    assert any("find_data" in str(entry) for entry in caught.traceback)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("it broke"), "RuntimeError: it broke (--debug shows where; unless memory ran out, a bug in"),
        (RuntimeError("x failed:\n  Traceback\n  y\nKeyError: 3"), "RuntimeError: x failed: KeyError: 3 (--debug"),
        (KeyError("k"), "KeyError: 'k' (--debug shows where"),
    ],
)
def test_a_bug_is_one_line_and_exit_code_1(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def broken(_: object) -> None:
        raise error

    monkeypatch.setattr(list_verb, "run", broken)
    with pytest.raises(SystemExit) as caught:
        main(["list", "positions"])
    assert caught.value.code == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"relpos: error: {line}")
    assert len(printed.splitlines()) == 1
    with pytest.raises(type(error)):
        main(["list", "positions", "--debug"])


def test_an_engine_that_lacks_something_is_a_users_error(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def lacking(_: object) -> None:
        raise NotImplementedError("backend 'sdpa' lacks Softcap")

    monkeypatch.setattr(list_verb, "run", lacking)
    with pytest.raises(SystemExit) as caught:
        main(["list", "positions"])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "relpos: error: backend 'sdpa' lacks Softcap\n"


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def missing(_: object) -> None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

    monkeypatch.setattr(list_verb, "run", missing)
    with pytest.raises(SystemExit) as caught:
        main(["list", "positions"])
    assert caught.value.code == 2
    assert re.search(r"this needs sklearn; install it with: pip install 'relpos\[.*train.*\]'", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("compare", "; what was finished is kept; the same command continues from there"),
        ("bench", "; what was finished is kept; the same command continues from there"),
        ("train --position none --out x", "; what checkpoints hold is kept"),
        ("show none", "; nothing was drawn"),
        ("list positions", ""),
    ],
)
def test_an_interruption_says_what_is_left(
    typed: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"relpos.cli.{typed.split()[0]}_verb.run", interrupted)
    with pytest.raises(SystemExit) as caught:
        main(typed.split())
    assert caught.value.code == 130
    assert capsys.readouterr().err == f"relpos: error: interrupted{says}\n"


@pytest.mark.parametrize("typed", ["compare --positions lerned", "train --position lerned --out x", "show lerned"])
def test_a_misspelt_mechanism_is_known_before_libraries_load(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(f"relpos.cli.{typed.split()[0]}_verb.LIBRARIES", ("relpos.no_such_library",))
    with pytest.raises(SystemExit) as caught:
        main(typed.split())
    assert caught.value.code == 2
    assert "got 'lerned'. Did you mean 'learned'?" in capsys.readouterr().err


def test_an_interruption_while_libraries_load_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    with pytest.raises(SystemExit) as caught:
        main(["list", "positions"])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "relpos: error: interrupted\n"


@pytest.mark.parametrize("library", ["relpos.cli", pytest.param("relpos.train", marks=pytest.mark.slow)])
def test_an_interruption_inside_an_import_is_one_line(library: str, tmp_path: Path) -> None:
    """Where it would be an exception, some imports swallow it and others leave a library half loaded."""
    code = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {library!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass
sys.meta_path.insert(0, Interrupting())
sys.argv = ["relpos", "train", "--position", "none", "--out", {str(tmp_path / "out")!r}]
import relpos_command
relpos_command.main()
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (130, "relpos: error: interrupted\n")
    assert not (tmp_path / "out").exists()


def test_the_script_starts_there() -> None:
    import tomllib

    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"relpos": "relpos_command:main"}
    code = "import sys; before = set(sys.modules); import relpos_command; print(*sorted(set(sys.modules) - before))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    slow = set(done.stdout.split()) - {"relpos_command"} - set(sys.stdlib_module_names)
    assert not slow, "loading anything else takes time"


@pytest.mark.parametrize("typed", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help_is_exit_code_0(typed: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(typed)
    assert caught.value.code == 0
    assert "usage: relpos" in capsys.readouterr().out


def test_list_positions(capsys: Captured) -> None:
    main(["list", "positions"])
    printed = capsys.readouterr()
    words = " ".join(printed.out.split())
    for name, preset in presets().items():
        assert re.search(rf"^{re.escape(name)} ", printed.out, flags=re.MULTILINE)
        assert preset.title in words
    assert "Relative bias, 2-D (also swin, beit)" in words
    assert printed.err == ""


def test_list_data_and_backends(capsys: Captured) -> None:
    main(["list", "data"])
    printed = capsys.readouterr().out
    for name in ("digits", "text", "DIR", "FILE"):
        assert re.search(rf"^{name} ", printed, flags=re.MULTILINE)
    main(["list", "backends"])
    printed = capsys.readouterr().out
    for name in relpos.backends():
        assert re.search(rf"^{name} ", printed, flags=re.MULTILINE)


@pytest.mark.slow
def test_train_saves_a_model_and_never_overwrites_it(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "model"
    typed = ["train", "--position", "learned+relative_2d", "--out", str(out), "--steps", "2", "--device", "cpu"]
    main([*typed, "--seed", "5", "--optimizer", "lion"])
    printed = " ".join(capsys.readouterr().out.split())
    model, config = load(out)
    assert config["position"] == "learned+relative_2d"
    assert config["recipe"]["steps"] == 2
    assert config["recipe"]["optimizer"] == "lion"
    assert "by lion" in printed
    assert (config["seed"], config["threads"], config["precision"]) == (5, 1, "float32")
    assert config["relpos"] == relpos.__version__
    assert model(torch.zeros(1, 1, 16, 16)).shape == (1, 10)
    assert f"test {config['test_accuracy']:.1%}" in printed
    assert json.loads((out / "config.json").read_text())["torch"] == torch.__version__

    def no_training(*_: object, **__: object) -> None:
        raise AssertionError("it trains before it looks whether it may save")

    monkeypatch.setattr(relpos.train, "train", no_training)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(SystemExit) as caught:
        main(typed)
    assert caught.value.code == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.slow
def test_train_repeats(tmp_path: Path) -> None:
    for name in ("a", "b"):
        main(["train", "--position", "learned", "--out", str(tmp_path / name), "--steps", "2", "--device", "cpu"])
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
