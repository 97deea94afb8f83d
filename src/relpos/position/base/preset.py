"""Named, ready-made mechanisms, gathered from the modules of `relpos.position`.

A module lists its mechanisms in `PRESETS`; there is no registry to edit. Names joined with `+` are sums:
`learned+relative_2d`. Names joined with `~` are a schedule over layers: `rotary_1d~none`. A preset is found by its name
(`relative_2d`), which may also be a module's (`none`, `learned`), or by an alias (`rope`). Presets of one module may
share an alias: the axes of the tokens choose among them. Results and files have the name, never the alias.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from relpos.core import Coordinates, require_coordinates
from relpos.core.checks import fail, require_int, require_name
from relpos.position.base.mechanism import Mechanism
from relpos.position.base.site import Site

Family = Literal["none", "absolute", "bias", "rotation", "vectors", "sum", "other"]
SCHEDULE = "~"
"""Joins the entries of a schedule: layer i takes entry i modulo their number."""
OUTSIDE: dict[str, Preset] = {}
"""Mechanisms of files that the user named in this process: `relpos.position.from_file`."""
OFFERS: list[Callable[[], dict[str, Preset]]] = []
"""Functions that return the mechanisms of other packages by name."""


@dataclass(frozen=True)
class Preset:
    """A mechanism under a name.

    Attributes:
        name: its name on the command line.
        title: its name on pages.
        build: makes it for a site; call `make` instead.
        summary: two sentences for someone who meets it first: what it is, what to expect.
        source: the paper and section.
        family: where position enters: "absolute" (on the tokens, or learned per position in the scores), "bias" (on the
            scores), "rotation" (of queries and keys), "vectors" (that queries or keys are multiplied by), "sum",
            "other" (a schedule).
        token_axes: the numbers of axes it makes sense on (1 sequences, 2 images, 3 video, 0 graphs).
        aliases: its other names.
        near: names of similar mechanisms, each with the difference, for the message to a person who types one.
        schedule: the presets of its entries if it is a schedule over layers.
    """

    name: str
    title: str
    build: Callable[[Site], Mechanism]
    summary: str
    source: str
    token_axes: tuple[int, ...]
    family: Family
    aliases: tuple[str, ...] = ()
    near: tuple[tuple[str, str], ...] = ()
    schedule: tuple[Preset, ...] = ()

    def make(self, site: Site) -> Mechanism:
        """The mechanism for a site, frozen where the site says so."""
        mechanism = self.build(site)
        if not site.trainable:
            mechanism.trainable = False
        return mechanism


def presets() -> dict[str, Preset]:
    """Every preset by name, in alphabetical order of modules and their own order inside.

    Those of other packages come last.

    Raises:
        ValueError: two presets share a name, an alias is the name of another preset or of a preset's of another module.

    Examples:
        >>> preset = relpos.position.presets()["relative_2d"]
        >>> preset.source
        'Liu et al. 2021 (Swin), section 3.2; Bao et al. 2022 (BEiT) for prefix tokens'
    """
    found: dict[str, Preset] = {}
    aliases: dict[str, tuple[str, str]] = {}  # the module and the name of the first preset that has it
    package = sys.modules["relpos.position"]  # other packages may extend its path
    for module in _modules(tuple(package.__path__)):
        for preset in getattr(importlib.import_module(f"relpos.position.{module}"), "PRESETS", []):
            if preset.name in found:
                raise ValueError(f"two modules of relpos.position offer a preset named {preset.name!r}; rename one")
            found[preset.name] = preset
            for alias in preset.aliases:
                owner, name = aliases.setdefault(alias, (module, preset.name))
                if owner != module:
                    raise ValueError(f"{name!r} and {preset.name!r} both have the alias {alias!r}; rename one")
    for alias, (_, name) in aliases.items():
        if alias in found:
            raise ValueError(f"{alias!r} is a preset and an alias of the preset {name!r}; rename one")
    for name, preset in (pair for offer in OFFERS for pair in offer().items()):
        if name in found or name in aliases:
            warnings.warn(f"left out the position {name} of {preset.source}: relpos has this name", stacklevel=2)
        else:
            found[name] = preset
    return found


@functools.cache
def _modules(path: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the modules in these folders, in order. Folders are read once: every name is looked up here."""
    return tuple(sorted(found.name for found in pkgutil.iter_modules(path)))


def sum_of(*names: str) -> Callable[[Site], Mechanism]:
    """A function that builds the sum of several presets."""

    def build(site: Site) -> Mechanism:
        first, *rest = (find(name).make(site) for name in names)
        return sum(rest, first)

    return build


def find(name: str, axes: int | None = None) -> Preset:
    """The preset of a name or an alias, of a sum joined with `+`, or of a schedule over layers joined with `~`.

    Args:
        name: as `relpos list positions` has them, or several joined with `+`, `~` or both: `a+b~c` is the sum in even
            layers and `c` in odd ones. Also that of a mechanism of `from_file`.
        axes: of the tokens. It chooses where presets share an alias: "rope" is `rotary_2d` on a grid and `rotary_1d` on
            a sequence, and where it is None.

    Returns:
        The `Preset`: its `make(site)` builds the mechanism.

    Raises:
        ValueError: no such name; the message offers the nearest.

    Examples:
        >>> relpos.position.find("learned+relative_2d").title
        'Hybrid: learned absolute + relative 2-D'
        >>> [one.name for one in relpos.position.find("rope~rope~rope~none").schedule]
        ['rotary_1d', 'rotary_1d', 'rotary_1d', 'none']
    """
    if isinstance(name, str) and SCHEDULE in name:
        return _schedule(name, axes)
    known = presets()
    if not isinstance(name, str) or "+" not in name or name in known:
        return _one(name, known, axes)
    parts = [_one(part.strip(), known, axes) for part in name.split("+")]
    names = [part.name for part in parts]
    joined = "+".join(names)
    if joined in known:  # written with aliases
        return known[joined]
    return Preset(
        name=joined,
        title=" + ".join(part.title for part in parts),
        build=sum_of(*names),
        summary="A sum: each part adds its own terms. " + " ".join(part.summary for part in parts),
        source="; ".join(part.source for part in parts),
        token_axes=_shared_axes(parts),
        family="sum",
    )


