"""CABLE's bias: against loops, the authors' lines, at many tokens, and in a model with a cache."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relpos
from conformance.suite import LibrarySuite
from relpos import CABLEBias, KeyValueCache, LanguageModel, Mask, Sequence, Site
from relpos.core import Coordinates
from relpos.testing import oracle


def spoken(layer: Any, states: Tensor) -> list[Tensor]:
    """`w x + b` a token at a time, `[B, H]` each; in half precision as in float32."""
    wide = torch.promote_types(states.dtype, torch.float32)
    weight, bias = layer.weight.to(wide), layer.bias.to(wide)
    return [(states[:, t].to(wide)[:, None] * weight).sum(-1) + bias for t in range(states.shape[1])]


class TestCable(LibrarySuite):
    """Its terms are of the forget gate's kind."""

    alike = True
    axes = (1,)
    causal = True
    translation_invariant = True
    preset = "cable"

    def build(self, site: Site) -> CABLEBias:
        bias = CABLEBias(site.num_heads, site.embed_dim, init_std=0.2)
        for layer in (bias.cable_layer, bias.cable_layer_scale):
            nn.init.uniform_(layer.bias, 0.1, 0.5)
        return bias

    def takes(self, case: Any) -> bool:
        """Irregular coordinates are served where queries are keys."""
        return super().takes(case) and not (case.irregular and case.keys is not None)

    def oracle_attention(
        self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, queries: Coordinates, keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The suite's hidden states are q and k, the heads side by side."""
        own, states = (oracle.heads_of(x, q.shape[1]).transpose(1, 2).flatten(2) for x in (q, k))
        steps = [x.clamp(min=0) for x in spoken(mechanism.cable_layer, states)]
        slopes = [torch.log1p(torch.exp(x)) for x in spoken(mechanism.cable_layer_scale, own)]
        irregular = not hasattr(queries, "length")

        def places(side: Coordinates) -> list[int | None]:
            found = oracle.places(side)
            return [None if place is None else n if irregular else place[0] for n, place in enumerate(found)]

        def before(place: int | None) -> Tensor:
            """S, of the keys up to a place."""
            behind = [x for x, at in zip(steps, places(keys), strict=True) if None not in (at, place) and at <= place]  # type: ignore[operator]
            return -torch.stack([torch.zeros_like(steps[0]), *behind]).sum(0)

        rows = []
        for i, query in enumerate(places(queries)):
            row = [before(query) - before(key) if None not in (query, key) else 0 * steps[0] for key in places(keys)]
            rows.append(slopes[i][..., None] * torch.stack(row, dim=-1))
        return oracle.attention(q, k, v, bias=torch.stack(rows, dim=-2).to(q.dtype), allowed=allowed)[0]


def test_values_and_gradients_are_those_of_the_authors_lines() -> None:
    """`Sums` and `bias_weights` as their code has them."""
    torch.manual_seed(0)
    own, x, tokens = CABLEBias(3, 12, init_std=0.7).double(), torch.randn(2, 9, 12).double(), Sequence(9)
    q, k, v = torch.randn(3, 2, 3, 9, 4, dtype=torch.float64)
    sums = torch.cumsum(-F.relu(own.cable_layer(x)), dim=1).permute(0, 2, 1)
    weights = F.softplus(own.cable_layer_scale(x)).permute(0, 2, 1)
    bias = weights.unsqueeze(-1) * (sums.unsqueeze(3) - sums.unsqueeze(2))
    wanted = (q @ k.mT / 2 + bias + torch.full((9, 9), -torch.inf).triu(1)).softmax(-1) @ v
    found = relpos.attention(q, k, v, position=own, queries=tokens, states=x, mask="causal")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    pair = [torch.autograd.grad(y.square().sum(), list(own.parameters())) for y in (found, wanted)]
    for mine, theirs in zip(*pair, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_sums_over_many_tokens_are_as_exact_as_their_differences() -> None:
    """At 32,768 tokens the sums end near -20,000, where float32 has steps of 0.002."""
    n = 32_768
    torch.manual_seed(0)
    own, x = CABLEBias(1, 8, init_std=0.5), torch.randn(1, n, 8)
    nn.init.constant_(own.cable_layer.bias, 0.4)
    terms = own.terms(Sequence(n), states=x)
    twin = copy.deepcopy(own).double()
    sums = torch.cumsum(-F.relu(twin.cable_layer(x.double())), dim=1)[0, :, 0].detach()
    slopes = F.softplus(twin.cable_layer_scale(x.double()))[0, :, 0].detach()
    assert sums[-1] < -20_000
    assert slopes.max() > 2
    for rows, columns in ((slice(-256, None), slice(-512, None)), (slice(-1, None), slice(None))):
        found = sum((t.query[0, 0, rows] @ t.key[0, 0, columns].mT).detach().double() for t in terms)  # type: ignore[attr-defined]
        query, key = terms.items[0].query[0, 0, rows], terms.items[0].key[0, 0, columns]  # type: ignore[attr-defined]
        assert torch.equal((query @ key.mT).double(), query.double() @ key.double().mT), "whole numbers are exact"
        difference = sums[rows, None] - sums[None, columns]
        wanted = slopes[rows, None] * difference
        assert ((found - wanted).abs() <= 1.5e-5 * (1 + slopes[rows, None]) * (1 + difference.abs() / 32)).all()


def test_a_model_decodes_crops_and_reorders_as_it_reads() -> None:
    torch.manual_seed(0)
    model = LanguageModel(
        64, 32, 32, depth=2, num_heads=4, num_kv_heads=2, position="cable+fox", position_init_std=0.5
    ).double()  # fmt: skip
    tokens = torch.randint(0, 64, (2, 12))
    whole, cache = model(tokens), KeyValueCache(2)
    with torch.no_grad(), relpos.decoding(model):
        steps = [model(tokens[:, :5], cache=cache)]
        steps += [model(tokens[:, t : t + 1], cache=cache) for t in range(5, 12)]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-12, atol=1e-12)
        assert cache.layers[0].remembered.shape == (2, 4, 12, 2)  # type: ignore[union-attr]
        cache.crop(7)
        cache.reorder(torch.tensor([1, 1, 0]))
        again = model(tokens[[1, 1, 0], 7:], cache=cache)
        torch.testing.assert_close(again, whole[[1, 1, 0], 7:], rtol=1e-12, atol=1e-12)


def test_a_key_without_distance_is_as_near_as_the_query() -> None:
    """Where all relus are 0, scores have no bias whatever the weight."""
    own, q = CABLEBias(2, 8), torch.randn(1, 2, 6, 4)
    nn.init.constant_(own.cable_layer.bias, -9.0)
    given: Any = {"queries": Sequence(6), "states": torch.randn(1, 6, 8), "mask": Mask.causal()}
    plain = relpos.attention(q, q, q, mask="causal")
    torch.testing.assert_close(relpos.attention(q, q, q, position=own, **given), plain)
