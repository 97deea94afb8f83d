"""Two and four ranks compute what one process does: outputs, and all gradients."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from loaded import Loaded
from relpos.parallel.ranks import Ranks

pytestmark = pytest.mark.slow

TOLERANCE = 1e-12
Found = list[dict[str, Any]]


on_four = pytest.mark.parametrize("found", [4], ids=["four"], indirect=True)


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, loaded: Loaded) -> Found:
    """What each rank found."""
    folder, size = tmp_path_factory.mktemp("ranks"), request.param
    done = loaded.run(pathlib.Path(__file__).with_name("ranks.py"), folder, processes=size, needs=["train"])
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def test_outputs_and_gradients_are_those_of_one_process(found: Found) -> None:
    refused = 0
    for rank, of_rank in enumerate(found):
        for case, difference in of_rank["compared"].items():
            if isinstance(difference, str):
                refused += 1
                method = case.split(", ")[2]
                assert method in ("ring", "ulysses"), case
                assert f"for method '{method}'" in difference, case
            else:
                assert difference < TOLERANCE, (rank, case)
    assert 0 < refused < 0.35 * sum(len(of_rank["compared"]) for of_rank in found)


@on_four
def test_two_runs_have_the_same_bits(found: Found) -> None:
    for of_rank in found:
        assert len(of_rank["repeated"]) == 6
        assert all(of_rank["repeated"].values()), of_rank["repeated"]


def test_a_rank_that_sees_nothing_takes_part(found: Found) -> None:
    for of_rank in found:
        assert len(of_rank["blind"]) == 3
        for name, difference in of_rank["blind"].items():
            assert difference < TOLERANCE, name


def test_models_train_as_in_one_process(found: Found) -> None:
    for of_rank in found:
        assert len(of_rank["models"]) == (6 if len(found) == 2 else 3)
        for name, difference in of_rank["models"].items():
            assert difference < TOLERANCE, name


@on_four
def test_a_ring_of_blocks_in_lower_precision(found: Found) -> None:
    for of_rank in found:
        blocks = of_rank["blocks"]
        assert blocks["bits, torch.float32"]
        assert blocks["bits, torch.bfloat16"]
        assert blocks["blocks, torch.float32"] < 1e-3  # of a table's gradient, which is a sum over all pairs
        assert blocks["blocks, torch.bfloat16"] < 1.5


SAID = {
    "unequal": "ValueError: expected shapes of q, k and v alike on all",
    "unequal, beside coordinates": "ValueError: expected ",
    "empty": "ValueError: expected a share with tokens on every rank",
    "empty on one rank": "ValueError: expected ",
    "another method": "ValueError: expected the method alike on all",
    "dropout": "ValueError: expected no dropout of attention weights over several ranks",
    "a rule of rows": "NotImplementedError: expected a position without a rule of rows",
    "heads": "nothing",
    "a mask of few tokens": "ValueError: expected a mask of",
    "another mask": "ValueError: expected the mask alike on all",
    "other tokens": "ValueError: expected the coordinates alike on all",
    "a frozen weight on one rank": "ValueError: expected the position alike on all",
    "terms of a share": "ValueError: expected DenseBias",
    "more terms of a share": "ValueError: expected DenseBias",
    "states of all tokens": "ValueError: expected states of 1 elements and the 4 tokens that q has",
    "no states on one rank": "ValueError: expected ",
    "a block of two ranks": "NotImplementedError: expected shares that begin at a multiple of 3",
    "a block of two ranks, automatically": "nothing",
}


def test_refusals_are_one_line_on_every_rank(found: Found) -> None:
    for of_rank in found:
        for name, begins in SAID.items():
            said = of_rank["refused"][name]
            assert said.startswith(begins), (name, said)
            assert "\n" not in said


def test_shares_make_the_whole_and_gradients_their_mean(found: Found) -> None:
    mean = sum(range(len(found))) / len(found)
    for of_rank in found:
        assert of_rank["unshard"]
        assert of_rank["average"] == [[[mean] * 3] * 2, None]


def test_a_lost_rank_is_one_line(found: Found) -> None:
    assert found[0]["lost"].startswith("expected an answer from each of")
    assert "\n" not in found[0]["lost"]


@pytest.mark.parametrize(
    ("gloo", "said"),
    [("Timed out waiting 8000ms", "A rank has ended, or is later than"), ("Connection closed", "Another rank has")],
)
def test_a_rank_that_is_late_is_not_said_to_have_ended(gloo: str, said: str) -> None:
    with pytest.raises(ConnectionError, match=f"rank 0 got: {gloo}. {said}"), Ranks(None, 0, 2).watched():  # type: ignore[arg-type]
        raise RuntimeError(f"[/gloo/buffer.cc:78] {gloo}")
