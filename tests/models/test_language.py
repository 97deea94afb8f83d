"""The language model: the whole of it by hand in plain PyTorch, and what a decoder must keep to."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from small import text as small
from torch import Tensor, nn

from relpos import (
    KeyValueCache,
    Mechanism,
    Sequence,
    Site,
    count_parameters,
)
from relpos.models.language import positions_in
from relpos.models.sampling import sample
from relpos.position import presets
from relpos.position.base.saved_settings import is_settings

FAST_SHARE = 2  # of its tests, in the fast part

LINE = [name for name, preset in presets().items() if 1 in preset.token_axes]


def some(*shape: int) -> Tensor:
    return torch.randint(7, shape)


# by hand, without anything of relpos


def t5_bucket(distance: int) -> int:
    """32 buckets up to 128, causal: the first 16 hold one distance each."""
    return distance if distance < 16 else min(16 + int(math.log(distance / 16) / math.log(128 / 16) * 16), 31)


def by_hand(state: dict[str, Tensor], position: str, tokens: Tensor) -> Tensor:
    """Two layers, four query heads of width 4, two key heads, from the weights alone."""
    n = tokens.shape[1]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * state[f"{name}.weight"]

    def turned(x: Tensor) -> Tensor:
        columns = []
        for place in range(n):
            row = list(x[:, place].unbind(-1))
            for pair in range(2):
                angle = place * 10000.0 ** (-pair / 2)
                a, b = row[pair], row[pair + 2]
                row[pair] = a * math.cos(angle) - b * math.sin(angle)
                row[pair + 2] = a * math.sin(angle) + b * math.cos(angle)
            columns.append(torch.stack(row, dim=-1))
        return torch.stack(columns, dim=1)

    x = state["token_embed.weight"][tokens] * 12.0  # 3 sqrt(16)
    for layer in range(2):
        block = f"blocks.{layer}"
        projected = norm(x, f"{block}.norm1") @ state[f"{block}.attn.qkv.weight"].T
        heads = []
        for head in range(4):
            group = head // 2
            q, k, v = (projected[..., 4 * c : 4 * c + 4] for c in (head, 4 + group, 6 + group))
            if position == "rotary_1d":
                q, k = turned(q), turned(k)
            rows = []
            for i in range(n):
                score = (k[:, : i + 1] @ q[:, i, :, None]).squeeze(-1) / 2.0
                distances = [i - j for j in range(i + 1)]
                if position == "alibi":
                    score = score - 4.0 ** -(head + 1) * torch.tensor(distances, dtype=score.dtype)
                if position == "t5":
                    table = state[f"positions.{layer}.mechanisms.0.relative_attention_bias"]
                    score = score + torch.stack([table[t5_bucket(d), head] for d in distances])
                rows.append((score.softmax(-1)[..., None] * v[:, : i + 1]).sum(1))
            heads.append(torch.stack(rows, dim=1))
        x = x + torch.cat(heads, dim=-1) @ state[f"{block}.attn.proj.weight"].T
        gate, value = (norm(x, f"{block}.norm2") @ state[f"{block}.mlp.fc1.weight"].T).split(24, dim=-1)
        x = x + (gate / (1 + torch.exp(-gate)) * value) @ state[f"{block}.mlp.fc2.weight"].T
    return norm(x, "norm") @ state["token_embed.weight"].T


@pytest.mark.parametrize("position", ["none", "rotary_1d", "alibi", "t5"])
def test_the_whole_by_hand(position: str) -> None:
    """Logits and the gradient of every parameter, in float64. 20 tokens reach T5's logarithmic buckets."""
    model = small(position=position, context=20).double()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    tokens = some(2, 20)
    state = {name: x.detach().clone().requires_grad_() for name, x in model.named_parameters()}
    assert set(state) == {name for name in model.state_dict() if not is_settings(name)}, "the head is the embedding"
    ours, theirs = model(tokens), by_hand(state, position, tokens)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(ours)
    mine = torch.autograd.grad(ours, list(model.parameters()), upstream)
    other = torch.autograd.grad(theirs, list(state.values()), upstream)
    for name, a, b in zip(state, mine, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


# what a decoder keeps to, with every mechanism

ADDED_UP = {"fox": 1, "cable": 1, "carope": 1, "selective_rope": 2}
"""Mechanisms that add up what tokens contribute, and the numbers a head of it."""


@pytest.mark.parametrize("position", LINE)
def test_cache_and_causality(position: str) -> None:
    """Prefill, one token and several at a time give the logits of the full pass, to which later tokens mean nothing."""
    model, tokens = small(position=position).double().eval(), some(2, 9)
    whole = model(tokens)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 7
    other = model(changed)
    assert torch.equal(other[:, :6], whole[:, :6])
    assert not torch.isclose(other[:, 6:], whole[:, 6:]).all(-1).any(), "and to which it means something from there on"
    cache = KeyValueCache(2)
    parts = [model(tokens[:, a:b], cache=cache) for a, b in itertools.pairwise((0, 4, 5, 7, 8, 9))]
    assert cache.length == 9
    gates = 2 * 2 * 4 * 9 * 8 * ADDED_UP.get(position, 0)  # of each layer, row, head and token
    expected = 2 * 2 * 2 * 2 * 9 * 4 * 8 + gates
    assert cache.bytes == expected, "layers, keys and values, batch, groups, tokens, width, float64"
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("position", [*LINE, "alibi+learned"])
def test_packed_documents_are_separate_ones(position: str) -> None:
    """Three documents in one row, one of them in two pieces, padding between: values and gradients as alone.

    What tokens add up, as forget gates, needs documents in one piece: it counts all that stands between two tokens.
    """
    model = small(position=position).double().eval()  # training may draw
    first = [0, 1, 2, 3] if position in ADDED_UP else [0, 1, 2, 5]
    segments = torch.full((2, 9), -1)
    tokens = some(2, 9)
    documents = [(0, first), (0, [4]), (0, [6, 7]), (1, list(range(9)))]
    for number, (row, columns) in enumerate(documents):
        segments[row, columns] = number
    packed = model(tokens, segments=segments)
    alone = [model(tokens[row, columns][None])[0] for row, columns in documents]
    for (row, columns), wanted in zip(documents, alone, strict=True):
        torch.testing.assert_close(packed[row, columns], wanted, rtol=1e-12, atol=1e-12)
    total = sum(packed[row, columns].square().sum() for row, columns in documents)
    ours = torch.autograd.grad(total, list(model.parameters()))
    theirs = torch.autograd.grad(sum(x.square().sum() for x in alone), list(model.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("position", ["learned", "relative_1d"])
def test_a_row_of_documents_may_be_longer_than_the_context(position: str) -> None:
    model, tokens = small(position=position).double(), some(1, 30)
    segments = torch.tensor([[0] * 9 + [1] * 5 + [-1] * 12 + [2] * 4])
    packed = model(tokens, segments=segments)[0]
    for part in (slice(0, 9), slice(9, 14), slice(26, 30)):
        torch.testing.assert_close(packed[part], model(tokens[:, part])[0], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="documents of at most 9 tokens"):
        model(tokens, segments=torch.zeros(1, 30, dtype=torch.long))


def test_places_are_counted_a_segment() -> None:
    segments = torch.tensor([[3, 3, 1, 3, -1, 1, -1], [0, 0, 0, 0, 0, 0, 0]])
    assert positions_in(segments).tolist() == [[0, 1, 0, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6]], "padding stands at 0"


@pytest.mark.parametrize("position", ["rotary_1d", "t5", "shaw", "none+learned"])
def test_generate_is_the_loop_without_a_cache(position: str) -> None:
    model, prompt = small(position=position, proj_drop_rate=0.5, attn_drop_rate=0.5).double(), some(2, 3)
    for arguments in ({"temperature": 0}, {"temperature": 0.7}, {"top_k": 3, "top_p": 0.8}):
        random = {} if arguments.get("temperature") == 0 else {"generator": torch.Generator().manual_seed(3)}
        ours = model.generate(prompt, 6, **arguments, **random)
        assert model.training, "the mode is restored"
        again = {} if not random else {"generator": torch.Generator().manual_seed(3)}
        model.eval()
        tokens = prompt
        for _ in range(6):
            with torch.no_grad():
                tokens = torch.cat([tokens, sample(model(tokens)[:, -1], **arguments, **again)], dim=1)
        model.train()
        assert torch.equal(ours, tokens)
    assert torch.equal(model.generate(prompt, 0), prompt)
    assert torch.equal(model.eval().generate(prompt, 2)[:, :3], prompt)
    assert not model.training


def test_sampling() -> None:
    """The share of each of four tokens of probability 0.4, 0.3, 0.2 and 0.1, in some order."""
    probability = torch.tensor([0.2, 0.4, 0.1, 0.3])
    logits = (probability.log() + 5).expand(20_000, 4)

    def shares(**arguments: Any) -> Tensor:
        drawn = sample(logits, **arguments)
        assert drawn.shape == (20_000, 1)
        return torch.bincount(drawn.flatten(), minlength=4) / 20_000

    for arguments, wanted in (
        ({}, [0.2, 0.4, 0.1, 0.3]),
        ({"temperature": 0.5}, [4 / 30, 16 / 30, 1 / 30, 9 / 30]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, [0.2, 0.4, 0.1, 0.3]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.85}, [2 / 9, 4 / 9, 0, 3 / 9]),
        ({"top_p": 1.0}, [0.2, 0.4, 0.1, 0.3]),
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 0, 3 / 7]),
    ):
        found = shares(**arguments)
        assert torch.equal(found == 0, torch.tensor(wanted) == 0), arguments
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32), rtol=0, atol=0.02)


