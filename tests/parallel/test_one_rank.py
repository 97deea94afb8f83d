"""What a call refuses or keeps, which one rank shows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import relpos
from relpos import Mask, Sequence
from relpos.core import Term
from relpos.core.tree import register
from relpos.parallel import context_attention, context_parallel, ring_node
from relpos.parallel.by_heads import of_heads
from relpos.parallel.exchange import _Gather, heads_for_tokens, tokens_for_heads
from relpos.parallel.layout import stretches
from relpos.parallel.ranks import Ranks, rank_ordered_sum

B, H, N, D = 2, 4, 8, 6
METHODS = ["gather", "ring", "ulysses"]


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Any]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def heads() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, B, H, N, D, dtype=torch.float64)
    return q, k, v


@register("made_up.Nearness")
@dataclass(frozen=True, eq=False)
class Nearness(Term):
    """Adds `gain[h] * (i - j)` for all tokens: a kind of term that no engine was taught."""

    gain: Tensor

    def scores(self, q: Tensor, k: Tensor, scale: float, allowed: Tensor | None) -> Tensor:
        return self.gain[:, None, None] * (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2]))


@pytest.mark.parametrize("method", METHODS)
def test_what_does_not_fit_is_refused_by_every_method(method: Any, mesh: Any) -> None:
    options: dict[str, Any] = {"mesh": mesh, "method": method}
    with pytest.raises(ValueError, match=f"expected LineBias values for {H} query heads"):
        context_attention(*heads(), position=relpos.T5Bias(2), queries=Sequence(N), **options)
    with pytest.raises(ValueError, match=f"expected Mask query_segments for a batch of {B}"):
        context_attention(*heads(), mask=Mask.padding(torch.ones(B + 1, N, dtype=torch.bool)), **options)


def test_a_term_that_no_engine_computes_in_shards(mesh: Any) -> None:
    tensors, nearness = heads(), Nearness(torch.randn(H, dtype=torch.float64))
    torch.testing.assert_close(
        context_attention(*tensors, position=nearness, mesh=mesh), relpos.attention(*tensors, position=nearness)
    )
    with pytest.raises(NotImplementedError, match=r"a position without Nearness.* for method 'ring'"):
        context_attention(*tensors, position=nearness, mesh=mesh, method="ring")


@pytest.mark.parametrize("method", METHODS)
def test_random_places_are_drawn_once(method: Any, mesh: Any) -> None:
    tensors, states = heads(), torch.randn(B, N, 5, dtype=torch.float64)
    both = (relpos.RandomizedPositions(relpos.RotaryEmbedding(D), 64) + relpos.ForgetGate(H, 5)).double()
    given: dict[str, Any] = {"position": both, "queries": Sequence(N), "mask": "causal", "states": states}
    torch.manual_seed(1)
    whole = relpos.attention(*tensors, **given)
    torch.manual_seed(1)
    torch.testing.assert_close(context_attention(*tensors, mesh=mesh, method=method, **given), whole)


def test_a_weight_that_changes_before_the_backward_is_noticed(mesh: Any) -> None:
    shaw = relpos.ShawPosition(D).double()
    out = context_attention(*heads(), position=shaw, queries=Sequence(N), mesh=mesh, method="ring")
    with torch.no_grad():
        for weight in shaw.parameters():
            weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_engine_of_shards_is_chosen_by_the_gradients_it_must_compute(
    mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd runs a node's forward without gradients."""
    seen, real = [], ring_node.choose_for_shards

    def watched(call: Any) -> Any:
        seen.append(torch.is_grad_enabled())
        return real(call)

    monkeypatch.setattr(ring_node, "choose_for_shards", watched)
    for position in (relpos.ShawPosition(D).double(), relpos.RotaryEmbedding(D)):
        context_attention(*heads(), position=position, queries=Sequence(N), mesh=mesh, method="ring")
    assert seen == [True, False]


def test_what_ranks_exchange_has_no_second_derivative(mesh: Any) -> None:
    shares, x = stretches(N, 1, "contiguous"), heads()[0].requires_grad_()
    ranks = Ranks.of(mesh)
    for whole in (
        heads_for_tokens(ranks, shares, x),
        tokens_for_heads(ranks, shares, x),
        *_Gather.apply(ranks, shares, 2, x),  # type: ignore[no-untyped-call]
    ):
        (found,) = torch.autograd.grad(whole.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            found.sum().backward()


def test_a_sum_over_many_ranks_is_not_taken_in_half_precision() -> None:
    found = rank_ordered_sum(torch.ones(600, 1, dtype=torch.bfloat16))
    assert (found.dtype, float(found)) == (torch.bfloat16, 600)


@pytest.mark.parametrize("axis", [0, 1], ids=["of heads", "of queries"])
def test_sinks_are_divided_by_heads(axis: int) -> None:
    logits = torch.randn(H) if axis == 0 else torch.randn(B, H, H)
    (own,) = of_heads(relpos.Terms(relpos.Sinks(logits)), slice(1, 3), H).of(relpos.Sinks)
    assert torch.equal(own.logits, logits.narrow(axis, 1, 2))


def test_a_layer_of_ranks_is_copied_with_them(mesh: Any) -> None:
    layer = context_parallel(relpos.MultiHeadAttention(8, H, position=relpos.RotaryEmbedding(2)), mesh)
    x = torch.randn(B, N, 8)
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))


def test_a_position_is_one_that_attention_takes(mesh: Any) -> None:
    with torch.device("meta"):
        slopes = relpos.ALiBi(H)
    tensors, given = heads(), {"queries": Sequence(N), "mesh": mesh}
    out = context_attention(*tensors, position=slopes, **given)  # its device is that of the tokens
    torch.testing.assert_close(out, relpos.attention(*tensors, position=relpos.ALiBi(H), queries=Sequence(N)))
    on_tokens = relpos.create_position("learned", num_heads=H, head_dim=D, queries=Sequence(N))
    with pytest.raises(ValueError, match="expected a mechanism that acts in attention; got LearnedPositionEmb"):
        context_attention(*tensors, position=on_tokens, **given)
