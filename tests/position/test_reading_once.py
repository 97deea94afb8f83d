"""`relpos.reading_once`: layers that share a mechanism read it once a forward, and nothing is different."""

import copy
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import relpos
from patience import PATIENCE
from relpos import Grid, Positions, Sequence, attention, reading_once
from relpos.position import Mechanism

DEPTH, HEADS, TOKENS, WIDTH = 3, 2, 6, 4


class Counted(relpos.T5Bias):
    """Counts how often it is asked."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.calls: list[Any] = []

    @property
    def asked(self) -> int:
        return len(self.calls)

    def terms(self, *given: Any) -> relpos.Terms:
        self.calls.append(given)
        return super().terms(*given)


class Stack(nn.Module):
    """Layers that ask one mechanism, some of them or all checkpointed."""

    def __init__(self, position: Mechanism | None = None, keep: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.position = Counted(HEADS) if position is None else position
        self.where: Any = Sequence(TOKENS)
        self.keep = keep

    def layer(self, x: Tensor) -> Tensor:
        out = attention(x, x, x, position=self.position, queries=self.where)
        assert isinstance(out, Tensor)
        return x + out

    def forward(self, x: Tensor) -> Tensor:
        for number in range(DEPTH):
            x = self.layer(x) if self.keep is None or number == 0 else self.keep(self.layer, x)
        return x


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(1, HEADS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, *losses: Tensor) -> list[Tensor]:
    """Of all losses, backward one after another."""
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return [x.grad.clone() for x in model.parameters() if x.grad is not None]


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # sums in another order


def test_a_mechanism_is_asked_once_a_forward_and_the_numbers_are_the_same() -> None:
    model = Stack()
    wanted = gradients(model, model(tokens()).square().sum())
    with torch.no_grad():
        out = model(tokens())
    model.position.calls.clear()
    with reading_once(model):
        found = gradients(model, model(tokens()).square().sum())
        assert model.position.asked == 1
        with torch.no_grad():
            assert torch.equal(model(tokens()), out)
        assert model.position.asked == 2
    same(found, wanted)
    model(tokens())
    assert model.position.asked == 2 + DEPTH, "without the scope"


def test_two_forwards_then_two_backwards() -> None:
    model = Stack()
    wanted = gradients(model, *(model(tokens(seed)).square().sum() for seed in (0, 1)))
    with reading_once(model):
        losses = [model(tokens(seed)).square().sum() for seed in (0, 1)]
    same(gradients(model, *losses), wanted)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_checkpointed_make_theirs_again(reentrant: bool) -> None:
    model = Stack(keep=lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant))
    x = tokens().requires_grad_()
    wanted = gradients(model, model(x).square().sum())
    with reading_once(model):
        within = gradients(model, model(x).square().sum())
        loss = model(x).square().sum()
    same(within, wanted)
    same(gradients(model, loss), wanted)


PLACES = torch.arange(TOKENS)
CHANGES: dict[str, Callable[[Stack], object]] = {
    "a grid": lambda model: setattr(model, "where", Grid(2, 3)),
    "places of a tensor": lambda model: setattr(model, "where", Positions(PLACES, low=0, high=TOKENS)),
    "the tensor is written to": lambda model: model.where.values.add_(1).remainder_(TOKENS),
    "a weight is written to": lambda model: model.position.relative_attention_bias.detach().add_(1),
    "another weight": lambda model: setattr(
        model.position, "relative_attention_bias", nn.Parameter(torch.ones(32, HEADS))
    ),
    "gradients are not wanted": lambda model: torch.set_grad_enabled(False),
    "it is frozen": lambda model: model.position.requires_grad_(False),
    "a setting": lambda model: setattr(model.position, "scaled", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_within_a_forward_what_is_asked_for_decides(change: Callable[[Stack], object]) -> None:
    model = Stack()
    model.where = Positions(PLACES.clone(), low=0, high=TOKENS)

    def forward(x: Tensor) -> Tensor:
        model.layer(x)
        change(model)
        return model.layer(x)

    model.forward = forward  # type: ignore[method-assign]
    with reading_once(model), torch.enable_grad():
        out = model(tokens())
        wanted = model.layer(tokens())  # no forward of the model is under way
        assert torch.equal(out, wanted)
        assert out.requires_grad == wanted.requires_grad


def test_weights_that_are_handed_in() -> None:
    model, x = Stack(), tokens()
    other = {name: torch.randn_like(one) for name, one in model.named_parameters()}
    wanted = functional_call(model, other, (x,))
    with reading_once(model):
        model(x)
        assert torch.equal(functional_call(model, other, (x,)), wanted)
        twin = model.position.terms_from({name.partition(".")[2]: one for name, one in other.items()}, model.where)
        assert not torch.equal(twin.items[0].values, model.position.terms(model.where).items[0].values)


def test_it_ends_with_the_forward_the_scope_and_an_error(unchecked: None) -> None:
    model = Stack()
    right, model.where = model.where, Sequence(TOKENS + 1)
    with reading_once(model):
        with pytest.raises(ValueError, match="tokens"):
            model(tokens())
        model.where = right
        model.position.calls.clear()
        for _ in range(2):  # no forward of the model is under way
            model.layer(tokens())
        assert model.position.asked == 2
        with reading_once(model):
            model(tokens())
        model(tokens())
        assert model.position.asked == 4, "the outer scope counts"
    assert "terms" not in model.position.__dict__
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_forward_that_is_interrupted_leaves_nothing() -> None:
    model = Stack()

    def interrupted(layer: Any, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with reading_once(model):
        model.keep = interrupted
        with pytest.raises(KeyboardInterrupt):
            model(tokens())
        model.keep = None
        wanted = gradients(model, model(tokens()).square().sum())
        same(gradients(model, model.layer(tokens()).sum()), gradients(model, model.layer(tokens()).sum()))
    same(gradients(model, model(tokens()).square().sum()), wanted)


def test_hooks_that_do_not_come_in_pairs() -> None:
    """A hook of somebody else raises before ours is asked; the forward around it goes on."""
    model = Stack()

    def refuse(module: nn.Module, given: Any) -> None:
        raise RuntimeError("not today")

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(RuntimeError, match="not today"):
                self.inner(x)
            return self.inner.layer(self.inner.layer(x))

    around, handle = Around(), model.register_forward_pre_hook(refuse)
    with reading_once(around, model):
        model.position.calls.clear()
        around(tokens())
        assert model.position.asked == 1
    handle.remove()


def test_scopes_of_a_part_and_of_the_whole() -> None:
    part = Stack()
    whole = nn.Sequential(part)
    for first, second in ((part, whole), (whole, part)):
        part.position.calls.clear()
        with reading_once(first), reading_once(second):
            whole(tokens())
        assert part.position.asked == 1


def test_terms_that_an_instance_has_of_its_own_stay() -> None:
    model = Stack()
    own = model.position.__dict__["terms"] = lambda queries, keys=None: relpos.Terms()
    with reading_once(model):
        assert model.position.terms is own
        assert len(copy.deepcopy(model).position.terms(model.where)) == 0
    assert model.position.terms is own


def test_where_nothing_counts_what_is_written_nothing_is_kept() -> None:
    with torch.inference_mode():
        model = Stack()
        with reading_once(model):
            out = model(tokens())
            model.where = Positions(PLACES.clone(), low=0, high=TOKENS)
            assert torch.equal(model(tokens()), out)
    with reading_once(shapes := Stack().to("meta")):
        assert shapes(tokens().to("meta")).shape == tokens().shape


def test_copies_files_and_replicas_are_of_their_own() -> None:
    model = Stack()
    with reading_once(model):
        twin, file = copy.deepcopy(model), io.BytesIO()
        torch.save(model, file)
        replica = model.position._replicate_for_data_parallel()
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.position.relative_attention_bias.zero_()
            assert not torch.equal(other(tokens()), model(tokens()))
    assert "terms" not in replica.__dict__


def test_each_thread_has_forwards_of_its_own() -> None:
    model, meet = Stack(), threading.Barrier(2)
    wanted = [gradients(model, model(tokens(seed)).square().sum()) for seed in (0, 1)]
    model.keep = lambda layer, x: (meet.wait(PATIENCE), layer(x))[1]  # both are under way at once

    def train(seed: int) -> list[Tensor]:
        return list(torch.autograd.grad(model(tokens(seed)).square().sum(), list(model.parameters())))

    with reading_once(model), ThreadPoolExecutor(2) as pool:
        for found, right in zip(pool.map(train, (0, 1)), wanted, strict=True):
            same(found, right)
