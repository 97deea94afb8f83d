"""What is promised of several mechanisms alike: what a site makes, growth as they are, far places, memory."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import relpos
from position.published import largest_tensor
from relpos import ALiBi, CoPE, FIREBias, Grid, Kerple, LineBias, Mechanism, Sandwich, Sequence, Site
from relpos.core import Coordinates, RowRule
from relpos.position import presets
from relpos.position.base.states import terms_at_rest
from relpos.testing import oracle

SEQUENCE, GRID, TOKENED = Sequence(9), Grid(2, 5), Grid(2, 5, prefix=1)
TABLE = "relative_position_bias_table"

MADE: list[tuple[str, Coordinates, dict[str, tuple[int, ...]], dict[str, Any]]] = [
    ("alibi", GRID, {}, {"num_heads": 3, "distance": "euclidean"}),
    ("alibi_axes", GRID, {"log_slopes": (2, 3)}, {"distance": "axes"}),
    ("alibi_axes", Grid(2, 2, 3), {"log_slopes": (3, 3)}, {}),
    ("alibi_learned", GRID, {"log_slopes": (1, 3)}, {"distance": "euclidean"}),
    ("alibi_manhattan", GRID, {}, {"num_heads": 3, "distance": "manhattan"}),
    ("clipped", GRID, {TABLE: (33, 3)}, {"max_distance": 16}),
    ("cope", SEQUENCE, {"pos_emb": (64, 4)}, {}),
    ("decomposed", GRID, {"rel_pos.0": (3, 4), "rel_pos.1": (9, 4)}, {}),
    ("factored_2d", GRID, {"tables.0": (3, 3), "tables.1": (9, 3)}, {"beyond": "raise"}),
    ("irpe_euclidean", GRID, {"table": (1, 42, 4)}, {"method": "euclidean", "ratio": 20.0}),
    ("irpe_product", GRID, {"table": (1, 50, 4)}, {"method": "product", "ratio": 1.9}),
    ("kerple_log", GRID, {"log_r1": (3,), "raw_r2": (3,)}, {"kernel": "log"}),
    ("kerple_power", GRID, {"log_r1": (3,), "raw_r2": (3,)}, {"kernel": "power"}),
    ("learned", TOKENED, {"pos_embed": (1, 11, 12)}, {}),
    ("learned", Sequence(4, start=5), {"pos_embed": (1, 9, 12)}, {}),
    ("relative_1d", TOKENED, {TABLE: (19 + 3, 3)}, {"bias_type": "1d", "sizes": (10,), "prefix": 1}),
    ("relative_2d", TOKENED, {TABLE: (3 * 9 + 3, 3)}, {"bias_type": "2d", "sizes": (2, 5), "prefix": 1}),
    ("sandwich", GRID, {}, {"num_heads": 3, "width": 128, "base": 10000.0}),
    ("shaw", GRID, {"key_vectors": (33, 4), "value_vectors": (33, 4)}, {}),
    ("sinusoidal_1d", GRID, {}, {"axes": 1, "layout": "interleaved", "base": 10000.0}),
    ("sinusoidal_2d", GRID, {}, {"axes": 2, "layout": "half", "base": 10000.0}),
    ("t5", GRID, {"relative_attention_bias": (32, 3)}, {"max_distance": 128, "bidirectional": True, "scaled": True}),
    (
        "deberta",
        GRID,
        {
            "rel_embeddings": (64, 12),
            "pos_key.weight": (12, 12),
            "pos_key.bias": (12,),
            "pos_query.weight": (12, 12),
            "pos_query.bias": (12,),
        },
        {"span": 32, "max_distance": 128},
    ),
    (
        "fire",
        SEQUENCE,
        {
            "c": (1,),
            "multiplier": (1,),
            "mlp.0.weight": (32, 1),
            "mlp.0.bias": (32,),
            "mlp.2.weight": (3, 32),
            "mlp.2.bias": (3,),
        },
        {"threshold": 512.0, "c": 0.1, "multiplier": 1.0},
    ),
    (
        "log_cpb",
        GRID,
        {"cpb_mlp.0.weight": (512, 2), "cpb_mlp.0.bias": (512,), "cpb_mlp.2.weight": (3, 512)},
        {"sizes": (2, 5)},
    ),
    (
        "transformer_xl",
        GRID,
        {"u": (3, 4), "v": (3, 4), "projection.weight": (12, 12)},
        {"layout": "grouped", "base": 10000.0},
    ),
    (
        "tupe",
        TOKENED,
        {
            "places.pos_embed": (1, 2 + 10, 12),
            "norm.weight": (12,),
            "norm.bias": (12,),
            "pos_query.weight": (12, 12),
            "pos_query.bias": (12,),
            "pos_key.weight": (12, 12),
            "pos_key.bias": (12,),
        },
        {},
    ),
]
"""The preset, its tokens, what it learns by the names of checkpoints, and settings as published."""


@pytest.mark.parametrize(("name", "tokens", "learned", "settings"), MADE)
def test_what_a_site_makes(name: str, tokens: Coordinates, learned: dict[str, Any], settings: dict[str, Any]) -> None:
    own = presets()[name].make(Site(3, 4, 12, tokens))
    assert {name: tuple(x.shape) for name, x in own.named_parameters()} == learned
    for setting, wanted in settings.items():
        found = getattr(own, setting)
        assert (pytest.approx(found.item()) if isinstance(found, Tensor) else found) == wanted, setting


TABLED = [
    *("clipped", "cope", "deberta", "decomposed", "factored_2d", "irpe_product", "learned", "relative_1d"),
    *("relative_2d", "shaw", "t5", "transformer_xl", "tupe"),
]
LAYERS = ("norm.", "pos_key.", "pos_query.", "projection.")
"""What starts as PyTorch's layers do."""


