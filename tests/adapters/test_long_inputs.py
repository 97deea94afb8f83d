"""What relative positions by relpos are for: long audio and texts in O(N) numbers, masks included."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import relpos
from models import Model, models, padding, sounds, tokens

FAST_CASES = 2  # of each of its tests, in the fast part
N = 800  # from 2 ** 20 scores of all heads on nothing dense is chosen
_WORDS = {"input_ids": tokens(2, N), "attention_mask": padding(2, N)}
LONG: dict[str, dict[str, Any]] = {
    "parakeet": {"input_features": sounds(1, 2 * N, 8), "attention_mask": padding(1, 2 * N)},
    "nemotron_asr_streaming": {"input_features": sounds(1, 2 * N, 8), "attention_mask": padding(1, 2 * N)},
    "wav2vec2_conformer": {"input_values": sounds(1, 8 * N)},
    "wav2vec2_bert": {"input_features": sounds(1, N, 10), "attention_mask": padding(1, N)},
    "seamless_m4t_v2": {"input_features": sounds(1, N, 10), "attention_mask": padding(1, N)},
    "fastspeech2_conformer": {"input_ids": tokens(1, N, 30), "attention_mask": padding(1, N)},
    "vits": {"input_ids": tokens(1, N, 30), "padding_mask": torch.ones(1, N, 1), "attention_mask": padding(1, N)},
    "wavlm": {"input_values": sounds(1, 8 * N)},
    **dict.fromkeys(("bloom", "mpt", "falcon"), _WORDS),
}


class _Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that PyTorch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


def _largest(model: Model, inputs: dict[str, Any], *, retrofitted: bool) -> int:
    module: Any = model.made(torch.float32)
    if model.name == "mpt":
        module.config.max_seq_len = N
    if retrofitted:
        relpos.retrofit(module, border=0, verify=False)
    with _Largest() as largest:
        module(**inputs)[0].sum().backward()
    return largest.numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_long_inputs_take_no_numbers_for_pairs(name: str) -> None:
    assert _largest(models()[name], LONG[name], retrofitted=True) < N * N


def test_published_they_do() -> None:
    assert _largest(models()["parakeet"], LONG["parakeet"], retrofitted=False) >= N * N
