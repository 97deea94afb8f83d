"""Inkling's bias: against loops, transformers' own, in a model with a cache, and where it ends."""

from typing import Any

import pytest
import torch
from torch import Tensor

import relpos
from conformance.suite import LibrarySuite
from parity import TIGHT, layers_agree
from position.published import BOTH, model, running_in, tokens
from relpos import InklingBias, KeyValueCache, LanguageModel, Mask, Sequence, Site
from relpos.core import Coordinates
from relpos.testing import oracle

WIDTH, EXTENT = 3, 4  # so that the cases' distances reach beyond


class TestInkling(LibrarySuite):
    axes = (1,)
    translation_invariant = True
    preset = "inkling"

    def build(self, site: Site) -> InklingBias:
        return InklingBias(site.num_heads, site.embed_dim, WIDTH, EXTENT, init_std=0.7)

    def oracle_attention(
        self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, queries: Coordinates, keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The suite's hidden states are q, the heads side by side. In half precision as in float32."""
        wide = torch.promote_types(q.dtype, torch.float32)
        states = q.transpose(1, 2).flatten(2).to(wide)
        weight, curves = mechanism.r_proj.weight.to(wide), mechanism.proj.to(wide)
        rows = []
        for i, query in enumerate(oracle.places(queries)):
            relative = [(states[:, i, None] * weight[h * WIDTH : (h + 1) * WIDTH]).sum(-1) for h in range(q.shape[1])]
            row = []
            for key in oracle.places(keys):
                distance = -1 if query is None or key is None else query[0] - key[0]
                curve = curves[:, distance] if 0 <= distance < EXTENT else torch.zeros_like(curves[:, 0])
                row.append(torch.stack([(r * curve).sum(-1) for r in relative], dim=-1))
            rows.append(torch.stack(row, dim=-1))
        return oracle.attention(q, k, v, bias=torch.stack(rows, dim=-2).to(q.dtype), allowed=allowed)[0]


@BOTH
def test_parity_with_inkling(timm: Any, backend: str, dtype: torch.dtype) -> None:
    """Projection and bias, at the end of more keys than the curves reach."""
    n, m, heads, extent = 5, 12, 3, 7
    own = InklingBias(heads, 12, 16, extent, init_std=0.5).to(dtype)
    with running_in(dtype):
        theirs = model("inkling").InklingRelativeLogits(16, extent).to(dtype)
    theirs.proj.data.copy_(own.proj.data)
    x = tokens(2, n, 12, dtype=dtype)
    q = tokens(2, heads, n, 4, dtype=dtype)
    k, v = (tokens(2, heads, m, 4, dtype=dtype) for _ in range(2))
    order = torch.arange(m)
    bias = theirs((x @ own.r_proj.weight.mT).view(2, n, heads, 16), order[m - n :], order)
    hidden = torch.where(order <= order[m - n :, None], 0.0, -torch.inf).to(dtype)
    wanted = (q @ k.mT / 2 + bias + hidden).softmax(dim=-1) @ v
    found = relpos.attention(
        q, k, v, position=own, queries=Sequence(n, start=m - n), keys=Sequence(m), states=x,
        mask=Mask.causal(order[m - n :], order), backend=backend,
    )  # fmt: skip
    leaves = {"x": x, "q": q, "k": k, "v": v, "r_proj": own.r_proj.weight, "proj": theirs.proj}
    name, oracle_name = "inkling", "transformers InklingRelativeLogits"
    layers_agree(name, oracle_name, found, wanted, leaves, {"proj": own.proj}, limit=TIGHT[dtype])


def test_a_model_decodes_crops_and_reorders_as_it_reads() -> None:
    """A cache holds keys and values alone."""
    torch.manual_seed(0)
    model = LanguageModel(
        64, 8, 32, depth=2, num_heads=4, num_kv_heads=2, position="inkling", position_init_std=0.5
    ).double()  # fmt: skip
    biases = [block.attn.position for block in model.blocks]
    assert len({id(x) for one in biases for x in one.parameters()}) == 4  # type: ignore[union-attr]
    assert [part.extent for part in biases[0].parts()] == [4]  # type: ignore[union-attr,operator]
    tokens = torch.randint(0, 64, (2, 12))
    whole = model(tokens)
    cache = KeyValueCache(2)
    with torch.no_grad(), relpos.decoding(model):
        steps = [model(tokens[:, :5], cache=cache)]
        steps += [model(tokens[:, t : t + 1], cache=cache) for t in range(5, 12)]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-12, atol=1e-12)
        assert cache.layers[0].remembered is None
        cache.crop(7)
        cache.reorder(torch.tensor([1, 1, 0]))
        again = model(tokens[[1, 1, 0], 7:], cache=cache)
        torch.testing.assert_close(again, whole[[1, 1, 0], 7:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("init_std", [0.02, 0.0])
def test_it_starts_as_published(init_std: float) -> None:
    torch.manual_seed(0)
    bias = InklingBias(8, 64, init_std=init_std)
    assert {name: tuple(x.shape) for name, x in bias.named_parameters()} == {
        "proj": (16, 1024),
        "r_proj.weight": (128, 64),
    }
    assert float(bias.proj.detach().std()) == pytest.approx(init_std, rel=0.05)
    assert float(bias.r_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.05)  # curves of 0 learn by it