@pytest.mark.parametrize("std", [0.0, None, 0.5])
@pytest.mark.parametrize("name", TABLED)
def test_a_site_says_how_large_tables_start(name: str, std: float | None) -> None:
    tokens = SEQUENCE if name == "cope" else GRID
    site = Site(3, 4, 12, tokens) if std is None else Site(3, 4, 12, tokens, init_std=std)
    parameters = presets()[name].make(site).named_parameters()
    start = torch.cat([x.detach().flatten() for name, x in parameters if not name.startswith(LAYERS)])
    wanted = 0.02 if std is None else std
    assert 0.6 * wanted <= start.std() <= 1.4 * wanted


# other places

ENDING = {"factored_2d", "learned", "relative_1d", "relative_2d", "tupe"}
"""Mechanisms with tables that end; how they grow is in test_windows.py."""


@pytest.mark.parametrize("name", [name for name in presets() if name not in ENDING and "+" not in name])
def test_what_is_defined_anywhere_grows_as_it_is(name: str) -> None:
    near, far = (Grid(2, 2), Grid(9, 9)) if 2 in presets()[name].token_axes else (Sequence(4), Sequence(81))
    own = presets()[name].make(Site(3, 4, 12, near))
    assert own.growth == ("as is",) or name.startswith("rotary_")  # whose scalings are rules, too
    assert own.grow(far, "as is") is own
    terms_at_rest(own, far)
    own.embed(torch.zeros(1, 81, 12), far)


FAR: dict[str, tuple[Any, Any, float]] = {
    "alibi": (ALiBi(12), lambda own, n: [-slope * n for slope in oracle.alibi_slopes(12)], 0.0),
    "sandwich": (
        Sandwich(3),
        lambda own, n: [math.fsum(math.cos(n * 1e4 ** (-p / 64)) for p in range(64)) * 3 / 8 / h for h in (1, 2, 3)],
        1e-7,
    ),
    "kerple_log": (
        Kerple(3),
        lambda own, n: [-math.log1p(math.exp(rate) * n) for rate in own.raw_r2.tolist()],
        1e-6,
    ),
    "kerple_power": (Kerple(3, "power"), lambda own, n: [-math.exp(rate) * n for rate in own.log_r1.tolist()], 1e-6),
}
"""A mechanism, its biases at a distance in Python's floats, and how near float32 comes; 0 where it is rounded once."""


