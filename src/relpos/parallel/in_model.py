"""A model whose sequences are spread over ranks: each attends to all tokens and computes the rest of its own alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, get_args

import torch.distributed as dist
from jaxtyping import Float
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

    def share(self, x: Float[Tensor, "B N E"]) -> Float[Tensor, "B n E"]:
        return shard(x, self.mesh, layout=self.layout)

    def whole(self, x: Float[Tensor, "B n E"]) -> Float[Tensor, "B N E"]:
        return unshard(x, self.mesh, layout=self.layout)

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
            coordinates = Sequence(heads[0].shape[2] * Ranks.of(self.mesh).size)
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
    coordinates and mask of all. In each case a weight's gradient is the mean over ranks: wrap the model in
    DistributedDataParallel or FSDP over the mesh (or over it and the mesh of the data), or call `average_gradients`.

    Args:
        model: a `LanguageModel`, a `VisionTransformer`, or any module with `MultiHeadAttention` in it.
        mesh: the ranks that share a sequence; None to have each process compute whole sequences again.
        method: as in `context_attention`.
        layout: as in `context_attention`; "zigzag" for causal models.

    Returns:
        The model.

    Raises:
        ValueError: no `MultiHeadAttention` in the model, such as in models of other libraries, or an invalid argument.
    """
    require_choice(method, "method", get_args(ShardMethod))
    require_layout(layout)
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    if not layers:
        remedy = "Call relpos.parallel.context_attention in its attention, with coordinates of all tokens."
        fail("a model of relpos's MultiHeadAttention", type(model).__name__, remedy)
    if mesh is not None:
        Ranks.of(mesh)
    context = None if mesh is None else _Context(mesh, method, layout)
    for module in model.modules():
        if hasattr(type(module), "shared_sequence"):  # attention layers, and models that cut their tokens
            module.shared_sequence = context  # type: ignore[assignment]
    return model
