"""A flag is True or False: everything else that Python would take for one of them gives one line."""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ingredients import LINE, site, vit, x

import relpos
from relpos import patterns
from relpos.data.images import ImageFolder


def language(**changes: Any) -> relpos.LanguageModel:
    return relpos.LanguageModel(7, context=6, embed_dim=8, depth=1, num_heads=2, **changes)


def swin(**changes: Any) -> relpos.SwinTransformer:
    return relpos.SwinTransformer(8, 2, embed_dim=8, depths=(1,), num_heads=(2,), window_size=2, **changes)


def created(**given: Any) -> Any:
    return relpos.create_position("t5", num_heads=2, head_dim=8, queries=relpos.Sequence(5), **given)


def replaced(**given: Any) -> Any:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    return relpos.replace_position(attention, "t5", coordinates=relpos.Sequence(5), **given)


FLAGS: dict[str, Callable[[Any], Any]] = {
    "ALiBi.learned": lambda flag: relpos.ALiBi(4, learned=flag),
    "DisentangledPosition.c2p": lambda flag: relpos.DisentangledPosition(4, 8, 8, c2p=flag),
    "DisentangledPosition.p2c": lambda flag: relpos.DisentangledPosition(4, 8, 8, p2c=flag),
    "FlashAttention.causal": lambda flag: relpos.FlashAttention(8, 2, causal=flag),
    "GroupNorm.across_tokens": lambda flag: relpos.GroupNorm(8, 2, across_tokens=flag),
    "LanguageModel.position_trainable": lambda flag: language(position_trainable=flag),
    "LanguageModel.qkv_bias": lambda flag: language(qkv_bias=flag),
    "LanguageModel.shared_position": lambda flag: language(shared_position=flag),
    "LanguageModel.tie_embeddings": lambda flag: language(tie_embeddings=flag),
    "LineVectors.scaled": lambda flag: relpos.LineVectors(torch.zeros(1, 11, 8), None, LINE, "query", scaled=flag),
    "LinearAttention.causal": lambda flag: relpos.LinearAttention(8, 2, causal=flag),
    "LinearAttention.proj_bias": lambda flag: relpos.LinearAttention(8, 2, proj_bias=flag),
    "LinearAttention.qkv_bias": lambda flag: relpos.LinearAttention(8, 2, qkv_bias=flag),
    "LinearAttention.retention": lambda flag: relpos.LinearAttention(8, 2, causal=True, retention=flag),
    "LocalAttention.causal": lambda flag: relpos.LocalAttention(8, 2, causal=flag),
    "MultiHeadAttention.proj_bias": lambda flag: relpos.MultiHeadAttention(8, 2, proj_bias=flag),
    "MultiHeadAttention.qkv_bias": lambda flag: relpos.MultiHeadAttention(8, 2, qkv_bias=flag),
    "ScaledDotProductAttention.scale": lambda flag: relpos.ScaledDotProductAttention(scale=flag),
    "ShawPosition.values": lambda flag: relpos.ShawPosition(8, values=flag),
    "create_position.causal": lambda flag: created(causal=flag),
    "create_position.trainable": lambda flag: created(trainable=flag),
    "Site.causal": lambda flag: site(causal=flag),
    "Site.trainable": lambda flag: site(trainable=flag),
    "SparseAttention.causal": lambda flag: relpos.SparseAttention(8, 2, causal=flag),
    "SwinTransformer.position_trainable": lambda flag: swin(position_trainable=flag),
    "SwinTransformer.qkv_bias": lambda flag: swin(qkv_bias=flag),
    "SwinTransformer.shared_position": lambda flag: swin(shared_position=flag),
    "T5Bias.bidirectional": lambda flag: relpos.T5Bias(4, bidirectional=flag),
    "T5Bias.scaled": lambda flag: relpos.T5Bias(4, scaled=flag),
    "TransformerBlock.post_norm": lambda flag: relpos.TransformerBlock(8, 2, post_norm=flag),
    "TransformerBlock.proj_bias": lambda flag: relpos.TransformerBlock(8, 2, proj_bias=flag),
    "TransformerBlock.qkv_bias": lambda flag: relpos.TransformerBlock(8, 2, qkv_bias=flag),
    "VisionTransformer.class_token": lambda flag: vit(class_token=flag, global_pool="avg"),
    "VisionTransformer.distilled": lambda flag: vit(distilled=flag),
    "VisionTransformer.fc_norm": lambda flag: vit(fc_norm=flag),
    "VisionTransformer.position_trainable": lambda flag: vit(position_trainable=flag),
    "VisionTransformer.qkv_bias": lambda flag: vit(qkv_bias=flag),
    "VisionTransformer.shared_position": lambda flag: vit(shared_position=flag),
    "YaRN.truncate": lambda flag: relpos.YaRN(4.0, 2048, truncate=flag),
    "attention.return_lse": lambda flag: relpos.attention(x(), x(), x(), return_lse=flag),
    "explain.return_lse": lambda flag: relpos.explain(x(), x(), x(), return_lse=flag),
    "flash_attention.causal": lambda flag: relpos.flash_attention(x(), x(), x(), causal=flag),
    "linear_attention.causal": lambda flag: relpos.linear_attention(x(), x(), x(), causal=flag),
    "linear_attention.normalize": lambda flag: relpos.linear_attention(x(), x(), x(), normalize=flag),
    "replace_position.shared": lambda flag: replaced(shared=flag),
    "replace_position.trainable": lambda flag: replaced(trainable=flag),
    "replace_position.force": lambda flag: replaced(force=flag),
    "patterns.dilated.causal": lambda flag: patterns.dilated(6, 3, 2, causal=flag),
    "patterns.fixed.causal": lambda flag: patterns.fixed(6, 3, causal=flag),
    "patterns.local.causal": lambda flag: patterns.local(3, causal=flag),
    "patterns.strided.causal": lambda flag: patterns.strided(6, 3, causal=flag),
}
NO_FLAGS = {"an int": 1, "zero": 0, "None": None, "a word": "yes", "numpy's": np.True_, "a tensor": torch.tensor(True)}


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_is_true_or_false(name: str) -> None:
    flag = name.rsplit(".", 1)[1]
    FLAGS[name](False)
    FLAGS[name](True)
    for came in NO_FLAGS.values():
        with pytest.raises(ValueError, match=rf"^expected (Site )?{flag} to be True or False; got .+\. .+$") as caught:
            FLAGS[name](came)
        assert "\n" not in str(caught.value)


def test_every_flag_of_a_public_name_is_tried() -> None:
    found = set()
    for module, prefix in ((relpos, ""), (patterns, "patterns.")):
        for name in module.__all__:
            public = getattr(module, name)
            if not callable(public) or not public.__module__.startswith("relpos"):
                continue
            parameters = inspect.signature(public).parameters.values()
            found |= {f"{prefix}{name}.{one.name}" for one in parameters if one.annotation in (bool, "bool")}
    elsewhere = {"retrofit.force", "retrofit.verify"}  # tests/adapters/test_wrong_uses.py: they want a model
    elsewhere |= {"compare.quick", "compare.rotate"}  # cases_models.py: they train
    assert found - elsewhere == set(FLAGS)


def test_what_is_set_later_and_what_a_file_says() -> None:
    with pytest.raises(ValueError, match="expected trainable to be True or False; got int 1"):
        relpos.ALiBi(4).trainable = 1  # type: ignore[assignment]
    with pytest.raises(ValueError, match="expected rotate to be True or False; got str 'no'"):
        ImageFolder(pathlib.Path(), rotate="no")  # type: ignore[arg-type]
