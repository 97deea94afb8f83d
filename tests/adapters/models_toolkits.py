"""Models of speech toolkits and Chronos-Bolt, from their wheels (`wheels.importable` must be open)."""

import importlib
from functools import partial
from typing import Any

import torch
from models_speech import ALIKE, UV
from torch import Tensor, nn

from models import Model, at_tokens, padding, sounds
from relpos.adapters.common.libraries import imported

LENGTHS = torch.tensor([96, 70, 50])
FRAMES = 25


class Attention(nn.Module):
    """A layer of attention by itself, called with random positions."""

    def __init__(self, path: str, *args: Any, distances: int = 2 * FRAMES - 1, **settings: Any) -> None:
        super().__init__()
        file, _, name = path.rpartition(".")
        self.layer = getattr(importlib.import_module(file), name)(*args, **settings)
        self.distances = distances

    def forward(self, x: Tensor, real: Tensor) -> tuple[Tensor, ...]:
        """With padding alone, and with chunks of four frames beside it."""
        positions = torch.randn(1, self.distances, x.shape[2], generator=torch.Generator().manual_seed(1)).to(x)
        chunk = torch.arange(x.shape[1]) // 4
        seen = real[:, None] & (chunk[:, None] >= chunk)
        file = type(self.layer).__module__.partition(".")[0]
        if file == "espnet":
            calls: tuple[Any, ...] = (positions, real[:, None]), (positions, seen)
        elif file == "espnet2":
            calls = (positions, ~real), (positions, ~real, ~seen[0])
        else:
            calls = (~(real[:, None] & real[:, :, None]), positions), (~seen, positions)
        return tuple(self.layer(x, x, x, *call) for call in calls)


def _frames() -> dict[str, Tensor]:
    return {"x": sounds(3, FRAMES, 32), "real": padding(3, FRAMES).bool()}


def _at_real(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return tuple(at_tokens(x, inputs["real"]) for x in out)


def _espnet(legacy: bool, **more: Any) -> nn.Module:
    file = importlib.import_module("espnet2.asr.encoder.conformer_encoder")
    prefix = "legacy_" if legacy else ""
    made: nn.Module = file.ConformerEncoder(
        20, output_size=32, attention_heads=4, linear_units=48, num_blocks=2, cnn_module_kernel=5, dropout_rate=0.0,
        rel_pos_type="legacy" if legacy else "latest", pos_enc_layer_type=prefix + "rel_pos",
        selfattention_layer_type=prefix + "rel_selfattn", **more,
    )  # fmt: skip
    return made


def _espnet_frames(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (torch.cat([frames[:length] for frames, length in zip(out[0], out[1], strict=True)]),)


class _Transcribed(nn.Module):
    """SpeechBrain's model, whose sinusoids are in float32 unless told otherwise."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        file = importlib.import_module("speechbrain.lobes.models.transformer.TransformerASR")
        self.model = file.TransformerASR(
            tgt_vocab=20, input_size=12, d_model=32, nhead=4, num_encoder_layers=2, num_decoder_layers=1, d_ffn=48,
            attention_type="RelPosMHAXL", positional_encoding=None, normalize_before=True, dropout=0.0, kernel_size=5,
            csgu_linear_units=48, **settings,
        )  # fmt: skip
        self.model.positional_encoding.emb_dtype = torch.float64

    def forward(self, x: Tensor, real: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        """Encoded frames, and decoded tokens."""
        lengths = real.sum(-1) / real.shape[1]
        encoded, decoded = self.model(x, text, lengths)
        return encoded, self.model.encode(x, lengths), decoded


def _read() -> dict[str, Tensor]:
    return {"x": sounds(3, FRAMES, 12), "real": padding(3, FRAMES).bool(), "text": torch.arange(1, 16).view(3, 5)}


def _at_real_and_text(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (*(at_tokens(x, inputs["real"]) for x in out[:-1]), out[-1])


def _bolt() -> nn.Module:
    config = imported("transformers").T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=2, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    config.chronos_config = {
        "context_length": 256, "prediction_length": 16, "input_patch_size": 8, "input_patch_stride": 8,
        "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True,
    }  # fmt: skip
    made: nn.Module = importlib.import_module("chronos.chronos_bolt").ChronosBoltModelForForecasting(config)
    return made


def _series() -> dict[str, Tensor]:
    series = sounds(3, 250)
    series[1, :100] = torch.nan  # not observed
    return {"context": series}


_ESPNET = "espnet.nets.pytorch_backend.transformer.attention."
_TRANSDUCER = "espnet2.asr_transducer.encoder.modules.attention.RelPositionMultiHeadedAttention"
_NEMO = "nemo.collections.asr.parts.submodules.multi_head_attention.RelPositionMultiHeadAttention"
_SPEECH = partial(Model, inputs=_frames, outputs=_at_real, exact=1e-10, tables=UV)
_ENCODER = {
    "inputs": lambda: {"xs_pad": sounds(3, 96, 20), "ilens": LENGTHS},
    "outputs": _espnet_frames,
    "exact": 1e-10,
    "tables": UV,
}
MODELS = [
    Model("espnet", lambda: _espnet(False), **_ENCODER),
    Model("espnet, zero_triu", lambda: _espnet(False, zero_triu=True), **_ENCODER, tags=ALIKE),
    Model("espnet legacy", lambda: _espnet(True), **_ENCODER),
    _SPEECH("espnet legacy, chunks", lambda: Attention(
        _ESPNET + "LegacyRelPositionMultiHeadedAttention", 4, 32, 0.0, distances=FRAMES
    ), tags=ALIKE),
    _SPEECH("espnet legacy, zero_triu", lambda: Attention(
        _ESPNET + "LegacyRelPositionMultiHeadedAttention", 4, 32, 0.0, zero_triu=True, distances=FRAMES
    ), tags=ALIKE),
    _SPEECH("espnet transducer", lambda: Attention(_TRANSDUCER, 4, 32)),
    _SPEECH("espnet transducer, simplified", lambda: Attention(_TRANSDUCER, 4, 32, simplified_attention_score=True)),
    _SPEECH("nemo", lambda: Attention(_NEMO, 4, 32, 0.0, None, None)),
    _SPEECH("nemo, sdpa", lambda: Attention(_NEMO, 4, 32, 0.0, None, None, use_pytorch_sdpa=True), tags=ALIKE),
    Model("speechbrain", lambda: _Transcribed(encoder_module="conformer"), _read, _at_real_and_text, 1e-10, UV),
    Model(
        "speechbrain, branchformer, causal", lambda: _Transcribed(encoder_module="branchformer", causal=True),
        _read, _at_real_and_text, 1e-10, UV, ALIKE,
    ),
    Model(
        "speechbrain, separator", lambda: importlib.import_module("speechbrain.lobes.models.dual_path")
        .SBConformerEncoderBlock(2, 32, 4, 48, dropout=0.0, kernel_size=5), lambda: {"x": sounds(2, FRAMES, 32)},
        exact=1e-10, tables=UV, tags=ALIKE,
    ),
    Model(
        "chronos bolt", _bolt, _series, lambda out, inputs: (out.quantile_preds,), 1e-9,
        ("relative_attention_bias.weight",), ALIKE,
    ),
]  # fmt: skip
