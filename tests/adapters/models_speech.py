"""Models of speech: Transformer-XL's and Shaw's positions, and WavLM's gated bias."""

from typing import Any

import torch
from torch import Tensor, nn

from models import SMALL, Model, at_real, at_tokens, first, hf, padding, sounds, tokens
from relpos.adapters.common.libraries import imported

ALIKE = frozenset({"alike"})
UV = ("pos_bias_u", "pos_bias_v")


def spoken() -> dict[str, Tensor]:
    """Frames of ten numbers."""
    return {"input_features": sounds(3, 24, 10), "attention_mask": padding(3, 24)}


def samples() -> dict[str, Tensor]:
    """Sound of which a model of wav2vec 2.0's kin hears a frame every eight samples."""
    mask = (torch.arange(8 * 23) < torch.tensor([8 * 23, 8 * 17, 8 * 11])[:, None]).long()
    return {"input_values": sounds(3, 8 * 23), "attention_mask": mask}


def _heard(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    """Its real frames."""
    return (at_tokens(out[0], inputs["attention_mask"][:, ::8]),)


def _text() -> dict[str, Tensor]:
    return {"input_ids": tokens(3, 21, 30), "attention_mask": padding(3, 21)}


# Transformer-XL

_PARAKEET = {
    **SMALL, "conv_kernel_size": 5, "subsampling_factor": 2, "subsampling_conv_channels": 4, "num_mel_bins": 8,
    "dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip
_BIASES = ("bias_u", "bias_v")


def _parakeet(**more: Any) -> nn.Module:
    transformers = imported("transformers")
    made: nn.Module = transformers.ParakeetEncoder._from_config(transformers.ParakeetEncoderConfig(**_PARAKEET), **more)
    return made


def _nemotron() -> nn.Module:
    return hf(
        "nemotron_asr_streaming", "NemotronAsrStreamingEncoder", "", **_PARAKEET, sliding_window=9,
        default_num_lookahead_tokens=2,
    )  # fmt: skip


def _frames() -> dict[str, Tensor]:
    return {"input_features": sounds(3, 47, 8), "attention_mask": padding(3, 47)}


def _subsampled(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (at_tokens(out[0], out.attention_mask),)


_OF_SAMPLES = {
    **SMALL, "conv_dim": (16, 16), "conv_kernel": (4, 2), "conv_stride": (4, 2), "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip


def _wav2vec2_conformer() -> nn.Module:
    return hf(
        "wav2vec2_conformer", "Wav2Vec2Conformer", **_OF_SAMPLES, conv_depthwise_kernel_size=5, max_source_positions=20
    )


def _seamless(version: str) -> nn.Module:
    return hf(
        f"seamless_m4t{version and '_' + version}", f"SeamlessM4T{version}", "SpeechEncoder", hidden_size=32,
        feature_projection_input_dim=10, speech_encoder_layers=2, speech_encoder_attention_heads=4,
        speech_encoder_intermediate_size=48, speech_encoder_layerdrop=0.0, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, conv_depthwise_kernel_size=5, max_source_positions=30, adaptor_dropout=0.0,
        adaptor_kernel_size=4, adaptor_stride=4,
    )  # fmt: skip


def _adapted(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    """What an adapter makes of the frames: all of the first row, where no frame is padded."""
    return (out[0][0], out[0][1:, 0])


class _Encoder(nn.Module):
    """FastSpeech2's encoder alone: the model between it and its decoder knows float32 alone."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.encoder(input_ids, attention_mask[:, None], return_dict=True)


def _fastspeech2() -> nn.Module:
    transformers = imported("transformers")
    file = imported("transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer")
    config = transformers.FastSpeech2ConformerConfig(
        hidden_size=32, vocab_size=30, encoder_num_attention_heads=4, encoder_layers=2, encoder_linear_units=32,
        encoder_kernel_size=5,
    )  # fmt: skip
    model = _Encoder(file.FastSpeech2ConformerEncoder(config, config.encoder_config, use_encoder_input_layer=True))
    for name, x in model.named_parameters():
        if name.endswith(UV):  # left as memory was
            nn.init.zeros_(x)
    return model


# Clipped offsets


def _phi4(**more: Any) -> nn.Module:
    return hf(
        "phi4_multimodal", "Phi4MultimodalAudio", hidden_size=32, intermediate_size=48, num_blocks=2,
        num_attention_heads=4, ext_pw_out_channel=32, depthwise_separable_out_channel=32, input_size=16,
        nemo_conv_channels=8, **{"bias_max_distance": 5} | more,
    )  # fmt: skip


_SOFT = frozenset({"no padding"})  # its mask is a number added to scores, 1 where a frame is seen


def _phi4_frames(count: int, batch: int = 2) -> dict[str, Tensor]:
    return {"hidden_states": sounds(batch, count, 16), "mask": padding(batch, count).bool()}


# Shaw


def _wav2vec2_bert(**more: Any) -> nn.Module:
    return hf(
        "wav2vec2_bert", "Wav2Vec2Bert", **SMALL, feature_projection_input_dim=10, conv_depthwise_kernel_size=5,
        left_max_position_embeddings=7, right_max_position_embeddings=3, max_source_positions=30, layerdrop=0.0,
        apply_spec_augment=False, **more,
    )  # fmt: skip


def _speecht5() -> nn.Module:
    transformers = imported("transformers")
    file = imported("transformers.models.speecht5.modeling_speecht5")
    config = transformers.SpeechT5Config(
        vocab_size=30, hidden_size=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=32,
        decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=32, encoder_max_relative_position=6,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, hidden_dropout=0.0, positional_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, max_text_positions=40,
    )  # fmt: skip
    made: nn.Module = transformers.SpeechT5Model(
        config, file.SpeechT5EncoderWithTextPrenet(config), file.SpeechT5DecoderWithTextPrenet(config)
    )
    return made


def _translation() -> dict[str, Tensor]:
    inputs = _text()
    return {"input_values": inputs.pop("input_ids"), "decoder_input_values": tokens(3, 9, 30, seed=1), **inputs}


def _translated(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return out[0], at_tokens(out.encoder_last_hidden_state, inputs["attention_mask"])


def _vits() -> nn.Module:
    """As the whole model has it; without an implementation its encoder makes no mask."""
    transformers = imported("transformers")
    config = transformers.VitsConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, window_size=4,
        flow_size=8, attn_implementation="eager",
    )  # fmt: skip
    made: nn.Module = imported("transformers.models.vits.modeling_vits").VitsTextEncoder(config)
    return made


def _vits_inputs() -> dict[str, Tensor]:
    inputs = _text()
    return inputs | {"padding_mask": inputs["attention_mask"][:, :, None].float()}


def _granite(file: str, prefix: str) -> nn.Module:
    transformers, library = imported("transformers"), imported(f"transformers.models.{file}.modeling_{file}")
    config = getattr(transformers, f"{prefix}EncoderConfig")(
        input_dim=10, num_layers=2, hidden_dim=32, num_heads=4, dim_head=8, output_dim=12, context_size=8,
        max_pos_emb=16, conv_kernel_size=5, dropout=0.0,
    )  # fmt: skip
    made: nn.Module = getattr(library, f"{prefix}CTCEncoder")(config)
    return made


def _granite5() -> nn.Module:
    return hf(
        "granite_speech5", "GraniteSpeech5Encoder", "", **SMALL, num_mel_bins=3, num_key_value_heads=4, head_dim=8,
        vocab_size=12, context_size=8, max_position_embeddings=16, subsample_layers=[], attention_dropout=0.0,
    )  # fmt: skip


# WavLM


def _wavlm(**more: Any) -> nn.Module:
    return hf(
        "wavlm", "WavLM", **_OF_SAMPLES, num_feat_extract_layers=2, num_buckets=16, max_bucket_distance=20, **more
    )


_GATED = ("rel_attn_embed.weight", "gru_rel_pos_const")
_TAGS = frozenset({"no pickle", "not reentrant"})
ONE_TABLE = frozenset({"no head order"})
"""All heads share a table."""
WINDOWS = ONE_TABLE | {"windows"}

MODELS = [
    Model("phi4_multimodal", _phi4, lambda: _phi4_frames(200), tables=("bias_values.weight",), tags=_SOFT),
    Model(
        "phi4_multimodal, in pieces, symmetric, eager",
        lambda: _phi4(bias_symmetric=True, bias_max_distance=500, attn_implementation="eager"),
        lambda: _phi4_frames(4100, batch=1),  # published code fails on more
        exact=1e-6,
        tables=("bias_values.weight",),
        tags=_SOFT | {"alike"},
    ),
    Model("parakeet", _parakeet, _frames, _subsampled, tables=_BIASES),
    Model(
        "parakeet, eager",
        lambda: _parakeet(attn_implementation="eager"),
        lambda: {"input_features": sounds(3, 47, 8)},  # padded rows are NaN as published, in float64
        first,
        1e-6,
        _BIASES,
        ALIKE,
    ),
    Model("nemotron_asr_streaming", _nemotron, _frames, _subsampled, tables=_BIASES),
    Model("wav2vec2_conformer", _wav2vec2_conformer, samples, _heard, tables=UV, tags={"no pickle"}),
    Model("seamless_m4t", lambda: _seamless(""), spoken, _adapted, tables=UV),
    Model("fastspeech2_conformer", _fastspeech2, _text, at_real, tables=UV),
    Model("wav2vec2_bert", _wav2vec2_bert, spoken, at_real, tags=ONE_TABLE),
    Model(
        "wav2vec2_bert, relative",
        lambda: _wav2vec2_bert(position_embeddings_type="relative", attn_implementation="eager"),
        spoken,
        at_real,
        tables=UV,
        tags=ONE_TABLE | ALIKE,
    ),
    Model("seamless_m4t_v2", lambda: _seamless("v2"), spoken, _adapted, tags=ONE_TABLE),
    Model("speecht5", _speecht5, _translation, _translated, tags=ONE_TABLE | {"not reentrant"}),
    Model("vits", _vits, _vits_inputs, at_real, tags=ONE_TABLE),
    *(
        Model(
            file,
            lambda file=file, prefix=prefix: _granite(file, prefix),
            lambda: {"hidden_states": sounds(2, 21, 10)},
            tags=tags,
        )
        for file, prefix, tags in (
            ("granite_speech", "GraniteSpeech", WINDOWS),
            ("granite_speech_plus", "GraniteSpeechPlus", WINDOWS | ALIKE),
        )
    ),
    Model(
        "granite_speech5",
        _granite5,
        lambda: {"input_features": sounds(3, 21, 12), "attention_mask": padding(3, 21)},
        at_real,
        tags=WINDOWS,
    ),
    Model("wavlm", _wavlm, samples, _heard, tables=_GATED, tags=_TAGS),
    Model(
        "wavlm, norm first",
        lambda: _wavlm(do_stable_layer_norm=True),
        samples,
        _heard,
        tables=_GATED,
        tags=_TAGS | ALIKE,
    ),
]
