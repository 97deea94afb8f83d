"""Every term compiles whole, and compiled gives what eager gives."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from compile_terms import CASES, TERMS

from loaded import Loaded

SCRIPT = Path(__file__).with_name("compile_terms.py")


def test_the_script_holds_every_term() -> None:
    import torch

    import relpos

    def kinds(name: str) -> set[str]:
        terms = CASES[name].terms(*(torch.zeros(shape) for shape in CASES[name].leaves))
        return {type(term).__name__ for term in (terms if isinstance(terms, relpos.Terms) else (terms,))}

    public = (getattr(relpos, name) for name in relpos.__all__)
    every = {x.__name__ for x in public if isinstance(x, type) and issubclass(x, relpos.core.Term)}
    assert set.union(*(kinds(name) for name in TERMS)) == every


@pytest.mark.traced
@pytest.mark.slow
def test_what_importing_inductor_warns_of_is_no_error() -> None:
    """Torch 2.10 and 2.11 use what they have deprecated; on a GPU the compiler is imported within tests."""
    importlib.import_module("torch._inductor.compile_fx")


@pytest.mark.traced
@pytest.mark.slow
def test_inductor(loaded: Loaded) -> None:
    """In a process of its own, without the shape checks."""
    result = loaded.run(SCRIPT, needs=["compiler"])
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("ok ") == 2 * (len(TERMS) + 1)
