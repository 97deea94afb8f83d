"""Attention over a sequence whose tokens are spread over ranks, with any learned position.

    from relpos.parallel import average_gradients, context_attention, context_parallel, shard, unshard

docs/parallel.md has a training step, and which method is taken when.
"""

from relpos.parallel.api import context_attention
from relpos.parallel.in_model import context_parallel
from relpos.parallel.sharding import average_gradients, shard, unshard

__all__ = ["average_gradients", "context_attention", "context_parallel", "shard", "unshard"]
