"""PoPE and the forget gate in x-transformers' own attention: output and the gradients of all weights."""

import importlib
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from relpos import ForgetGate, PolarEmbedding, Sequence, attention
from relpos.position import Mechanism

with warnings.catch_warnings():  # it scripts a function, which PyTorch would not have any more
    warnings.simplefilter("ignore", DeprecationWarning)
    published = importlib.import_module("x_transformers.x_transformers")
B, H, N, D = 2, 2, 11, 8


def pope(theirs: nn.Module) -> tuple[Mechanism, dict[str, Tensor], list[Tensor]]:
    """Ours with the weights of theirs, what their attention is given, and the weights of position of both."""
    polar = published.PolarEmbedding(D, H, bias_uniform_init=False).double()
    nn.init.uniform_(polar.learned_bias, -6.0, -0.1)
    ours = PolarEmbedding(H, D).double()
    ours.phase.data.copy_(polar.learned_bias[:, 0])
    return ours, {"polar_pos_emb": polar(torch.arange(N))}, [polar.learned_bias, ours.phase]


def fox(theirs: nn.Module) -> tuple[Mechanism, dict[str, Tensor], list[Tensor]]:
    linear = theirs.data_dependent_alibi.to_forget_gates[0]
    ours = ForgetGate(H, H * D).double()
    ours.fgate_proj.load_state_dict(linear.state_dict())
    return ours, {}, [linear.weight, ours.fgate_proj.weight, linear.bias, ours.fgate_proj.bias]


@pytest.mark.parametrize(("make", "options"), [(pope, {}), (fox, {"data_dependent_alibi": True})])
def test_as_in_x_transformers(
    make: Callable[[nn.Module], tuple[Mechanism, dict[str, Tensor], list[Tensor]]],
    options: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    theirs = published.Attention(H * D, dim_head=D, heads=H, causal=True, **options).double()
    # It maps queries and keys, counts frequencies and takes the softmax in float32, whatever comes.
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    theirs.attend.attn_fn = nn.Softmax(dim=-1)
    ours, given, weights = make(theirs)
    x = torch.randn(B, N, H * D, dtype=torch.float64, requires_grad=True)
    expected = theirs(x, **given)

    heads = [project(x).unflatten(2, (H, D)).transpose(1, 2) for project in (theirs.to_q, theirs.to_k, theirs.to_v)]
    states = x if options else None
    out = attention(*heads, position=ours, queries=Sequence(N), mask="causal", states=states)
    mine = theirs.to_out(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)

    up = torch.randn_like(expected)
    shared = [x, *(layer.weight for layer in (theirs.to_q, theirs.to_k, theirs.to_v, theirs.to_out))]
    wanted = torch.autograd.grad(expected, [*shared, *weights[::2]], up)
    found = torch.autograd.grad(mine, [*shared, *weights[1::2]], up)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.reshape(one.shape), rtol=1e-11, atol=1e-11)
