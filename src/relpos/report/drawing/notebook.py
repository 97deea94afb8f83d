"""A mechanism in notebooks: the picture of `relpos show` with its current parameters."""

from __future__ import annotations

from html import escape
from itertools import product

import torch

from relpos.core import Grid, Sequence
from relpos.position import Mechanism
from relpos.report.drawing.canvas import LAID_OUT, to_svg
from relpos.report.drawing.mechanism_data import View, strips
from relpos.report.drawing.mechanism_picture import picture
from relpos_command.visible import visible

_LENGTH, _GRID = 16, (8, 8)


def mechanism_html(mechanism: Mechanism) -> str:
    """Draw a mechanism on its own tokens; if they cannot be guessed, return its plain text.

    A mechanism does not know its attention, so this tries numbers of heads and widths: those in its attributes, then
    the sizes of its parameters.
    """
    shapes = [x.shape for x in mechanism.parameters() if x.dim() > 0]
    ends, starts = [shape[-1] for shape in shapes], [shape[0] for shape in shapes]
    heads = _distinct([*_named(mechanism, ("num_heads", "heads")), 1, *starts, *ends])
    widths = _distinct([*_named(mechanism, ("head_dim", "width", "dim")), 64, *ends, *(2 * end for end in ends)])
    for tokens, head, width in product(_tokens(mechanism), heads, widths):
        for embed in _distinct([*_named(mechanism, ("embed_dim",)), head * width, *ends]):
            try:
                with torch.random.fork_rng():
                    drawn = strips(list(mechanism.parts()), View(tokens, head, width, embed))
            except (ValueError, RuntimeError, NotImplementedError):
                continue
            name = type(mechanism).__name__
            where = (
                f"{tokens.count} tokens"
                if isinstance(tokens, Sequence)
                else f"{' x '.join(map(str, tokens.sizes))} patches"
            )
            note = f"Drawn on {where}. Offset is query minus key."
            return f"<div>{to_svg(picture(name, note, drawn), name=name, title=name)}</div>"
    return f"<pre>{escape(visible(repr(mechanism), keep=LAID_OUT))}</pre>"


_TRIED = 6
"""How many candidates to try for each size."""


def _distinct(sizes: list[int]) -> list[int]:
    return list(dict.fromkeys(sizes))[:_TRIED]


def _named(mechanism: Mechanism, names: tuple[str, ...]) -> list[int]:
    """Positive integers in attributes with these names, of the mechanism or its parts."""
    values = (getattr(part, name, None) for part in mechanism.modules() for name in names)
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one > 0]


def _tokens(mechanism: Mechanism) -> list[Sequence | Grid]:
    """Candidates for its tokens, the likeliest first: those it was built for."""
    candidates: list[Sequence | Grid] = []
    for part in mechanism.modules():
        candidates += [value for value in vars(part).values() if isinstance(value, Sequence | Grid)]
        sizes, prefix = getattr(part, "sizes", ()), getattr(part, "prefix", 0)
        if sizes:
            candidates.append(Sequence(sizes[0], prefix=prefix) if len(sizes) == 1 else Grid(*sizes, prefix=prefix))
    return [*candidates, Sequence(_LENGTH), Grid(*_GRID)]
