"""Map the weight names of timm's and transformers' models to the names in relpos's models.

A translation takes the model and their state dict and changes neither. Unknown tensors are left out, and `load_weights`
reports them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from relpos.position.base.saved_settings import is_settings

Weights = Mapping[str, Tensor]


@dataclass
class Translation:
    """Their tensors under our names.

    Attributes:
        family: their origin.
        tensors: the new value for each of ours. sources: the names of theirs that it is made from.
        left: their tensors that need no counterpart, and why.
    """

    family: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, tensor: Tensor, *sources: str) -> None:
        """Add a tensor under our name, with its sources."""
        self.tensors[name], self.sources[name] = tensor, sources

    @property
    def used(self) -> set[str]:
        """Their names that are used or left."""
        return {source for sources in self.sources.values() for source in sources} | self.left.keys()


OWN = "relpos"
"""The family of weights that already have our names."""


def _own(model: nn.Module, theirs: Weights) -> Translation:
    return Translation(OWN, dict(theirs), {name: (name,) for name in theirs})


def _named(patterns: Mapping[str, str], name: str) -> str:
    """Our name for theirs, by the first pattern that matches it fully; else their name."""
    for pattern, ours in patterns.items():
        if match := re.fullmatch(pattern, name):
            return match.expand(ours)
    return name


def _mechanisms(model: nn.Module, path: str, parameter: str, theirs: str) -> str:
    """Our name of the mechanism's parameter under `path`; their name if there is none."""
    names = [name for name in model.state_dict() if name.startswith(f"{path}.") and name.endswith(f".{parameter}")]
    return names[0] if len(names) == 1 else theirs


_VIT = {
    r"(blocks\.\d+\.attn)\.q_norm\.(\w+)": r"\1.qk_norm.query.\2",
    r"(blocks\.\d+\.attn)\.k_norm\.(\w+)": r"\1.qk_norm.key.\2",
}
_PREFIX = ("cls_token", "dist_token", "reg_token")
"""Prefix tokens in their order."""


def _vit(model: Any, theirs: Weights) -> Translation:
    """timm's ViT and DeiT, including distilled DeiT and DeiT III."""
    found = Translation("timm's ViT")
    prefix = [name for name in _PREFIX if name in theirs]
    if prefix and all(theirs[name].dim() == 3 for name in prefix):
        found.take("prefix_tokens", torch.cat([theirs[name] for name in prefix], dim=1), *prefix)
    for name, tensor in theirs.items():
        if name in prefix:
            continue
        ours = _named(_VIT, name)
        if name == "pos_embed":
            ours = _mechanisms(model, "positions.0", "pos_embed", name)
            if tensor.dim() == 3 and tensor.shape[1] == model.patch_embed.num_patches:  # prefix tokens have no position
                tensor = torch.cat([tensor.new_zeros(1, model.prefix, tensor.shape[2]), tensor], dim=1)
        found.take(ours, tensor, name)
    return found


_SWIN = {
    r"patch_embed\.norm\.(\w+)": r"patch_norm.\1",
    r"layers\.(\d+)\.downsample\.(.+)": r"stages.\1.merging.\2",
    r"layers\.(\d+\.blocks\.\d+\.attn)\.logit_scale": r"stages.\1.qk_norm.logit_scale",
    r"layers\.(\d+\.blocks\..+)": r"stages.\1",
    r"head\.fc\.(\w+)": r"head.\1",
}
_TABLES = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.attn\.(relative_position_bias_table|cpb_mlp\..+)")
_MERGING = re.compile(r"layers\.(\d+)\.downsample\.(.+)")
_BUFFERS = ("relative_position_index", "relative_coords_table", "attn_mask", "k_bias")


def _swin(model: Any, theirs: Weights) -> Translation:
    """timm's Swin and Swin V2, and the authors' files, which merge at the end of a stage; not timm's `cr` variant."""
    authors = "layers.0.downsample.reduction.weight" in theirs
    found = Translation("the authors' Swin" if authors else "timm's Swin")
    for name, tensor in theirs.items():
        if authors and (match := _MERGING.fullmatch(name)):
            found.take(f"stages.{int(match[1]) + 1}.merging.{match[2]}", tensor, name)
        elif name.endswith(_BUFFERS):
            found.left[name] = "follows from the window"
        elif match := _TABLES.fullmatch(name):
            stage, layer, parameter = match.groups()
            found.take(_mechanisms(model, f"positions.{stage}.{layer}", parameter, name), tensor, name)
        else:
            found.take(_named(_SWIN, name), tensor, name)
    return found


_LLAMA = {
    r"embed_tokens\.weight": "token_embed.weight",
    r"lm_head\.weight": "head.weight",
    r"layers\.(\d+)\.self_attn\.o_proj\.(\w+)": r"blocks.\1.attn.proj.\2",
    r"layers\.(\d+)\.mlp\.down_proj\.(\w+)": r"blocks.\1.mlp.fc2.\2",
    r"layers\.(\d+)\.input_layernorm\.(\w+)": r"blocks.\1.norm1.\2",
    r"layers\.(\d+)\.post_attention_layernorm\.(\w+)": r"blocks.\1.norm2.\2",
}
_JOINED = {
    r"layers\.(\d+)\.self_attn\.q_proj\.(\w+)": (r"blocks.\1.attn.qkv.\2", ("q_proj", "k_proj", "v_proj")),
    r"layers\.(\d+)\.mlp\.gate_proj\.(\w+)": (r"blocks.\1.mlp.fc1.\2", ("gate_proj", "up_proj")),
}


def _llama(model: Any, theirs: Weights) -> Translation:
    """transformers' Llama, with or without its head."""
    found = Translation("transformers' Llama")
    for name, tensor in theirs.items():
        bare = name.removeprefix("model.")
        if bare.endswith("inv_freq"):
            found.left[name] = "follows from the rotation's base"
        elif bare == "lm_head.weight" and model.head is None:
            tied = theirs.get(f"{'model.' if 'model.embed_tokens.weight' in theirs else ''}embed_tokens.weight")
            if tied is not None and torch.equal(tensor, tied):
                found.left[name] = "is the token embedding"
        elif joined := next((one for one in _JOINED if re.fullmatch(one, bare)), None):
            ours, parts = _JOINED[joined]
            sources = [name.replace(parts[0], part) for part in parts]
            if all(source in theirs for source in sources):
                found.take(_named({joined: ours}, bare), torch.cat([theirs[source] for source in sources]), *sources)
        elif not re.search(r"\.(k_proj|v_proj|up_proj)\.", bare):
            found.take(_named(_LLAMA, bare), tensor, name)
    return found


_FAMILIES: dict[str, Callable[[Any, Weights], Translation]] = {
    "VisionTransformer": _vit,
    "SwinTransformer": _swin,
    "LanguageModel": _llama,
}
"""Translations by the class of our model."""


def translated(model: nn.Module, theirs: Weights) -> Translation:
    """Weights of any family under our names; weights with our names are unchanged."""
    ours = r"positions\.|token_position\.|token_embed\.|prefix_tokens$|stages\.|blocks\.\d+\.attn\.position\."
    own = {name for name in model.state_dict() if not is_settings(name)}
    if theirs.keys() >= own or any(re.match(ours, name) for name in theirs):
        return _own(model, theirs)
    family = next((_FAMILIES[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in _FAMILIES), _own)
    return family(model, theirs)