def _shared_axes(parts: Iterable[Preset]) -> tuple[int, ...]:
    return tuple(sorted(set.intersection(*(set(part.token_axes) for part in parts))))


def _schedule(name: str, axes: int | None) -> Preset:
    """The preset of a schedule over layers."""
    written = [entry.strip() for entry in name.split(SCHEDULE)]
    if not all(written):
        fail("a position in each entry of a schedule", repr(name), "Write none for a layer without a position.")
    entries = tuple(find(entry, axes) for entry in written)
    joined = SCHEDULE.join(entry.name for entry in entries)

    def build(site: Site) -> Mechanism:
        if site.layer is None:
            fail("a layer for a schedule over layers", f"{joined!r} without one", "Pass layer=0 for the first.")
        return entries[site.layer % len(entries)].make(site)

    distinct = list({entry.name: entry for entry in entries}.values())
    return Preset(
        name=joined,
        title=" ~ ".join(entry.title for entry in entries),
        build=build,
        summary="A schedule over layers: layer i has entry i modulo their number. "
        + " ".join(entry.summary for entry in distinct),
        source="; ".join(entry.source for entry in distinct),
        token_axes=_shared_axes(entries),
        family="other",
        schedule=entries,
    )


_LISTED = "relpos list positions shows all, and the command takes FILE.py:NAME, your own."


def _one(name: str, known: dict[str, Preset], axes: int | None) -> Preset:
    """The preset of a name or an alias, in capitals or not."""
    if isinstance(name, str) and name in OUTSIDE:
        return OUTSIDE[name]
    if isinstance(name, str) and ".py:" in name:
        remedy = f"Only the command and relpos.compare run a file; call relpos.position.from_file({name!r}) first."
        fail("the name of a position", repr(name), remedy)
    if isinstance(name, str) and "." in name and name not in known:
        came = f"{name!r}, of a file or package that is not loaded"
        fail("the name of a position", came, "Call relpos.position.from_file first, or name FILE.py:NAME beside it.")
    if isinstance(name, str) and name not in known:
        name = name.lower()
    if isinstance(name, str) and name not in known:
        aliased = [preset for preset in known.values() if name in preset.aliases]
        serving = [preset for preset in aliased if axes is None or axes in preset.token_axes]
        if aliased:  # the one for the fewest kinds of tokens is made for these
            return min(serving or aliased, key=lambda preset: 0 if axes is None else len(preset.token_axes))
        for preset in known.values():
            if name in dict(preset.near):
                fail(
                    "the name of a position", repr(name), f"The nearest is {preset.name!r}: {dict(preset.near)[name]}."
                )
    others = [alias for preset in known.values() for alias in preset.aliases]
    require_name(name, known, "the name of a position", others, listed_by=_LISTED)
    return known[name]


def create_position(
    name: str,
    *,
    num_heads: int,
    head_dim: int,
    queries: Coordinates,
    keys: Coordinates | None = None,
    embed_dim: int | None = None,
    causal: bool = False,
    init_std: float = 0.02,
    trainable: bool = True,
    layer: int | None = None,
) -> Mechanism:
    """Build a mechanism by name, as models with that `position` and the command do. Its repr is its constructor.

    Args:
        name: of a preset, an alias, or several joined with `+`: `relpos list positions` has them. Names joined with `~`
            are a schedule over layers.
        num_heads: query heads, H.
        head_dim: width of a head, D.
        queries: coordinates of the query tokens.
        keys: coordinates of the key tokens; default the queries.
        embed_dim: width of a token, E; `num_heads * head_dim` where left out.
        causal: whether a query sees only what comes before it.
        init_std: standard deviation that learned tables start from. Models use 0.02; the command's recipes use 0.5
            on images and 0.1 on text.
        trainable: False for frozen parameters.
        layer: the number of the layer, from 0; a schedule needs it.

    Returns:
        The mechanism.

    Raises:
        ValueError: no such name, a position that makes no sense on tokens with that many axes, or sizes that it cannot
            have.

    Examples:
        >>> relpos.create_position("rotary_2d", num_heads=8, head_dim=64, queries=relpos.Grid(14, 14))
        RotaryEmbedding(head_dim=64, axes=2, base=100.0, layout='interleaved')
    """
    require_coordinates(queries, "queries")
    preset = find(name, queries.axes)
    if embed_dim is None:
        for size, what in ((num_heads, "num_heads"), (head_dim, "head_dim")):
            require_int(size, what, at_least=1)
        embed_dim = num_heads * head_dim
    site = Site(num_heads, head_dim, embed_dim, queries, keys, causal, init_std, trainable, layer)
    remedy = "Choose another: relpos list positions --long."
    if not preset.token_axes:
        what = "a schedule" if preset.schedule else "a sum"
        fail(f"positions for the same number of axes in {what}", repr(name), remedy)
    if queries.axes not in preset.token_axes:
        axes = " or ".join(map(str, preset.token_axes))
        fail(f"tokens with {axes} {'axis' if axes == '1' else 'axes'} for {preset.name}", repr(queries), remedy)
    return preset.make(site)
