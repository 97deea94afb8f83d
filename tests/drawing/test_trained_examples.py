"""The trained examples that come with the package."""

from importlib.resources import files

import pytest
import torch
from torch.utils._pytree import tree_leaves

from relpos import Grid, Sequence, Site
from relpos.position import Mechanism, presets
from relpos.position.base.states import terms_at_rest
from relpos.report.drawing.trained_examples import FILE, HEAD_DIM, HEADS, SITES, start, trained

LEARNED = [
    (name, axes)
    for axes in SITES
    for name, preset in presets().items()
    if axes in preset.token_axes and any(True for _ in start(name, axes).parameters())
]


def said(mechanism: Mechanism, site: Site) -> list[object]:
    embedded = mechanism.embed(torch.zeros(1, site.queries.count, site.embed_dim), site.queries)
    return [embedded, *tree_leaves(terms_at_rest(mechanism, site.queries))]


@pytest.mark.parametrize(("name", "axes"), LEARNED)
@torch.no_grad()
def test_every_mechanism_that_learns_has_learned_something(name: str, axes: int) -> None:
    began, became = start(name, axes), trained(name, axes=axes)
    assert became is not None, f"run python recipes/trained_examples.py {name}"
    assert repr(became) == repr(began)
    assert all(x.isfinite().all() for x in became.parameters())
    pairs = zip(began.parameters(), became.parameters(), strict=True)
    assert any((a - b).abs().max() > 0.01 for a, b in pairs)
    assert all(x.isfinite().all() for x in said(became, SITES[axes]) if isinstance(x, torch.Tensor))


def test_it_is_small() -> None:
    assert len(files("relpos.report.drawing").joinpath(FILE).read_bytes()) < 220_000


def test_where_there_is_none() -> None:
    widths = (HEADS, HEAD_DIM, HEADS * HEAD_DIM)
    assert trained("alibi", axes=1) is None
    assert trained("relative_1d", Site(2, HEAD_DIM, 2 * HEAD_DIM, Sequence(8))) is None
    assert trained("relative_1d", Site(*widths, Sequence(129))) is None
    assert trained("relative_2d", Site(*widths, Grid(9, 8))) is None
    assert trained("rotary_multimodal", Site(*widths, Grid(2, 2, 2))) is None
    assert trained("t5", Site(*widths, Sequence(1000))) is not None
    assert trained("swin", Site(*widths, Grid(8, 4))) is not None


def test_numbers_of_others_are_left_alone() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    trained("t5", axes=1)
    assert torch.equal(torch.rand(1), wanted)
