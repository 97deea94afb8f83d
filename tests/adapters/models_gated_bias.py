"""Models with WavLM's gated bias."""

from __future__ import annotations

from typing import Any

from models_transformer_xl import heard, samples
from torch import nn

from models import Model
from relpos.adapters.libraries import imported

_WAVLM = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 2),
    "conv_stride": (4, 2),
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "num_buckets": 16,
    "max_bucket_distance": 20,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}


def _wavlm(**more: Any) -> nn.Module:
    transformers = imported("transformers")
    made: nn.Module = transformers.WavLMModel(transformers.WavLMConfig(**_WAVLM, **more))
    return made


_TABLES = ("rel_attn_embed.weight", "gru_rel_pos_const")
_TAGS = frozenset({"no pickle", "not reentrant"})
MODELS = [
    Model("wavlm", _wavlm, samples, heard, tables=_TABLES, tags=_TAGS),
    Model(
        "wavlm, norm first",
        lambda: _wavlm(do_stable_layer_norm=True),
        samples,
        heard,
        tables=_TABLES,
        tags=_TAGS | {"alike"},
    ),
]
