"""The forget gate: against loops, at many tokens, in layers and models with a cache, and where states are asked for."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relpos
from conformance.suite import LibrarySuite
from relpos import ForgetGate, KeyValueCache, LanguageModel, Mechanism, MultiHeadAttention, Sequence
from relpos.core import Coordinates
from relpos.position.base.states import terms_of
from relpos.testing import oracle

FAST_CASES = 1  # of each of its tests, in the fast part


def gates(mechanism: Any, states: Tensor) -> Tensor:
    """`log f[b, h, t]`, a token at a time; in half precision as in float32, as published."""
    wide = torch.promote_types(states.dtype, torch.float32)
    weight, bias = (x.to(wide) for x in (mechanism.fgate_proj.weight, mechanism.fgate_proj.bias))
    logits = [(states[:, t].to(wide)[:, None] * weight).sum(-1) + bias for t in range(states.shape[1])]
    return torch.stack([-torch.log1p(torch.exp(-x)) for x in logits], dim=-1)


class TestFox(LibrarySuite):
    axes = (1,)
    causal = True
    translation_invariant = True
    preset = "fox"

    def build(self, site: relpos.Site) -> ForgetGate:
        gate = ForgetGate(site.num_heads, site.embed_dim, init_std=0.5)
        nn.init.uniform_(gate.fgate_proj.bias, -1, 1)
        return gate

    def takes(self, case: Any) -> bool:
        """Irregular coordinates are served where queries are keys."""
        return super().takes(case) and not (case.irregular and case.keys is not None)

    def oracle_attention(
        self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, queries: Coordinates, keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The suite's hidden states are q and k, the heads side by side."""
        states = oracle.heads_of(k, q.shape[1]).transpose(1, 2).flatten(2)
        forgets = gates(mechanism, states)
        places, key_places = oracle.places(queries), oracle.places(keys)
        irregular = not hasattr(queries, "length")
        rows = []
        for i, query in enumerate(places):
            row = []
            for j, key in enumerate(key_places):
                between: list[int] = []  # the tokens whose gates lie between the two
                at, to = 0, 0
                if query is not None and key is not None:
                    at, to = (i, j) if irregular else (query[0], key[0])
                    order = [None if one is None else t if irregular else one[0] for t, one in enumerate(key_places)]
                    between = [t for t, x in enumerate(order) if x is not None and min(at, to) < x <= max(at, to)]
                row.append(forgets[..., between].sum(-1) * (1 if to < at else -1))
            rows.append(torch.stack(row, dim=-1))
        return oracle.attention(q, k, v, bias=torch.stack(rows, dim=-2).to(q.dtype), allowed=allowed)[0]


@pytest.mark.slow
def test_sums_over_many_tokens_are_as_exact_as_their_differences() -> None:
    """At 32,768 tokens that each forget half: c ends near -27,000, where float32 has steps of 0.002."""
    n = 32_768
    torch.manual_seed(0)
    gate, x = ForgetGate(1, 8, init_std=0.5), torch.randn(1, n, 8)
    terms = gate.terms(Sequence(n), states=x)
    exact = gates(copy.deepcopy(gate).double(), x.double())[0, 0].detach().cumsum(0)
    assert exact[-1] < -20_000
    for rows, columns in ((slice(-256, None), slice(-512, None)), (slice(-1, None), slice(None))):
        found = sum((t.query[0, 0, rows] @ t.key[0, 0, columns].mT).detach().double() for t in terms)  # type: ignore[attr-defined]
        wanted = exact[rows, None] - exact[None, columns]
        assert ((found - wanted).abs() <= 4e-6 * (1 + wanted.abs() / 32)).all()
    tf32 = [(t.query.detach(), t.key.detach()) for t in terms.items[:1]]  # type: ignore[attr-defined]
    for side in tf32[0]:  # whole numbers that TF32's eleven bits hold
        kept = torch.ldexp(torch.frexp(side)[0].mul(2**11).round() / 2**11, torch.frexp(side)[1])
        assert torch.equal(kept, side)


