"""Models with BEiT's tables."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models import Model, images
from relpos.adapters.libraries import imported

TABLES = ("relative_position_bias_table",)
SMALL = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "layer_scale_init_value": 0.5,
    "drop_path_rate": 0.0,
}
UNPADDED = frozenset({"no padding"})
LIKE = frozenset({"no padding", "alike"})


def _build(name: str, *, own: bool = True, shared: bool = False, **more: Any) -> nn.Module:
    transformers = imported("transformers")
    config = getattr(transformers, f"{name}Config")(
        **{**SMALL, **more}, use_relative_position_bias=own, use_shared_relative_position_bias=shared
    )
    made: nn.Module = getattr(transformers, f"{name}Model")(config)
    return made


def _timm(*, own: bool = True, shared: bool = False) -> nn.Module:
    timm = imported("timm")
    made: nn.Module = timm.models.beit.Beit(
        img_size=(32, 24),
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        num_classes=5,
        init_values=0.5,
        use_rel_pos_bias=own,
        use_shared_rel_pos_bias=shared,
        head_init_scale=1.0,
    )
    return made


def _pixels(size: int | tuple[int, int] = 32) -> dict[str, Any]:
    return {"pixel_values": images(2, size)}


def _states(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (out[0],)


def _logits(out: Any, inputs: Any) -> tuple[Tensor, ...]:
    return (out,)


MODELS = [
    Model("beit", lambda: _build("Beit"), _pixels, _states, 1e-9, TABLES, tags=UNPADDED),
    Model(
        "beit, one table for all layers",
        lambda: _build("Beit", own=False, shared=True),
        _pixels,
        _states,
        1e-9,
        TABLES,
        tags=UNPADDED,
    ),
    Model(
        "beit, both tables, eager, another resolution",
        lambda: _build("Beit", shared=True, attn_implementation="eager"),
        lambda: _pixels((48, 24)) | {"interpolate_pos_encoding": True},
        _states,
        1e-6,
        TABLES,
        tags=LIKE,
    ),
    Model("data2vec-vision", lambda: _build("Data2VecVision"), _pixels, _states, 1e-9, TABLES, tags=UNPADDED),
    Model(
        "data2vec-vision, both tables, eager",
        lambda: _build("Data2VecVision", shared=True, attn_implementation="eager"),
        _pixels,
        _states,
        1e-9,
        TABLES,
        tags=LIKE,
    ),
    Model("timm beit", _timm, lambda: images(2, (32, 24)), _logits, 1e-9, TABLES, "timm", UNPADDED),
    Model(
        "timm beit, both tables",
        lambda: _timm(shared=True),
        lambda: images(2, (32, 24)),
        _logits,
        1e-9,
        TABLES,
        "timm",
        LIKE,
    ),
]
