"""Models with T5's buckets."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models import Model, at_tokens, padding, tokens
from relpos.adapters.libraries import imported

SMALL = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
ALIKE = frozenset({"alike"})
TABLES = ("relative_attention_bias.weight",)


def _build(config: str, model: str, **more: Any) -> nn.Module:
    transformers = imported("transformers")
    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**SMALL, **more))
    return made


def _translation() -> dict[str, Tensor]:
    return {
        "input_ids": tokens(3, 21),
        "attention_mask": padding(3, 21),
        "decoder_input_ids": tokens(3, 13, seed=1),
        "decoder_attention_mask": padding(3, 13),
    }


def _translated(out: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return at_tokens(out[0], inputs["decoder_attention_mask"]), at_tokens(
        out.encoder_last_hidden_state, inputs["attention_mask"]
    )


def _encoded(out: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return (at_tokens(out[0], inputs["attention_mask"]),)


def _text() -> dict[str, Tensor]:
    return {"input_ids": tokens(3, 21), "attention_mask": padding(3, 21)}


def _pix2struct() -> nn.Module:
    transformers = imported("transformers")
    text = transformers.Pix2StructTextConfig(
        vocab_size=99, hidden_size=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, is_decoder=True
    )
    text.initializer_range = 0.02  # the whole model's configuration sets it
    made: nn.Module = transformers.Pix2StructTextModel(text)
    return made


def _pop2piano() -> nn.Module:
    transformers = imported("transformers")
    made: nn.Module = transformers.Pop2PianoForConditionalGeneration(transformers.Pop2PianoConfig(**SMALL))
    return made


def _mpnet() -> nn.Module:
    transformers = imported("transformers")
    config = transformers.MPNetConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    made: nn.Module = transformers.MPNetModel(config)
    return made


# T5's layer norm takes its variance in float32, so that rounding in float64 shows as 1e-7
MODELS = [
    Model("t5", lambda: _build("T5Config", "T5Model"), _translation, _translated, 1e-6, TABLES),
    Model(
        "t5 encoder, eager",
        lambda: _build("T5Config", "T5EncoderModel", attn_implementation="eager"),
        _text,
        _encoded,
        1e-6,
        TABLES,
    ),
    Model("mt5", lambda: _build("MT5Config", "MT5Model"), _translation, _translated, 1e-6, TABLES, tags=ALIKE),
    Model("umt5", lambda: _build("UMT5Config", "UMT5Model"), _translation, _translated, 1e-6, TABLES),
    Model(
        "switch_transformers",
        lambda: _build("SwitchTransformersConfig", "SwitchTransformersModel", num_experts=2, router_jitter_noise=0.0),
        _translation,
        _translated,
        1e-6,
        TABLES,
    ),
    Model("longt5", lambda: _build("LongT5Config", "LongT5Model"), _translation, _translated, 1e-6, TABLES, tags=ALIKE),
    Model(
        "pix2struct",
        _pix2struct,
        lambda: {"input_ids": tokens(3, 21), "attention_mask": padding(3, 21)},
        _encoded,
        1e-6,
        TABLES,
    ),
    Model("mpnet", _mpnet, _text, _encoded, tables=TABLES),
    Model("pop2piano", _pop2piano, _translation, lambda out, inputs: (out.encoder_last_hidden_state,), 1e-6, TABLES),
]
