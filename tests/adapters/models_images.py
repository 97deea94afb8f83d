"""Models of images: tables of windows and of whole images, vectors of each axis, and biases of distances."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from models import SMALL, Model, first, hf, images, timm
from relpos.adapters.common.libraries import imported

TABLES = (
    "relative_position_bias_table", "mlp.2.weight", "meta_mlp.fc2.weight", "rel_pos_h", "rel_pos_w", "rel_pos_t",
    "attention_biases", "height_rel", "width_rel",
)  # fmt: skip
IMAGE = frozenset({"no padding"})
WINDOWS = IMAGE | {"windows"}
BY_AXIS = IMAGE | {"no head order"}  # heads share the vectors
NORMED = WINDOWS | {"training differs"}  # by batch norm
ALIKE = frozenset({"alike"})


def _hf(
    name: str, build: Any, size: int | tuple[int, int], tags: frozenset[str], exact: float = 1e-9, **more: Any
) -> Model:
    """A model of transformers."""
    return Model(name, build, lambda: {"pixel_values": images(2, size), **more}, first, exact, TABLES, tags)


def _timm(
    name: str, build: Any, size: int | tuple[int, int], tags: frozenset[str], tables: tuple[str, ...] = TABLES
) -> Model:
    return Model(name, build, lambda: images(2, size), first, tables=tables, tags=tags)


_rel_pos = partial(_timm, tables=(*TABLES, "mlp.fc2.weight"))


# Windows

_SWIN = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
    "drop_path_rate": 0.0,
}  # fmt: skip


def _swin(file: str, prefix: str, **more: Any) -> Any:
    return lambda: hf(file, prefix, **_SWIN | more)


def _clap() -> nn.Module:
    return hf(
        "clap", "ClapAudio", spec_size=32, num_mel_bins=8, patch_size=4, patch_stride=[4, 4],
        patch_embeds_hidden_size=16, hidden_size=32, depths=[2, 1], num_attention_heads=[2, 4], window_size=4,
        drop_path_rate=0.0,
    )  # fmt: skip


def _clap_inputs() -> dict[str, Tensor]:
    features = images(2, (128, 8), channels=1)
    return {"input_features": features, "is_longer": features.new_zeros(2, 1).bool()}


def _timm_swin(file: str, kind: str) -> Any:
    settings = {key: tuple(x) if isinstance(x, list) else x for key, x in _SWIN.items() if key != "image_size"}
    return lambda: timm(file, kind, img_size=32, **settings)


def _torchvision(version: int) -> nn.Module:
    """Swin of torchvision: of two stages, whose second has one window, so that nothing is shifted."""
    library = imported("torchvision.models.swin_transformer")
    sizes = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "stochastic_depth_prob": 0.0, "num_classes": 5}
    if version == 3:
        video = imported("torchvision.models.video.swin_transformer")
        made: nn.Module = video.SwinTransformer3d(patch_size=[2, 4, 4], window_size=[2, 3, 3], **sizes)
    elif version == 2:
        parts = {"block": library.SwinTransformerBlockV2, "downsample_layer": library.PatchMergingV2}
        made = library.SwinTransformer(patch_size=[4, 4], window_size=[4, 3], **sizes, **parts)
    else:
        made = library.SwinTransformer(patch_size=[4, 4], window_size=[4, 3], **sizes)
    return made


def _maxvit() -> nn.Module:
    """MaxViT of torchvision: windows, and a grid, of 3 x 3."""
    made: nn.Module = imported("torchvision.models.maxvit").MaxVit(
        (24, 24), stem_channels=8, partition_size=3, block_channels=[16, 32], block_layers=[1, 1], head_dim=8,
        stochastic_depth_prob=0.0, num_classes=5,
    )  # fmt: skip
    return made


def _multiscale() -> nn.Module:
    """MViT of torchvision: queries pooled in the second layer, keys in both, in the first to half of all rows."""
    library = imported("torchvision.models.video.mvit")
    block = partial(library.MSBlockConfig, kernel_kv=[3, 3, 3], stride_kv=[1, 2, 2])
    layers = [
        block(num_heads=1, input_channels=16, output_channels=32, kernel_q=[], stride_q=[]),
        block(num_heads=2, input_channels=32, output_channels=32, kernel_q=[3, 3, 3], stride_q=[1, 2, 2]),
    ]
    made: nn.Module = library.MViT(
        (20, 20), 4, layers, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
        proj_after_attn=True, num_classes=5,
    )  # fmt: skip
    return made


def _video(frames: int = 6) -> Tensor:
    return images(2 * frames, 20).unflatten(0, (2, frames)).transpose(1, 2)


# BEiT


SMALL_BEIT = {
    **SMALL, "image_size": 32, "patch_size": 8, "layer_scale_init_value": 0.5, "drop_path_rate": 0.0,
}  # fmt: skip


def _beit(file: str, prefix: str, *, own: bool = True, shared: bool = False, **more: Any) -> Any:
    tables = {"use_relative_position_bias": own, "use_shared_relative_position_bias": shared}
    return lambda: hf(file, prefix, **SMALL_BEIT, **tables, **more)


def _timm_beit(shared: bool = False) -> nn.Module:
    return timm(
        "beit", "Beit", img_size=(32, 24), patch_size=8, embed_dim=32, depth=2, num_heads=4, init_values=0.5,
        use_rel_pos_bias=True, use_shared_rel_pos_bias=shared, head_init_scale=1.0,
    )  # fmt: skip


_DATA2VEC = ("data2vec/data2vec_vision", "Data2VecVision")

# Vectors of each axis

_SAM = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 8,
    "window_size": 4, "global_attn_indexes": [1], "output_channels": 16, "mlp_dim": 48,
}  # fmt: skip
_LIKE_SAM: dict[str, tuple[str, str]] = {
    "sam_hq": ("SamHQVision", "Encoder"),
    "got_ocr2": ("GotOcr2Vision", "Encoder"),
    "deepseek_ocr2": ("DeepseekOcr2SamVision", "Encoder"),
    "unlimited_ocr": ("UnlimitedOcrSamVision", "Encoder"),
    "pp_formulanet": ("PPFormulaNetVision", "Model"),
    "slanext": ("SLANeXtVision", "Encoder"),
}


def _sam(file: str, prefix: str, part: str = "Encoder", **more: Any) -> Any:
    """The vision encoder of an architecture in SAM's way."""
    if file == "pp_formulanet":
        more |= {f"post_conv_{name}_channels": 16 for name in ("in", "mid", "out")}
    return lambda: hf(file, prefix, part, **_SAM | more)


