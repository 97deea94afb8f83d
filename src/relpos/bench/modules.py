"""Peers that are whole attention layers: transformers' DeBERTa-v2 and T5, timm's RelPosAttention, and ours.

Each has 8 heads of 64 in 512 wide tokens, or the case's sizes, in training mode without dropout. Values that the models
compute once for all layers (DeBERTa's bucket of every pair) are computed beforehand. DeBERTa's layer ends in a residual
and a LayerNorm, which the others do not have. Libraries are imported only when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relpos.adapters.common.libraries import imported
from relpos.bench.cases import VECTORS, Case
from relpos.bench.inputs import Inputs
from relpos.bench.peers import FREE, Peer, Workload, dense_bytes, engine_peer, op_peers, pairs, taken
from relpos.layers import MultiHeadAttention

FREE_LAYER = "layer-free"
DEBERTA = "deberta-v2"


class PlainLayer(nn.Module):
    """`x -> Linear -> heads -> SDPA -> Linear`, without position: the baseline for layers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.heads, self.causal = case.heads, case.causal
        self.qkv = nn.Linear(case.width, 3 * case.width)
        self.proj = nn.Linear(case.width, case.width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        projected: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return projected


def _work(inputs: Inputs, module: nn.Module, forward: Callable[[Tensor], Tensor], *more: Tensor) -> Workload:
    x = inputs.x
    assert x is not None
    if inputs.case.what == "forward":
        return Workload(lambda: forward(x))
    leaves = (x, *(parameter for parameter in module.parameters() if parameter.requires_grad), *more)
    return Workload(lambda: forward(x), leaves, inputs.gradient)


def _as_tokens(inputs: Inputs) -> dict[str, Any]:
    """Dtype and device of the tokens."""
    assert inputs.x is not None
    return {"dtype": inputs.x.dtype, "device": inputs.x.device}


def _plain(inputs: Inputs) -> Workload:
    module = PlainLayer(inputs.case).to(**_as_tokens(inputs))
    return _work(inputs, module, module)


def _engine(engine: str) -> Peer:
    def build(inputs: Inputs) -> Workload:
        case, position = inputs.case, inputs.position
        module = MultiHeadAttention(case.width, case.heads, backend=engine).to(**_as_tokens(inputs))
        module.position = position  # after the cast: tables stay float32
        where = None if position is None else inputs.tokens
        work = _work(inputs, module, lambda x: module(x, coordinates=where, mask=inputs.mask))
        return replace(work, backend=taken(op_case(case), engine))

    ours = engine_peer(engine)

    def needs(case: Case) -> int:
        return ours.needs(op_case(case))

    return Peer(ours.name, ours.title, _a_layer, build, needs)


def op_case(case: Case) -> Case:
    """The attention inside a layer, as a separate case."""
    return replace(case, layer=False)


def _a_layer(case: Case) -> bool:
    return case.layer


def _missing(name: str) -> Callable[[], str | None]:
    """A function that says why a library cannot be imported, or returns None."""

    def missing() -> str | None:
        try:
            imported(name)
        except Exception as error:  # a library may raise anything
            what = (str(error).strip().splitlines() or ["no message"])[0]
            return f"{name.split('.')[0]} cannot be imported: {what}"
        return None

    return missing


_DEBERTA = "transformers.models.deberta_v2.modeling_deberta_v2"
_T5 = "transformers.models.t5.modeling_t5"
_TIMM = "timm.models.vision_transformer_relpos"


def _with_vectors(case: Case) -> bool:
    return case.layer and case.position in VECTORS and not case.causal


def _deberta(inputs: Inputs) -> Workload:
    case = inputs.case
    modeling = imported(_DEBERTA)
    config = modeling.DebertaV2Config(
        hidden_size=case.width, num_attention_heads=case.heads, attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=256,
        max_position_embeddings=512,
    )  # fmt: skip
    module = modeling.DebertaV2Attention(config).to(**_as_tokens(inputs))
    n = case.count
    seen = torch.ones(case.batch, 1, n, n, dtype=torch.bool, device=case.device)
    blank = torch.empty(1, n, 1, device=case.device)
    where = modeling.build_relative_position(blank, blank, bucket_size=256, max_position=512)
    table = torch.randn(512, case.width, **_as_tokens(inputs), requires_grad=case.what == "step")

    def forward(x: Tensor) -> Tensor:
        output: Tensor = module(x, seen, relative_pos=where, rel_embeddings=table)[0]
        return output

    return _work(inputs, module, forward, table)


def _with_buckets(case: Case) -> bool:
    return case.layer and case.position == "t5"


def _t5(inputs: Inputs) -> Workload:
    case = inputs.case
    modeling = imported(_T5)
    config = modeling.T5Config(
        d_model=case.width, d_kv=case.head_dim, num_heads=case.heads, dropout_rate=0.0, is_decoder=case.causal
    )
    config._attn_implementation = "eager"
    module = modeling.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    module = module.to(**_as_tokens(inputs))
    n = case.count
    like_tokens = _as_tokens(inputs)
    mask = torch.full((n, n), torch.finfo(like_tokens["dtype"]).min, **like_tokens).triu(1) if case.causal else None

    def forward(x: Tensor) -> Tensor:
        output: Tensor = module(x, mask=mask)[0]
        return output

    return _work(inputs, module, forward)


def _on_a_grid(case: Case) -> bool:
    return case.layer and case.position == "grid" and case.prefix <= 1 and not case.causal


def _timm(inputs: Inputs) -> Workload:
    case = inputs.case
    bias = partial(imported("timm.layers").RelPosBias, window_size=case.sizes, prefix_tokens=case.prefix)
    timm = imported(_TIMM)
    module = timm.RelPosAttention(case.width, case.heads, qkv_bias=True, rel_pos_cls=bias).to(**_as_tokens(inputs))
    return _work(inputs, module, module)


def layer_peers(engines: tuple[str, ...]) -> tuple[Peer, ...]:
    """The peers that run layers, the one without position first."""

    def dozen(case: Case) -> int:
        return 12 * pairs(case)

    return (
        Peer(FREE_LAYER, "layer without bias", _a_layer, _plain, lambda case: 0, exact=False),
        *(_engine(engine) for engine in engines),
        Peer(DEBERTA, "transformers DeBERTa-v2", _with_vectors, _deberta, dozen, _missing(_DEBERTA), exact=False),
        Peer("t5", "transformers T5", _with_buckets, _t5, dozen, _missing(_T5), exact=False),
        Peer("timm", "timm RelPosAttention", _on_a_grid, _timm, dense_bytes, _missing(_TIMM), exact=False),
    )


def peers_of(case: Case, engines: tuple[str, ...]) -> tuple[Peer, ...]:
    """All peers that suit a case."""
    peers = layer_peers(engines) if case.layer else op_peers(engines)
    return tuple(peer for peer in peers if peer.suits(case))


def baseline(case: Case) -> str:
    """The name of the peer that a case's ratios refer to."""
    if not case.layer:
        return FREE
    return DEBERTA if _with_vectors(case) else FREE_LAYER
