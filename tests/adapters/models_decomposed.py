"""Models with a vector an axis."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from models import Model, images
from relpos.adapters.libraries import imported

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 8,
    "window_size": 4,
    "global_attn_indexes": [1],
    "output_channels": 16,
    "mlp_dim": 48,
}
TABLES = ("rel_pos_h", "rel_pos_w")
NO_PADDING = frozenset({"no padding", "no head order"})  # heads share the vectors
ALIKE = NO_PADDING | {"alike"}


def _encoder(file: str, name: str, **more: Any) -> nn.Module:
    """The vision encoder of an architecture in SAM's way."""
    library = imported(f"transformers.models.{file}.modeling_{file}")
    config = getattr(imported(f"transformers.models.{file}.configuration_{file}"), f"{name}Config")
    made: nn.Module = getattr(library, more.pop("model", f"{name}Encoder"))(config(**SMALL | more))
    return made


def _image() -> dict[str, Tensor]:
    return {"pixel_values": images(2, 64)}


def _features(out: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return (out[0],)


def _vitdet() -> nn.Module:
    transformers = imported("transformers")
    config = transformers.VitDetConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=64,
        pretrain_image_size=64,
        patch_size=8,
        window_size=4,
        window_block_indices=[0],
        use_relative_position_embeddings=True,
    )
    made: nn.Module = transformers.VitDetModel(config)
    return made


def _seggpt() -> nn.Module:
    transformers = imported("transformers")
    config = transformers.SegGptConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=[32, 16],
        patch_size=4,
        pretrain_image_size=16,
        mlp_dim=48,
        decoder_hidden_size=8,
        merge_index=0,
        drop_path_rate=0.0,
        intermediate_hidden_state_indices=[0, 1],
    )
    made: nn.Module = transformers.SegGptModel(config)
    return made


def _pairs() -> dict[str, Tensor]:
    return {"pixel_values": images(1, 16), "prompt_pixel_values": images(1, 16), "prompt_masks": images(1, 16)}


def _timm_sam() -> nn.Module:
    made: nn.Module = imported("timm.models.vision_transformer_sam").VisionTransformerSAM(
        img_size=64,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        use_rel_pos=True,
        window_size=4,
        global_attn_indexes=(1,),
        num_classes=5,
    )
    return made


def _mvit(**more: Any) -> nn.Module:
    library = imported("timm.models.mvitv2")
    config = library.MultiScaleVitCfg(depths=(1, 2), embed_dim=(16, 32), num_heads=(1, 2), **more)
    made: nn.Module = library.MultiScaleVit(config, img_size=64, num_classes=5)
    return made


def _logits(out: Tensor, inputs: Tensor) -> tuple[Tensor, ...]:
    return (out,)


_MODEL = {
    "pp_formulanet": {
        "model": "PPFormulaNetVisionModel",
        "post_conv_in_channels": 16,
        "post_conv_mid_channels": 16,
        "post_conv_out_channels": 16,
    }
}
_LIKE_SAM = {
    "sam_hq": "SamHQVision",
    "got_ocr2": "GotOcr2Vision",
    "deepseek_ocr2": "DeepseekOcr2SamVision",
    "unlimited_ocr": "UnlimitedOcrSamVision",
    "pp_formulanet": "PPFormulaNetVision",
    "slanext": "SLANeXtVision",
}

MODELS = [
    Model("sam", lambda: _encoder("sam", "SamVision"), _image, _features, tables=TABLES, tags=NO_PADDING),
    Model(
        "sam, eager",
        lambda: _encoder("sam", "SamVision", attn_implementation="eager"),
        _image,
        _features,
        1e-6,
        TABLES,
        tags=ALIKE,
    ),
    *(
        Model(
            architecture,
            lambda architecture=architecture, name=name: _encoder(architecture, name, **_MODEL.get(architecture, {})),
            _image,
            _features,
            1e-6,
            TABLES,
            tags=ALIKE,
        )
        for architecture, name in _LIKE_SAM.items()
    ),
    *(
        Model(
            f"{architecture}, eager",
            lambda architecture=architecture: _encoder(
                architecture, _LIKE_SAM[architecture], attn_implementation="eager"
            ),
            _image,
            _features,
            1e-6,
            TABLES,
            tags=ALIKE,
        )
        for architecture in ("sam_hq", "deepseek_ocr2", "unlimited_ocr")
    ),
    Model("vitdet", _vitdet, lambda: {"pixel_values": images(2, (64, 48))}, _features, tables=TABLES, tags=NO_PADDING),
    Model("seggpt", _seggpt, _pairs, _features, 1e-6, TABLES, tags=NO_PADDING),
    Model(
        "vision_transformer_sam",
        _timm_sam,
        lambda: images(2, 64),
        _logits,
        tables=TABLES,
        library="timm",
        tags=NO_PADDING,
    ),
    Model("mvitv2", _mvit, lambda: images(2, 64), _logits, tables=TABLES, library="timm", tags=NO_PADDING),
    Model(
        "mvitv2, class token",
        lambda: _mvit(use_cls_token=True),
        lambda: images(2, 64),
        _logits,
        tables=TABLES,
        library="timm",
        tags=ALIKE,
    ),
]