def _vitdet() -> nn.Module:
    return hf(
        "vitdet", "VitDet", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=64,
        pretrain_image_size=64, patch_size=8, window_size=4, window_block_indices=[0],
        use_relative_position_embeddings=True,
    )  # fmt: skip


def _seggpt() -> nn.Module:
    return hf(
        "seggpt", "SegGpt", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=[32, 16],
        patch_size=4, pretrain_image_size=16, mlp_dim=48, decoder_hidden_size=8, merge_index=0, drop_path_rate=0.0,
        intermediate_hidden_state_indices=[0, 1],
    )  # fmt: skip


def _timm_sam() -> nn.Module:
    return timm(
        "vision_transformer_sam", "VisionTransformerSAM", img_size=64, patch_size=8, embed_dim=32, depth=2, num_heads=2,
        use_rel_pos=True, window_size=4, global_attn_indexes=(1,),
    )  # fmt: skip


def _mvit(**more: Any) -> nn.Module:
    config = imported("timm.models.mvitv2").MultiScaleVitCfg(
        depths=(1, 2), embed_dim=(16, 32), num_heads=(1, 2), **more
    )
    return timm("mvitv2", "MultiScaleVit", cfg=config, img_size=64)


def _botnet(**more: Any) -> nn.Module:
    file = imported("timm.models.byobnet")
    block = file.ByoBlockCfg(type="self_attn", d=2, c=32, s=2, gs=0, br=0.5, self_attn_kwargs={"num_heads": 2, **more})
    config = file.ByoModelCfg(
        blocks=(file.ByoBlockCfg(type="bottle", d=1, c=16, s=1, gs=0, br=0.5), block),
        stem_chs=8,
        stem_type="3x3",
        fixed_input_size=True,
        self_attn_layer="bottleneck",
    )
    return timm("byobnet", "ByobNet", cfg=config, img_size=(32, 24))


# timm's modules of relative position


def _relpos_vit(**more: Any) -> Any:
    return lambda: timm(
        "vision_transformer_relpos", "VisionTransformerRelPos", img_size=(32, 24), patch_size=8, embed_dim=32, depth=2,
        num_heads=4, **more,
    )  # fmt: skip


