"""`relpos.compare` of a model that answers one text by another, T5, by a step of one's own on Python's documentation.

A lambda cannot be sent to another process: in this one the library is imported once.
"""

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from calls import compare
from torch import Tensor

import relpos
from relpos.adapters.common.libraries import imported
from relpos.results import load_results

TEXT = "".join(topics[name] for name in sorted(topics)).encode()


def pairs(start: int, count: int) -> tuple[Tensor, Tensor]:
    """Texts of 16 bytes, and the 8 that follow."""
    ids = torch.frombuffer(bytearray(TEXT[start : start + 24 * count]), dtype=torch.uint8).long().view(count, 24)
    return ids[:, :16].contiguous(), ids[:, 16:].contiguous()


def build(position: str, task: Any) -> Any:
    transformers = imported("transformers")
    config = transformers.T5Config(
        vocab_size=257, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=256, pad_token_id=256, eos_token_id=None,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    relpos.replace_position(model, position, init_std=0.02)
    return model


def step(model: Any, batch: Any) -> Tensor:
    texts, answers = batch
    loss: Tensor = model(input_ids=texts, labels=answers).loss
    return loss


@pytest.mark.slow
def test_t5_is_compared_by_a_step(tmp_path: Path) -> None:
    data = pairs(0, 96), pairs(24 * 96, 32), pairs(24 * 128, 48)
    result, _ = compare(
        tmp_path / "out", lambda position, task: build(position, task), data, ["own", "none"], seeds=2, step=step,
        steps=12, lr=1e-2, batch_size=16, recipe={"position_learning_rate_multiplier": 1},
    )  # fmt: skip
    assert len(result.models) == 4
    for run in result.results.records:
        (metric,) = run.metrics
        assert metric.values is not None
        assert len(metric.values) == 3, "a loss for each batch of the 48 test pairs"
        assert run.curve.loss[-1] < run.curve.loss[0]
    assert "lower is better" in str(result.table())
    assert load_results(result.folder) == result.results
