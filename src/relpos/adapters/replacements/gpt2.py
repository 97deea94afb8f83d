"""transformers' GPT-2. Own position: one learned vector per token, `wpe`, added to the embedding of words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relpos.adapters.common.kinds import class_path
from relpos.adapters.replacements.hf import RepositionedEmbedding, RepositionedInterfaceAttention
from relpos.adapters.replacements.stacks import Given, Own, Stack, require_class
from relpos.position import Site


def _gpt2(name: str, model: Any, given: Given) -> Iterator[Stack]:
    layers = tuple(require_class(block.attn, _ATTENTION) for block in model.h)
    vectors, first = model.wpe, layers[0]
    longest = given.sequence(vectors.num_embeddings)
    site = Site(first.num_heads, first.head_dim, vectors.embedding_dim, longest, causal=True)
    own = (Own("wpe", f"absolute embedding of {vectors.num_embeddings} positions", ("wpe.weight",)),)
    yield Stack(name, model, site, layers, RepositionedInterfaceAttention, own, ((vectors, RepositionedEmbedding),))


_MODEL, _ATTENTION = (class_path("gpt2", name) for name in ("GPT2Model", "GPT2Attention"))
STACKS = {_MODEL: _gpt2}
READS = {_MODEL: ("forward",), _ATTENTION: ("forward",)}
