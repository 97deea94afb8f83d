"""A right call of each public function, of which tests replace one argument by something wrong."""

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from ingredients import LINE, TABLE, x
from torch import nn

import relpos
from relpos import Grid, Sequence

ATTENDING = {"num_heads": 2, "head_dim": 8, "embed_dim": 16}
WINDOW = {"num_heads": 2, "window_size": (4, 4)}
LAYER = {"d_model": 8, "num_heads": 2}
QKV = {"q": x(), "k": x(), "v": x()}
TEXT = {"vocab_size": 8, "context": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}
IMAGES = {"img_size": 16, "patch_size": 2, "in_chans": 1, "num_classes": 2, "embed_dim": 8}
STRETCH = {"factor": 2.0, "trained_length": 8}
PLANES = {"grid": Grid(4, 6), "size": (2, 3), "shift": (1, 1)}

# Public name of relpos, and what tells two calls of one apart, to the arguments.
RIGHT: dict[str, dict[str, Any]] = {
    "ALiBi": {"num_heads": 2},
    "ALiBi, axes": {"num_heads": 2, "distance": "axes", "learned": True},
    "ALiBiPositionalEmbedding": {"num_heads": 2},
    "Blocks": {"layout": torch.ones(1, 2, 2, dtype=torch.bool), "size": 4},
    "CABLEBias": {"num_heads": 2, "embed_dim": 8},
    "CARoPE": {"num_heads": 2, "head_dim": 4, "embed_dim": 8},
    "ClippedBias": {"num_heads": 2, "max_distance": 4},
    "ClippedScaling": {"trained_length": 16},
    "CoPE": {"head_dim": 8},
    "DecomposedPosition": {"head_dim": 8, "window_size": (4, 4)},
    "DenseBias": {"bias": torch.zeros(1, 1, 6, 6)},
    "DisentangledPosition": {**ATTENDING, "span": 8, "max_distance": 16},
    "DynamicNTK": STRETCH,
    "FIREBias": {"num_heads": 2},
    "FactoredBias": WINDOW,
    "ForgetGate": {"num_heads": 2, "embed_dim": 8},
    "FlashAttention": LAYER,
    "GatedMlp": {"in_features": 8, "hidden_features": 8},
    "Graph": {"distances": torch.zeros(3, 3).long(), "prefix": 1},
    "Graph.from_edges": {"edges": torch.tensor([[0], [1]]), "nodes": 2},
    "GraphormerBias": {"num_heads": 2},
    "Grid": {"rows": 1, "columns": 1, "prefix": 1},
    "GroupNorm": {"d_model": 8, "num_groups": 2},
    "ImageRelativePosition": {"num_heads": 2, "head_dim": 8},
    "IndexedBias": {"values": torch.zeros(4, 3), "index": torch.zeros(1, 6, 6).long()},
    "InklingBias": {"num_heads": 2, "embed_dim": 8},
    "Kerple": {"num_heads": 2},
    "KeyValueCache": {"depth": 1},
    "LanguageModel": TEXT,
    "LanguageModel.generate": {"tokens": torch.zeros(1, 2, dtype=torch.long), "max_new_tokens": 1, "top_k": 2},
    "LanguageModel.grow": {"length": 9, "rule": "as is"},
    "LearnedPositionEmbedding": {"embed_dim": 8, "seq_len": 8},
    "LineBias": {"values": torch.zeros(4, 11), "lines": LINE},
    "LineVectors": {"vectors": torch.zeros(1, 11, 8), "index": None, "lines": LINE, "side": "query"},
    "LinearAttention": LAYER,
    "LinearScaling": {"factor": 2.0},
    "Lines": {"query": LINE.query, "key": LINE.key, "origin": 5, "length": 11, "layout": LINE.layout},
    "Lion": {"params": [nn.Parameter(torch.ones(3))]},
    "Llama3Scaling": STRETCH,
    "LocalAttention": LAYER,
    "LogContinuousBias": WINDOW,
    "LongRoPE": {"short_factor": (1.0,), "long_factor": (1.0,), **STRETCH},
    "LowRank": {"query": torch.zeros(4, 6, 2), "key": torch.zeros(4, 6, 2)},
    "Mask": {},
    "Mask.window": {"left": 1, "right": 1},
    "Mlp": {"in_features": 8, "hidden_features": 8},
    "MultiHeadAttention": {"dim": 8, "num_heads": 2},
    "MultiQueryAttention": LAYER,
    "MultimodalRotary": {"head_dim": 8, "sections": (2, 1, 1)},
    "NTKScaling": {"factor": 2.0},
    "PatchEmbedding": {"img_size": 8, "patch_size": 4},
    "PairRotations": {
        "rotations": (relpos.Rotation(torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 6, 4), layout="half"),),
        "pairs": (relpos.Mask(),),
    },
    "Polar": {"query": torch.zeros(1, 1, 6, 8), "key": torch.zeros(1, 1, 6, 8)},
    "PolarEmbedding": {"num_heads": 2, "head_dim": 8},
    "Positions": {"values": torch.tensor([1, 2]), "low": 0, "high": 5},
    "ProportionalScaling": {"share": 0.5},
    "QueryBias": {"u": torch.zeros(4, 8)},
    "QueryScale": {"factor": torch.ones(1, 4, 6)},
    "RMSNorm": {"d_model": 8},
    "RelativePositionBias": {"num_heads": 2, "seq_len": 8},
    "RelativePositionBias, grid": WINDOW,
    "RelativePositionBias.extend": {"length": 9},
    "DualChunk": {"rotary": relpos.RotaryEmbedding(8), "size": 6, "local": 0},
    "ReRoPE": {"rotary": relpos.RotaryEmbedding(8), "window": 4},
    "SelfExtend": {"rotary": relpos.RotaryEmbedding(8), "window": 4, "group": 2},
    "RandomizedPositions": {"mechanism": relpos.RotaryEmbedding(8), "longest": 9},
    "ResonanceScaling": {},
    "RotaryDINOv3": {"head_dim": 8},
    "RotaryEmbedding": {"head_dim": 8},
    "RotaryMixed": {"num_heads": 2, "head_dim": 8},
    "RotaryPositionalEmbedding": {"d_model": 8},
    "Rotation": {"query": torch.zeros(1, 1, 6, 4), "key": None, "layout": "half"},
    "RowRule": {"rule": lambda q, k, allowed, rows: allowed},
    "Sandwich": {"num_heads": 2},
    "Scale": {"value": 1.0},
    "ScaledDotProductAttention": {},
    "Sequence": {"length": 4, "start": 0, "prefix": 0},
    "SelectiveRoPE": {"num_heads": 2, "head_dim": 4, "embed_dim": 8},
    "ShawPosition": {"head_dim": 8},
    "Sinks": {"logits": torch.zeros(4)},
    "SinusoidalPositionEmbedding": {"embed_dim": 8},
    "Site": {**ATTENDING, "queries": Sequence(8)},
    "Softcap": {"cap": 1.0},
    "Sophia": {"params": [nn.Parameter(torch.ones(3))]},
    "SparseAttention": LAYER,
    "SwinTransformer": {**IMAGES, "num_heads": (1, 2, 2, 2), "depths": (1, 1, 1, 1)},
    "T5Bias": {"num_heads": 2},
    "T5Bias, causal": {"num_heads": 2, "bidirectional": False},
    "TUPEPosition": {**ATTENDING, "seq_len": 8},
    "TransformerBlock": {"dim": 8, "num_heads": 2},
    "TransformerXLPosition": ATTENDING,
    "VisionTransformer": {**IMAGES, "depth": 1, "num_heads": 2},
    "XPos": {"head_dim": 8},
    "YaRN": STRETCH,
    "alibi_slopes": {"num_heads": 4},
    "attention": QKV,
    "attention_weights": {"q": x(), "k": x()},
    "create_position": {"name": "t5", "num_heads": 2, "head_dim": 4, "queries": Sequence(8)},
    "explain": QKV,
    "flash_attention": {**QKV, "bias": None, "causal": True, "scale": 1.0, "block_size": 2},
    "get_relative_position_index_1d": {"seq_len": 4},
    "get_relative_position_index_2d": {"window_size": (2, 2)},
    "linear_attention": {
        **QKV, "feature_map": "elu", "causal": True, "position": None, "decay": torch.ones(4), "normalize": True,
        "form": "chunked", "chunk": 2,
    },
    "optim.parameter_groups": {"model": nn.Linear(2, 2), "learning_rate": 1.0, "weight_decay": 0.0},
    "patterns.big_bird": {
        "length": 12, "size": 2, "window": 3, "global_blocks": 1, "random_blocks": 1, "heads": 2, "seed": 0,
    },
    "patterns.block_sparse": {"layout": torch.ones(2, 2, dtype=torch.bool), "size": 3},
    "patterns.dilated": {"length": 6, "window_size": 3, "dilation": 2, "causal": False},
    "patterns.fixed": {"length": 6, "stride": 3, "summaries": 1, "causal": False},
    "patterns.join": {"x": torch.zeros(8, 6, 3), **PLANES},
    "patterns.local": {"window_size": 3, "causal": False},
    "patterns.longformer": {"length": 6, "window_size": 3, "global_tokens": [0]},
    "patterns.partition": {"x": torch.zeros(2, 4, 6, 3), "size": (2, 3), "shift": (1, 1)},
    "patterns.strided": {"length": 6, "stride": 3, "causal": False},
    "patterns.windows": PLANES,
    "replace_position": {"position": "t5", "coordinates": Sequence(5)},
    "rotate": {"x": x(), "angles": torch.zeros(1, 1, 6, 4), "layout": "half"},
}  # fmt: skip

OTHERWISE: dict[str, Callable[..., Any]] = {
    "Grid": lambda rows, columns, prefix: Grid(rows, columns, prefix=prefix),
    "LanguageModel.generate": lambda **given: relpos.LanguageModel(**TEXT).generate(**given),
    "LanguageModel.grow": lambda length, rule: relpos.LanguageModel(**TEXT).grow(length, rule),
    "RelativePositionBias.extend": TABLE.extend,
    "replace_position": lambda **given: relpos.replace_position(nn.MultiheadAttention(8, 2, batch_first=True), **given),
}


def call(name: str, **changed: Any) -> Any:
    """The right call with some arguments changed."""
    public = name.split(",")[0]
    return (OTHERWISE.get(public) or attrgetter(public)(relpos))(**{**RIGHT[name], **changed})


def arguments(name: str) -> dict[str, set[str]]:
    """Of a public name, its arguments to the types of their annotations."""
    signature = inspect.signature(attrgetter(name.split(",")[0])(relpos))
    named = [one for one in signature.parameters.values() if one.kind is not one.VAR_POSITIONAL]
    return {one.name: set(str(one.annotation).split(" | ")) for one in named}
