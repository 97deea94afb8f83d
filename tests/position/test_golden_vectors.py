"""relpos against the golden vectors, whose numbers come from mpmath and published code."""

import json
import math
from importlib import resources
from typing import Any

import pytest
import torch
from torch import Tensor

import relpos
from relpos import Grid, Positions, RotaryEmbedding, Sequence

CASES = json.loads(resources.files("relpos").joinpath("golden_vectors.json").read_text("utf-8"))["cases"]
EPSILON = torch.finfo(torch.float64).eps


def of_kind(kind: str) -> list[Any]:
    return [pytest.param(case, id=case["name"]) for case in CASES if case["kind"] == kind]


def double(tree: Any) -> Tensor:
    return torch.tensor(tree, dtype=torch.float64)


def scaling_of(name: str, own: dict[str, Any]) -> Any:
    """The scaling of a case."""
    factor, trained = own.get("factor", 1), own.get("trained_length", 1)
    match name.split("_")[1]:
        case "linear":
            return relpos.LinearScaling(factor)
        case "ntk":
            return relpos.NTKScaling(factor)
        case "dynamic":
            return relpos.DynamicNTK(factor, trained)
        case "yarn":
            return relpos.YaRN(factor, trained, magnitude=own.get("attention_factor"))
        case "deepseek":
            above, below = own["mscale"], own["mscale_all_dim"]
            size = (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
            return relpos.YaRN(factor, trained, magnitude=size)
        case "longrope":
            return relpos.LongRoPE(own["short_factor"], own["long_factor"], trained, factor)
        case "proportional":
            return relpos.ProportionalScaling(own["partial_rotary_factor"], factor)
        case "llama3":
            return relpos.Llama3Scaling(factor, trained, own["low_freq_factor"], own["high_freq_factor"])
    return None


def rotation_of(case: dict[str, Any]) -> tuple[Tensor, float]:
    """relpos's angles and magnitude."""
    own, layout = case["parameters"], case["layout"]
    if case["name"].startswith("mrope"):
        places = torch.tensor(case["positions"])
        rotary = relpos.MultimodalRotary(own["head_dim"], own["sections"], order=own["order"], base=own["base"])
        return rotary.angles(Positions(places, high=(10, 10, 10), low=(0, 0, 0))), 1.0
    if case["name"] == "rope_dinov3":
        return relpos.RotaryDINOv3(own["head_dim"], base=own["base"]).angles(Grid(*own["grid"])), 1.0
    if "grid" in own:
        rotary = RotaryEmbedding(own["head_dim"], axes=2, base=own["base"], layout=layout)
        return rotary.angles(Grid(*own["grid"])), 1.0
    scaling = scaling_of(case["name"], own)
    rotary = RotaryEmbedding(
        own["head_dim"], base=own["base"], layout=layout, rotary_dim=own.get("rotary_dim"), scaling=scaling
    )
    length = own.get("length", 1)
    places = torch.tensor(case["positions"])
    angles = rotary.angles(Positions(places, high=(100000,), low=(0,)), length)
    return angles, rotary.bands(length)[1]


@pytest.mark.parametrize("case", of_kind("rotation"))
def test_rotations(case: dict[str, Any]) -> None:
    angles, magnitude = rotation_of(case)
    expected = double(case["angles"])
    torch.testing.assert_close(angles[0, 0], expected, rtol=8 * EPSILON, atol=0)
    assert math.isclose(magnitude, case["magnitude"], rel_tol=4 * EPSILON)
    x = double(case["input"]).expand(1, 1, len(expected), -1)
    turned = relpos.rotate(x, angles, layout=case["layout"], magnitude=magnitude)[0, 0]
    takes, gives = torch.tensor(case["input_pairs"]), torch.tensor(case["output_pairs"])
    wanted = double(case["output"])
    moved = wanted.clone()
    moved[:, takes] = wanted[:, gives]
    bound = 16 * EPSILON * max(1.0, expected.abs().max().item())  # a sine is as exact as its angle
    torch.testing.assert_close(turned, moved, rtol=0, atol=bound)


@pytest.mark.parametrize("case", of_kind("buckets"))
def test_buckets(case: dict[str, Any]) -> None:
    own, offsets = case["parameters"], torch.tensor(case["offsets"])
    if case["name"].startswith("t5"):
        assert relpos.T5Bias(1, **own).bucket(offsets).tolist() == case["buckets"]
        return
    shaw = relpos.ShawPosition(1, own["max_distance"], values=False)
    rows = 2 * own["max_distance"] + 1
    with torch.no_grad():  # a vector that is its row in the order of the paper, key - query
        shaw.key_vectors.copy_(torch.arange(rows - 1, -1, -1.0)[:, None])
    (term,) = shaw.terms(Sequence(601), Sequence(1, start=300)).items
    found = term.scores(torch.ones(1, 1, 601, 1), torch.ones(1, 1, 1, 1), 1.0, None).flatten()
    assert found[offsets + 300].tolist() == case["buckets"]


@pytest.mark.parametrize("case", of_kind("slopes"))
def test_slopes(case: dict[str, Any]) -> None:
    assert relpos.alibi_slopes(case["parameters"]["num_heads"]) == pytest.approx(case["slopes"], rel=4 * EPSILON, abs=0)


@pytest.mark.parametrize("case", of_kind("index"))
def test_index(case: dict[str, Any]) -> None:
    own = case["parameters"]
    bias = relpos.RelativePositionBias(1, tuple(own["window"]), prefix=own["prefix"])
    assert len(bias.relative_position_bias_table) == case["rows"]
    with torch.no_grad():
        bias.relative_position_bias_table.copy_(torch.arange(float(case["rows"]))[:, None])
    assert bias()[0].tolist() == case["index"]


@pytest.mark.parametrize("backend", ["reference", "streaming", "sdpa"])
@pytest.mark.parametrize("case", of_kind("attention"))
def test_attention(case: dict[str, Any], backend: str) -> None:
    own = case["parameters"]
    q, k, v = (double(case[name])[None] for name in "qkv")
    position: relpos.Mechanism
    match case["name"]:
        case "attention_rope":
            position = RotaryEmbedding(q.shape[-1], base=own["base"], layout=own["layout"])
        case "attention_alibi":
            position = relpos.ALiBi(own["num_heads"])
        case _:
            sizes = {name: own[name] for name in ("num_buckets", "max_distance", "bidirectional")}
            position = relpos.T5Bias(q.shape[1], **sizes)
            with torch.no_grad():
                position.relative_attention_bias.copy_(double(case["table"]))
    mask = "causal" if own["causal"] else None
    found = relpos.attention(q, k, v, position=position, queries=Sequence(q.shape[2]), mask=mask, backend=backend)
    torch.testing.assert_close(found[0], double(case["output"]), rtol=0, atol=32 * EPSILON)
