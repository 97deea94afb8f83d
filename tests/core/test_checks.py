"""Checks that more than one public function shares; their messages in use are in tests/errors."""

import re

import numpy as np
import pytest
import torch

from relpos.core.checks import (
    fail,
    require_choice,
    require_int,
    require_name,
    require_number,
    require_probability,
    without_remedy,
)


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


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("relu", "str 'relu'. Another is another."),
        ("gelu_new", "str 'gelu_new'. Another is another."),
        ("SwiGLU", "str 'SwiGLU'. Another is another. Did you mean 'swiglu'?"),
        (None, "None. Another is another."),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_weights_were_trained_with_is_not_to_be_chosen(name: object, rest: str) -> None:
    """Nor is one offered that has a name like it."""
    message = f"expected mlp to be one of 'gelu', 'swiglu'; got {rest}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        require_choice(name, "mlp", ("gelu", "swiglu"), "Another is another.")


@pytest.mark.parametrize("x", [torch.tensor(0.25), np.float32(0.25), "0.25", None, True])
@pytest.mark.usefixtures("unchecked")
def test_what_is_no_number_is_to_be_made_one(x: object) -> None:
    """The remedy for a number out of its range would be another number."""
    for check in (
        lambda: require_number(x, "scale", "above 0", "Leave it out."),
        lambda: require_probability(x, "scale"),
    ):
        with pytest.raises(ValueError, match=r"Pass scale as a Python number\.$"):
            check()


def test_an_error_without_its_remedy() -> None:
    with pytest.raises(ValueError, match=r"^expected a; got b\. Do c\.$") as caught:
        fail("a", "b", "Do c.")
    assert str(without_remedy(caught.value)) == "expected a; got b"
    other = ValueError("expected a; got b. Do c.")
    assert without_remedy(other) is other


def test_an_integer_of_thousands_of_digits_is_named_without_them() -> None:
    with pytest.raises(ValueError, match=r"length to be an integer of at most 64 bits; got int of 16610 bits\. Pass"):
        require_int(10**5000, "length", at_least=1)
