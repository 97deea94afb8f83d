"""timm's BEiT. Own position: a table of offsets per layer, or one for all, and in some models an absolute embedding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from relpos.adapters.replacements.repositioned import Repositioned
from relpos.adapters.replacements.stacks import Given, Own, Stack, require_class
from relpos.adapters.replacements.vit import RepositionedPatches, absolute
from relpos.adapters.retrofits.windows import projected_with_biases
from relpos.core import Grid
from relpos.position import Site

_TABLE = "relative_position_bias_table"


class RepositionedBeitAttention(Repositioned):
    """`Attention` of timm's BEiT."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Attention among tokens `[B, N, E]`."""
        module: Any = self
        q, k, v = (
            projected_with_biases(self, x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        dropout = module.attn_drop.p if self.training else 0.0
        out = self.attend_repositioned(q, k, v, scale=module.scale, dropout=dropout)
        projected: Tensor = module.proj_drop(module.proj(out.transpose(1, 2).flatten(2)))
        return projected


class RepositionedBeit(Repositioned):
    """`Beit`: no table for all layers, and an absolute embedding if the mechanism has one."""

    @property
    def rel_pos_bias(self) -> None:
        """None: no table for all layers."""

    @property
    def pos_embed(self) -> Tensor:
        """The vectors added to tokens, `[1, N, E]`, instead of its own."""
        return self.added_for("pos_embed")


def _beit(name: str, model: Any, given: Given) -> Iterator[Stack]:
    layers = tuple(require_class(block.attn, "timm.models.beit.Attention") for block in model.blocks)
    first = layers[0]
    own = [] if model.pos_embed is None else [absolute("pos_embed", model.pos_embed)]
    if model.rel_pos_bias is not None:
        where = f"rel_pos_bias.{_TABLE}"
        own.append(Own(where, f"table of {len(model.rel_pos_bias.relative_position_bias_table)} offsets", (where,)))
    if first.relative_position_bias_table is not None:
        own.append(tables("blocks.{}.attn", len(layers), first))
    site = Site(
        first.num_heads,
        first.qkv.out_features // 3 // first.num_heads,
        model.embed_dim,
        given.grid(Grid(*model.patch_embed.grid_size, prefix=1)),
    )
    tokens = ((model, RepositionedBeit), (model.patch_embed, RepositionedPatches))
    yield Stack(name, model, site, layers, RepositionedBeitAttention, tuple(own), tokens)


def tables(layer: str, count: int, first: Any) -> Own:
    """The tables of all layers. `layer` is a layer's name with {} for its number."""
    parameters = tuple(f"{layer.format(number)}.{_TABLE}" for number in range(count))
    rows = len(first.relative_position_bias_table)
    return Own(f"{layer.format('*')}.{_TABLE}", f"tables of {rows} offsets, {count} layers", parameters)


STACKS = {"timm.models.beit.Beit": _beit}
READS = {"timm.models.beit.Attention": ("forward",), "timm.models.beit.Beit": ("forward_features",)}
