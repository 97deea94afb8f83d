"""Models with Transformer-XL's positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models import Model, at_tokens, padding, tokens
from relpos.adapters.libraries import imported

NO_DROPOUT = {"dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
UV = ("pos_bias_u", "pos_bias_v")
_PARAKEET = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_kernel_size": 5,
    "subsampling_factor": 2,
    "subsampling_conv_channels": 4,
    "num_mel_bins": 8,
    **NO_DROPOUT,
}


def sounds(batch: int, length: int, width: int | None = None) -> Tensor:
    """Samples, or frames of this width."""
    shape = (batch, length) if width is None else (batch, length, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def at_frames(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    """The real frames of an encoder that makes as many as it is given."""
    return (at_tokens(out[0], inputs["attention_mask"]),)


def encoder_of_speech(class_name: str, config: str, **more: Any) -> nn.Module:
    """An encoder of wav2vec 2.0's kin, or of SeamlessM4T."""
    transformers = imported("transformers")
    settings = getattr(transformers, config)(**more)
    file = imported(
        f"transformers.models.{settings.model_type.replace('-', '_')}.modeling_{settings.model_type.replace('-', '_')}"
    )
    made: nn.Module = getattr(file, class_name)(settings)
    return made


def _parakeet(**more: Any) -> nn.Module:
    transformers = imported("transformers")
    made: nn.Module = transformers.ParakeetEncoder._from_config(transformers.ParakeetEncoderConfig(**_PARAKEET), **more)
    return made


def _nemotron() -> nn.Module:
    transformers = imported("transformers")
    config = transformers.NemotronAsrStreamingEncoderConfig(
        **_PARAKEET, sliding_window=9, default_num_lookahead_tokens=2
    )
    made: nn.Module = transformers.NemotronAsrStreamingEncoder(config)
    return made


def _frames() -> dict[str, Tensor]:
    return {"input_features": sounds(3, 47, 8), "attention_mask": padding(3, 47)}


def _subsampled(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (at_tokens(out[0], out.attention_mask),)


_WAV2VEC = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_depthwise_kernel_size": 5,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 2),
    "conv_stride": (4, 2),
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
    "max_source_positions": 20,
}


def _wav2vec(**more: Any) -> nn.Module:
    transformers = imported("transformers")
    made: nn.Module = transformers.Wav2Vec2ConformerModel._from_config(
        transformers.Wav2Vec2ConformerConfig(**_WAV2VEC), **more
    )
    return made


def samples() -> dict[str, Tensor]:
    """Sound of which a model of wav2vec 2.0's kin hears a frame every eight samples."""
    mask = (torch.arange(8 * 23) < torch.tensor([8 * 23, 8 * 17, 8 * 11])[:, None]).long()
    return {"input_values": sounds(3, 8 * 23), "attention_mask": mask}


def heard(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    """Its real frames."""
    return (at_tokens(out[0], inputs["attention_mask"][:, ::8]),)


SEAMLESS = {
    "hidden_size": 32,
    "feature_projection_input_dim": 10,
    "speech_encoder_layers": 2,
    "speech_encoder_attention_heads": 4,
    "speech_encoder_intermediate_size": 48,
    "speech_encoder_layerdrop": 0.0,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "conv_depthwise_kernel_size": 5,
    "max_source_positions": 30,
    "adaptor_dropout": 0.0,
}


def adapted(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    """What an adapter makes of the frames: all of the first row, where no frame is padded."""
    return (out[0][0], out[0][1:, 0])


def spoken() -> dict[str, Tensor]:
    """Frames of ten numbers."""
    return {"input_features": sounds(3, 24, 10), "attention_mask": padding(3, 24)}


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
        hidden_size=32,
        vocab_size=30,
        encoder_num_attention_heads=4,
        encoder_layers=2,
        encoder_linear_units=32,
        encoder_kernel_size=5,
    )
    model = _Encoder(file.FastSpeech2ConformerEncoder(config, config.encoder_config, use_encoder_input_layer=True))
    for name, x in model.named_parameters():
        if name.endswith(UV):  # left as memory was
            nn.init.zeros_(x)
    return model


_PARAKEET_TABLES = ("bias_u", "bias_v")
MODELS = [
    Model("parakeet", _parakeet, _frames, _subsampled, tables=_PARAKEET_TABLES),
    Model(
        "parakeet, eager",
        lambda: _parakeet(attn_implementation="eager"),
        lambda: {"input_features": sounds(3, 47, 8)},  # padded rows are NaN as published, in float64
        lambda out, inputs: (out[0],),
        1e-6,
        tables=_PARAKEET_TABLES,
        tags=frozenset({"alike"}),
    ),
    Model("nemotron_asr_streaming", _nemotron, _frames, _subsampled, tables=_PARAKEET_TABLES),
    Model("wav2vec2_conformer", _wav2vec, samples, heard, tables=UV, tags=frozenset({"no pickle"})),
    Model(
        "seamless_m4t",
        lambda: encoder_of_speech(
            "SeamlessM4TSpeechEncoder", "SeamlessM4TConfig", **SEAMLESS, adaptor_kernel_size=4, adaptor_stride=4
        ),
        spoken,
        adapted,
        tables=UV,
    ),
    Model(
        "fastspeech2_conformer",
        _fastspeech2,
        lambda: {"input_ids": tokens(3, 21, 30), "attention_mask": padding(3, 21)},
        at_frames,
        tables=UV,
    ),
]
