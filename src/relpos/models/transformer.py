"""Common base of the image and text models: blocks, and position in them.

    tokens -> embedding -> position on tokens -> blocks, position in attention -> norm

Position is in `models/positions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Mask, Terms
from relpos.core.checks import NO_OTHER, require_choice, require_int, require_probability
from relpos.layers import KeyValueCache, TransformerBlock
from relpos.layers.block import BlockConfig
from relpos.layers.context import SharedSequence
from relpos.models.attention_choice import ATTENTIONS, AttentionChoice
from relpos.models.config import LanguageConfig, VisionConfig
from relpos.models.positions import LayerPositions
from relpos.models.pretrained import PretrainedModel
from relpos.position import Mechanism, Site, Sum
from relpos.position.base.sum import grow_part, growth_of_all
from relpos.position.base.tables import require_std
from relpos.position.base.wrapped import parts_of


class Transformer(PretrainedModel):
    """Base of the models. A subclass sets `blocks`, `norm` and `positions` in the order of its checkpoints.

    Args:
        config: the model's arguments. block: the blocks' configuration.
    """

    blocks: nn.ModuleList
    norm: nn.Module
    positions: LayerPositions
    _causal = False
    shared_sequence: SharedSequence | None = None
    """The ranks that share a sequence; `relpos.parallel.context_parallel` sets it."""

    def __init__(self, config: VisionConfig | LanguageConfig, block: BlockConfig) -> None:
        super().__init__(config)
        require_int(config.depth, "depth", at_least=1)
        require_choice(config.attention, "attention", ATTENTIONS, NO_OTHER)
        require_probability(config.drop_rate, "drop_rate")
        require_probability(config.pos_drop_rate, "pos_drop_rate")
        self.block_config = block
        self.attention: AttentionChoice = config.attention
        self.shared_position = config.shared_position
        self.head_drop, self.pos_drop = nn.Dropout(config.drop_rate), nn.Dropout(config.pos_drop_rate)

    def _mechanisms(self, config: VisionConfig | LanguageConfig, queries: Coordinates) -> LayerPositions:
        """The mechanisms of the layers, for tokens at these coordinates; those that need states go to the blocks."""
        require_std(config.position_init_std, "position_init_std")
        heads, width = self.block_config.num_heads, self.block_config.dim
        site = Site(heads, width // heads, width, queries, causal=self._causal, init_std=config.position_init_std)
        positions, own = LayerPositions.and_own(
            config.position, site, len(self.blocks), shared=self.shared_position, trainable=config.position_trainable
        )
        for block, one in zip(self.blocks, own, strict=True):
            block.attn.position = one  # type: ignore[union-attr]
        return positions

    def _of_blocks(self) -> list[Mechanism]:
        """The mechanisms that stand in the blocks."""
        return [one for one in self._in_blocks() if one is not None]

    def _in_blocks(self) -> list[Mechanism | None]:
        """The same, with None for each block that has none."""
        return [block.attn.position for block in self.blocks]  # type: ignore[union-attr,misc]

    @property
    def token_position(self) -> Sum:
        """The mechanisms that act on tokens."""
        return self.positions.on_tokens()

    @property
    def attention_position(self) -> list[Sum]:
        """The mechanisms that act in attention, one sum per layer, per entry of a shared schedule, or one for all."""
        found = self.positions.in_attention()
        if not self._of_blocks():
            return found
        both = [(found[layer % len(found)], own) for layer, own in enumerate(self._in_blocks())]
        return [Sum(one for one in pair if one is not None) for pair in both]

    def position_parameters(self) -> list[nn.Parameter]:
        """The parameters that position mechanisms own."""
        return [*self.positions.parameters(), *(x for one in self._of_blocks() for x in one.parameters())]

    def growth(self) -> tuple[str, ...]:
        """The rules by which its mechanisms extrapolate to other coordinates, as in `Sum`."""
        return growth_of_all(self._of_period())

    def _of_period(self) -> list[Mechanism]:
        """The parts of all mechanisms of a schedule's entries, or of the first layer."""
        own = self._in_blocks()[: self.positions.period]
        return [*self.positions.entries(), *(part for one in own if one is not None for part in parts_of(one))]

    def _grow(self, coordinates: Coordinates, rule: str) -> None:
        """Take its mechanisms to other coordinates by one of the rules."""
        own = self._in_blocks()
        if not self._of_blocks():
            self.positions = self.positions.grown(coordinates, rule)
            return
        if rule not in self.growth():
            Sum(self._of_period()).grow(coordinates, rule)  # raises
        grown = [None if one is None else grow_part(one, coordinates, rule) for one in own]
        rules = self.positions.growth()
        self.positions = self.positions.grown(coordinates, rule if rule in rules else rules[0])
        for block, one in zip(self.blocks, grown, strict=True):
            block.attn.position = one  # type: ignore[union-attr]

    def _block(self, block: nn.Module, x: Tensor, coordinates: Coordinates, **given: Any) -> Tensor:
        """The tokens after a block, which makes terms of its own where a mechanism stands in it."""
        own = block.attn.position is not None and given.get("cache") is None  # type: ignore[union-attr]
        after: Tensor = block(x, coordinates=coordinates, **given) if own else block(x, **given)
        return after

    def _features(
        self, x: Float[Tensor, "B N E"], terms: list[Terms], masks: list[Mask | None], coordinates: Coordinates,
        cache: KeyValueCache | None = None,
    ) -> Float[Tensor, "B N E"]:  # fmt: skip
        """Normalized tokens after the last block; where ranks share the sequence, this rank's."""
        caches = [None] * len(self.blocks) if cache is None else cache.layers
        x = x if self.shared_sequence is None else self.shared_sequence.share(x)
        for block, position, mask, layer in zip(self.blocks, terms, masks, caches, strict=True):
            x = self._block(block, x, coordinates, position=position, mask=mask, cache=layer)
        features: Tensor = self.norm(x)
        return features

    def _maps(
        self, x: Float[Tensor, "B N E"], terms: list[Terms], masks: list[Mask | None], coordinates: Coordinates
    ) -> Iterator[Float[Tensor, "B H N N"]]:
        """Yield the attention weights of each layer."""
        for block, position, mask in zip(self.blocks, terms, masks, strict=True):
            assert isinstance(block, TransformerBlock)
            where = None if block.attn.position is None else coordinates
            yield block.attn.weights(block.norm1(x), position=position, coordinates=where, mask=mask)
            x = self._block(block, x, coordinates, position=position, mask=mask)
