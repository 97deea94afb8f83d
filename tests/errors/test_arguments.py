"""In a right call one argument is replaced: by no flag, no whole number, no number, no known name, by anything."""

import math
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from ingredients import is_one_line, require_said
from right_calls import RIGHT, arguments, call

import relpos
from relpos import Grid, Sequence, patterns
from relpos.data.images import ImageFolder

# True or False

BESIDE: dict[str, dict[str, Any]] = {
    "LinearAttention.retention": {"causal": True},
    "VisionTransformer.class_token": {"global_pool": "avg"},
    "linear_attention.causal": {"decay": None},
}
"""What a flag needs beside it to be either."""
WITHOUT = {"retrofit", "compare"}
"""Want a model, or train: tests/adapters/test_wrong_uses.py and wrong_layers.py call them."""
NO_FLAGS = {
    "int 1": 1,
    "int 0": 0,
    "None": None,
    "str 'yes'": "yes",
    "bool...": np.True_,
    "a tensor...": torch.tensor(1),
}


def flags() -> list[tuple[str, str]]:
    """Of all that is public."""
    names = [name for name in relpos.__all__ if name != "AdamW" and name not in WITHOUT]
    names += [f"patterns.{name}" for name in patterns.__all__]
    found = [(name, one) for name in names for one, types in arguments(name).items() if types == {"bool"}]
    return [one for one in found if one != ("Polar", "values")]  # inherited, and refused


@pytest.mark.parametrize(("name", "flag"), flags())
def test_a_flag_is_true_or_false(name: str, flag: str) -> None:
    beside = BESIDE.get(f"{name}.{flag}", {})
    call(name, **{flag: False}, **beside)
    call(name, **{flag: True}, **beside)
    for came, wrong in NO_FLAGS.items():
        require_said(lambda wrong=wrong: call(name, **{flag: wrong}), f"...{flag} to be True or False; got {came}. ...")


def test_there_are_flags() -> None:
    assert len(flags()) > 50


def test_a_flag_is_checked_where_it_is_set_later_and_where_a_file_says_it() -> None:
    require_said(
        lambda: setattr(relpos.ALiBi(4), "trainable", 1), "trainable to be True or False; got int 1. Pass one of them."
    )
    require_said(lambda: ImageFolder(pathlib.Path(), rotate="no"), "rotate to be True or False; got str 'no'. ...")


# whole numbers