def _maxxvit(kind: str, conv: bool = False) -> nn.Module:
    maxxvit = imported("timm.models.maxxvit")
    transformer = maxxvit.MaxxVitTransformerCfg(
        dim_head=8, window_size=(4, 4), grid_size=(4, 4), rel_pos_type=kind, rel_pos_dim=16, use_nchw_attn=conv
    )
    config = maxxvit.MaxxVitCfg(
        embed_dim=(16, 32), depths=(1, 1), block_type=("C", "T" if conv else "M"), stem_width=8,
        transformer_cfg=transformer,
    )  # fmt: skip
    return timm("maxxvit", "MaxxVit", cfg=config, img_size=32)


def _gcvit() -> nn.Module:
    return timm(
        "gcvit", "GlobalContextVit", img_size=32, window_size=(4, 2), depths=(2, 1), num_heads=(2, 4), embed_dim=16
    )


# Distances: LeViT and what came after it


def _forget(module: nn.Module, inputs: Any) -> None:
    """In `eval()` LeViT keeps its biases with the graph that made them: a second backward pass would fail."""
    for one in module.modules():
        if hasattr(one, "attention_bias_cache"):
            one.attention_bias_cache = {}


def _forgetful(model: nn.Module) -> nn.Module:
    model.register_forward_pre_hook(_forget)
    return model


def _levit() -> nn.Module:
    return _forgetful(hf(
        "levit", "Levit", image_size=96, hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ))  # fmt: skip


def _timm_levit(**more: Any) -> nn.Module:
    return _forgetful(timm(
        "levit", "Levit", img_size=(64, 96), embed_dim=(16, 24), num_heads=(2, 3), depth=(1, 1), key_dim=8, **more
    ))  # fmt: skip


def _tiny_vit() -> nn.Module:
    return _forgetful(timm(
        "tiny_vit", "TinyVit", embed_dims=(16, 32), depths=(1, 2), num_heads=(2, 4), window_sizes=(4, 4)
    ))  # fmt: skip


def _efficientformer(file: str, kind: str, **more: Any) -> Any:
    return lambda: _forgetful(timm(file, kind, embed_dims=(8, 8, 16, 32), **more))


def _efficientvit() -> nn.Module:
    return _forgetful(timm(
        "efficientvit_msra", "EfficientVitMsra", img_size=64, embed_dim=(16, 24, 32), key_dim=(8, 8, 8),
        depth=(1, 1, 1), num_heads=(2, 2, 2), window_size=(3, 3, 3), kernels=(3, 3),
    ))  # fmt: skip


