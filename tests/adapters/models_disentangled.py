"""Models with disentangled attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models import Model, at_tokens, padding, tokens
from relpos.adapters.libraries import imported

SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
}
TABLES = ("rel_embeddings.weight",)


def _build(config: str, model: str, **more: Any) -> nn.Module:
    transformers = imported("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**SMALL | more))
    return made


def _v2(**more: Any) -> nn.Module:
    return _build("DebertaV2Config", "DebertaV2Model", type_vocab_size=0, position_biased_input=False, **more)


def _v3() -> nn.Module:
    """With buckets, shared projections, a norm of the table and the convolution, as v2-xlarge and v3 have them."""
    return _v2(position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm", conv_kernel_size=3)


def _sew_d() -> nn.Module:
    made = _build(
        "SEWDConfig",
        "SEWDModel",
        conv_dim=(16, 16),
        conv_stride=(4, 2),
        conv_kernel=(4, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=6,
        num_conv_pos_embedding_groups=2,
        position_buckets=8,
        squeeze_factor=2,
        mask_time_prob=0.0,
        mask_feature_prob=0.0,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
    )
    # PyTorch pickles no module with a weight norm
    made.get_submodule("encoder.pos_conv_embed").conv = nn.Conv1d(32, 32, 6, stride=2, padding=3, groups=2)
    return made


def _text() -> dict[str, Tensor]:
    return {"input_ids": tokens(3, 21), "attention_mask": padding(3, 21)}


def _encoded(out: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return (at_tokens(out[0], inputs["attention_mask"]),)


def _sound() -> dict[str, Tensor]:
    wave = torch.randn(2, 8 * 40, generator=torch.Generator().manual_seed(0))
    return {"input_values": wave, "attention_mask": (torch.arange(320) < torch.tensor([[320], [240]])).long()}


# published and checkpointed, reentrant, these go back through the norm of the table once a layer, which PyTorch refuses
NORMED = frozenset({"no reentrant"})

MODELS = [
    Model("deberta_v2", _v3, _text, _encoded, tables=TABLES, tags=NORMED),
    Model("deberta_v2, clipped", lambda: _v2(max_relative_positions=9), _text, _encoded, tables=TABLES),
    Model(
        "deberta_v2, c2p alone",
        lambda: _v2(pos_att_type=["c2p"], position_buckets=8),
        _text,
        _encoded,
        tables=TABLES,
        tags=frozenset({"alike"}),
    ),
    Model(
        "deberta_v2, p2c alone",
        lambda: _v2(pos_att_type=["p2c"], position_buckets=8),
        _text,
        _encoded,
        tables=TABLES,
        tags=frozenset({"alike"}),
    ),
    # its layer norm is computed in float32
    Model("deberta", lambda: _build("DebertaConfig", "DebertaModel"), _text, _encoded, 1e-6, TABLES),
    Model("sew_d", _sew_d, _sound, lambda out, inputs: (out[0][0], out[0][1, :30]), tables=TABLES, tags=NORMED),
]
