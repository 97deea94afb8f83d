"""transformers' BERT. Own position: one learned vector per token, `position_embeddings`, added before the first
norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relpos.adapters.common.kinds import class_path
from relpos.adapters.replacements.hf import RepositionedEmbedding, RepositionedInterfaceAttention
from relpos.adapters.replacements.stacks import Given, Own, Stack, require_class
from relpos.position import Site


def _bert(name: str, model: Any, given: Given) -> Iterator[Stack]:
    layers = tuple(require_class(layer.attention.self, _ATTENTION) for layer in model.encoder.layer)
    vectors, first = model.embeddings.position_embeddings, layers[0]
    longest = given.sequence(vectors.num_embeddings)
    site = Site(
        first.num_attention_heads, first.attention_head_size, vectors.embedding_dim, longest, causal=first.is_causal
    )
    where = "embeddings.position_embeddings"
    own = (Own(where, f"absolute embedding of {vectors.num_embeddings} positions", (f"{where}.weight",)),)
    yield Stack(name, model, site, layers, RepositionedInterfaceAttention, own, ((vectors, RepositionedEmbedding),))


_ATTENTION = class_path("bert", "BertSelfAttention")
STACKS = {class_path("bert", "BertModel"): _bert}
READS = {_ATTENTION: ("forward",), class_path("bert", "BertEmbeddings"): ("forward",)}