LEAST: dict[str, dict[str, int]] = {
    "ALiBi": {"num_heads": 1},
    "ALiBi, axes": {"num_axes": 1},
    "Blocks": {"size": 1},
    "CABLEBias": {"num_heads": 1, "embed_dim": 1},
    "CARoPE": {"num_heads": 1, "head_dim": 2, "embed_dim": 1},
    "ClippedBias": {"num_heads": 1, "max_distance": 0},
    "ClippedScaling": {"trained_length": 1, "clipped": 0},
    "CoPE": {"head_dim": 1, "max_position": 1},
    "DecomposedPosition": {"head_dim": 1},
    "DisentangledPosition": {"num_heads": 1, "head_dim": 1, "embed_dim": 1, "span": 4, "max_distance": 6},
    "DynamicNTK": {"trained_length": 1},
    "FIREBias": {"num_heads": 1, "hidden_dim": 1},
    "FactoredBias": {"num_heads": 1},
    "ForgetGate": {"num_heads": 1, "embed_dim": 1},
    "FlashAttention": {"block_size": 1},
    "GatedMlp": {"in_features": 1, "hidden_features": 1},
    "Graph": {"prefix": 0},
    "Graph.from_edges": {"nodes": 1, "prefix": 0},
    "GraphormerBias": {"num_heads": 1, "max_distance": 0},
    "Grid": {"prefix": 0},
    "ImageRelativePosition": {"num_heads": 1, "head_dim": 1},
    "InklingBias": {"num_heads": 1, "embed_dim": 1, "width": 1, "extent": 1},
    "Kerple": {"num_heads": 1},
    "KeyValueCache": {"depth": 1},
    "LanguageModel": {"vocab_size": 1, "context": 1, "depth": 1, "num_heads": 1},
    "LanguageModel.generate": {"max_new_tokens": 0, "top_k": 1},
    "LanguageModel.grow": {"length": 1},
    "LearnedPositionEmbedding": {"embed_dim": 1, "seq_len": 1, "prefix": 0},
    "Llama3Scaling": {"trained_length": 1},
    "LogContinuousBias": {"num_heads": 1, "hidden_dim": 1},
    "LongRoPE": {"trained_length": 2},
    "Mlp": {"in_features": 1, "hidden_features": 1},
    "MultiHeadAttention": {"dim": 1, "num_heads": 1},
    "MultimodalRotary": {"head_dim": 2},
    "PatchEmbedding": {"in_chans": 1, "embed_dim": 1},
    "PolarEmbedding": {"num_heads": 1, "head_dim": 1},
    "Positions": {"prefix": 0},
    "RMSNorm": {"d_model": 1},
    "RelativePositionBias": {"num_heads": 1, "seq_len": 1, "prefix": 0},
    "DualChunk": {"size": 1, "local": 0},
    "ReRoPE": {"window": 1},
    "SelfExtend": {"window": 1, "group": 1},
    "RandomizedPositions": {"longest": 1},
    "RotaryEmbedding": {"head_dim": 2, "axes": 1, "rotary_dim": 2, "trained_length": 1},
    "RotaryDINOv3": {"head_dim": 4},
    "RotaryMixed": {"num_heads": 1, "head_dim": 4},
    "RowRule": {"width": 1},
    "Sandwich": {"num_heads": 1, "width": 2},
    "SelectiveRoPE": {"num_heads": 1, "head_dim": 2, "embed_dim": 1, "rank": 1, "conv_size": 1},
    "Sequence": {"length": 1, "prefix": 0},
    "ShawPosition": {"head_dim": 1, "max_distance": 0},
    "SinusoidalPositionEmbedding": {"embed_dim": 1, "axes": 1},
    "Site": {"num_heads": 1, "head_dim": 1, "embed_dim": 1},
    "SparseAttention": {"sparsity_factor": 1},
    "T5Bias": {"num_heads": 1, "num_buckets": 4, "max_distance": 9},
    "T5Bias, causal": {"num_buckets": 2, "max_distance": 17},
    "TUPEPosition": {"num_heads": 1, "head_dim": 1, "embed_dim": 1},
    "TransformerBlock": {"dim": 1},
    "TransformerXLPosition": {"num_heads": 1, "head_dim": 1, "embed_dim": 2},
    "VisionTransformer": {"depth": 1, "num_classes": 0, "reg_tokens": 0, "num_heads": 1},
    "XPos": {"head_dim": 2},
    "YaRN": {"trained_length": 1},
    "alibi_slopes": {"num_heads": 1},
    "create_position": {"num_heads": 1, "head_dim": 1, "embed_dim": 1},
}
"""Of each argument the least that it may be."""


@pytest.mark.parametrize(("name", "argument"), [(name, one) for name, own in LEAST.items() for one in own])
def test_a_whole_number_has_its_least(name: str, argument: str) -> None:
    least = LEAST[name][argument]
    expected = f"...{argument} to be an integer of at least {least}; got"
    require_said(lambda: call(name, **{argument: least - 1}), f"{expected} int {least - 1}. Pass a larger one.")
    for wrong in (float(least), str(least), True, (least,)):
        came = f"{type(wrong).__name__} {wrong!r}. Pass ...{argument} as a Python int."
        require_said(lambda wrong=wrong: call(name, **{argument: wrong}), f"{expected} {came}")


def numbers(name: str) -> list[str]:
    """All arguments that are numbers."""
    own = [one for one, value in RIGHT[name].items() if isinstance(value, int | float | tuple)]
    signed = [one for one, types in arguments(name).items() if types & {"int", "float"}]
    return list(dict.fromkeys([*own, *signed]))


@pytest.mark.parametrize("name", [name for name in RIGHT if numbers(name) and name != "rotate"])
def test_a_number_that_is_too_large_is_one_line_or_taken(name: str) -> None:
    """Integers of more than 64 bits, and those that no float holds: a factor or a base may be one."""
    said = []
    for argument in numbers(name):
        was = RIGHT[name].get(argument)
        for large in (2**63, 2**70, -(2**70), 10**400):
            wrong = (large,) * len(was) if isinstance(was, tuple) else large
            try:
                call(name, **{argument: wrong})
            except ValueError as error:
                said.append(str(error))
    assert said
    assert all(map(is_one_line, said)), said


# numbers

