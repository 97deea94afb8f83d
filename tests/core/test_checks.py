"""Checks that more than one public function shares; their messages in use are in tests/errors."""

from __future__ import annotations

import re

import pytest

from relpos.core.checks import require_choice, require_int, require_name


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("aple", "'aple'. Did you mean 'apple'?"),
        ("plumm", "'plumm'. Did you mean 'plum'?"),
        ("zzz", "'zzz'. Choose one of them."),
        ("", "''. Choose one of them."),
        (None, "None. Choose one of them."),
        (3, "int 3. Choose one of them."),
        (["apple"], "list ['apple']. Choose one of them."),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_a_wrong_name_is_met_with_the_nearest(name: object, rest: str) -> None:
    message = f"expected a fruit among apple, pear, plum; got {rest}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        require_name(name, {"apple": 1, "pear": 2, "plum": 3}, "a fruit")


def test_a_right_name_is_let_through() -> None:
    require_name("pear", iter(["apple", "pear"]), "a fruit")


def test_a_choice_that_is_nearly_right_is_offered() -> None:
    with pytest.raises(
        ValueError,
        match=r"to be one of 'fast', 'exact'; got str 'exakt'\. Choose one of them for mode\. Did you mean 'exact'\?",
    ):
        require_choice("exakt", "mode", ("fast", "exact"))


def test_an_integer_of_thousands_of_digits_is_named_without_them() -> None:
    with pytest.raises(ValueError, match=r"length to be an integer of at most 64 bits; got int of 16610 bits\. Pass"):
        require_int(10**5000, "length", at_least=1)
