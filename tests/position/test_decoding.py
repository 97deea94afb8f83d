"""`relpos.decoding`: the same numbers, from what was made for the first token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

import relpos
from relpos.core import Sequence

H, D, LENGTH = 2, 8, 300  # longer than the shortest sequence that is held

BIASES: dict[str, Callable[[], relpos.Mechanism]] = {
    "t5": lambda: relpos.T5Bias(H, bidirectional=False),
    "alibi": lambda: relpos.ALiBi(H),
    "kerple": lambda: relpos.Kerple(H),
    "limited": lambda: relpos.RelativePositionBias(H, seq_len=LENGTH),
    "summed": lambda: relpos.T5Bias(H) + relpos.ALiBi(H),
    "rotary": lambda: relpos.RotaryEmbedding(D),
}


def decoded(
    position: relpos.Mechanism, tokens: Tensor, places: Iterable[int] = (0, 1, 2, 255, 256, 257, 299)
) -> Tensor:
    outs = []
    for last in places:
        q, k, where = tokens[:, :, last : last + 1], tokens[:, :, : last + 1], Sequence(1, start=last)
        outs.append(relpos.attention(q, k, k, position=position, queries=where, keys=Sequence(last + 1)))
    return torch.cat(outs, dim=2)


@pytest.mark.parametrize("name", BIASES)
@torch.no_grad()
def test_same_numbers_and_weights_are_read_again_afterwards(name: str) -> None:
    position, tokens = BIASES[name](), torch.randn(1, H, LENGTH, D)
    wanted = decoded(position, tokens)
    with relpos.decoding(position):
        torch.testing.assert_close(decoded(position, tokens), wanted, rtol=0, atol=1e-6)
    for parameter in position.parameters():
        parameter.data.add_(1).mul_(3)
    fresh = BIASES[name]()
    fresh.load_state_dict(position.state_dict())
    torch.testing.assert_close(decoded(position, tokens), decoded(fresh, tokens))


def test_terms_are_made_once() -> None:
    class Counted(relpos.T5Bias):
        calls = 0

        def bias(self, offsets: relpos.Offsets) -> Tensor:
            self.calls += 1
            return super().bias(offsets)

    position, tokens = Counted(H), torch.randn(1, H, LENGTH, D)
    with torch.no_grad(), relpos.decoding(position):
        decoded(position, tokens, range(100, 110))
    assert position.calls == 1


def test_gradients_are_taken_of_the_weights() -> None:
    position, q = relpos.T5Bias(H), torch.randn(1, H, 5, D)
    with relpos.decoding(position):
        with torch.no_grad():
            relpos.attention(q, q, q, position=position, queries=Sequence(5))
        relpos.attention(q, q, q, position=position, queries=Sequence(5)).sum().backward()
    assert position.relative_attention_bias.grad is not None


def test_scopes_nest_and_close_after_an_error() -> None:
    position = relpos.T5Bias(H)
    model = nn.ModuleList([position])
    with pytest.raises(RuntimeError, match="mine"), relpos.decoding(model), relpos.decoding(position):
        raise RuntimeError("mine")
    assert position._decoding_terms is None
    with relpos.decoding(model):
        with relpos.decoding(position):
            pass
        assert position._decoding_terms is not None


def test_positions_that_are_written_to() -> None:
    position, q, places = relpos.T5Bias(H, init_std=1.0), torch.randn(1, H, 3, D), torch.tensor([0, 1, 2])
    where = relpos.Positions(places, low=0, high=90)
    with torch.no_grad(), relpos.decoding(position):
        relpos.attention(q, q, q, position=position, queries=where)
        places.copy_(torch.tensor([0, 9, 90]))
        held = relpos.attention(q, q, q, position=position, queries=where)
    with torch.no_grad():
        assert torch.equal(held, relpos.attention(q, q, q, position=position, queries=where))


class Asked(nn.Module):
    """A module around a mechanism, as a model is."""

    def __init__(self, position: relpos.Mechanism) -> None:
        super().__init__()
        self.position = position

    def forward(self, tokens: Tensor) -> Tensor:
        return decoded(self.position, tokens, places=(LENGTH - 1,))


@pytest.mark.parametrize("name", [name for name in BIASES if list(BIASES[name]().parameters())])
def test_weights_that_are_handed_in_are_read(name: str) -> None:
    model, tokens = Asked(BIASES[name]()), torch.randn(1, H, LENGTH, D)
    other = {name: torch.randn_like(x) for name, x in model.named_parameters()}
    with torch.no_grad():
        wanted, own = torch.func.functional_call(model, other, tokens), model(tokens)
        with relpos.decoding(model):
            for _ in range(2):  # what the one is held for is not read by the other
                torch.testing.assert_close(model(tokens), own, rtol=0, atol=1e-6)
                torch.testing.assert_close(torch.func.functional_call(model, other, tokens), wanted)
