"""Calls that are refused, and a model that `relpos train` saved."""

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from relpos.cli import main

Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Makes a call that ends with an error; returns its one line, without what every such line begins with."""

    def call(typed: str | Sequence[str], code: int = 2, *, begun: bool = False) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(typed.split() if isinstance(typed, str) else typed)
        printed = capsys.readouterr()
        assert ended.value.code == code
        assert begun or printed.out == "", "nothing is said before"
        assert printed.err.startswith("relpos: error: ")
        assert printed.err.endswith("\n")
        assert printed.err.count("\n") == 1, printed.err
        return printed.err.removeprefix("relpos: error: ").rstrip("\n")

    return call


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a trained model, to be read alone, and what was printed when it was trained."""
    folder, said = tmp_path_factory.mktemp("trained") / "mine", io.StringIO()
    typed = "train --position learned+relative_2d --steps 3 --device cpu --seed 5 --optimizer lion --out"
    with contextlib.redirect_stdout(said):
        main([*typed.split(), str(folder)])
    return folder, " ".join(said.getvalue().split())
