"""The command: what starts it, what it lists, and that whatever a verb raises is one line."""

import errno
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import relpos
from relpos.cli import VERBS, main
from relpos.position import presets
from relpos_command.parsing import parse

SOURCE = Path(__file__).resolve().parents[2] / "src"
Captured = pytest.CaptureFixture[str]
Refused = Callable[..., str]
NAMED = {"compare": "compare", "train": "train --position none --out x", "show": "show none", "list": "list positions"}


def python(*typed: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, as a person starts it."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run([sys.executable, *typed], env=environment, capture_output=True, text=True, check=False)


def test_the_process_exits_with_that_code_and_line() -> None:
    done = python("-m", "relpos.cli", "list", "--lng")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "relpos: error: unrecognized arguments: --lng. Did you mean --long? See relpos list --help.\n"
    )


@pytest.mark.parametrize("typed", ["compare --debug --data digit", "--debug compare --data digit"])
def test_debug_shows_where_a_users_error_was_found(typed: str) -> None:
    with pytest.raises(ValueError, match="expected data as a folder of images") as caught:
        main(typed.split())
    assert any("find_data" in str(entry) for entry in caught.traceback)


_BUG = r"\(--debug shows where; unless memory ran out, this is a bug in relpos\)"
_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/socket")
_NO_LIBRARY = ModuleNotFoundError("No module named 'sklearn'", name="sklearn")


@pytest.mark.parametrize(
    ("verb", "error", "code", "line"),
    [
        ("list", RuntimeError("it broke"), 1, rf"RuntimeError: it broke {_BUG}"),
        (
            "list",
            RuntimeError("x failed:\n  Traceback\nKeyError: 3"),
            1,
            rf"RuntimeError: x failed: KeyError: 3 {_BUG}",
        ),
        ("list", KeyError("k"), 1, rf"KeyError: 'k' {_BUG}"),
        ("list", NotImplementedError("backend 'sdpa' lacks Softcap"), 2, "backend 'sdpa' lacks Softcap"),
        ("list", _NO_LIBRARY, 2, r"this needs sklearn; install it with: pip install 'relpos\[.*train.*\]'"),
        ("list", _FULL, 2, "No space left on device: /tmp/socket"),
        ("list", KeyboardInterrupt(), 130, "interrupted"),
        ("show", KeyboardInterrupt(), 130, "interrupted; nothing was drawn"),
        ("train", KeyboardInterrupt(), 130, "interrupted; checkpoints are kept"),
        (
            "compare",
            KeyboardInterrupt(),
            130,
            "interrupted; finished work is kept; the same command continues from there",
        ),
    ],
)
def test_what_a_verb_raises_is_one_line(
    verb: str, error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    def broken(_: object) -> None:
        raise error

    monkeypatch.setattr(f"relpos.cli.{verb}_verb.run", broken)
    assert re.fullmatch(line, refused(NAMED[verb], code))
    with pytest.raises(type(error)):
        main([*NAMED[verb].split(), "--debug"])


@pytest.mark.parametrize("typed", ["compare --positions lerned", "train --position lerned --out x", "show lerned"])
def test_a_misspelt_mechanism_is_known_before_libraries_load(
    typed: str, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr(f"relpos.cli.{typed.split()[0]}_verb.LIBRARIES", ("relpos.no_such_library",))
    assert "got 'lerned'. Did you mean 'learned'?" in refused(typed)


def test_an_interruption_while_libraries_load_is_one_line(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    parse(["list", "positions"])  # the parser's own libraries load before
    monkeypatch.setattr("importlib.import_module", interrupted)
    assert refused("list positions", 130) == "interrupted"


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
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (130, "relpos: error: interrupted\n")
    assert not (tmp_path / "out").exists()


def test_the_script_starts_there() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"relpos": "relpos_command:main"}
    done = python(
        "-c", "import sys; before = set(sys.modules); import relpos_command; print(*sorted(set(sys.modules) - before))"
    )
    slow = set(done.stdout.split()) - {"relpos_command"} - set(sys.stdlib_module_names)
    assert "relpos_command" in done.stdout
    assert not slow, "loading anything else takes time"


@pytest.mark.parametrize("typed", [["--help"], *([verb, "--help"] for verb in VERBS)])
def test_help_is_exit_code_0(typed: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(typed)
    assert caught.value.code == 0
    assert "usage: relpos" in capsys.readouterr().out


def test_list_positions(capsys: Captured) -> None:
    main(["list", "positions"])
    short = capsys.readouterr()
    assert len(short.out.splitlines()) == len(presets())
    assert "Relative bias, 2-D (also swin, beit, relative_3d)" in " ".join(short.out.split())
    assert short.err == ""
    main(["list", "positions", "--long"])
    long = capsys.readouterr().out
    for name, preset in presets().items():
        assert re.search(rf"^{re.escape(name)} ", short.out, flags=re.MULTILINE)
        assert preset.title in short.out
        assert preset.summary in long
        assert f"Source: {preset.source}" in long
        assert preset.summary not in short.out


@pytest.mark.parametrize(
    ("kind", "names"), [("data", ("digits", "text", "DIR", "FILE")), ("backends", relpos.backends())]
)
def test_list_data_and_backends(kind: str, names: tuple[str, ...], capsys: Captured) -> None:
    main(["list", kind])
    printed = capsys.readouterr().out
    for name in names:
        assert re.search(rf"^{name} ", printed, flags=re.MULTILINE)
