"""Every public constructor and function called wrongly gives one line: what was expected, what came, the remedy."""

from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest
import test_arguments
import torch
import wrong_attention
import wrong_layers
import wrong_mechanisms
import wrong_terms
from ingredients import require_said, x

import relpos

MODULES = (wrong_terms, wrong_attention, wrong_mechanisms, wrong_layers)
ROWS = [(name, *row) for module in MODULES for name, rows in module.CASES.items() for row in rows]

NOTHING_TO_GET_WRONG = {
    "AdamW",  # PyTorch says what is wrong
    "ComparisonResult",  # what compare returns
    "Explanation",  # what explain returns
    "Mechanism",  # a base without arguments
    "backends",  # takes none
}


@pytest.mark.parametrize(("name", "call", "text"), ROWS, ids=[f"{name}: {text}"[:90] for name, _, text in ROWS])
def test_a_wrong_call_says_what_was_expected_what_came_and_the_remedy(
    name: str, call: Callable[[], Any], text: str
) -> None:
    require_said(call, text, NotImplementedError if "backend that supports this call" in text else ValueError)


def test_every_public_name_is_called_wrongly() -> None:
    replaced = [*test_arguments.LEAST, *test_arguments.BOUNDS, *(name for name, *_ in test_arguments.DIMENSIONS)]
    tried = {name for name, _, _ in ROWS} | {name.split(",")[0] for name in replaced} | {"NoPosition"}
    assert set(relpos.__all__) <= tried | NOTHING_TO_GET_WRONG


def test_shape_checks_are_off_here_and_would_have_come_first() -> None:
    """Otherwise the table would test the checker of the tests instead of the library."""

    def call() -> None:
        relpos.attention([1], [1], [1])  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="expected q to be a tensor"):
        call()
    jaxtyping.config.update("jaxtyping_disable", False)
    with pytest.raises(jaxtyping.TypeCheckError):
        call()


@pytest.mark.parametrize("call", [relpos.linear_attention, relpos.flash_attention])
def test_dtypes_may_differ_where_autocast_makes_them_one(call: Callable[..., Any]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call(x(), x(), x().bfloat16())
