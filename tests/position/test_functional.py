"""Parameters handed in: sums and wrappers, transforms, compilers, threads, decoding, and bad arguments."""

import copy
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

import relpos
from loaded import Loaded
from patience import PATIENCE
from relpos import (
    ALiBi,
    Grid,
    LineBias,
    LogContinuousBias,
    Mechanism,
    NoPosition,
    OffsetBias,
    RelativePositionBias,
    Sequence,
    T5Bias,
    Terms,
    TUPEPosition,
)
from relpos.core import Coordinates, Offsets, cached
from relpos.position import FIREBias, Sum
from relpos.position.base.saved_settings import with_settings

SCRIPT = Path(__file__).with_name("compile_functional.py")
GRID = Grid(3, 4)
LINE = Sequence(12)


def others(mechanism: nn.Module, seed: int = 5) -> dict[str, Tensor]:
    """Other numbers for all parameters."""
    torch.manual_seed(seed)
    return {name: torch.randn_like(x).requires_grad_() for name, x in mechanism.named_parameters()}


def loaded(mechanism: Mechanism, tensors: dict[str, Tensor]) -> Mechanism:
    twin = copy.deepcopy(mechanism)
    twin.load_state_dict(with_settings(twin, {name: x.detach() for name, x in tensors.items()}))
    return twin


def values_of(terms: Terms) -> Tensor:
    bias = terms.one(LineBias)
    assert bias is not None
    return bias.values


def relative() -> RelativePositionBias:
    return RelativePositionBias(2, window_size=(3, 4), init_std=1.0)


