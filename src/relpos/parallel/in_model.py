"""A model whose sequences are spread over ranks: each attends to all tokens and computes the rest of its own alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from relpos.core import Coordinates, MaskLike, Sequence, Term, Terms
from relpos.core.checks import fail, require_choice
from relpos.layers import MultiHeadAttention
from relpos.parallel.api import context_attention
from relpos.parallel.choice import ShardMethod
from relpos.parallel.layout import ShardLayout, require_layout
from relpos.parallel.ranks import Ranks
from relpos.parallel.sharding import shard, unshard
from relpos.position import Mechanism
from relpos.position.base.states import needs_states

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class _Context:
    """The ranks of a model, and how they compute; a `layers.context.SharedSequence`."""

    mesh: DeviceMesh | dist.ProcessGroup
    method: ShardMethod
    layout: ShardLayout

    def __deepcopy__(self, memo: dict[int, Any]) -> _Context:
        """Itself: a copy of a model, as of averaged weights, belongs to the same ranks, which cannot be copied."""
        return self

    @property
    def size(self) -> int:
        return Ranks.of(self.mesh).size

    def share(self, x: Shaped[Tensor, "B N ..."]) -> Shaped[Tensor, "B n ..."]:
        return shard(x, self.mesh, layout=self.layout)

    def whole(self, x: Shaped[Tensor, "B n ..."], dim: int = 1) -> Shaped[Tensor, "B N ..."]:
        return unshard(x, self.mesh, dim=dim, layout=self.layout)

    def of_first(self, x: Tensor) -> Tensor:
        """What the first rank has in the place of a tensor: a random draw."""
        return Ranks.of(self.mesh).of_first(x)

    def attend(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        *,
        position: Mechanism | None,
        terms: Terms | Term | None,
        coordinates: Coordinates | None,
        mask: MaskLike | None,
        scale: float | None,
        states: Tensor,
    ) -> Tensor:
        if position is not None and coordinates is None:
            coordinates = Sequence(heads[0].shape[2] * self.size)
        return context_attention(
            *heads,
            position=position,
            queries=None if position is None else coordinates,
            mask=mask,
            mesh=self.mesh,
            method=self.method,
            layout=self.layout,
            scale=scale,
            terms=terms,
            states=states if needs_states(position) else None,
        )


def context_parallel(
    model: M,
    mesh: DeviceMesh | dist.ProcessGroup | None,
    *,
    method: ShardMethod = "auto",
    layout: ShardLayout = "contiguous",
) -> M:
    """Spread the sequences of a model over ranks, in place.

    A `LanguageModel` takes all tokens, the same on every rank, and returns the logits of this rank's: `shard` cuts the
    labels alike, and a rank's loss is the mean over its own. A `VisionTransformer` returns the scores of whole images
    on every rank. A `TransformerBlock`, a `MultiHeadAttention` and any module of these take this rank's tokens, with
    coordinates and mask of all. A retrofitted T5 of transformers, and others whose outputs are by token
    (docs/parallel.md), take this rank's tokens and their mask. In each case a weight's gradient is the mean over ranks:
    wrap the model in DistributedDataParallel or FSDP over the mesh (or over it and the mesh of the data), or call
    `average_gradients`.

    Args:
        model: a `LanguageModel`, a `VisionTransformer`, any module with `MultiHeadAttention` in it, or a model after
            `relpos.retrofit` or `relpos.replace_position`.
        mesh: the ranks that share a sequence; None to have each process compute whole sequences again.
        method: as in `context_attention`.
        layout: as in `context_attention`; "zigzag" for causal models.

    Returns:
        The model.

    Raises:
        ValueError: no attention of relpos in the model, a model of another library that cannot be spread, or an
            invalid argument.
    """
    require_choice(method, "method", get_args(ShardMethod))
    require_layout(layout)
    takers: list[Any] = [module for module in model.modules() if hasattr(type(module), "shared_sequence")]
    adapted = next((module for module in takers if hasattr(module, "prepare_sharing")), None)
    if adapted is None and not any(isinstance(module, MultiHeadAttention) for module in takers):
        remedy = "Call relpos.retrofit(model) first, or relpos.parallel.context_attention in its attention."
        fail("a model of relpos's MultiHeadAttention, or a retrofitted one", type(model).__name__, remedy)
    if mesh is not None:
        Ranks.of(mesh)
    context = None if mesh is None else _Context(mesh, method, layout)
    if adapted is not None:
        adapted.prepare_sharing(model, context)
    for module in takers:  # attention layers, models that cut their tokens, and random positions
        module.shared_sequence = context
    return model