PUBLISHED = "Use the checkpoint's ..."
STD = {"init_std": ("of at least 0", "Pass 0.0 to start from zeros.")}
FACTOR = {"factor": ("above 0", "It is the longer context divided by the trained one, for example 4.0.")}
MODEL = {
    "position_init_std": STD["init_std"],
    "mlp_ratio": ("above 0", "It is the MLP's hidden width divided by dim."),
}
BOUNDS: dict[str, dict[str, tuple[str, str]]] = {
    "CABLEBias": STD,
    "CARoPE": {"base": ("above 0", "RoFormer's is 10000.")},
    "ClippedBias": STD,
    "CoPE": STD,
    "DecomposedPosition": STD,
    "DisentangledPosition": STD,
    "DynamicNTK": {"factor": ("above 0", "1.0 stretches as much as the context grows.")},
    "FIREBias": {"c": ("above 0", "The published one is 0.1."), "threshold": ("above 0", "The published one is 512.")},
    "FactoredBias": STD,
    "ForgetGate": {**STD, "init_bias": ("of at least 0", "0.0 is the published one.")},
    "ImageRelativePosition": {**STD, "ratio": ("above 0", "The authors use 1.9 for products and 20 for distances.")},
    "GraphormerBias": STD,
    "InklingBias": STD,
    "LanguageModel": {**MODEL, "embed_scale": ("above 0", "Llama's is 1.")},
    "LanguageModel.generate": {
        "temperature": ("of at least 0", "0 takes the likeliest token."),
        "top_p": ("above 0", "Leave it out to draw from all."),
    },
    "LearnedPositionEmbedding": STD,
    "LinearScaling": FACTOR,
    "Llama3Scaling": {**FACTOR, "low": ("above 0", PUBLISHED)},
    "LongRoPE": {**FACTOR, "magnitude": ("above 0", "Leave it out for the published one.")},
    "MultimodalRotary": {"base": ("above 0", PUBLISHED)},
    "NTKScaling": FACTOR,
    "ProportionalScaling": {
        **FACTOR,
        "share": ("above 0", "Use the checkpoint's partial_rotary_factor; Gemma 4's is 0.25."),
    },
    "RelativePositionBias": STD,
    "RotaryDINOv3": {
        "base": ("above 0", "The published one is 100."),
        "shift": ("of at least 0", "Leave it out for no shift."),
        "jitter": ("above 0", "1 changes nothing; DINOv3 was trained with rescale 2."),
        "rescale": ("above 0", "1 changes nothing; DINOv3 was trained with rescale 2."),
    },
    "RotaryEmbedding": {"base": ("above 0", "Use the checkpoint's rope_theta; RoFormer's is 10000.")},
    "PolarEmbedding": {"base": ("above 0", "The published one is 10000.")},
    "RotaryMixed": {"base": ("above 0", "The published one is 10.")},
    "Rotation": {"magnitude": ("above 0", "Leave it out for 1.")},
    "Sandwich": {"base": ("above 0", "The published one is 10000.")},
    "SelectiveRoPE": {**STD, "base": ("above 0", "The published one is 500000.")},
    "ShawPosition": STD,
    "SinusoidalPositionEmbedding": {"base": ("above 0", "The published one is 10000.")},
    "Sophia": {"rho": ("above 0", "The paper uses 0.01 to 0.05.")},
    "T5Bias": STD,
    "TUPEPosition": STD,
    "TransformerBlock": {
        "mlp_ratio": MODEL["mlp_ratio"],
        "norm_eps": ("above 0", "It keeps a norm from dividing by 0."),
        "layer_scale": ("above 0", "DeiT III starts from 1e-5."),
    },
    "TransformerXLPosition": {**STD, "base": ("above 0", "The published one is 10000.")},
    "VisionTransformer": MODEL,
    "XPos": {
        "scale_base": ("above 0", "The published one is 512."),
        "gamma": ("above 0", "The published one is 0.4."),
    },
    "YaRN": {
        **FACTOR,
        "beta_fast": ("above 0", PUBLISHED),
        "magnitude": ("above 0", "Leave it out for the published one."),
    },
    "attention": {"scale": ("above 0", "Leave it out for 1/sqrt(head width).")},
    "flash_attention": {"scale": ("above 0", "...")},
    "optim.parameter_groups": {
        "learning_rate": ("of at least 0", "Pass a learning rate."),
        "weight_decay": ("of at least 0", "0 is none."),
        "position_learning_rate_multiplier": ("of at least 0", "1 is the rate of the rest."),
    },
}
"""Of each argument its bound, and the remedy."""


