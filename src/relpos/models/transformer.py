"""What the models of images and of text share: blocks, and position in them.

    tokens -> embedding -> position on tokens -> blocks, position in attention -> norm

`models/positions.py` has what position is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Mask, Terms
from relpos.core.checks import NO_OTHER, require_choice, require_int, require_probability
from relpos.layers import KeyValueCache, TransformerBlock
from relpos.layers.block import BlockConfig
from relpos.models.attending import ATTENTIONS, AttentionChoice, kind_of
from relpos.models.positions import LayerPositions
from relpos.models.pretrained import PretrainedModel
from relpos.position import Site, Sum
from relpos.position.tables import require_std


class Transformer(PretrainedModel):
    """Base of the models. A subclass sets `blocks`, `norm` and `positions` where its checkpoints have them.

    Args:
        given: `locals()` of the subclass's constructor, whose arguments have timm's names.
        block: as in `BlockConfig.of_model`, what the blocks have besides.
    """

    blocks: nn.ModuleList
    norm: nn.Module
    positions: LayerPositions
    _causal = False

    def __init__(self, given: Mapping[str, Any], **block: Any) -> None:
        super().__init__(given)
        require_int(given["depth"], "depth", at_least=1)
        require_choice(given["attention"], "attention", ATTENTIONS, NO_OTHER)
        require_probability(given["drop_rate"], "drop_rate")
        require_probability(given["pos_drop_rate"], "pos_drop_rate")
        self.block_config = BlockConfig.of_model(given, kind=kind_of(given["attention"]), **block)
        self.attention: AttentionChoice = given["attention"]
        self.shared_position: bool = given["shared_position"]
        self.head_drop, self.pos_drop = nn.Dropout(given["drop_rate"]), nn.Dropout(given["pos_drop_rate"])

    def _mechanisms(self, given: Mapping[str, Any], queries: Coordinates) -> LayerPositions:
        """The mechanisms of the layers, for tokens at these coordinates."""
        std, trainable = given["position_init_std"], given["position_trainable"]
        require_std(std, "position_init_std")
        heads, width = self.block_config.num_heads, self.block_config.dim
        site = Site(heads, width // heads, width, queries, causal=self._causal, init_std=std)
        return LayerPositions.for_layers(
            given["position"], site, len(self.blocks), shared=self.shared_position, trainable=trainable
        )

    @property
    def token_position(self) -> Sum:
        """The mechanisms that act on tokens."""
        return self.positions.on_tokens()

    @property
    def attention_position(self) -> list[Sum]:
        """The mechanisms that act in attention, one sum per layer or one for all."""
        return self.positions.in_attention()

    def position_parameters(self) -> list[nn.Parameter]:
        """The parameters that position mechanisms own."""
        return list(self.positions.parameters())

    def growth(self) -> tuple[str, ...]:
        """The rules by which its mechanisms extrapolate to other coordinates, as `Sum` has them."""
        return self.positions.growth()

    def _features(
        self, x: Float[Tensor, "B N E"], terms: list[Terms], mask: Mask | None, cache: KeyValueCache | None = None
    ) -> Float[Tensor, "B N E"]:
        """Normed tokens after the last block."""
        caches = [None] * len(self.blocks) if cache is None else cache.layers
        for block, position, layer in zip(self.blocks, terms, caches, strict=True):
            x = block(x, position=position, mask=mask, cache=layer)
        features: Tensor = self.norm(x)
        return features

    def _maps(
        self, x: Float[Tensor, "B N E"], terms: list[Terms], mask: Mask | None
    ) -> Iterator[Float[Tensor, "B H N N"]]:
        """The attention weights of one layer after another."""
        for block, position in zip(self.blocks, terms, strict=True):
            assert isinstance(block, TransformerBlock)
            yield block.attn.weights(block.norm1(x), position=position, mask=mask)
            x = block(x, position=position, mask=mask)
