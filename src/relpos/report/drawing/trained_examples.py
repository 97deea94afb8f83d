"""Trained examples in the package: the learned parameters of mechanisms, and their initial state.

`recipes/trained_examples.py` makes the file: on images a vision transformer of 2 blocks on handwritten digits, 8 x 8
tokens; on sequences a causal language model of 2 blocks on 128 bytes of English at a time. One seed, 4 heads of width
16, tables in float16. They are only illustrations: a picture of one is no evidence about a mechanism.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import torch
from safetensors.torch import load
from torch import Tensor

from relpos.core import Grid, Sequence
from relpos.position import Mechanism, Site, find
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.saved_settings import with_settings
from relpos.position.base.states import terms_at_rest
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens

FILE = "examples.safetensors"
HEADS, HEAD_DIM, SEED = 4, 16, 0
SITES = {
    1: Site(HEADS, HEAD_DIM, HEADS * HEAD_DIM, Sequence(128), causal=True, init_std=0.1),
    2: Site(HEADS, HEAD_DIM, HEADS * HEAD_DIM, Grid(8, 8), init_std=0.5),
}
"""The training sites, by the tokens' number of axes; `init_std` is that of the command's recipes."""
TRAINED_ON = {1: "English text, where no token sees what follows", 2: "handwritten digits"}


def start(name: str, axes: int) -> Mechanism:
    """A preset as its example was initialized."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return find(name, axes).make(SITES[axes])


def trained(name: str, site: Site | None = None, *, axes: int | None = None) -> Mechanism | None:
    """A preset with the parameters of its trained example.

    Args:
        name: the preset's name.
        site: the site to use it at; by default its training site with `axes` axes.

    Returns:
        None if there is no example: it has no parameters, heads or widths differ, or it is not defined on these tokens,
        which lie outside the trained ones.
    """
    if site is not None:
        axes = site.queries.axes
    if axes not in SITES:
        return None
    example = SITES[axes]
    state = _stored().get((find(name, axes).name, axes))
    widths = None if site is None else (site.num_heads, site.head_dim, site.embed_dim)
    if state is None or widths not in (None, (example.num_heads, example.head_dim, example.embed_dim)):
        return None
    mechanism = start(name, axes)
    if site is not None and AS_IS not in mechanism.growth and not _within(site, example):
        return None
    mechanism.load_state_dict(with_settings(mechanism, state))  # the preset's name determines the settings
    return mechanism if site is None or _serves(mechanism, site) else None


@torch.no_grad()
def _serves(mechanism: Mechanism, site: Site) -> bool:
    """Whether it is defined on these tokens: learned position vectors fit only one grid."""
    try:
        for part in mechanism.parts():
            if acts_on_tokens(part):
                part.embed(torch.zeros(1, site.queries.count, site.embed_dim), site.queries)
            if acts_in_attention(part):
                terms_at_rest(part, site.queries, site.keys)
    except ValueError:
        return False
    return True


def _within(site: Site, example: Site) -> bool:
    """Whether the example's site contains all tokens of this one."""
    outer = example.queries
    return not any(
        tokens.prefix or low < least or high > most
        for tokens in ((site.queries,) if site.keys is None else (site.queries, site.keys))
        for low, high, least, most in zip(tokens.low, tokens.high, outer.low, outer.high, strict=True)
    )


@cache
def _stored() -> dict[tuple[str, int], dict[str, Tensor]]:
    """The parameters of each example by name and axes."""
    examples: dict[tuple[str, int], dict[str, Tensor]] = {}
    for key, x in load(files("relpos.report.drawing").joinpath(FILE).read_bytes()).items():
        axes, name, parameter = key.split("/")
        examples.setdefault((name, int(axes)), {})[parameter] = x.float()
    return examples
