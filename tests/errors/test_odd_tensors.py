"""Tensors that nothing here computes with (sparse, nested, of 8 bits), and odd arguments of `compare`: our own line."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ingredients import is_one_line
from torch import Tensor

import relpos

DENSE = torch.linspace(-1, 1, 64).view(1, 2, 4, 8)


def _nested(layout: torch.layout, *parts: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        made: Tensor = torch.nested.nested_tensor(list(parts) or [torch.ones(2, 4, 8)] * 2, layout=layout)
    return made


KINDS: dict[str, Callable[[], Tensor]] = {
    "sparse": DENSE.to_sparse,
    "nested": lambda: _nested(torch.strided),
    "jagged": lambda: _nested(torch.jagged),
    "mkldnn": DENSE.to_mkldnn,
    "float8": lambda: DENSE.to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: DENSE.to(torch.float8_e5m2),
    "complex": lambda: DENSE.to(torch.complex64),
}
LINES = relpos.lines(relpos.Sequence(4))
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda x: relpos.attention(x, x, x),
    "attention, v": lambda x: relpos.attention(DENSE, DENSE, x),
    "attention, T5": lambda x: relpos.attention(x, x, x, position=relpos.T5Bias(2), queries=relpos.Sequence(4)),
    "attention, mask": lambda x: relpos.attention(DENSE, DENSE, DENSE, mask=x),
    "attention_weights": lambda x: relpos.attention_weights(x, x),
    "explain": lambda x: relpos.explain(x, x, x),
    "linear_attention": lambda x: relpos.linear_attention(x, x, x),
    "flash_attention": lambda x: relpos.flash_attention(x, x, x),
    "rotate": lambda x: relpos.rotate(x, torch.zeros(1, 1, 4, 2), layout="half"),
    "DenseBias": lambda x: relpos.attention(DENSE, DENSE, DENSE, position=relpos.DenseBias(x)),
    "LineBias": lambda x: relpos.LineBias(x, LINES),
    "lookup, index": lambda x: relpos.lookup(DENSE, x),
    "Positions": lambda x: relpos.Positions(x, low=0, high=5),
    "embed": lambda x: relpos.LearnedPositionEmbedding(8, seq_len=4).embed(x, relpos.Sequence(4)),
    "MultiHeadAttention": lambda x: relpos.MultiHeadAttention(8, 2)(x),
    "Mlp": lambda x: relpos.Mlp(8, 8)(x),
    "GroupNorm": lambda x: relpos.GroupNorm(8, 2)(x),
    "VisionTransformer": lambda x: relpos.VisionTransformer(4, 2, 2, 3, embed_dim=8, depth=1, num_heads=2)(x),
    "LanguageModel": lambda x: relpos.LanguageModel(8, context=8, embed_dim=8, depth=1, num_heads=2)(x),
}


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[pytest.mark.slow] * (x == "jagged")) for x in KINDS])
def test_a_tensor_of_another_kind_is_one_line(kind: str) -> None:
    said = {}
    for name, call in CALLS.items():
        with pytest.raises(ValueError) as caught:
            call(KINDS[kind]())
        said[name] = str(caught.value)
    assert all(map(is_one_line, said.values())), said
    called = {"float8": "float8_e4m3fn", "complex": "complex64", "jagged": "a nested tensor"}
    assert called.get(kind, kind) in said["attention"]
    if kind == "sparse":
        assert all("x.to_dense()" in said[name] for name in ("attention", "lookup, index", "LanguageModel"))


@pytest.mark.slow
def test_an_mlp_sees_one_token_at_a_time() -> None:
    tokens = _nested(torch.jagged, torch.ones(3, 8), torch.ones(2, 8))
    mlp = relpos.Mlp(8, 8)
    together = mlp(tokens)
    for own, alone in zip(together.unbind(), (torch.ones(1, 3, 8), torch.ones(1, 2, 8)), strict=True):
        assert torch.equal(own, mlp(alone)[0])


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["positions", "choices", "recipe", "out", "device", "seeds", "model", "data"])
def test_compare_says_what_it_takes(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"what": "norm"} if argument == "choices" else {}
    for wrong in (-1, 1.5, object()):
        with pytest.raises(ValueError, match=r"^expected .*; got .*\. .*"):
            relpos.compare(**{"positions": "none", **more, argument: wrong})