@pytest.mark.parametrize("distance", [1, 1995, 100_000, 10_000_000])
@pytest.mark.parametrize("name", FAR)
def test_far_away_in_a_bfloat16_model(name: str, distance: int) -> None:
    """There 1,995 would be 1,992."""
    own, by_hand, slack = FAR[name]
    own = copy.deepcopy(own).to(torch.bfloat16)
    for query, key in ((distance, 0), (0, distance)):
        (term,) = own.terms(Sequence(1, start=query), Sequence(1, start=key)).of(LineBias)
        assert term.values.dtype == torch.float32
        wanted = torch.tensor(by_hand(own, distance), dtype=torch.float64)
        wanted = wanted if slack else wanted.float().double()
        torch.testing.assert_close(term.values[:, 0].double(), wanted, rtol=slack, atol=min(slack, 1e-7))


@pytest.mark.parametrize("size", [-30.0, -3.0, 0.0, 3.0])
@pytest.mark.parametrize("make", [lambda: ALiBi(2, learned=True), lambda: Kerple(2), lambda: Kerple(2, "power")])
def test_no_training_makes_it_reward_distance(make: Any, size: float) -> None:
    own = make().double()
    for parameter in own.parameters():
        torch.nn.init.constant_(parameter, size)
    (term,) = own.terms(Sequence(1, start=50), Sequence(51)).of(LineBias)
    falling = term.values.diff(dim=1)
    assert term.values.max() == 0
    assert (falling <= 0).all()
    assert size == -30 or (falling < 0).all()


# memory

PAIRS = 256 * 256
LARGEST: list[tuple[Any, Any, float]] = [
    (lambda: CoPE(64, 64, init_std=1.0), ("reference", "sdpa"), 2 * PAIRS),  # of a place, and of the next one
    (lambda: relpos.DisentangledPosition(1, 64, 64, span=32), ("reference", "sdpa"), 2 * PAIRS),
    (lambda: FIREBias(1, hidden_dim=32), ("reference", "sdpa"), 32 * PAIRS),  # the hidden units of every pair
    (lambda: Raster(relpos.ImageRelativePosition(1, 64)), ("reference", "sdpa"), 2 * PAIRS),
    (lambda: relpos.ShawPosition(64, 16), ("reference",), 2 * PAIRS),
    (lambda: relpos.ShawPosition(64, 16, values=False), ("reference", "sdpa"), 2 * PAIRS),
    (lambda: relpos.TransformerXLPosition(1, 64, 64), ("reference", "sdpa"), 2 * 256 * 257 - 1),  # N x 2 N
    (lambda: relpos.TUPEPosition(1, 64, 8, seq_len=256), ("reference", "sdpa"), PAIRS),
]


class Raster(Mechanism):
    """A mechanism of a grid on a sequence of as many cells."""

    def __init__(self, own: Mechanism) -> None:
        super().__init__()
        self.own = own

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> relpos.Terms:
        return self.own.terms(Grid(16, 16))


@pytest.mark.parametrize(("make", "backends", "numbers"), LARGEST)
def test_never_a_vector_a_pair(make: Any, backends: tuple[str, ...], numbers: int) -> None:
    """Of 256 tokens and width 64, forward and backward."""
    for backend in backends:
        assert largest_tensor(make(), backend) <= numbers


@pytest.mark.parametrize("make", [lambda: CoPE(4, 4, init_std=1.0), lambda: FIREBias(3, threshold=3.0)])
def test_a_block_of_rows_is_the_same_rows(make: Any) -> None:
    own = make().double()
    (term,) = own.terms(Sequence(9)).of(RowRule)
    q, k = torch.randn(2, 2, 3, 9, 4, dtype=torch.float64)
    allowed = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    blocks = [term(q[:, :, a:b], k, allowed[:, :, a:b], slice(a, b)) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(blocks, dim=2), term(q, k, allowed, slice(0, 9)), rtol=1e-13, atol=1e-13)
