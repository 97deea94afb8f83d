"""Every term compiles whole, and compiled gives what eager gives."""

import importlib
from pathlib import Path

import pytest
from compile_terms import ASKED, CASES, TERMS
from test_terms_in_engines import EVERY_TERM, kinds

from loaded import Loaded


def test_the_script_holds_every_term() -> None:
    assert set.union(*(kinds(CASES[name]) for name in TERMS)) == EVERY_TERM


@pytest.mark.traced
@pytest.mark.slow
def test_what_importing_inductor_warns_of_is_no_error() -> None:
    """Torch 2.10 and 2.11 use what they have deprecated; on a GPU the compiler is imported within tests."""
    importlib.import_module("torch._inductor.compile_fx")


@pytest.mark.traced
@pytest.mark.slow
@pytest.mark.parametrize(("script", "said"), [("compile_terms", len(ASKED)), ("compile_verdicts", 1)])
def test_compiled_as_users_do(script: str, said: int, loaded: Loaded) -> None:
    """In a process of its own, without the shape checks."""
    result = loaded.run(Path(__file__).with_name(f"{script}.py"), needs=["compiler"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") == said, result.stdout
