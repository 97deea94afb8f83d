"""The effect of every mechanism on scores if all keys are equal, as plain numbers: the data of the explorer's page.

    explored(preset)        {"name": ..., "sequence": {...}, "grid": {...}} as in JSON

A number is the change of a score: the score with position minus the score without it. The query and every key are one
vector, whose dot product with itself is `strength`. A bias on scores does not depend on `strength`; a rotation or a
vector that multiplies queries and keys does. For vectors added to tokens, the number is the cosine of those of query
and key, after subtracting their mean, times `strength`, minus `strength`.

If it depends only on `offset = query - key`, one number per offset is stored, else one per pair. Numbers are integers
in thousandths; None marks a key that is masked for a causal query.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.core import Grid, LineVectors, Mask, PairRotations, Rotation, RowRule, Sequence, Terms
from relpos.engines import attention, attention_weights
from relpos.position import Mechanism, Preset, Site
from relpos.position.base.states import needs_states, terms_at_rest
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens, parts_of
from relpos.report.drawing.trained_examples import HEAD_DIM, HEADS, SEED, SITES

STRENGTHS = (1, 4)
"""Scores without position: of vectors of length 1 without scaling, and of heads 16 wide with entries of variance 1."""
LONG, WIDE = 128, 12
"""Tokens of a sequence, and rows and columns of a grid, for which offsets are stored."""
LENGTHS, GRIDS = (16, 32), (6, 8)
"""Tokens for which pairs are stored."""
LONGER = 4
"""Rotations along a sequence are drawn at this multiple of the trained length: some act only beyond it."""
TURNS = 64
"""How many tokens have their rotation angles stored."""

FAMILIES = {
    "none": "No position",
    "absolute": "Absolute",
    "bias": "Bias on scores",
    "rotation": "Rotation",
    "vectors": "Vectors by offset",
    "sum": "Sums",
}
"""The families' titles on pages, in order."""

Maker = Callable[[Site], Mechanism | None]


def explored(preset: Preset, trained: Maker | None = None) -> dict[str, Any]:
    """A mechanism's text on the page, and its numbers for the tokens that it supports.

    Args:
        trained: makes the trained mechanism for a site, or returns None if there is none.
    """
    entry: dict[str, Any] = {word: getattr(preset, word) for word in ("name", "title", "summary", "source", "family")}
    entry |= _facts(preset)
    for name, axes, long, few in (
        ("sequence", 1, Sequence(LONG), [Sequence(n) for n in LENGTHS]),
        ("grid", 2, Grid(WIDE, WIDE), [Grid(n, n) for n in GRIDS]),
    ):
        if axes not in preset.token_axes:
            continue
        states = {"start": _numbers(partial(began, preset), long, few)}
        if trained is not None:  # it may be defined only on fewer tokens
            learned = _numbers(trained, long, few) or _numbers(trained, few[-1], few)
            states |= {} if learned is None else {"trained": learned}
        entry[name] = states
    return entry


def _site(tokens: Sequence | Grid) -> Site:
    """The site of the trained examples with these tokens: the recipes' `init_std`, and causal on sequences."""
    return replace(SITES[2 if isinstance(tokens, Grid) else 1], queries=tokens)