def test_a_sum_and_the_modules_inside() -> None:
    mechanism = relative() + LogContinuousBias(2, (3, 4), hidden_dim=8) + T5Bias(2, scaled=True)
    tensors = others(mechanism)
    assert "mechanisms.1.cpb_mlp.0.weight" in tensors
    found, wanted = (
        [term.values for term in terms.of(LineBias)]
        for terms in (mechanism.terms_from(tensors, GRID), loaded(mechanism, tensors).terms(GRID))
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    for x in torch.autograd.grad(torch.cat(found, dim=1).sum(), list(tensors.values())):
        assert x.any()


def test_a_mechanism_that_a_sum_holds_twice_has_one_name() -> None:
    bias = relative()
    mechanism = Sum([bias, bias])
    assert list(others(mechanism)) == ["mechanisms.0.relative_position_bias_table"]
    table = torch.randn_like(bias.relative_position_bias_table)
    twice = values_of(mechanism.terms_from({"mechanisms.0.relative_position_bias_table": table}, GRID))
    assert torch.equal(twice, 2 * table.T)


def test_a_parameter_that_two_modules_share_is_replaced_in_both() -> None:
    mechanism = TUPEPosition(2, 4, 8, grid_size=(3, 4), init_std=1.0)
    mechanism.pos_key.weight = mechanism.pos_query.weight
    weight = torch.randn_like(mechanism.pos_query.weight)
    found = mechanism.terms_from({"pos_query.weight": weight}, GRID)
    with torch.no_grad():
        mechanism.pos_query.weight.copy_(weight)
    for ours, theirs in zip(*(each.of(relpos.LowRank) for each in (found, mechanism.terms(GRID))), strict=True):
        assert torch.equal(ours.query, theirs.query)
        assert torch.equal(ours.key, theirs.key)


def test_one_tensor_under_two_names() -> None:
    mechanism = FIREBias(2, hidden_dim=2)
    tensors = others(mechanism) | dict.fromkeys(("mlp.0.bias", "mlp.2.bias"), torch.randn(2))
    q = torch.randn(1, 2, 12, 4)
    wanted = relpos.attention(q, q, q, position=loaded(mechanism, tensors), queries=LINE)
    found = relpos.attention(q, q, q, position=mechanism.terms_from(tensors, LINE))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Halved(nn.Module):
    """What an adapter puts around a mechanism."""

    def __init__(self, inner: Mechanism) -> None:
        super().__init__()
        self.inner, self.factor = inner, nn.Parameter(torch.tensor(0.5))

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        (bias,) = self.inner.terms(queries, keys)
        return Terms(LineBias(bias.values * self.factor, bias.lines))


@pytest.mark.usefixtures("unchecked")
def test_a_wrapped_mechanism_in_a_sum() -> None:
    mechanism = Sum([ALiBi(2), Halved(T5Bias(2, scaled=True))])  # type: ignore[list-item]
    tensors = others(mechanism)
    assert set(tensors) == {"mechanisms.1.factor", "mechanisms.1.inner.relative_attention_bias"}
    found, wanted = mechanism.terms_from(tensors, LINE), loaded(mechanism, tensors).terms(LINE)
    assert torch.equal(values_of(found), values_of(wanted))


class Stored(OffsetBias):
    """A bias with a number in a buffer that is saved; what it makes of it is kept."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.tensor(2.0))
        self.register_buffer("passing", torch.tensor(2.0), persistent=False)

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        level = cached(self, "level", self.device, lambda: self.level + 1)
        return level * torch.ones(1, len(offsets.kind))


def test_persistent_buffers() -> None:
    mechanism = Stored()
    before = values_of(mechanism.terms(LINE))
    assert (before == 3).all()
    assert (values_of(mechanism.terms_from({"level": torch.tensor(5.0)}, LINE)) == 6).all()
    assert (values_of(mechanism.terms(LINE)) == 3).all()
    with pytest.raises(ValueError, match="among level; got 'passing'"):
        mechanism.terms_from({"passing": torch.tensor(5.0)}, LINE)


def test_what_follows_from_shapes_is_kept_once() -> None:
    mechanism = T5Bias(2, scaled=True)
    first, second = (mechanism.terms_from(others(mechanism), LINE) for _ in range(2))
    own = mechanism.terms(LINE)
    lines = [terms.of(LineBias)[0].lines for terms in (first, second, own)]
    assert lines[0] is lines[1] is lines[2]


def test_nothing_is_held_while_tokens_are_decoded() -> None:
    mechanism = T5Bias(2, scaled=True)
    tensors = others(mechanism)
    wanted = values_of(loaded(mechanism, tensors).terms(Sequence(1, start=11), LINE))
    with torch.no_grad(), relpos.decoding(mechanism):
        own = values_of(mechanism.terms(Sequence(1, start=11), LINE))
        found = values_of(mechanism.terms_from(tensors, Sequence(1, start=11), LINE))
        assert torch.equal(values_of(mechanism.terms(Sequence(1, start=11), LINE)), own)
    assert torch.equal(found, wanted)


MECHANISMS = [relative, lambda: LogContinuousBias(2, (3, 4), hidden_dim=8), lambda: T5Bias(2, scaled=True)]


@pytest.mark.parametrize("make", MECHANISMS, ids=["table", "network", "buckets"])
def test_gradients_by_a_transform(make: Callable[[], Mechanism]) -> None:
    mechanism, q = make(), torch.randn(1, 2, 12, 4)
    tensors = others(mechanism)

    def total(tensors: dict[str, Tensor]) -> Tensor:
        terms = mechanism.terms_from(tensors, GRID)
        return relpos.attention(q, q, q, position=terms, backend="reference").square().sum()

    wanted = torch.autograd.grad(total(tensors), list(tensors.values()))
    by_transform = torch.func.grad(total)({name: x.detach() for name, x in tensors.items()})
    for found, exact in zip(by_transform.values(), wanted, strict=True):
        torch.testing.assert_close(found, exact)
    several = {name: torch.stack([x.detach(), -x.detach()]) for name, x in tensors.items()}
    both = torch.func.vmap(total)(several)
    torch.testing.assert_close(both[0], total(tensors).detach())
    torch.testing.assert_close(both[1], total({name: x[1] for name, x in several.items()}))


@pytest.mark.traced
@pytest.mark.slow
def test_in_a_compiled_graph(loaded: Loaded) -> None:
    """In a process of its own: compilers must see relpos as users have it, without the shape checks."""
    result = loaded.run(SCRIPT, needs=["compiler"])
    assert result.stdout == "ok\n", result.stderr


class Meeting(OffsetBias):
    """Two threads meet while it is asked for its bias, before and after its parameter is read."""

    def __init__(self, threads: threading.Barrier) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.zeros(2))
        self.inside = [threads]

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        self.inside[0].wait(timeout=PATIENCE)
        level = self.level
        self.inside[0].wait(timeout=PATIENCE)
        return level[:, None] * torch.ones(len(offsets.kind))


def test_two_threads_at_once() -> None:
    mechanism = Meeting(threading.Barrier(3))
    given = [torch.full((2,), 1.0), torch.full((2,), 2.0), None]
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        level = given[number]
        terms = mechanism.terms(LINE) if level is None else mechanism.terms_from({"level": level}, LINE)
        found[number] = values_of(terms)[:, 0].detach()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[0], torch.ones(2))
    assert torch.equal(found[1], 2 * torch.ones(2))
    assert torch.equal(found[2], torch.zeros(2)), "its own terms, asked for by a third thread"


def test_functional_call() -> None:
    mechanism = T5Bias(2, scaled=True)
    tensors = others(mechanism)
    found = torch.func.functional_call(mechanism, tensors, (LINE, Sequence(5)))
    assert torch.equal(values_of(found), values_of(mechanism.terms_from(tensors, LINE, Sequence(5))))
    assert torch.equal(values_of(mechanism(LINE)), values_of(mechanism.terms(LINE)))
    bias = relative()
    tensors = others(bias)
    dense = torch.func.functional_call(bias, tensors, ())
    assert torch.equal(dense, loaded(bias, tensors)())


TABLE = "relative_position_bias_table"
BAD: list[tuple[Callable[[], Mechanism], Any, str]] = [
    (relative, [torch.zeros(35, 2)], "expected tensors by the names of parameters; got list"),
    (
        relative, {"relative_position_bias": torch.zeros(35, 2)},
        f"among {TABLE}; got 'relative_position_bias'. Did you mean '{TABLE}'?",
    ),
    (relative, {3: torch.zeros(35, 2)}, f"among {TABLE}; got int 3."),
    (
        relative, {TABLE: torch.zeros(36, 2)},
        f"expected {TABLE} of RelativePositionBias as a floating-point tensor of shape (35, 2); got a tensor of shape "
        "(36, 2) and dtype float32. Shape it like the parameter.",
    ),
    (relative, {TABLE: [0.0]}, "as a floating-point tensor of shape (35, 2); got list [0.0]."),
    (relative, {TABLE: torch.zeros(35, 2, dtype=torch.int64)}, "and dtype int64."),
    (
        relative, {TABLE: torch.zeros(35, 2, device="meta")},
        f"expected {TABLE} of RelativePositionBias on cpu; got meta. Move it, or the mechanism, with .to(device).",
    ),
    (NoPosition, {"x": torch.zeros(1)}, "expected no tensors for NoPosition, which has no"),
]  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("make", "tensors", "message"), BAD)
def test_bad_tensors(make: Callable[[], Mechanism], tensors: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        make().terms_from(tensors, GRID)
    assert "\n" not in str(caught.value)
