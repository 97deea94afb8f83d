"""TUPE: the untied product, the class token, and TUPE-R. Other sizes are in test_windows.py."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from position.published import attended
from position.suites import PositionSuite
from relpos import Scale, Sequence, Site, T5Bias, TUPEPosition
from relpos.core import Coordinates
from relpos.testing import SuiteCase, oracle


def untied(own: Any, queries: list[Any], keys: list[Any]) -> Tensor:
    """Ke et al. 2021, equations 7 and 9, `[H, N, M]`, a pair at a time. Places are row numbers, None a prefix."""
    heads = own.num_heads
    width = own.pos_query.out_features // heads

    def side(layer: Any) -> list[Tensor]:
        made = []
        for p in own.places.pos_embed[0]:
            centred = p - p.mean()
            normed = centred / torch.sqrt((centred * centred).mean() + own.norm.eps) * own.norm.weight + own.norm.bias
            made.append((layer.weight @ normed + layer.bias).view(heads, width))
        return made

    query, key = side(own.pos_query), side(own.pos_key)
    entries = []
    for i in queries:
        for j in keys:
            # the first two vectors are those of the thetas
            a, b = (0, 0) if i is None else (1, 1) if j is None else (2 + i, 2 + j)
            entries.append((query[a] * key[b]).sum(dim=-1) / math.sqrt(2 * width))
    return torch.stack(entries, dim=-1).view(heads, len(queries), len(keys))


def numbers(coordinates: Coordinates) -> list[Any]:
    return [place and place[0] for place in oracle.raster(coordinates)]


class TestTUPE(PositionSuite):
    axes = (1,)
    preset = "tupe"

    def takes(self, case: SuiteCase) -> bool:
        sides = [case.queries] if case.keys is None else [case.queries, case.keys]
        return super().takes(case) and all(side.low[0] >= 0 for side in sides)

    def build(self, site: Site) -> TUPEPosition:
        return TUPEPosition.from_site(site)

    def said(self, own: Any, q: Tensor, k: Tensor, queries: Any, keys: Any) -> dict[str, Any]:
        return {"bias": untied(own, numbers(queries), numbers(keys))[None], "scale": (2 * q.shape[-1]) ** -0.5}


class TestTUPEGrid(TestTUPE):
    alike = True
    axes = (2, 3)
    cross = False
    irregular = False


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("prefix", [0, 3])
def test_tupe_r(prefix: int, backend: str) -> None:
    """With T5's bias: one scale, sqrt(2 D); the class token has its two numbers and no relative bias, as equation 9."""
    own = TUPEPosition(3, 4, 10, seq_len=6, init_std=1.0).double()
    relative = T5Bias(3, num_buckets=8, max_distance=6, scaled=True, init_std=1.0).double()
    where = Sequence(6, prefix=prefix)
    q, k, v = torch.randn(3, 2, 3, where.count, 4, dtype=torch.float64)
    bias = untied(own, numbers(where), numbers(where))
    for i in range(6):
        for j in range(6):
            row = relative.relative_attention_bias[oracle.t5_bucket(i - j, 8, 6, True)]
            bias[:, prefix + i, prefix + j] = bias[:, prefix + i, prefix + j] + row
    wanted = oracle.attention(q, k, v, bias=bias[None], scale=8**-0.5)[0]
    total = own + relative
    assert [term.value for term in total.terms(where).of(Scale)] == [pytest.approx(8**-0.5)]
    found = attended(total, q, k, v, queries=where, backend=backend)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_t5_must_not_bring_its_own_scale() -> None:
    with pytest.raises(ValueError, match="one scale"):
        (TUPEPosition(3, 4, 10, seq_len=6) + T5Bias(3)).terms(Sequence(6))
