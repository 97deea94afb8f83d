"""transformers' models on two ranks' shares of tokens compute what one process does, or are refused in one line."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from loaded import Loaded

TOLERANCE = 1e-12
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, loaded: Loaded) -> Found:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    program = pathlib.Path(__file__).with_name("ranks_of_models.py")
    done = loaded.run(program, folder, processes=2, needs=["train", "models"])
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_models_of_tokens_are_those_of_one_process(found: Found) -> None:
    for of_rank in found:
        assert len(of_rank["compared"]) == 9
        for name, difference in of_rank["compared"].items():
            assert difference < TOLERANCE, name


SAID = {
    "labels": "expected no labels where ranks share a sequence",
    "positions": "expected no position_ids where ranks share a sequence",
    "weights": "expected a plain call where ranks share a sequence; got attention weights",
    "pairs": "expected a mask of this rank's tokens",
    "dropout": "expected no dropout of attention weights over several ranks",
    "pooled": "expected a model by token of T5, MT5, UMT5, Llama, GPT2, Bert",
    "pooler": "expected a BertModel without pooler",
    "published layers": "expected relpos in every attention layer; got T5Attention at decoder",
    "nothing of ours": "expected a model of relpos's MultiHeadAttention, or a retrofitted one; got Linear",
}


def test_what_a_share_cannot_compute_is_refused_in_one_line(found: Found) -> None:
    for of_rank in found:
        assert set(of_rank["refused"]) == set(SAID)
        for name, begins in SAID.items():
            assert of_rank["refused"][name].startswith(begins), name
            assert "\n" not in of_rank["refused"][name]
