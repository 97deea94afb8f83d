"""Every public constructor and function called wrongly gives one line: what was expected, what came, the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import cases_around
import cases_attention
import cases_biases
import cases_content
import cases_coordinates
import cases_mechanisms
import cases_models
import cases_position
import cases_rotary
import cases_terms
import cases_vectors
import jaxtyping
import pytest

import relpos

MODULES = (
    cases_coordinates,
    cases_terms,
    cases_attention,
    cases_position,
    cases_mechanisms,
    cases_models,
    cases_biases,
    cases_content,
    cases_vectors,
    cases_rotary,
    cases_around,
)
CASES = [case for module in MODULES for case in module.CASES]

NOTHING_TO_GET_WRONG = {
    "AdamW",  # PyTorch says what is wrong
    "ComparisonResult",  # what compare returns
    "Explanation",  # what explain returns
    "Mechanism",  # a base without arguments
    "backends",  # takes none
}


@pytest.mark.parametrize(
    ("kind", "call", "expected", "came", "remedy"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_a_wrong_call_says_what_was_expected_what_came_and_the_remedy(
    kind: type[Exception], call: Callable[[], Any], expected: str, came: str, remedy: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message, "one line"
    parts = re.fullmatch(r"expected (?P<expected>.+); got (?P<rest>.+\. .+\S)", message)
    assert parts is not None, f"not of the form 'expected ...; got .... Remedy': {message}"
    assert expected in parts["expected"]
    assert came in parts["rest"]
    assert remedy in parts["rest"][parts["rest"].index(came) + len(came) :], "the remedy comes last"


def test_every_public_name_is_called_wrongly() -> None:
    tried = {case[0].split(":")[0] for case in CASES}
    assert tried | NOTHING_TO_GET_WRONG == set(relpos.__all__)


def test_ids_are_unique() -> None:
    ids = [case[0] for case in CASES]
    assert len(ids) == len(set(ids))


def test_shape_checks_are_off_here_and_would_have_come_first() -> None:
    """Otherwise the table would test the checker of the tests instead of the library."""

    def call() -> None:
        relpos.attention([1], [1], [1])  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="expected q to be a tensor"):
        call()
    jaxtyping.config.update("jaxtyping_disable", False)
    with pytest.raises(jaxtyping.TypeCheckError):
        call()
