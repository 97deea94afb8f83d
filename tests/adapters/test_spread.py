"""What is refused where ranks share the tokens of models of transformers. `test_processes` compares numbers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from spread_models import make

import relpos
from relpos.parallel import context_parallel

PART = torch.zeros(1, 4, dtype=torch.long)
BOTH = {"input_ids": PART, "decoder_input_ids": PART}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """One rank alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def t5(mesh: Any) -> Any:
    return context_parallel(make("T5", "ForConditionalGeneration"), mesh)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input_ids": PART, "labels": PART}, "expected no labels where ranks share a sequence"),
        (BOTH | {"output_attentions": True}, "expected a plain call where .*; got attention weights"),
        (BOTH | {"attention_mask": torch.zeros(1, 1, 4, 4)}, "expected a mask of this rank's tokens"),
    ],
)
def test_calls_that_a_share_cannot_compute(t5: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        t5(**given)


def _dropping() -> Any:
    model = make("T5", "EncoderModel")
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.1
    return model


def _half_retrofitted() -> Any:
    model = make("T5", "ForConditionalGeneration")
    relpos.restore(model)
    relpos.retrofit(model.encoder, verify=False)
    return model


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (_dropping, "expected no dropout of attention weights over several ranks"),
        (_half_retrofitted, "expected relpos in every attention layer; got T5Attention at decoder"),
        (
            lambda: make("T5", "ForSequenceClassification"),
            "a model by token of T5, .*; got T5ForSequenceClassification",
        ),
        (lambda: make("Bert", "Model", "alibi"), "expected a BertModel without pooler"),
        (lambda: torch.nn.Linear(2, 2), "expected a model of relpos's MultiHeadAttention, or a retrofitted one"),
    ],
)
def test_models_that_cannot_be_spread(mesh: Any, build: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        context_parallel(build(), mesh)(PART)


@pytest.mark.parametrize(
    ("dtype", "mask", "said"),
    [
        (torch.float64, torch.tensor([[1, 1, 1, 0]]), "expected no padding in BLOOM"),
        (torch.bfloat16, None, "expected BLOOM in float32 or float64"),
    ],
)
def test_a_bias_that_counts_tokens(mesh: Any, dtype: torch.dtype, mask: Any, said: str) -> None:
    model = context_parallel(make("Bloom", "Model").to(dtype), mesh)
    with pytest.raises(ValueError, match=said):
        model(PART, attention_mask=mask)


def test_positions_are_not_the_callers(mesh: Any) -> None:
    model = context_parallel(make("GPT2", "Model", "alibi"), mesh)
    with pytest.raises(ValueError, match="expected no position_ids where ranks share a sequence"):
        model(PART, position_ids=PART)
    relpos.restore(model)
    model(PART, position_ids=PART)