@pytest.mark.parametrize(("name", "argument"), [(name, one) for name, own in BOUNDS.items() for one in own])
def test_a_number_has_its_bound(name: str, argument: str) -> None:
    bound, remedy = BOUNDS[name][argument]
    expected = f"...{argument} to be a number {bound}; got"
    for wrong in (-1, -0.5, math.nan, math.inf, *([0] if bound == "above 0" else [])):
        came = f"{type(wrong).__name__} {wrong}. {remedy}"
        require_said(lambda wrong=wrong: call(name, **{argument: wrong}), f"{expected} {came}")
    for wrong in ("1", True, torch.tensor(1.0)):
        came = f"... Pass ...{argument} as a Python number."
        require_said(lambda wrong=wrong: call(name, **{argument: wrong}), f"{expected} {came}")


SHARES = {
    "GatedMlp": ("drop",),
    "LanguageModel": ("drop_rate", "pos_drop_rate"),
    "Mlp": ("drop",),
    "MultiHeadAttention": ("attn_drop", "proj_drop"),
    "ScaledDotProductAttention": ("dropout",),
    "TransformerBlock": ("proj_drop",),
    "VisionTransformer": ("drop_rate", "pos_drop_rate", "attn_drop_rate"),
    "attention": ("dropout",),
}


@pytest.mark.parametrize(("name", "argument"), [(name, one) for name, own in SHARES.items() for one in own])
def test_a_dropout_is_a_share(name: str, argument: str) -> None:
    label = "attn_drop" if argument == "attn_drop_rate" else argument
    expected = f"{label} to be a number in [0, 1); got"
    for wrong in (1.0, -0.1, math.nan):
        came = f"float {wrong}. Pass {label}=0.0 to switch it off."
        require_said(lambda wrong=wrong: call(name, **{argument: wrong}), f"{expected} {came}")
    for wrong in ("0.1", torch.zeros(2)):
        came = f"... Pass {label} as a Python number."
        require_said(lambda wrong=wrong: call(name, **{argument: wrong}), f"{expected} {came}")


# names

NO_OTHER = "No other is supported: trained weights would compute something else with these...."
LAYOUT = ("layout", "'half', 'interleaved'", "'half' pairs p with p + P (Hugging Face's Llama, GPT-NeoX), ...")
BEYOND = ("beyond", "'raise', 'clip'", "Choose one of them for beyond.")
CHOICES: list[tuple[str, str, str, str]] = [
    ("ALiBi", "distance", "'euclidean', 'manhattan', 'axes'", NO_OTHER),
    ("CARoPE", *LAYOUT),
    ("FactoredBias", *BEYOND),
    ("ImageRelativePosition", "method", "'product', 'euclidean', 'quantization', 'rows', 'columns'", NO_OTHER),
    ("Kerple", "kernel", "'log', 'power'", NO_OTHER),
    ("LanguageModel", "mlp", "'gelu', 'swiglu'", NO_OTHER),
    ("LanguageModel", "norm", "'layernorm', 'rmsnorm', 'groupnorm'", NO_OTHER),
    ("LineVectors", "side", "'query', 'key', 'value'", "Choose one of them for side."),
    ("MultiHeadAttention", "qk_norm", "'layernorm', 'rmsnorm', 'cosine'", NO_OTHER),
    ("MultimodalRotary", "order", "'blocked', 'interleaved'", "Qwen2-VL's is 'blocked', Qwen3-VL's ..."),
    ("MultimodalRotary", *LAYOUT),
    ("QueryScale", "on", "'content', 'scores'", 'Biases are multiplied too on "scores".'),
    ("RelativePositionBias", "bias_type", "'1d', '2d', '3d'", "Choose one of them for bias_type."),
    ("RelativePositionBias", *BEYOND),
    ("RotaryDINOv3", "normalize", "'separate', 'min', 'max'", "The published models have 'separate'."),
    ("RotaryDINOv3", *LAYOUT),
    ("RotaryEmbedding", "beyond", "'as is', 'linear', 'ntk', 'yarn', 'llama3'", "For a checkpoint's scaling pass ..."),
    ("RotaryEmbedding", *LAYOUT),
    ("RotaryMixed", *LAYOUT),
    ("Rotation", *LAYOUT),
    ("SelectiveRoPE", *LAYOUT),
    ("SinusoidalPositionEmbedding", "layout", "'interleaved', 'half', 'grouped'", "Vaswani's is 'interleaved', ..."),
    ("TransformerBlock", "mlp", "'gelu', 'swiglu'", NO_OTHER),
    ("TransformerBlock", "norm", "'layernorm', 'rmsnorm', 'groupnorm'", NO_OTHER),
    ("TransformerXLPosition", "layout", "'grouped', 'interleaved'", "The authors' is 'grouped', Conformer's ..."),
    ("VisionTransformer", "global_pool", "'token', 'avg', 'max'", NO_OTHER),
    ("rotate", *LAYOUT),
]


