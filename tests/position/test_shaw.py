"""Shaw's vectors for keys and values: clipping, the skew, and published code of the key part."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from parity import TIGHT, layers_agree
from position.published import BOTH, DTYPES, attended, config, heads, merged, model, random, running_in, tokens
from position.suites import PositionSuite
from relpos import Mask, Sequence, ShawPosition, Site
from relpos.testing import oracle

FARTHEST = 3  # so that the cases' offsets are clipped on both sides


class Shaw(PositionSuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    raster = True
    translation_invariant = True
    values: ClassVar[bool] = True

    def build(self, site: Site) -> ShawPosition:
        return ShawPosition(site.head_dim, FARTHEST, values=self.values, init_std=1.0)

    def said(self, own: Any, q: Tensor, k: Tensor, queries: Any, keys: Any) -> dict[str, Any]:
        def vectors(table: Tensor) -> list[list[Tensor]]:
            rows = table.unbind()

            def clipped(offset: int) -> Tensor:
                return rows[max(-FARTHEST, min(FARTHEST, offset)) + FARTHEST]

            return self.by_offset(queries, keys, clipped, torch.zeros_like(rows[0]))

        said = {"bias": oracle.meet(q, vectors(own.key_vectors)) * q.shape[-1] ** -0.5}
        if self.values:
            said["value_vectors"] = torch.stack([torch.stack(row) for row in vectors(own.value_vectors)])[None]
        return said


class TestShaw(Shaw):
    preset = "shaw"
    lacks: ClassVar[dict[str, str]] = {"sdpa": "value side"}


class TestShawKeysOnly(Shaw):
    alike = True
    row = "shaw (keys alone)"
    values = False
    every = 4
    sampled = 4


class TestShawCausal(Shaw):
    alike = True
    row = "shaw"
    axes = (1,)
    causal = True
    every = 4
    sampled = 4
    lacks: ClassVar[dict[str, str]] = {"sdpa": "value side"}


# the sign, the clip and the skew


@DTYPES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(4, 9), (9, 4)])
def test_shaws_own_indices(n: int, m: int, causal: bool, dtype: torch.dtype) -> None:
    """Equations 3 to 5 as the paper writes them: row clip(j - i, k) + k of tables that run the other way."""
    own = ShawPosition(4, 2, init_std=1.0).to(dtype)
    assert own.value_vectors is not None
    keys, values = own.key_vectors.flip(0), own.value_vectors.flip(0)
    q = tokens(2, 3, n, 4, dtype=dtype)
    k, v = (tokens(2, 3, m, 4, dtype=dtype) for _ in range(2))
    rows = (torch.arange(m) - torch.arange(n)[:, None]).clamp(-2, 2) + 2
    score = torch.einsum("bhid,bhijd->bhij", q, k[:, :, None] + keys[rows]) / 2
    mask = None
    if causal:
        later = torch.arange(m) > torch.arange(n)[:, None]
        score = score.masked_fill(later, -torch.inf)
        mask = Mask.causal(torch.arange(n), torch.arange(m))
    weights = score.softmax(dim=-1)
    wanted = torch.einsum("bhij,bhijd->bhid", weights, v[:, :, None] + values[rows])
    found = attended(own, q, k, v, queries=Sequence(n), keys=Sequence(m), mask=mask)
    leaves = {"q": q, "k": k, "v": v, **dict(own.named_parameters())}
    layers_agree("shaw", "Shaw et al. 2018, equations 3 to 5", found, wanted, leaves, limit=TIGHT[dtype])


@DTYPES
@pytest.mark.parametrize("n", [1, 7])
def test_the_skew(n: int, dtype: torch.dtype) -> None:
    """Huang et al. 2018, section 3.4.1: pad a column, reshape, drop a row; for causal masks and N = M."""
    own = ShawPosition(4, n - 1, values=False, init_std=1.0).to(dtype)
    q, k, v = (tokens(2, 3, n, 4, dtype=dtype) for _ in range(3))
    vectors = own.key_vectors[n - 1 :].flip(0)  # from the farthest past to the query itself
    padded = nn.functional.pad(q @ vectors.mT, (1, 0))
    skewed = padded.reshape(2, 3, n + 1, n)[:, :, 1:]
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    wanted = ((q @ k.mT + skewed) / 2).masked_fill(later, -torch.inf).softmax(dim=-1) @ v
    leaves = {"q": q, "k": k, "v": v, "key_vectors": own.key_vectors}
    for backend in ("reference", "sdpa"):
        found = attended(own, q, k, v, queries=Sequence(n), mask=Mask.causal(), backend=backend)
        name, oracle = "shaw (keys alone)", "Huang et al. 2018 (Music Transformer), the skew"
        layers_agree(name, oracle, found, wanted, leaves, limit=TIGHT[dtype])


@BOTH
def test_parity_with_wav2vec2_bert(timm: Any, backend: str, dtype: torch.dtype) -> None:
    """The whole layer with `relative_key`: vectors for keys alone, counted key - query."""
    n, farthest = 9, 3
    settings = config(
        "wav2vec2_bert",
        hidden_size=12,
        num_attention_heads=3,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=farthest,
        right_max_position_embeddings=farthest,
        attention_dropout=0.0,
    )
    settings._attn_implementation = "eager"
    x = tokens(2, n, 12, dtype=dtype)
    with running_in(dtype):
        block = random(model("wav2vec2_bert").Wav2Vec2BertSelfAttention(settings), dtype)
        theirs = block(x)[0]
    own = ShawPosition(4, farthest, values=False).to(dtype)
    del own.key_vectors
    own.key_vectors = block.distance_embedding.weight.flip(0)  # type: ignore[assignment]
    q, k, v = (heads(layer(x), 3) for layer in (block.linear_q, block.linear_k, block.linear_v))
    output = block.linear_out(merged(attended(own, q, k, v, queries=Sequence(n), backend=backend)))
    leaves = {"x": x, **dict(block.named_parameters())}
    name, oracle = "shaw (keys alone)", "transformers Wav2Vec2BertSelfAttention"
    layers_agree(name, oracle, output, theirs, leaves, limit=TIGHT[dtype])
