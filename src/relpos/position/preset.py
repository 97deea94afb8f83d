"""Named, ready-made mechanisms, gathered from the modules of `relpos.position`.

A module offers its mechanisms in a list `PRESETS`; nobody edits a registry. Names joined with `+` are sums:
`learned+relative_2d`. A name that is also a module's (`none`, `learned`) or a preset of one (`relative_2d`) is found
alike.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from relpos.core.checks import require_name

if TYPE_CHECKING:
    from relpos.position.mechanism import Mechanism, Site

Family = Literal["none", "absolute", "bias", "rotation", "vectors", "sum"]


@dataclass(frozen=True)
class Preset:
    """A mechanism under a name.

    Attributes:
        name: what the command line calls it.
        title: what a page calls it.
        build: makes it for a site; `make` is what to call.
        summary: two sentences for someone who meets it first: what it is, what to expect.
        source: the paper and section.
        family: where position enters: "absolute" (on the tokens, or learned per position in the scores), "bias" (on the
            scores), "rotation" (of queries and keys), "vectors" (that queries or keys are multiplied by), "sum".
        token_axes: the numbers of axes it makes sense on (1 sequences, 2 images, 3 video).
    """

    name: str
    title: str
    build: Callable[[Site], Mechanism]
    summary: str
    source: str
    token_axes: tuple[int, ...]
    family: Family

    def make(self, site: Site) -> Mechanism:
        """The mechanism for a site, frozen where the site says so."""
        mechanism = self.build(site)
        if not site.trainable:
            mechanism.trainable = False
        return mechanism


def presets() -> dict[str, Preset]:
    """Every preset by name, in alphabetical order of modules and their own order inside.

    Examples:
        >>> preset = relpos.position.presets()["relative_2d"]
        >>> preset.source
        'Liu et al. 2021 (Swin), section 3.2; Bao et al. 2022 (BEiT) for prefix tokens'
    """
    found: dict[str, Preset] = {}
    package = sys.modules["relpos.position"]  # whose path others may extend
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        for preset in getattr(importlib.import_module(f"relpos.position.{module.name}"), "PRESETS", []):
            if preset.name in found:
                raise ValueError(f"two modules of relpos.position offer a preset named {preset.name!r}; rename one")
            found[preset.name] = preset
    return found


def sum_of(*names: str) -> Callable[[Site], Mechanism]:
    """What builds the sum of several presets."""

    def build(site: Site) -> Mechanism:
        first, *rest = (find(name).make(site) for name in names)
        return sum(rest, first)

    return build


def find(name: str) -> Preset:
    """The preset of a name, or of several joined with `+`.

    Args:
        name: as `relpos list positions` has them, or several joined with `+`.

    Returns:
        The `Preset`: its `make(site)` builds the mechanism.

    Raises:
        ValueError: no such name; the message offers the nearest.

    Examples:
        >>> relpos.position.find("learned+relative_2d").title
        'Hybrid: learned absolute + relative 2-D'
    """
    known = presets()
    if "+" in name and name not in known:
        names = [part.strip() for part in name.split("+")]
        parts = [find(part) for part in names]
        return Preset(
            name="+".join(names),
            title=" + ".join(part.title for part in parts),
            build=sum_of(*names),
            summary="A sum: each part adds what it knows. " + " ".join(part.summary for part in parts),
            source="; ".join(part.source for part in parts),
            token_axes=tuple(sorted(set.intersection(*(set(part.token_axes) for part in parts)))),
            family="sum",
        )
    require_name(name, known, "a position")
    return known[name]