def began(preset: Preset, site: Site) -> Mechanism:
    """The mechanism before training; a rotation along a sequence is grown to `LONGER` times its trained length."""
    if preset.family != "rotation" or not isinstance(site.queries, Sequence):
        return preset.make(site)
    short = preset.make(replace(site, queries=Sequence(max(1, site.queries.count // LONGER))))
    return short.grow(site.queries, short.growth[0])


def _made(make: Maker, tokens: Sequence | Grid) -> Mechanism | None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        mechanism = make(_site(tokens))
    return None if mechanism is None else mechanism.double()


@torch.no_grad()
def _numbers(make: Maker, long: Sequence | Grid, few: list[Sequence] | list[Grid]) -> dict[str, Any] | None:
    mechanism = _made(make, long)
    if mechanism is None:
        return None
    lines = [_line(one, long) for one in _scores(mechanism, long)]
    most = long.sizes[0] if isinstance(long, Grid) else long.count
    if all(line is not None for line in lines):
        stored: dict[str, Any] = {"offsets": [_whole(line) for line in lines if line is not None], "most": most}
    else:
        stored = {"pairs": {}}
        for tokens in few:
            if (smaller := _made(make, tokens)) is None:
                continue
            size = tokens.sizes[0] if isinstance(tokens, Grid) else tokens.count
            with suppress(ValueError):  # a trained table fits only its own grid
                stored["pairs"][str(size)] = [_whole(one.flatten(1)) for one in _scores(smaller, tokens)]
        if not stored["pairs"]:
            return None
    if (cosine := _cosine(mechanism, long)) is not None:
        stored["cosine"] = _whole(cosine)
    return stored


def _scores(mechanism: Mechanism, tokens: Sequence | Grid) -> list[Tensor]:
    """The change of the scores by position, `[heads or 1, N, N]`, for each strength; one if they are equal."""
    changes = []
    for strength in STRENGTHS:
        total = torch.zeros(1, tokens.count, tokens.count, dtype=torch.float64)
        for part in parts_of(mechanism):
            if acts_on_tokens(part):
                total = total + strength * (_likeness(part, tokens) - 1)
        inside = [part for part in parts_of(mechanism) if acts_in_attention(part)]
        if inside:
            terms = Terms()
            for part in inside:
                terms = terms + terms_at_rest(part, tokens)
            total = total + _in_attention(terms, tokens, strength, any(map(needs_states, inside)))
        plain = total.nan_to_num()
        changes.append(total[:1] if torch.equal(plain, plain[:1].expand_as(plain)) else total)
    alike = all(torch.allclose(one.nan_to_num(), changes[0].nan_to_num(), atol=1e-9) for one in changes)
    return changes[:1] if alike else changes


def _likeness(part: Mechanism, tokens: Sequence | Grid) -> Tensor:
    """Cosine similarity of every two position vectors, mean subtracted, `[1, N, N]`."""
    zeros = torch.zeros(1, tokens.count, HEADS * HEAD_DIM, dtype=torch.float64)
    vectors = part.embed(zeros, tokens)[0]
    unit = F.normalize(vectors - vectors.mean(dim=0), dim=-1)
    return (unit @ unit.mT)[None]


def _in_attention(terms: Terms, tokens: Sequence | Grid, strength: int, causal: bool) -> Tensor:
    """Scores with these terms minus `strength`, `[heads, N, N]`; NaN for masked keys of a causal query."""
    count = tokens.count
    causal = causal or bool(terms.of(RowRule)) or bool(terms.of(PairRotations))  # row rules count visible keys
    order = torch.arange(count)
    mask = Mask.causal(order, order) if causal else None
    same = torch.full((1, HEADS, count, HEAD_DIM), (strength / HEAD_DIM) ** 0.5, dtype=torch.float64)
    weights = attention_weights(same, same, position=terms, mask=mask, scale=1.0)
    _, lse = attention(same, same, same, position=terms, mask=mask, scale=1.0, return_lse=True, backend="reference")
    scores = (weights.log() + lse[..., None])[0] - strength
    return scores.masked_fill(scores == -torch.inf, torch.nan)


def _line(scores: Tensor, tokens: Sequence | Grid) -> Tensor | None:
    """One number per offset, `[heads, offsets]`, lowest first; None if pairs with the same offset differ."""
    sizes = tokens.sizes if isinstance(tokens, Grid) else (tokens.count,)
    coordinates = torch.cartesian_prod(*(torch.arange(size) for size in sizes)).reshape(tokens.count, len(sizes))
    offset = coordinates[:, None] - coordinates[None]
    index = torch.zeros_like(offset[..., 0])
    for axis, size in enumerate(sizes):
        index = index * (2 * size - 1) + offset[..., axis] + size - 1
    cells = int(index.max()) + 1
    line = torch.zeros(len(scores), cells, dtype=scores.dtype)
    line[:, index.flatten()] = scores.flatten(1)
    same = torch.allclose(line[:, index], scores, atol=1e-6, rtol=1e-5)  # False if there is a NaN
    return line if same else None


def _cosine(mechanism: Mechanism, tokens: Sequence | Grid) -> Tensor | None:
    """Cosine of the rotation angle of each pair of dimensions at the first tokens, `[heads or 1, P * N]`."""
    for part in parts_of(mechanism):
        if acts_in_attention(part) and (rotation := _rotation(terms_at_rest(part, tokens))) is not None:
            return rotation.query[0, :, :TURNS].cos().mT.flatten(1)
    return None


def _rotation(terms: Terms) -> Rotation | None:
    """The rotation of terms; of several by pair, that of near ones."""
    chosen = terms.one(PairRotations)
    return terms.one(Rotation) if chosen is None else chosen.rotations[0]


def _whole(values: Tensor) -> list[list[int | None]]:
    """Integers in thousandths; None for NaN."""
    return [[None if x != x else round(1000 * x) for x in row] for row in values.double().tolist()]


def _facts(preset: Preset) -> dict[str, Any]:
    """Whether it has parameters, adds vectors to values or tokens, and how many pairs of dimensions it rotates."""
    facts: dict[str, Any] = {"learns": False, "values": False, "added": False, "turns": {}}
    for name, axes, tokens in (("sequence", 1, Sequence(16)), ("grid", 2, Grid(4, 4))):
        if axes not in preset.token_axes:
            continue
        mechanism = _made(preset.make, tokens)
        assert mechanism is not None
        facts["learns"] = any(True for _ in mechanism.parameters())
        for part in parts_of(mechanism):
            facts["added"] |= acts_on_tokens(part)
            if not acts_in_attention(part):
                continue
            terms = terms_at_rest(part, tokens)
            facts["values"] |= any(term.side == "value" for term in terms.of(LineVectors))
            if (rotation := _rotation(terms)) is not None:
                facts["turns"][name] = rotation.query.shape[-1]
    return facts