# positions of a model


def test_what_position_is_in_the_model() -> None:
    model = small(position="learned+t5")
    assert model.coordinates == Sequence(9)
    assert [type(part).__name__ for part in model.token_position.parts()] == ["LearnedPositionEmbedding"]
    assert [[type(part).__name__ for part in each.parts()] for each in model.attention_position] == [["T5Bias"]] * 2
    assert [tuple(p.shape) for p in model.position_parameters()] == [(1, 9, 16), (32, 4), (32, 4)]
    assert not model.attention_position[0].parts()[0].bidirectional, "the site is causal"
    shared = small(position="learned+t5", shared_position=True)
    assert len(shared.attention_position) == 1
    assert [tuple(p.shape) for p in shared.position_parameters()] == [(1, 9, 16), (32, 4)]


def test_counts_sum_to_all() -> None:
    for tied in (True, False):
        model = small(position="learned+t5", tie_embeddings=tied)
        counts = count_parameters(model)
        assert sum(count.total for count in counts.values()) == sum(p.numel() for p in model.parameters())
        totals = {name: count.total for name, count in counts.items()}
        assert totals == {
            "attention qkv": 2 * 16 * (16 + 2 * 8),
            "attention projection": 2 * 16 * 16,
            "mlp": 2 * 3 * 16 * 24,
            "norm": 5 * 16,
            "token embedding": 7 * 16,
            "position": 9 * 16 + 2 * 32 * 4,
            **({} if tied else {"head": 7 * 16}),
        }


def test_a_function_of_the_site() -> None:
    sites = []

    def build(site: Site) -> Mechanism:
        sites.append(site)
        return Mechanism()

    small(position=build, context=5)
    site = Site(num_heads=4, head_dim=4, embed_dim=16, queries=Sequence(5), causal=True, init_std=0.5)
    assert sites == [replace(site, layer=0), replace(site, layer=1)]
