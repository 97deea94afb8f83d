"""Laws that hold for every mechanism, on random examples: heads, widths, lengths, starts, grids, prefixes, masks, sums.

The mechanisms are the presets, found by themselves, and sums of two. A new one is held to every law: what is exempt
from translation is declared below, once, and is shown to break it. `RELPOS_EXAMPLES=10000` runs 10,000 examples a law.
"""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from relpos import Grid, Mask, Mechanism, Positions, Sequence, Site, attention
from relpos.core import Coordinates, Terms, terms
from relpos.position import find, presets
from relpos.position.base import states
from relpos.position.base.states import terms_at_rest
from relpos.testing.calls import states_of

pytestmark = pytest.mark.slow

NEVER = {"learned", "sinusoidal_1d", "sinusoidal_2d", "tupe", "fire", "rotary_dinov3", "rotary_dynamic_ntk"}
"""What moving everything alike changes: vectors of a place, and what looks at how far a query or the text goes."""

TABLED = {"learned", "tupe"}
"""Those of them that know only the places of the queries they were built for."""

# A rotation claims it between tokens alone: prefix tokens are not turned. Nor does it beside Transformer-XL, whose u is
# added to the query after it was turned. All others always claim it.

EXAMPLES = max(200, int(os.environ.get("RELPOS_EXAMPLES", "0")))
many = settings(max_examples=EXAMPLES)
fewer = settings(max_examples=EXAMPLES // 2)  # of what each mechanism's suite asks, too


@dataclass(frozen=True)
class Traits:
    """What decides with what a preset can be summed, and on what it stands."""

    axes: frozenset[int]
    rotates: bool
    adds_to_queries: bool
    scale: float | None
    on_tokens: bool
    in_attention: bool


def _traits(name: str) -> Traits:
    preset = find(name)
    axes = frozenset(preset.token_axes) & {1, 2}
    side = Grid(2, 2) if 2 in axes else Sequence(2)
    mechanism = preset.make(Site(2, 8, 16, side))
    said = terms_at_rest(mechanism, side)
    rotates = said.one(terms.Rotation) is not None or said.one(terms.PairRotations) is not None
    adds, scale = bool(said.of(terms.QueryBias)), said.one(terms.Scale)
    value = None if scale is None else scale.value
    return Traits(axes, rotates, adds, value, mechanism.acts_on_tokens, mechanism.acts_in_attention)


TRAITS = {name: _traits(name) for name in presets() if "+" not in name}
"""Of every preset that is no sum. Built here: a strategy of hypothesis may not use chance, and shape checks do."""


def fit(a: str, b: str) -> bool:
    """Whether the sum of two presets means something: one rotation, one scale, one kind of tokens."""
    one, other = TRAITS[a], TRAITS[b]
    scales = {one.scale, other.scale} - {None}
    both_rotate = one.rotates and other.rotates
    return bool(one.axes & other.axes) and not both_rotate and len(scales) < 2


UNMOVED = ("carope", "selective_rope", "rerope")
"""Rotations by what tokens add up, or of queries alone, wherever they stand."""


def moves(name: str, prefix: int) -> bool:
    """Whether it claims that moving everything alike changes nothing."""
    parts = name.split("+")
    rotates = any(TRAITS[part].rotates and part not in UNMOVED for part in parts)
    unturned = prefix > 0 or any(TRAITS[part].adds_to_queries for part in parts)
    return not NEVER.intersection(parts) and not (rotates and unturned)


@dataclass(frozen=True)
class Example:
    """A mechanism somewhere, with tokens."""

    name: str
    seed: int
    batch: int
    heads: int
    width: int
    queries: Coordinates
    keys: Coordinates | None
    causal: bool
    mask: str
    backend: str

    def built(self) -> Mechanism:
        """The mechanism, all that it learns random, in float64."""
        embed_dim = self.heads * self.width
        site = Site(self.heads, self.width, embed_dim, self.queries, self.keys, self.causal, init_std=1.0)
        mechanism = find(self.name).make(site).double().eval()  # in training, some draw where tokens are
        self.generator(1)
        with torch.no_grad():
            for parameter in mechanism.parameters():
                parameter.normal_(std=0.5)
        return mechanism

    def generator(self, salt: int) -> None:
        torch.manual_seed(2 * self.seed + salt)

    def tokens(self) -> list[Tensor]:
        """Queries, keys and values before positions, `[B, N or M, E]`."""
        self.generator(0)
        keys = self.queries if self.keys is None else self.keys
        counts = self.queries.count, keys.count, keys.count
        return [torch.randn(self.batch, n, self.heads * self.width, dtype=torch.float64) for n in counts]

    def allowed(self, batch: slice | None = None) -> Mask | None:
        """The mask of the whole batch, or of a part."""
        m = (self.queries if self.keys is None else self.keys).count
        batch = slice(None) if batch is None else batch
        self.generator(3)
        valid, segments = torch.rand(self.batch, m) < 0.7, torch.randint(3, (self.batch, m)).sort(dim=1).values
        mask = None
        if self.mask == "padding":
            rows = None if self.keys is None else torch.ones(self.batch, self.queries.count, dtype=torch.bool)[batch]
            mask = Mask.padding(valid[batch], queries=rows)
        elif self.mask == "packed" and self.keys is None:
            mask = Mask.packed(segments[batch])
        if self.causal:
            mask = Mask.causal() if mask is None else mask & Mask.causal()
        return mask


@st.composite
def places(draw: st.DrawFn, axes: frozenset[int], prefixes: bool = True) -> Coordinates:
    prefix = draw(st.integers(0, 2)) if prefixes else 0
    if draw(st.sampled_from(sorted(axes))) == 2:
        return Grid(draw(st.integers(1, 4)), draw(st.integers(1, 4)), prefix=prefix)
    return Sequence(draw(st.integers(1, 7)), start=draw(st.integers(0, 30)), prefix=prefix)


@st.composite
def examples(
    draw: st.DrawFn, eligible: Callable[[str], bool] = lambda name: True, heads: tuple[int, ...] = (1, 2, 3, 4)
) -> Example:
    """A preset, or a sum of two."""
    names = [name for name in TRAITS if eligible(name)]
    name = draw(st.sampled_from(names))
    axes = TRAITS[name].axes
    if draw(st.integers(0, 3)) == 0:
        other = draw(st.sampled_from([other for other in names if fit(name, other)]))
        axes, name = axes & TRAITS[other].axes, f"{name}+{other}"
    queries, causal = draw(places(axes)), draw(st.booleans())
    keys = None
    own_places = any(TRAITS[part].on_tokens or part in TABLED for part in name.split("+"))
    if not causal and not own_places and draw(st.booleans()):
        keys = draw(places(frozenset({queries.axes}), prefixes=queries.prefix > 0))
    seed, batch = draw(st.integers(0, 2**30)), draw(st.integers(1, 3))
    count, width = draw(st.sampled_from(heads)), draw(st.sampled_from((8, 16)))
    mask, backend = draw(st.sampled_from(("none", "padding", "packed"))), draw(st.sampled_from(("reference", "sdpa")))
    return Example(name, seed, batch, count, width, queries, keys, causal, mask, backend)


def attend(example: Example, q: Tensor, k: Tensor, v: Tensor, said: Terms, mask: Mask | None) -> Tensor:
    """Attention in the example's engine; by the definition where that lacks a term."""
    try:
        return attention(q, k, v, position=said, mask=mask, backend=example.backend)
    except NotImplementedError:
        return attention(q, k, v, position=said, mask=mask, backend="reference")


def heads(example: Example, x: Tensor) -> Tensor:
    """`[B, N, E]` as `[B, H, N, D]`."""
    return x.unflatten(-1, (example.heads, example.width)).transpose(1, 2)


def layer(example: Example, mechanism: Mechanism, tokens: list[Tensor], queries: Any, keys: Any, mask: Any) -> Tensor:
    """Tokens with their positions, then attention."""
    if mechanism.acts_on_tokens:
        tokens = [mechanism.embed(x, queries) for x in tokens]
    q, k, v = (heads(example, x) for x in tokens)
    said = states.terms_of(mechanism, queries, keys, states_of(mechanism, q, k))
    return attend(example, q, k, v, said, mask)


def near(one: Tensor, other: Tensor, slack: float = 1e-11) -> None:
    torch.testing.assert_close(one, other, rtol=slack, atol=slack * max(1.0, float(other.detach().abs().max())))


# translation


def moved(side: Coordinates | None, by: tuple[int, int]) -> Any:
    """The same tokens elsewhere. A grid has no start: its cells become positions."""
    match side:
        case Sequence():
            return replace(side, start=side.start + by[0])
        case Grid():
            low, high = (tuple(x + step for x, step in zip(bound, by, strict=True)) for bound in (side.low, side.high))
            return Positions(side.tokens() + torch.tensor(by), low=low, high=high, prefix=side.prefix)
    return None


def takes(mechanism: Mechanism, side: Coordinates) -> bool:
    """Whether it is defined there."""
    try:
        terms_at_rest(mechanism, side)
    except ValueError:
        return False
    return True


def movable(example: Example, mechanism: Mechanism) -> Example | None:
    """The example where its tokens can be moved: a grid in raster order for what sees no rows and columns, and None
    where a sum has parts of both kinds."""
    if example.queries.axes == 1 or takes(mechanism, moved(example.queries, (0, 0))):
        return example
    queries, keys = example.queries.raster(), None if example.keys is None else example.keys.raster()
    return replace(example, queries=queries, keys=keys) if takes(mechanism, queries) else None


def shifted(example: Example, mechanism: Mechanism, by: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The layer's output here, and `by` farther on each axis."""
    tokens, mask = example.tokens(), example.allowed()
    here = layer(example, mechanism, tokens, example.queries, example.keys, mask)
    return here, layer(example, mechanism, tokens, moved(example.queries, by), moved(example.keys, by), mask)


@fewer
@given(examples(eligible=lambda name: moves(name, 0)), st.tuples(st.integers(-99, 99), st.integers(-99, 99)))
def test_translation(example: Example, by: tuple[int, int]) -> None:
    """Moving queries and keys alike changes nothing, for all that claim it."""
    if not moves(example.name, 1):  # between tokens alone
        example = replace(example, queries=bare(example.queries), keys=bare(example.keys))
    assume(moves(example.name, 0))
    mechanism = example.built()
    there = movable(example, mechanism)
    assume(there is not None)
    near(*shifted(there, mechanism, by))  # type: ignore[arg-type]


def bare(side: Any) -> Any:
    """The same places without a prefix."""
    return None if side is None else Grid(*side.sizes) if isinstance(side, Grid) else replace(side, prefix=0)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("name", [*TRAITS, "transformer_xl+rotary_1d"])
def test_what_does_not_claim_translation_breaks_it(name: str, prefix: int) -> None:
    if moves(name, prefix):
        return
    queries: Any = Sequence(5, prefix=prefix) if 1 in find(name).token_axes else Grid(2, 3, prefix=prefix)
    example = Example(name, 5, 1, 2, 8, queries, None, False, "none", "reference")
    room = moved(queries, (5003, 5003)) if name in TABLED else queries
    built = replace(example, queries=room)
    here, there = shifted(example, built.built(), (5003, 5003))
    assert (here - there).abs().max() > 1e-3


# heads

HEAD_AXIS = {
    terms.LineBias: {"values": 0},
    terms.LineVectors: {"vectors": 0, "bias": 0},
    terms.QueryBias: {"u": 0},
    terms.LowRank: {"query": -3, "key": -3},
    terms.DenseBias: {"bias": 1},
    terms.Sinks: {"logits": 0},
    terms.Rotation: {"query": 1, "key": 1, "query_magnitude": 1, "key_magnitude": 1},
}


def terms_of(said: Terms, order: Tensor) -> Terms:
    """The terms with their heads in another order: for numbers a head that are fixed, as slopes are."""
    other = Terms()
    for term in said:
        axes = HEAD_AXIS.get(type(term), {})  # type: ignore[call-overload]
        fields = {name: (getattr(term, name), axis) for name, axis in axes.items()}
        several = {name: (x, axis) for name, (x, axis) in fields.items() if x is not None and x.shape[axis] > 1}
        other = other + replace(term, **{name: x.index_select(axis, order) for name, (x, axis) in several.items()})
    return other


MIDDLE = {"frequencies"}
"""Parameters whose heads are the second axis of three."""

SIDE_BY_SIDE = {"r_proj"}
"""Layers that project tokens to some numbers of all heads, side by side."""

COMMON = {"proj"}
"""Parameters that all heads share, whatever their sizes."""


def of_heads(part: Mechanism, order: Tensor, width: int) -> tuple[Mechanism, bool]:
    """A copy whose parameters have their heads in another order, and whether any has heads.

    A parameter's last or first axis is as long as there are heads, or it projects tokens to all heads side by side.
    Tables have an odd number of rows, and heads are even in number, so that the one is not taken for the other.
    """
    twin, count, found = copy.deepcopy(part), len(order), False
    with torch.no_grad():
        for title, module in twin.named_modules():
            for name, own in module.named_parameters(recurse=False):
                square = isinstance(module, nn.Linear) and module.in_features == module.out_features == count * width
                if name in COMMON:
                    continue
                if square or title in SIDE_BY_SIDE:
                    own.copy_(own.unflatten(0, (count, -1))[order].flatten(0, 1))
                elif name in MIDDLE:
                    own.copy_(own[:, order])
                elif own.dim() and own.shape[-1] == count:
                    own.copy_(own[..., order])
                elif own.dim() and own.shape[0] == count:
                    own.copy_(own[order])
                else:
                    continue
                found = True
    return twin, found


@many
@given(examples(eligible=lambda name: TRAITS[name].in_attention, heads=(6, 10)), st.randoms(use_true_random=False))
def test_heads_in_another_order(example: Example, chance: Any) -> None:
    """Heads of q, k, v and of all that is a head's own, in another order: so are those of the output."""
    order = list(range(example.heads))
    chance.shuffle(order)
    turn = torch.tensor(order)
    mechanism, mask = example.built(), example.allowed()
    q, k, v = (heads(example, x) for x in example.tokens())
    given = example.queries, example.keys, states_of(mechanism, q, k)
    before = attend(example, q, k, v, states.terms_of(mechanism, *given), mask)
    said = Terms()
    for part in mechanism.parts():
        twin, learned = of_heads(part, turn, example.width)
        own = states.terms_of(twin, *given)
        said = said + (own if learned else terms_of(own, turn))
    near(attend(example, *(x[:, turn] for x in (q, k, v)), said, mask), before[:, turn])


# batches


@fewer
@given(examples(), st.booleans())
def test_each_of_a_batch_alone(example: Example, own_places: bool) -> None:
    """Values, and the gradient of a batch is the sum of those of its elements (what accumulation relies on); also
    where each element has places of its own."""
    mechanism, queries, keys = example.built(), example.queries, example.keys
    rows = [queries] * example.batch
    if own_places and isinstance(queries, Sequence) and keys is None:
        low, high = queries.start, queries.start + queries.length - 1
        every = torch.stack([low + torch.randperm(queries.length) for _ in range(example.batch)])
        queries = Positions(every, low=low, high=high, prefix=queries.prefix)
        rows = [Positions(own, low=low, high=high, prefix=queries.prefix) for own in every]
    tokens, parameters = example.tokens(), list(mechanism.parameters())
    together = layer(example, mechanism, tokens, queries, keys, example.allowed())
    upstream = torch.randn_like(together)
    summed = [torch.zeros_like(x) for x in parameters]
    for b in range(example.batch):
        one = slice(b, b + 1)
        alone = layer(example, mechanism, [x[one] for x in tokens], rows[b], keys, example.allowed(one))
        near(alone, together[one])
        for total, own in zip(summed, _grads(alone, parameters, upstream[one]), strict=True):
            total += own
    for own, total in zip(_grads(together, parameters, upstream), summed, strict=True):
        near(own, total)


def _grads(output: Tensor, leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Zeros where nothing depends on a leaf."""
    if not leaves or not output.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    found = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
    return [torch.zeros_like(x) if own is None else own for x, own in zip(leaves, found, strict=True)]


# memory layouts

LAYOUTS: dict[str, tuple[Callable[[list[int]], list[int]], Callable[[Tensor, list[int]], Tensor]]] = {
    "strided": (lambda size: [*size[:3], 2 * size[3]], lambda x, size: x[..., ::2]),
    "sliced": (lambda size: [*size[:2], size[2] + 3, size[3]], lambda x, size: x[:, :, 2:-1]),
    "expanded over the batch": (lambda size: [1, *size[1:]], lambda x, size: x.expand(size)),
    "expanded over heads": (lambda size: [size[0], 1, *size[2:]], lambda x, size: x.expand(size)),
    "tokens first": (lambda size: [size[0], size[2], size[1], size[3]], lambda x, size: x.transpose(1, 2)),
    "width first": (lambda size: [size[0], size[1], size[3], size[2]], lambda x, size: x.mT),
}
"""The shape of what is stored, and the view of it that attention gets."""


@many
@given(
    examples(eligible=lambda name: TRAITS[name].in_attention),
    st.tuples(*[st.sampled_from(sorted(LAYOUTS))] * 3),
    st.booleans(),
)
def test_how_tensors_lie_in_memory(example: Example, layouts: tuple[str, str, str], plain: bool) -> None:
    """Strided, sliced, expanded and transposed q, k and v, and an upstream gradient that is one number expanded, give
    the values and gradients of contiguous ones."""
    mechanism, mask = example.built(), example.allowed()
    sizes = [list(heads(example, x).shape) for x in example.tokens()]
    stored = [
        torch.randn(LAYOUTS[name][0](size), dtype=torch.float64) for name, size in zip(layouts, sizes, strict=True)
    ]
    results = []
    for contiguous in (False, True):
        leaves = [x.clone().requires_grad_() for x in stored]
        views = [LAYOUTS[name][1](x, size) for name, x, size in zip(layouts, leaves, sizes, strict=True)]
        if contiguous:
            views = [x.contiguous() for x in views]
        own = states_of(mechanism, *views[:2])
        said = states.terms_of(mechanism, example.queries, example.keys, own)
        output = attend(example, *views, said, mask)  # type: ignore[arg-type]
        upstream = torch.tensor(0.7, dtype=torch.float64).expand(output.shape)
        if plain:
            upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        elif contiguous:
            upstream = upstream.contiguous()
        results.append([output, *_grads(output, [*leaves, *mechanism.parameters()], upstream)])
    for one, other in zip(*results, strict=True):
        near(one, other)
