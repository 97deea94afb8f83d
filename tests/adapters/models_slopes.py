"""Models with slopes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models import Model, at_tokens, padding, tokens
from relpos.adapters.libraries import imported


def _bloom(**more: Any) -> nn.Module:
    transformers = imported("transformers")
    settings = {"vocab_size": 99, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    config = transformers.BloomConfig(**settings | more)
    made: nn.Module = transformers.BloomModel(config)
    return made


def _mpt() -> nn.Module:
    transformers = imported("transformers")
    config = transformers.MptConfig(vocab_size=99, d_model=48, n_layers=2, n_heads=6, max_seq_len=64, use_cache=False)
    made: nn.Module = transformers.MptModel(config)
    return made


def _falcon(**more: Any) -> nn.Module:
    transformers = imported("transformers")
    settings = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    config = transformers.FalconConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        use_cache=False,
        **settings | more,
    )
    made: nn.Module = transformers.FalconModel(config)
    return made


def _text(*, left: bool = False) -> dict[str, Tensor]:
    return {"input_ids": tokens(3, 21), "attention_mask": padding(3, 21, left=left)}


def _holed() -> dict[str, Tensor]:
    inputs = _text()
    inputs["attention_mask"][:, 7] = 0
    return inputs


def _decoded(out: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return (at_tokens(out[0], inputs["attention_mask"]),)


ALIKE = frozenset({"alike"})
LINEAR = frozenset({"no off by one"})  # every key of a query is as much further, which a softmax does not see
MODELS = [
    Model("bloom", _bloom, _text, _decoded, 1e-6, tags=LINEAR),
    Model("bloom, a token hidden", _bloom, _holed, _decoded, 1e-6, tags=ALIKE),
    Model("bloom, 16 heads", lambda: _bloom(n_head=16), _text, _decoded, 1e-6, tags=ALIKE),
    Model("mpt", _mpt, _text, _decoded, 1e-6, tags=LINEAR),
    Model("falcon", _falcon, _text, _decoded, 1e-6),
    Model("falcon, padded left", _falcon, lambda: _text(left=True), _decoded, 1e-6, tags=ALIKE),
    Model("falcon, eager", lambda: _falcon(attn_implementation="eager"), _text, _decoded, 1e-6, tags=ALIKE),
    Model(
        "falcon, keys shared",
        lambda: _falcon(multi_query=True, parallel_attn=True),
        _text,
        _decoded,
        1e-6,
        tags=ALIKE,
    ),
    Model(
        "falcon, new",
        lambda: _falcon(new_decoder_architecture=True, parallel_attn=True, num_kv_heads=2),
        _text,
        _decoded,
        1e-6,
        tags=ALIKE,
    ),
]
