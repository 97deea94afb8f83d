"""Multimodal rotary positions (M-RoPE): one rotation for text, images and video, by time, row and column.

    angle[p] = position[axis(p)] * w[p],    w[p] = base ** (-p / P),    P pairs in all

The P frequencies are those of a rotation along one axis, and each pair follows one of the three coordinates. `sections`
says how many follow time, rows and columns, `order` which:

    "blocked"        the first pairs time, the next rows, the last columns                      Qwen2-VL, Qwen2.5-VL
    "interleaved"    time, row, column, time, row, column, ...; time has what is left           Qwen3-VL

Blocked, columns have the slowest pairs and time the fastest; interleaved, each axis has fast and slow ones.

Text has its position as all three coordinates, and rotates exactly as in `rotary_1d`. So coordinates with one axis are
text, `Grid(rows, columns)` is an image at time 0, and three axes are (time, row, column). Text and images in one
sequence are `Positions` of three axes, `[N, 3]` or `[B, N, 3]`. In Qwen's models an image that begins at position s has
time s, rows s + 0, s + 1, ... and columns s + 0, s + 1, ..., and the text after it continues at s + max(rows, columns).
Prefix tokens are not turned.

Source: Wang et al. 2024 (Qwen2-VL), section 2.1, sections (16, 24, 24) and base 1,000,000; interleaved: Qwen3-VL
technical report (2025). Not to be confused with the axial rotation (`rotary_2d`), where each axis has all frequencies.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, Rotation, Terms, constant, require_coordinates
from relpos.core.checks import fail, require_choice, require_int, require_number, shape_of
from relpos.core.rotation import require_layout
from relpos.position.base.angles import frequencies, positions
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site

Order = Literal["blocked", "interleaved"]


class MultimodalRotary(Mechanism):
    """M-RoPE: rotation by time, row and column.

    Each pair of dimensions rotates with one of three coordinates. Text is a `Sequence`, an image `Grid(rows, columns)`,
    video a grid of three axes, and both together `Positions` of three. Prefix tokens are not rotated.

    Source: Wang et al. 2024 (Qwen2-VL), section 2.1.

    Args:
        head_dim: width of a head, D.
        sections: how many pairs follow time, rows and columns; together at most D / 2. The rest of a head passes
            through.
        order: "blocked" or "interleaved".
        base: the slowest pair rotates by nearly 1 / base radians per position.
        layout: "half" or "interleaved", which dimensions are a pair; see `relpos.rotate`.

    Raises:
        ValueError: sections that do not fit the head; in `terms`, coordinates with more than 3 axes.

    Examples:
        >>> rotary = relpos.MultimodalRotary(16, sections=(2, 3, 3))  # pairs that follow time, rows and columns
        >>> q = k = v = torch.randn(1, 2, 24, 16)
        >>> relpos.attention(q, k, v, position=rotary, queries=relpos.Grid(2, 3, 4)).shape
        torch.Size([1, 2, 24, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("sections", "order", "base", "layout")

    def __init__(
        self,
        head_dim: int,
        sections: tuple[int, int, int],
        *,
        order: Order = "blocked",
        base: float = 1_000_000.0,
        layout: Literal["half", "interleaved"] = "half",
    ) -> None:
        super().__init__()
        require_int(head_dim, "head_dim", at_least=2)
        if not isinstance(sections, tuple | list) or len(sections) != 3:
            fail("sections to be (time, row, column)", shape_of(sections), "Give the number of pairs for each.")
        for size in sections:
            require_int(size, "each of sections", at_least=0)
        if not 1 <= sum(sections) <= head_dim // 2:
            wanted = f"sections of 1 to {head_dim // 2} pairs together"
            fail(wanted, f"{tuple(sections)}, {sum(sections)} pairs", "Two dimensions are a pair.")
        whose = "Qwen2-VL's is 'blocked', Qwen3-VL's 'interleaved': use the one that the weights were trained with."
        require_choice(order, "order", ("blocked", "interleaved"), whose)
        require_number(base, "base", "above 0", "Use the checkpoint's rope_theta; Qwen2-VL's is 1000000.")
        require_layout(layout)
        self.head_dim, self.sections, self.base = head_dim, tuple(sections), base
        self.order: Order = order
        self.layout: Literal["half", "interleaved"] = layout
        self._axis = _axis_of_pair(self.sections, order)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        pairs = site.head_dim // 2
        rows, columns = (pairs + 1) // 3, pairs // 3
        return cls(site.head_dim, (pairs - rows - columns, rows, columns), order="interleaved", base=10000.0)

    def angles(self, coordinates: Coordinates) -> Float[Tensor, "_ 1 N P"]:
        """The angles of each token in radians, float64; `relpos.rotate` takes them for keys that go into a cache."""
        require_coordinates(coordinates, "coordinates")
        if coordinates.axes > 3:
            fail("coordinates with 1 to 3 axes", repr(coordinates), "Use a position, or (time, row, column).")
        own = positions(coordinates, self.device)
        if coordinates.axes == 1:
            own = own.expand(-1, -1, 3)
        elif coordinates.axes == 2:
            own = torch.nn.functional.pad(own, (1, 0))
        bands = constant(frequencies(len(self._axis), self.base), torch.float64, own.device)
        return (own[..., constant(tuple(self._axis), torch.int64, own.device)] * bands)[:, None]

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        query = self.angles(queries)
        key = query if keys is None else self.angles(keys)
        return Terms(Rotation(query, key, layout=self.layout, width=self.head_dim))


def _axis_of_pair(sections: tuple[int, ...], order: Order) -> tuple[int, ...]:
    """Which of the three coordinates each pair follows."""
    if order == "blocked":
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    pairs = sum(sections)
    for axis, name in ((1, "rows"), (2, "columns")):
        most = (pairs - axis + 2) // 3
        if sections[axis] > most:
            wanted = f"at most {most} of {pairs} interleaved pairs for {name}"
            fail(wanted, str(sections[axis]), "Only every third pair can be used: give the others to time.")
    found = [0] * pairs
    for axis in (1, 2):
        found[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return tuple(found)


PRESETS = [
    Preset(
        name="rotary_multimodal",
        title="Rotary (RoPE), multimodal",
        build=MultimodalRotary.from_site,
        summary="Pairs of dimensions rotate with a token's time, row and column in turn; text has the same position "
        "on all three. It is made for text, images and video in one sequence: on images alone a third of the "
        "pairs is idle.",
        source="Wang et al. 2024 (Qwen2-VL), section 2.1; interleaved as in Qwen3-VL, base 10,000",
        token_axes=(1, 2, 3),
        family="rotation",
    )
]