@pytest.mark.parametrize(("name", "argument", "listed", "remedy"), CHOICES, ids=lambda x: x if x.isidentifier() else "")
def test_a_name_is_one_of_those_known(name: str, argument: str, listed: str, remedy: str) -> None:
    for came, wrong in (("str '?'", "?"), ("int 3", 3)):
        text = f"{argument} to be one of {listed}; got {came}. {remedy}"
        require_said(lambda wrong=wrong: call(name, **{argument: wrong}), text)


@pytest.mark.parametrize("name", [name for name in RIGHT if "backend" in arguments(name)])
def test_a_backend_is_one_of_those_known(name: str) -> None:
    expected = "a backend among auto, triton, streaming, sdpa, flex, reference; got"
    require_said(lambda: call(name, backend="sdap"), f"{expected} 'sdap'. Did you mean 'sdpa'?")
    require_said(lambda: call(name, backend="x"), f"{expected} 'x'. Choose one of them.")
    require_said(lambda: call(name, backend=None), f"{expected} None. Choose one of them.")


# tensors

DIMENSIONS = [
    ("Blocks", "layout", "3"),
    ("DenseBias", "bias", "4"),
    ("LineBias", "values", "2"),
    ("LineVectors", "bias", "2"),
    ("LineVectors", "vectors", "3"),
    ("LowRank", "key", "3 or 4"),
    ("LowRank", "query", "3 or 4"),
    ("Mask", "allowed", "4"),
    ("Mask", "low", "1 or 2"),
    ("QueryBias", "u", "2"),
    ("QueryScale", "factor", "3"),
    ("Rotation", "query", "4"),
    ("Sinks", "logits", "1 or 3"),
    ("attention", "q", "4"),
    ("attention_weights", "q", "4"),
    ("rotate", "x", "4"),
]


@pytest.mark.parametrize(("name", "argument", "dimensions"), DIMENSIONS, ids=lambda x: x.replace(" ", "_"))
def test_a_tensor_has_its_dimensions(name: str, argument: str, dimensions: str) -> None:
    five = "a tensor of shape (1, 1, 1, 1, 1) and dtype float32"
    for came, wrong in ((five, torch.zeros(1, 1, 1, 1, 1)), ("list [0.0]", [0.0])):
        expected = f"...{argument} to be a tensor with {dimensions} dimensions; got {came}"
        text = f"{expected}. Reshape ...{argument} before the call."
        require_said(lambda wrong=wrong: call(name, **{argument: wrong}), text)


# anything

ANYTHING: list[Any] = [
    None, "x", b"x", 1.5, float("nan"), 3 + 4j, True, 0, -1, 7, int, object(), lambda: 1,
    [], (), {}, [1], (1,), (1, 2), (0, 0), (1.5, 2), ("a", "b"), [0.5], ["a"], [-1], [99], [True],
    torch.zeros(3), torch.tensor(2), torch.tensor([0.5]), torch.tensor([True, False]), torch.ones(2, 2).bool(),
    torch.zeros(2, 3, 4), torch.zeros(2, 6, 3), torch.zeros(0, 6, 3), torch.zeros(2, 6, 3, dtype=torch.long),
    Grid(2, 3), Grid(2, 3, prefix=1), Sequence(6),
]  # fmt: skip
OPEN = [name for name in RIGHT if name.startswith("patterns.") or name in ("flash_attention", "linear_attention")]


@pytest.mark.parametrize(("name", "argument"), [(name, one) for name in OPEN for one in RIGHT[name]])
def test_anything_in_place_of_an_argument(name: str, argument: str) -> None:
    """The call works, or gives one line."""
    said = []
    for other in ANYTHING:
        try:
            call(name, **{argument: other})
        except (ValueError, NotImplementedError) as error:
            said.append(str(error))
    assert all(map(is_one_line, said)), said
    assert len(said) > len(ANYTHING) / 2


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**64 - 1])
def test_every_seed_of_64_bits_will_do(seed: int) -> None:
    call("patterns.big_bird", seed=seed)
