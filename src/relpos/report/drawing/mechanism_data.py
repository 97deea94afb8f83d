"""The numbers of a position mechanism for the pictures of `relpos show`; nothing is drawn here.

A bias is shown over its offsets. A rotation is shown by its angles, and by the scores if one vector is the query and
key at every position. Vectors on tokens are shown as they are, and by their similarity. Any other mechanism is shown by
what it adds to the scores of that same vector. `offset = query - key` throughout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from relpos.core import Grid, LineBias, LineVectors, Mask, PairRotations, Rotation, RowRule, Scale, Sequence, Terms
from relpos.engines import attention, attention_weights
from relpos.position import Mechanism
from relpos.position.base.states import needs_states, terms_at_rest
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens
from relpos.report.drawing.mechanism_picture import (
    MINUS,
    Axis,
    Bars,
    Maps,
    Strip,
    Words,
    counted,
    heads_named,
    offsets_of,
    sheet,
)

HEADS_AT_MOST = 16
MATRIX_AT_MOST = 32
"""Up to this many tokens all pairs are drawn; with more, one query."""
SIMILARITY_AT_MOST = 256
"""Up to this many patches of a grid, all pairs are compared."""

OFFSET = f"offset = query {MINUS} key"
ADDED = "added to the score"


@dataclass(frozen=True)
class View:
    """The part to show: the tokens, the heads, the widths of a head and of a token, and one query, or None for all.

    `query` counts tokens from 0, without prefix tokens.
    """

    tokens: Sequence | Grid
    num_heads: int
    head_dim: int
    embed_dim: int
    query: int | None = None

    @property
    def count(self) -> int:
        """Tokens besides the prefix."""
        return self.tokens.count - self.tokens.prefix

    @property
    def chosen(self) -> int:
        """The query to draw if all do not fit: the requested one, or the middle one."""
        if self.query is not None:
            return self.query
        if isinstance(self.tokens, Grid):
            rows, columns = self.tokens.sizes
            return rows // 2 * columns + columns // 2
        return self.count // 2

    @property
    def chosen_name(self) -> str:
        """The name of that query."""
        if isinstance(self.tokens, Grid):
            return "query ({}, {})".format(*divmod(self.chosen, self.tokens.sizes[1]))
        return f"query {self.chosen}"


@torch.no_grad()
def strips(parts: list[Mechanism], view: View, *, where: str = "") -> list[Strip]:
    """One strip or more for each part of a mechanism; `where` names the layer if needed."""
    drawn: list[Strip] = []
    for part in parts:
        name = f"{type(part).__name__}{where}"
        if acts_on_tokens(part):
            drawn += _embedding(part, view, name)
        if acts_in_attention(part):
            drawn += _in_attention(part, view, name)
        if not acts_on_tokens(part) and not acts_in_attention(part):
            drawn += _nothing(view, name)
    return drawn or _nothing(view, "No position")


def _nothing(view: View, name: str) -> list[Strip]:
    """No position: scores stay unchanged, and the picture is flat."""
    text = "Nothing is added to tokens or to scores: attention treats the tokens as a set, without an order."
    zeros = torch.zeros(1, view.count)
    return [Words(name, text), _row(zeros, view, f"{name}: bias, {view.chosen_name} and every key", ADDED)]


def _in_attention(part: Mechanism, view: View, name: str) -> list[Strip]:
    terms = terms_at_rest(part, view.tokens)
    drawn: list[Strip] = []
    for term in terms.of(LineBias):
        drawn += _bias(term, view, name)
    rotation = terms.one(Rotation)
    if rotation is not None:
        drawn += _rotation(Terms(rotation), rotation, view, name)
    rest = [term for term in terms if not isinstance(term, LineBias | Rotation | Scale)]
    on_values = [term for term in rest if isinstance(term, LineVectors) and term.side == "value"]
    if len(rest) > len(on_values):
        drawn += _other(Terms(*rest), view, name, of_states=needs_states(part))
    if on_values:
        drawn.append(Words(f"{name}: vectors on values", "Vectors by offset are added to the values, not to scores."))
    return drawn


def _bias(term: LineBias, view: View, name: str) -> list[Strip]:
    layout = term.lines.layout
    prefix = view.tokens.prefix
    values = term.values[:, : layout.tokens]
    title = f"{name}: bias of each head"
    row = term.narrow(slice(prefix + view.chosen, prefix + view.chosen + 1), slice(prefix, None))
    of_query = row.values[:, row.lines.index()[0]]
    if view.query is not None or len(layout.spans) > 2:
        return [_row(of_query, view, f"{title}, {view.chosen_name} and every key", ADDED)]
    if len(layout.spans) == 2:
        rows, columns = (offsets_of(low, span) for low, span in zip(layout.low, layout.spans, strict=True))
        plain = _numbers(values.unflatten(1, layout.spans))
        down = Axis(f"row {OFFSET}", layout.low[0], rows)
        across = Axis(f"column {OFFSET}", layout.low[1], columns)
        return [Maps(f"{title} over offsets", heads_named(len(plain)), plain, down, across, ADDED, marked=(0, 0))]
    plain = _numbers(values)
    along = Axis(f"{OFFSET}{_raster(view)}", layout.low[0], offsets_of(layout.low[0], layout.spans[0]))
    drawn: list[Strip] = [Bars(f"{title} over offsets", heads_named(len(plain)), plain, along, ADDED)]
    if isinstance(view.tokens, Grid):
        drawn.append(_row(of_query, view, f"{title}, {view.chosen_name} and every key", ADDED))
    elif view.count <= MATRIX_AT_MOST:
        pairs = term.narrow(slice(prefix, None), slice(prefix, None))
        drawn.append(_matrix(pairs.values[:, pairs.lines.index()], view, f"{title}, every query and key", ADDED))
    return drawn


def _rotation(terms: Terms, rotation: Rotation, view: View, name: str) -> list[Strip]:
    prefix = view.tokens.prefix
    score = f"{name}: score if one vector of length 1 is every query and key"
    label = "score (1 without rotation)" if rotation.widens == 1 else "score"
    if view.query is not None:
        return [_row(_scores(terms, view, [view.query]), view, f"{score}, {view.chosen_name} and every key", label)]
    cosine = _numbers(rotation.query[0, :, prefix:].cos().mT)  # [1 or H, pairs, tokens]
    pairs = Axis("pair of dimensions", 0, counted(cosine.shape[1]))
    positions = Axis(f"position{_raster(view)}", 0, counted(view.count))
    drawn: list[Strip] = [
        Maps(
            f"{name}: cosine of the rotation angle of each pair",
            heads_named(len(cosine)),
            cosine,
            pairs,
            positions,
            "cosine",
            1.0,
        )
    ]
    if isinstance(view.tokens, Grid):
        row = _scores(terms, view, [view.chosen])
        return [*drawn, _row(row, view, f"{score}, {view.chosen_name} and every key", label)]
    ends = _scores(terms, view, [0, view.count - 1])  # the first query sees offsets 0 to -(n - 1), the last 0 to n - 1
    ahead, behind = ends[:, 0].flip(-1), ends[:, 1].flip(-1)
    plain = _numbers(torch.cat([ahead, behind[:, 1:]], dim=1))
    along = Axis(OFFSET, 1 - view.count, offsets_of(1 - view.count, 2 * view.count - 1))
    return [*drawn, Bars(f"{score}, over offsets", heads_named(len(plain)), plain, along, label)]


def _other(terms: Terms, view: View, name: str, *, of_states: bool) -> list[Strip]:
    """Terms that depend on queries and keys: what they add to the scores of one vector at every position. Terms that
    are made from hidden states are shown with one state at every token, for keys that are not in the future."""
    title = f"{name}: change of the score if one vector of length 1 is every query and key"
    title += ", with one hidden state at every token" if of_states else ""
    counts = of_states or bool(terms.of(RowRule)) or bool(terms.of(PairRotations))  # visible keys, or made for these
    causal = counts and isinstance(view.tokens, Sequence)
    title += ", under a causal mask" if causal else ""
    if view.query is None and isinstance(view.tokens, Sequence) and view.count <= MATRIX_AT_MOST:
        return [_matrix(_scores(terms, view, list(range(view.count)), causal=causal) - 1, view, title, ADDED)]
    row = _scores(terms, view, [view.chosen], causal=causal) - 1
    return [_row(row, view, f"{title}, {view.chosen_name} and every key", ADDED)]


def _scores(terms: Terms, view: View, queries: list[int], *, causal: bool = False) -> Tensor:
    """Scores `[H, queries, keys]` for q = k = one vector of length 1 with equal entries; scale 1.

    NaN for masked keys of a causal query. The head axis is 1 if all heads are equal. The scores come from the softmax's
    weights and normaliser: log w + lse.
    """
    prefix, count = view.tokens.prefix, view.tokens.count
    same = torch.full((1, view.num_heads, count, view.head_dim), view.head_dim**-0.5, dtype=torch.float64)
    rows = []
    for query in queries:
        part = slice(prefix + query, prefix + query + 1)
        narrowed = terms.narrow(part, slice(None))
        order = torch.arange(count)
        mask = Mask.causal(order[part], order) if causal else None
        q = same[:, :, part]
        weights = attention_weights(q, same, position=narrowed, mask=mask, scale=1.0)
        _, lse = attention(q, same, same, position=narrowed, mask=mask, scale=1.0, return_lse=True, backend="reference")
        row = (weights.log() + lse[..., None])[0, :, 0, prefix:]
        rows.append(row.masked_fill(row == -torch.inf, torch.nan))
    scores = torch.stack(rows, dim=1)
    alike = torch.equal(scores.nan_to_num(), scores[:1].expand_as(scores).nan_to_num())
    return scores[:1] if alike else scores


def _embedding(part: Mechanism, view: View, name: str) -> list[Strip]:
    tokens = view.tokens
    vectors = part.embed(torch.zeros(1, tokens.count, view.embed_dim), tokens)[0, tokens.prefix :].double()
    unit = F.normalize(vectors - vectors.mean(dim=0), dim=-1)
    title, label = f"{name}: similarity of the vectors of two positions", "cosine, mean subtracted"
    if view.query is not None:
        likeness = (unit[view.query] @ unit.T)[None]
        return [_row(likeness, view, f"{title}, {view.chosen_name} and every position", label, limit=1.0)]
    positions = Axis(f"position{_raster(view)}", 0, counted(view.count))
    dimensions = Axis("dimension of the vector", 0, counted(view.embed_dim))
    plain = _numbers(vectors[None])
    added = Maps(
        f"{name}: the vector added to each token",
        ("",),
        plain,
        positions,
        dimensions,
        "added to the token",
    )
    if isinstance(tokens, Sequence):
        return [added, _matrix((unit @ unit.T)[None], view, title, label, limit=1.0, of="position")]
    if view.count > SIMILARITY_AT_MOST:
        likeness = (unit[view.chosen] @ unit.T)[None]
        return [added, _row(likeness, view, f"{title}, {view.chosen_name} and every position", label, limit=1.0)]
    rows, columns = tokens.sizes
    return [added, sheet(_numbers((unit @ unit.T)[None])[0], rows, columns, title, label)]


def _row(values: Tensor, view: View, title: str, label: str, *, limit: float | None = None) -> Strip:
    """The values of one query for every key: a map for keys on a grid, bars for a sequence.

    `values` is `[heads, keys]` or `[heads, 1, keys]`.
    """
    plain = _numbers(values.flatten(1))
    if isinstance(view.tokens, Grid):
        rows, columns = view.tokens.sizes
        axes = (Axis("row of the key", 0, counted(rows)), Axis("column of the key", 0, counted(columns)))
        where = (view.chosen // columns, view.chosen % columns)
        maps = plain.reshape(-1, rows, columns)
        return Maps(title, heads_named(len(plain)), maps, *axes, label, limit, marked=where)
    return Bars(title, heads_named(len(plain)), plain, Axis("key", 0, counted(view.count)), label)


def _matrix(values: Tensor, view: View, title: str, label: str, *, limit: float | None = None, of: str = "") -> Maps:
    plain = _numbers(values)
    ticks = counted(view.count)
    axes = (Axis(of or "query", 0, ticks), Axis(of or "key", 0, ticks))
    return Maps(title, heads_named(len(plain)) if not of else ("",), plain, *axes, label, limit)


def _numbers(values: Tensor) -> NDArray[np.float64]:
    """`[heads, ...]` as NumPy, with at most `HEADS_AT_MOST` heads."""
    plain: NDArray[np.float64] = values[:HEADS_AT_MOST].double().cpu().numpy()
    return plain


def _raster(view: View) -> str:
    return ", in raster order" if isinstance(view.tokens, Grid) else ""
