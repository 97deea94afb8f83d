"""Models with Shaw's positions."""

from __future__ import annotations

from typing import Any

from models_transformer_xl import (
    SEAMLESS,
    UV,
    adapted,
    at_frames,
    encoder_of_speech,
    sounds,
    spoken,
)
from torch import Tensor, nn

from models import Model, at_tokens, padding, tokens
from relpos.adapters.libraries import imported

_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "feature_projection_input_dim": 10,
    "conv_depthwise_kernel_size": 5,
    "left_max_position_embeddings": 7,
    "right_max_position_embeddings": 3,
    "max_source_positions": 30,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


def _bert(**more: Any) -> nn.Module:
    return encoder_of_speech("Wav2Vec2BertModel", "Wav2Vec2BertConfig", **_BERT, **more)


def _speecht5() -> nn.Module:
    transformers = imported("transformers")
    file = imported("transformers.models.speecht5.modeling_speecht5")
    config = transformers.SpeechT5Config(
        vocab_size=30,
        hidden_size=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=32,
        encoder_max_relative_position=6,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        hidden_dropout=0.0,
        positional_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_text_positions=40,
    )
    made: nn.Module = transformers.SpeechT5Model(
        config, file.SpeechT5EncoderWithTextPrenet(config), file.SpeechT5DecoderWithTextPrenet(config)
    )
    return made


def _translation() -> dict[str, Tensor]:
    return {
        "input_values": tokens(3, 21, 30),
        "attention_mask": padding(3, 21),
        "decoder_input_values": tokens(3, 9, 30, seed=1),
    }


def _translated(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return out[0], at_tokens(out.encoder_last_hidden_state, inputs["attention_mask"])


def _vits() -> nn.Module:
    transformers = imported("transformers")
    file = imported("transformers.models.vits.modeling_vits")
    config = transformers.VitsConfig(
        vocab_size=30,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=32,
        window_size=4,
        flow_size=8,
        attn_implementation="eager",  # as the whole model has it; without, its encoder makes no mask
    )
    made: nn.Module = file.VitsTextEncoder(config)
    return made


def _text() -> dict[str, Tensor]:
    mask = padding(3, 21)
    return {"input_ids": tokens(3, 21, 30), "padding_mask": mask[:, :, None].float(), "attention_mask": mask}


_GRANITE = {
    "input_dim": 10,
    "num_layers": 2,
    "hidden_dim": 32,
    "num_heads": 4,
    "dim_head": 8,
    "output_dim": 12,
    "context_size": 8,
    "max_pos_emb": 16,
    "conv_kernel_size": 5,
    "dropout": 0.0,
}


def _granite(name: str) -> nn.Module:
    transformers = imported("transformers")
    architecture = "granite_speech" + ("_plus" if "Plus" in name else "")
    file = imported(f"transformers.models.{architecture}.modeling_{architecture}")
    made: nn.Module = getattr(file, f"{name}CTCEncoder")(getattr(transformers, f"{name}EncoderConfig")(**_GRANITE))
    return made


def _granite5() -> nn.Module:
    transformers = imported("transformers")
    config = transformers.GraniteSpeech5EncoderConfig(
        num_mel_bins=3,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        intermediate_size=48,
        vocab_size=12,
        context_size=8,
        max_position_embeddings=16,
        subsample_layers=[],
        attention_dropout=0.0,
    )
    made: nn.Module = transformers.GraniteSpeech5Encoder(config)
    return made


ONE_TABLE = frozenset({"no head order"})
"""All heads share a table."""
WINDOWS = ONE_TABLE | {"windows"}

MODELS = [
    Model("wav2vec2_bert", _bert, spoken, at_frames, tags=ONE_TABLE),
    Model(
        "wav2vec2_bert, relative",
        lambda: _bert(position_embeddings_type="relative", attn_implementation="eager"),
        spoken,
        at_frames,
        tables=UV,
        tags=ONE_TABLE | frozenset({"alike"}),
    ),
    Model(
        "seamless_m4t_v2",
        lambda: encoder_of_speech(
            "SeamlessM4Tv2SpeechEncoder", "SeamlessM4Tv2Config", **SEAMLESS, adaptor_kernel_size=4, adaptor_stride=4
        ),
        spoken,
        adapted,
        tags=ONE_TABLE,
    ),
    Model("speecht5", _speecht5, _translation, _translated, tags=ONE_TABLE | {"not reentrant"}),
    Model("vits", _vits, _text, at_frames, tags=ONE_TABLE),
    Model(
        "granite_speech",
        lambda: _granite("GraniteSpeech"),
        lambda: {"hidden_states": sounds(2, 21, 10)},
        lambda out, inputs: (out[0],),
        tags=WINDOWS,
    ),
    Model(
        "granite_speech_plus",
        lambda: _granite("GraniteSpeechPlus"),
        lambda: {"hidden_states": sounds(2, 21, 10)},
        lambda out, inputs: (out[0],),
        tags=WINDOWS | frozenset({"alike"}),
    ),
    Model(
        "granite_speech5",
        _granite5,
        lambda: {"input_features": sounds(3, 21, 12), "attention_mask": padding(3, 21)},
        at_frames,
        tags=WINDOWS,
    ),
]