@pytest.mark.parametrize("position", ["fox", "t5+fox", "rotary_1d+fox"])
@pytest.mark.parametrize("shared", [True, False])
def test_a_model_decodes_crops_and_reorders_as_it_reads(position: str, shared: bool) -> None:
    torch.manual_seed(0)
    model = LanguageModel(
        64, 32, 32, depth=2, num_heads=4, num_kv_heads=2, position=position, shared_position=shared,
        position_init_std=0.5,
    ).double()  # fmt: skip
    tokens = torch.randint(0, 64, (2, 12))
    whole = model(tokens)
    cache = KeyValueCache(2)
    with torch.no_grad(), relpos.decoding(model), relpos.reading_once(model):
        steps = [model(tokens[:, :5], cache=cache)]
        steps += [model(tokens[:, t : t + 1], cache=cache) for t in range(5, 12)]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-12, atol=1e-12)
        kept = cache.layers[0].remembered
        assert kept is not None
        assert kept.shape == (2, 4, 12, 1)
        assert cache.bytes == 2 * 12 * model.cache_bytes
        cache.crop(7)
        cache.reorder(torch.tensor([1, 1, 0]))
        again = model(tokens[[1, 1, 0], 7:], cache=cache)
        torch.testing.assert_close(again, whole[[1, 1, 0], 7:], rtol=1e-12, atol=1e-12)
    gates_of = [block.attn.position for block in model.blocks]
    assert len({id(x) for one in gates_of for x in one.parameters()}) == 4  # type: ignore[union-attr]
    assert {id(x) for one in gates_of for x in one.parameters()} <= set(map(id, model.position_parameters()))  # type: ignore[union-attr]
    assert model.generate(tokens, 3, temperature=0).shape == (2, 15)
    longer = model.grow(64, model.growth()[0])
    torch.testing.assert_close(longer(tokens), whole, rtol=1e-12, atol=1e-12)