MODELS = [
    _hf("swin", _swin("swin", "Swin"), 32, WINDOWS),
    _hf("swin, eager", _swin("swin", "Swin", attn_implementation="eager"), 32, WINDOWS | ALIKE, 1e-6),
    _hf("donut", _swin("donut/donut_swin", "DonutSwin"), 32, WINDOWS),
    _hf("maskformer", _swin("maskformer/maskformer_swin", "MaskFormerSwin"), 32, WINDOWS | ALIKE),
    Model("clap", _clap, _clap_inputs, tables=TABLES, tags=WINDOWS | ALIKE),
    _hf("swinv2", _swin("swinv2", "Swinv2"), 32, WINDOWS),
    _hf("swin2sr", _swin("swin2sr", "Swin2SR", image_size=8, patch_size=1), 8, WINDOWS | ALIKE),
    _timm("torchvision swin", partial(_torchvision, 1), (28, 36), WINDOWS),
    _timm("torchvision swin_v2", partial(_torchvision, 2), (28, 36), WINDOWS, ("cpb_mlp.2.weight",)),
    Model("torchvision swin3d", partial(_torchvision, 3), _video, first, tables=TABLES, tags=WINDOWS),
    _timm("torchvision maxvit", _maxvit, 24, NORMED),
    Model("torchvision mvit_v2", _multiscale, partial(_video, 4), first, tables=TABLES, tags=BY_AXIS),
    _timm("timm swin_transformer", _timm_swin("swin_transformer", "SwinTransformer"), 32, WINDOWS),
    _timm("timm swin_transformer_v2", _timm_swin("swin_transformer_v2", "SwinTransformerV2"), 32, WINDOWS | ALIKE),
    _timm("timm swin_transformer_v2_cr", _timm_swin("swin_transformer_v2_cr", "SwinTransformerV2Cr"), 32, WINDOWS),
    _hf("beit", _beit("beit", "Beit"), 32, IMAGE),
    _hf("beit, one table for all layers", _beit("beit", "Beit", own=False, shared=True), 32, IMAGE),
    _hf(
        "beit, both tables, eager, another resolution",
        _beit("beit", "Beit", shared=True, attn_implementation="eager"),
        (48, 24),
        IMAGE | ALIKE,
        1e-6,
        interpolate_pos_encoding=True,
    ),
    _hf("data2vec-vision", _beit(*_DATA2VEC), 32, IMAGE),
    _hf(
        "data2vec-vision, both tables, eager",
        _beit(*_DATA2VEC, shared=True, attn_implementation="eager"),
        32,
        IMAGE | ALIKE,
    ),
    _timm("timm beit", _timm_beit, (32, 24), IMAGE),
    _timm("timm beit, both tables", lambda: _timm_beit(shared=True), (32, 24), IMAGE | ALIKE),
    _hf("sam", _sam("sam", "SamVision"), 64, BY_AXIS),
    _hf("sam, eager", _sam("sam", "SamVision", attn_implementation="eager"), 64, BY_AXIS | ALIKE, 1e-6),
    *(_hf(file, _sam(file, *names), 64, BY_AXIS | ALIKE, 1e-6) for file, names in _LIKE_SAM.items()),
    *(
        _hf(f"{file}, eager", _sam(file, *_LIKE_SAM[file], attn_implementation="eager"), 64, BY_AXIS | ALIKE, 1e-6)
        for file in ("sam_hq", "deepseek_ocr2", "unlimited_ocr")
    ),
    _hf("vitdet", _vitdet, (64, 48), BY_AXIS),
    Model(
        "seggpt",
        _seggpt,
        lambda: dict.fromkeys(("pixel_values", "prompt_pixel_values", "prompt_masks"), images(1, 16)),
        first,
        1e-6,
        TABLES,
        BY_AXIS,
    ),
    _timm("vision_transformer_sam", _timm_sam, 64, BY_AXIS),
    _timm("mvitv2", _mvit, 64, BY_AXIS),
    _timm("timm bottleneck", _botnet, (32, 24), BY_AXIS | {"training differs"}),
    _timm(
        "timm bottleneck, scaled",
        lambda: _botnet(scale_pos_embed=True),
        (32, 24),
        BY_AXIS | {"training differs"} | ALIKE,
    ),
    _timm("mvitv2, class token", lambda: _mvit(use_cls_token=True), 64, BY_AXIS | ALIKE),
    _rel_pos(
        "timm vision_transformer_relpos",
        _relpos_vit(rel_pos_type="bias", class_token=True, global_pool="token"),
        (32, 24),
        NORMED,
    ),
    _rel_pos(
        "timm vision_transformer_relpos, a network",
        _relpos_vit(rel_pos_type="mlp", rel_pos_dim=16),
        (32, 24),
        NORMED | ALIKE,
    ),
    _rel_pos(
        "timm vision_transformer_relpos, one for all layers",
        _relpos_vit(rel_pos_type="mlp", rel_pos_dim=16, shared_rel_pos=True),
        (32, 24),
        NORMED - {"windows"},
    ),
    _rel_pos("timm maxxvit", lambda: _maxxvit("bias_tf"), 32, NORMED | ALIKE),
    _rel_pos("timm maxxvit, channels first", lambda: _maxxvit("mlp", True), 32, NORMED | ALIKE),
    _rel_pos("timm gcvit", _gcvit, 32, NORMED),
    _hf("levit", _levit, 96, NORMED),
    _timm("timm levit", _timm_levit, (64, 96), NORMED),
    _timm("timm levit, channels first", lambda: _timm_levit(use_conv=True), (64, 96), NORMED | ALIKE),
    _timm("timm tiny_vit", _tiny_vit, 32, NORMED | ALIKE),
    _timm(
        "timm efficientformer",
        _efficientformer("efficientformer", "EfficientFormer", depths=(1, 1, 1, 2), num_vit=1),
        224,
        NORMED | ALIKE,
    ),
    _timm(
        "timm efficientformer_v2",
        _efficientformer("efficientformer_v2", "EfficientFormerV2", depths=(1, 1, 1, 1), num_vit=0, img_size=128),
        128,
        NORMED,
    ),
    _timm("timm efficientvit_msra", _efficientvit, 64, NORMED | ALIKE | {"no head order"}),  # one head after another
]
