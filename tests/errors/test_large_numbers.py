"""Integers of more than 64 bits, and those that no float holds: one line from whatever public takes numbers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import relpos
from relpos import patterns

GRID, LINE = relpos.Grid(4, 4), relpos.Sequence(8)
TEXT = {"vocab_size": 8, "context": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}
IMAGES = {"img_size": 16, "patch_size": 2, "in_chans": 1, "num_classes": 2, "embed_dim": 8}
LARGE = (2**63, 2**70, -(2**70), 10**400)
ATTENDING = {"num_heads": 2, "head_dim": 8, "embed_dim": 16}

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Sequence": (relpos.Sequence, {"length": 4, "start": 0, "prefix": 0}),
    "Grid": (lambda rows, columns, prefix: relpos.Grid(rows, columns, prefix=prefix), dict.fromkeys(
        ("rows", "columns", "prefix"), 1)),
    "Positions": (lambda low, high: relpos.Positions(torch.tensor([1, 2]), low=low, high=high), {"low": 0, "high": 5}),
    "Blocks": (lambda size: relpos.Blocks(torch.ones(1, 2, 2, dtype=torch.bool), size), {"size": 4}),
    "Mask.window": (relpos.Mask.window, {"left": 1, "right": 1}),
    "RelativePositionBias": (relpos.RelativePositionBias, {"num_heads": 2, "seq_len": 8}),
    "RelativePositionBias, grid": (relpos.RelativePositionBias, {"num_heads": 2, "window_size": (4, 4)}),
    "T5Bias": (relpos.T5Bias, {"num_heads": 2}),
    "LogContinuousBias": (relpos.LogContinuousBias, {"num_heads": 2, "window_size": (4, 4)}),
    "FactoredBias": (relpos.FactoredBias, {"num_heads": 2, "window_size": (4, 4)}),
    "ClippedBias": (relpos.ClippedBias, {"num_heads": 2, "max_distance": 4}),
    "ALiBi": (relpos.ALiBi, {"num_heads": 2}),
    "Kerple": (relpos.Kerple, {"num_heads": 2}),
    "Sandwich": (relpos.Sandwich, {"num_heads": 2}),
    "FIREBias": (relpos.FIREBias, {"num_heads": 2}),
    "RotaryEmbedding": (relpos.RotaryEmbedding, {"head_dim": 8}),
    "RotaryMixed": (relpos.RotaryMixed, {"num_heads": 2, "head_dim": 8}),
    "XPos": (relpos.XPos, {"head_dim": 8}),
    "ShawPosition": (relpos.ShawPosition, {"head_dim": 8}),
    "TransformerXLPosition": (relpos.TransformerXLPosition, ATTENDING),
    "DisentangledPosition": (relpos.DisentangledPosition, {**ATTENDING, "span": 8, "max_distance": 16}),
    "TUPEPosition": (relpos.TUPEPosition, {**ATTENDING, "seq_len": 8}),
    "DecomposedPosition": (relpos.DecomposedPosition, {"head_dim": 8, "window_size": (4, 4)}),
    "ImageRelativePosition": (relpos.ImageRelativePosition, {"num_heads": 2, "head_dim": 8}),
    "CoPE": (relpos.CoPE, {"head_dim": 8}),
    "LearnedPositionEmbedding": (relpos.LearnedPositionEmbedding, {"embed_dim": 8, "seq_len": 8}),
    "SinusoidalPositionEmbedding": (relpos.SinusoidalPositionEmbedding, {"embed_dim": 8}),
    "LinearScaling": (relpos.LinearScaling, {"factor": 2.0}),
    "YaRN": (relpos.YaRN, {"factor": 2.0, "trained_length": 8}),
    "DynamicNTK": (relpos.DynamicNTK, {"factor": 2.0, "trained_length": 8}),
    "Llama3Scaling": (relpos.Llama3Scaling, {"factor": 2.0, "trained_length": 8}),
    "Site": (relpos.Site, {**ATTENDING, "queries": LINE}),
    "create_position": (lambda **sizes: relpos.create_position("t5", queries=LINE, **sizes), {
        "num_heads": 2, "head_dim": 4}),
    "alibi_slopes": (relpos.alibi_slopes, {"num_heads": 4}),
    "get_relative_position_index_1d": (relpos.get_relative_position_index_1d, {"seq_len": 4}),
    "get_relative_position_index_2d": (relpos.get_relative_position_index_2d, {"window_size": (2, 2)}),
    "ALiBiPositionalEmbedding": (relpos.ALiBiPositionalEmbedding, {"num_heads": 2}),
    "RotaryPositionalEmbedding": (relpos.RotaryPositionalEmbedding, {"d_model": 8}),
    "local": (patterns.local, {"window_size": 3}),
    "dilated": (patterns.dilated, {"length": 9, "window_size": 3, "dilation": 2}),
    "windows": (lambda size: patterns.windows(GRID, size), {"size": 2}),
    "FlashAttention": (relpos.FlashAttention, {"d_model": 8, "num_heads": 2}),
    "LinearAttention": (relpos.LinearAttention, {"d_model": 8, "num_heads": 2}),
    "LocalAttention": (relpos.LocalAttention, {"d_model": 8, "num_heads": 2}),
    "SparseAttention": (relpos.SparseAttention, {"d_model": 8, "num_heads": 2}),
    "MultiQueryAttention": (relpos.MultiQueryAttention, {"d_model": 8, "num_heads": 2}),
    "TransformerBlock": (relpos.TransformerBlock, {"dim": 8, "num_heads": 2}),
    "Mlp": (relpos.Mlp, {"in_features": 8, "hidden_features": 8}),
    "GatedMlp": (relpos.GatedMlp, {"in_features": 8, "hidden_features": 8}),
    "RMSNorm": (relpos.RMSNorm, {"d_model": 8}),
    "GroupNorm": (relpos.GroupNorm, {"d_model": 8, "num_groups": 2}),
    "PatchEmbedding": (relpos.PatchEmbedding, {"img_size": 8, "patch_size": 4}),
    "KeyValueCache": (relpos.KeyValueCache, {"depth": 1}),
    "LanguageModel": (relpos.LanguageModel, TEXT),
    "VisionTransformer": (relpos.VisionTransformer, {**IMAGES, "depth": 1, "num_heads": 2}),
    "SwinTransformer": (relpos.SwinTransformer, {**IMAGES, "num_heads": (1, 2, 2, 2), "depths": (1, 1, 1, 1)}),
    "extend": (relpos.RelativePositionBias(2, seq_len=8).extend, {"length": 9}),
    "generate": (lambda **how: relpos.LanguageModel(**TEXT).generate(torch.zeros(1, 2, dtype=torch.long), **how), {
        "max_new_tokens": 1, "top_k": 2, "temperature": 1.0}),
    "attention": (lambda scale: relpos.attention(*torch.ones(3, 1, 2, 4, 8), scale=scale), {"scale": 1.0}),
}  # fmt: skip


def numbers(call: Callable[..., Any], given: dict[str, Any]) -> list[str]:
    """The arguments that may be numbers: those given, and those that the signature says."""
    signed = inspect.signature(call).parameters
    more = [name for name, one in signed.items() if {"int", "float"} & set(str(one.annotation).split(" | "))]
    return list(dict.fromkeys([*(name for name, x in given.items() if isinstance(x, int | float | tuple)), *more]))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_is_too_large_is_one_line_or_taken(name: str) -> None:
    """As a factor or a base, which are floats, an integer of more than 64 bits may serve."""
    call, given = CALLS[name]
    call(**given)
    said = {}
    for argument in numbers(call, given):
        for large in LARGE:
            was = given.get(argument)
            wrong = (large,) * len(was) if isinstance(was, tuple) else large
            try:
                call(**{**given, argument: wrong})
            except ValueError as error:
                said[argument, large.bit_length()] = str(error)
    assert said
    assert not {key: line for key, line in said.items() if not re.fullmatch(r"expected .+; got .+\. .+", line)}