def test_documents_in_one_row_and_frozen_positions() -> None:
    torch.manual_seed(0)
    model = LanguageModel(64, 32, 32, depth=1, num_heads=2, position="fox", position_trainable=False).double()
    assert not any(x.requires_grad for x in model.position_parameters())
    tokens = torch.randint(0, 64, (1, 9))
    packed = model(tokens, segments=torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]))
    alone = torch.cat([model(tokens[:, :4]), model(tokens[:, 4:])], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer", ["multi", "block", "local", "sparse"])
def test_every_layer_hands_its_tokens_over(layer: str) -> None:
    """Against attention on what the layer projects, from its weights alone."""
    torch.manual_seed(0)
    made: Any = {
        "multi": lambda own: MultiHeadAttention(16, 2, position=own),
        "block": lambda own: relpos.TransformerBlock(16, 2, position=own),
        "local": lambda own: relpos.LocalAttention(16, 2, 3, causal=True, position=own),
        "sparse": lambda own: relpos.SparseAttention(16, 2, 3, causal=True, position=own),
    }[layer](ForgetGate(2, 16, init_std=0.5))
    made = made.double()
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    own = made if layer == "multi" else made.attn
    mask = made._pattern(x) if layer in ("local", "sparse") else relpos.Mask.causal()
    states = made.norm1(x) if layer == "block" else x
    q, k, v = own._heads(states)
    sums = gates(own.position, states).cumsum(-1)
    bias = relpos.DenseBias(sums[..., :, None] - sums[..., None, :])
    out = own._joined(relpos.attention(q, k, v, position=bias, mask=mask, backend="reference"))
    if layer == "block":
        out = x + out
        out = out + made.mlp(made.norm2(out))
    found = made(x) if layer in ("local", "sparse") else made(x, mask=mask)
    torch.testing.assert_close(found, out, rtol=1e-12, atol=1e-12)


class Salience(relpos.FromStates):
    """Of any tokens: each key adds what its hidden state says."""

    remembers = 1

    def __init__(self, site: relpos.Site) -> None:
        super().__init__()
        self.embed_dim, self.proj = site.embed_dim, nn.Linear(site.embed_dim, site.num_heads)
        self.given: list[tuple[Coordinates, Tensor]] = []

    def remembered(self, states: Tensor) -> Tensor:
        return self.proj(states).transpose(1, 2)[..., None]

    def from_states(self, queries: Any, keys: Any, states: Tensor, remembered: Any) -> relpos.Terms:
        self.given.append((queries, states))
        return relpos.Terms(relpos.DenseBias(remembered.transpose(2, 3)))


@pytest.mark.parametrize("model", [relpos.VisionTransformer, relpos.SwinTransformer])
def test_models_of_images_hand_their_tokens_over(model: Any) -> None:
    """Each layer what it projects, with the coordinates of its grid or window, to a mechanism of its own."""
    torch.manual_seed(0)
    sizes = {"depth": 2, "num_heads": 2} if model is relpos.VisionTransformer else {"depths": (2,), "num_heads": (2,)}
    made = model(8, 2, 1, 3, embed_dim=16, position=Salience, shared_position=True, **sizes).double()
    inputs: list[Tensor] = []
    layers = [one for one in made.modules() if isinstance(one, MultiHeadAttention)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    made(torch.randn(2, 1, 8, 8, dtype=torch.float64)).sum().backward()
    parts = [layer.position.parts()[0] for layer in layers]  # type: ignore[union-attr]
    assert len({id(part) for part in parts}) == len(inputs) == 2
    for part, x in zip(parts, inputs, strict=True):
        ((where, states),) = part.given
        assert torch.equal(states, x)
        assert where == relpos.Grid(4, 4, prefix=int(model is relpos.VisionTransformer))
        assert part.proj.weight.grad.any()
    assert {id(x) for part in parts for x in part.parameters()} <= set(map(id, made.position_parameters()))
    assert made.growth() == ()  # as it says none
    if model is relpos.VisionTransformer:
        weights = list(made.attention_maps(torch.randn(1, 1, 8, 8, dtype=torch.float64)))
        assert all(torch.allclose(x.sum(-1), torch.ones((), dtype=x.dtype)) for x in weights)


class Plain(relpos.OffsetBias):
    """As others have published theirs: it knows of no states."""

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> relpos.Terms:
        return super().terms(queries, keys)

    def bias(self, offsets: Any) -> Tensor:
        return -offsets.axes[:, 0].abs()[None].float()


class Loudness(relpos.FromStates):
    """Each key contributes one number to all heads."""

    embed_dim, remembers = 8, 1

    def remembered(self, states: Tensor) -> Tensor:
        return states.norm(dim=-1)[:, None, :, None]

    def from_states(self, queries: Any, keys: Any, states: Tensor, remembered: Any) -> relpos.Terms:
        return relpos.Terms(relpos.DenseBias(remembered.transpose(2, 3)))


def test_a_sum_hands_states_to_those_that_ask() -> None:
    x, tokens = torch.randn(2, 6, 8), Sequence(6)
    gate, other = ForgetGate(2, 8, init_std=1.0), ForgetGate(2, 8, init_std=1.0)
    total = Plain() + gate + other
    assert total.needs_states
    assert total.remembers == 2
    found = total.terms(tokens, states=x)
    assert [type(term).__name__ for term in found] == ["LineBias", *["LowRank"] * 4]
    kept = total.remembered(x)
    assert kept.shape == (2, 2, 6, 2)
    last = total.terms(Sequence(1, start=5), tokens, states=x[:, 5:], remembered=kept)
    q = k = torch.zeros(2, 2, 6, 4)
    whole = relpos.attention_weights(q, k, position=found)[:, :, 5:]
    torch.testing.assert_close(relpos.attention_weights(q[:, :, 5:], k, position=last), whole)
    both = Loudness() + gate
    assert both.remembered(x).shape == (2, 2, 6, 2)
    last = both.terms(Sequence(1, start=5), tokens, states=x[:, 5:], remembered=both.remembered(x))
    whole = relpos.attention_weights(q, k, position=both.terms(tokens, states=x))[:, :, 5:]
    torch.testing.assert_close(relpos.attention_weights(q[:, :, 5:], k, position=last), whole)
    assert not Plain().needs_states
    assert terms_of(Plain(), tokens, states=x).one(relpos.LineBias) is not None


@pytest.mark.parametrize("engine", ["reference", "sdpa", "streaming", "auto"])
def test_transforms_checkpoints_and_compilers_see_states(engine: str) -> None:
    torch.manual_seed(0)
    gate, tokens = ForgetGate(2, 8, init_std=1.0).double(), Sequence(6)
    x = torch.randn(3, 6, 8, dtype=torch.float64)

    def run(x: Tensor, own: Mechanism = gate) -> Any:
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return relpos.attention(q, q, q, position=own, queries=tokens, states=x, mask="causal", backend=engine)

    wanted = run(x)
    checkpointed = torch.utils.checkpoint.checkpoint(run, x.requires_grad_(), use_reentrant=False)
    assert torch.equal(checkpointed, wanted)
    leaves = [x, *gate.parameters()]
    pair = [torch.autograd.grad(y.sum(), leaves) for y in (run(x), checkpointed)]
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
    if engine == "streaming":  # as an operator; other engines' terms are compiled in tests/engines/compile_terms.py
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), wanted, rtol=1e-12, atol=1e-12)
    if engine in ("reference", "auto"):
        each = torch.func.vmap(lambda one: run(one[None])[0])(x.detach())
        torch.testing.assert_close(each, wanted, rtol=1e-12, atol=1e-12)
    twice = {name: 2 * p.detach() for name, p in gate.named_parameters()}
    by_tensors = gate.terms_from(twice, tokens, states=x)
    called = torch.func.functional_call(gate, twice, (tokens,), {"states": x})
    for one, other in zip(by_tensors, called, strict=True):
        assert torch.equal(one.key, other.key)  # type: ignore[attr-defined]
    q = x.unflatten(-1, (2, 4)).transpose(1, 2)
    given: Any = {"position": gate, "queries": tokens, "states": x, "mask": "causal"}
    assert relpos.explain(q, q, q, **given, backend=engine).backend in (engine, "sdpa")
    torch.testing.assert_close(relpos.attention_weights(q, q, **given) @ q, wanted, rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_a_cache_under_autocast_holds_float32() -> None:
    """As the full pass makes its gates: half precision would round every sum of them."""
    model = LanguageModel(11, context=40, embed_dim=16, depth=1, num_heads=2, position="fox", position_init_std=0.5)
    tokens, cache = torch.randint(0, 11, (1, 40)), KeyValueCache(1)
    with torch.autocast("cpu", torch.bfloat16):
        model.eval()(tokens, cache=cache)
    assert cache.layers[0].remembered is not None
    assert cache.layers[0].remembered.dtype == torch.float32
