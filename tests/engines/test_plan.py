"""Calls of one structure are checked and planned once; of what differs in anything they ask, anew."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable

import pytest
import torch

import relpos
from relpos import LineBias, RelativePositionBias, Sequence, T5Bias, Terms, attention, lines
from relpos.engines import plan
from relpos.engines.plan import PLANS, Plans

N, H, D = 6, 2, 4


def heads(tokens: int = N, count: int = H, width: int = D, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, count, tokens, width)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engines that were chosen, one entry for each choice that was made."""
    made: list[str] = []
    choose = plan.choose

    def spy(*arguments: object) -> object:
        choice = choose(*arguments)  # type: ignore[arg-type]
        made.append(choice.engine.name)
        return choice

    monkeypatch.setattr(plan, "choose", spy)
    return made


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Terms]:
    """The terms that were checked."""
    made: list[Terms] = []
    check = Terms.check

    def spy(self: Terms, *arguments: torch.Tensor) -> None:
        made.append(self)
        check(self, *arguments)

    monkeypatch.setattr(Terms, "check", spy)
    return made


@pytest.mark.parametrize("make", [lambda: T5Bias(H), lambda: RelativePositionBias(H, seq_len=N)])
def test_a_call_like_the_last_is_neither_checked_nor_chosen_again(
    make: Callable[[], relpos.Mechanism], chosen: list[str], checked: list[Terms]
) -> None:
    bias = make()
    for step in range(3):
        q, k, v = heads(), heads(), heads()
        ours = attention(q, k, v, position=bias, queries=Sequence(N))
        assert len(chosen) == len(checked) == min(step, 1) + 1
        theirs = attention(q, k, v, position=bias, queries=Sequence(N), backend="reference")
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            bias.get_parameter(next(name for name, _ in bias.named_parameters())).add_(step + 1.0)


WAYS = {
    "a view turned": (lambda: T5Bias(H).requires_grad_(False), Sequence(N)),
    "q turned": (lambda: T5Bias(H).requires_grad_(False), Sequence(3 * N)),
    "a part of a table": (lambda: RelativePositionBias(H, seq_len=40).requires_grad_(False), Sequence(N)),
    "written out": (lambda: RelativePositionBias(H, (2, 3)).requires_grad_(False), relpos.Grid(2, 3)),
    "with a prefix": (
        lambda: RelativePositionBias(H, (2, 3), prefix=1).requires_grad_(False),
        relpos.Grid(2, 3, prefix=1),
    ),
    "learned": (lambda: T5Bias(H), Sequence(N)),
    "learned in float32 beside float64": (lambda: T5Bias(H), Sequence(N)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_decided_once_is_right_for_other_numbers_strides_and_scales(way: str) -> None:
    make, tokens = WAYS[way]
    bias, dtype = make(), torch.float64 if "float64" in way else torch.float32
    for number, scale in enumerate((None, None, 0.3)):
        q, k, v = (heads(tokens.count).to(dtype).requires_grad_() for _ in range(3))
        asked = q.mT.contiguous().mT if number == 1 else q  # the width is not side by side
        given = {"position": bias, "queries": tokens, "scale": scale}
        ours, theirs = (attention(asked, k, v, **given, backend=name) for name in ("auto", "reference"))  # type: ignore[call-overload]
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        learned = [q, k, v, *(x for x in bias.parameters() if x.requires_grad)]
        for own, right in zip(
            torch.autograd.grad(ours.sin().sum(), learned),
            torch.autograd.grad(theirs.sin().sum(), learned),
            strict=True,
        ):
            torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for x in bias.parameters():
                x.add_(number + 1.0)


@pytest.mark.parametrize(
    "other",
    [
        lambda q: (heads(batch=2),) * 3,
        lambda q: (q.double(),) * 3,
        lambda q: (q, heads(count=1), heads(count=1)),
        lambda q: (q, q, heads(width=D + 1)),
        lambda q: (q, heads(width=2 * D)[..., ::2], q),
        lambda q: (q, q, heads(width=2 * D)[..., ::2]),
        lambda q: (heads(batch=0),) * 3,
    ],
    ids=["batch", "dtype", "grouped", "wide values", "strides of keys", "strides of values", "no batch"],
)
def test_other_arguments_are_asked_about_again(
    other: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], chosen: list[str], checked: list[Terms]
) -> None:
    bias, q = T5Bias(H), heads()
    attention(q, q, q, position=bias, queries=Sequence(N))
    tensors = other(q)
    ours = attention(*tensors, position=bias, queries=Sequence(N))
    assert (len(chosen), len(checked)) == (2, 2)
    theirs = attention(*tensors, position=bias, queries=Sequence(N), backend="reference")
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_gradients_and_autocast_change_is_asked_about_again(chosen: list[str]) -> None:
    q, line, values = heads(), lines(Sequence(N)), torch.randn(H, 2 * N - 1)
    learned = values.clone().requires_grad_()
    for number, (numbers, context) in enumerate(
        [
            (learned, torch.enable_grad()),
            (learned, torch.autocast("cpu", torch.bfloat16)),
            (values, torch.autocast("cpu", torch.bfloat16)),
            (values, torch.enable_grad()),
            (values, torch.no_grad()),
        ]
    ):
        for _ in range(2):
            with context:
                attention(q, q, q, position=LineBias(numbers, line))
        assert len(chosen) == number + 1


@pytest.mark.usefixtures("unchecked")
def test_what_autocast_alone_makes_one_dtype_is_refused_without_it() -> None:
    bias, q, k = T5Bias(H), heads().bfloat16(), heads()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert attention(q, k, k, position=bias, queries=Sequence(N)).dtype == torch.bfloat16
        with pytest.raises(ValueError, match="q, k and v in one dtype"):
            attention(q, k, k, position=bias, queries=Sequence(N))


@pytest.mark.usefixtures("unchecked")
def test_a_mechanism_that_returns_no_terms_is_refused() -> None:
    class Wrong:
        def terms(self, queries: object, keys: object) -> dict[str, int]:
            return {}

    with pytest.raises(ValueError, match=r"Terms from a mechanism's terms\(queries, keys\); got dict {} from Wrong"):
        attention(heads(), heads(), heads(), position=Wrong(), queries=Sequence(N))


@pytest.mark.usefixtures("unchecked")
def test_tokens_are_counted_before_a_mechanism_is_asked() -> None:
    class Asked:
        def terms(self, queries: object, keys: object) -> Terms:
            raise RuntimeError("it was asked")

    class Held:
        held = T5Bias(H).terms(Sequence(N))

        def terms(self, queries: object, keys: object) -> Terms:
            return self.held

    held = Held()
    attention(heads(), heads(), heads(), position=held, queries=Sequence(N))
    for position in (Asked(), held):
        with pytest.raises(ValueError, match=f"queries coordinates for {N} tokens"):
            attention(heads(), heads(), heads(), position=position, queries=Sequence(N + 3))


@pytest.mark.parametrize("make", [lambda: T5Bias(H), lambda: RelativePositionBias(H, seq_len=N - 2)])
@pytest.mark.usefixtures("unchecked")
def test_keys_and_values_that_do_not_fit_are_named_before_coordinates(make: Callable[[], relpos.Mechanism]) -> None:
    """Also where the mechanism does not serve these coordinates."""
    with pytest.raises(ValueError, match="k and v with the same heads and tokens"):
        attention(heads(), heads(N - 1), heads(), position=make(), queries=Sequence(N))


OTHER_CALLS: dict[str, Callable[[], dict[str, object]]] = {
    "a causal mask": lambda: {"mask": relpos.Mask.causal()},
    "a window": lambda: {"mask": relpos.Mask.window(2, 1)},
    "padding": lambda: {"mask": relpos.Mask.padding(torch.arange(N) < N - 1)},
    "a mask as a tensor": lambda: {"mask": torch.ones(N, N).tril().bool()},
    "dropout": lambda: {"dropout": 0.5},
    "the log-sum-exp": lambda: {"return_lse": True},
    "a scale": lambda: {"scale": 0.3},
    "a soft cap": lambda: {"position": T5Bias(H).terms(Sequence(N)) + relpos.Softcap(5.0)},
    "a rotation": lambda: {"position": relpos.RotaryEmbedding(D).terms(Sequence(N))},
    "vectors": lambda: {"position": relpos.ShawPosition(D, 3).terms(Sequence(N))},
    "an engine": lambda: {"backend": "streaming"},
    "no position": lambda: {"position": None},
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_every_kind_of_call_is_planned_once(name: str, chosen: list[str], checked: list[Terms]) -> None:
    q, terms = heads(), T5Bias(H, scaled=True).terms(Sequence(N))
    attention(q, q, q, position=terms)
    for _ in range(2):
        attention(q, q, q, **({"position": terms} | OTHER_CALLS[name]()))  # type: ignore[call-overload]
    assert (len(chosen), len(checked)) == (2, 2)


def test_what_is_a_function_is_planned_every_time(chosen: list[str]) -> None:
    q = heads()
    rule = relpos.RowRule(lambda q, k, allowed, rows: torch.zeros(1, 1, len(range(*rows.indices(N))), N))
    for _ in range(2):
        attention(q, q, q, position=rule)
    assert len(chosen) == 2


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ((heads(count=3),) * 3, "LineBias values for 3 query heads"),
        ((heads(count=4), heads(), heads()), "LineBias values for 4 query heads"),
        ((heads(), heads(N + 1), heads(N + 1)), f"lines of LineBias for {N + 1} keys"),
        ((heads(), heads(width=5), heads()), "q and k of one head width"),
        ((heads(), heads(batch=2), heads()), "one batch size"),
        ((heads(), heads().double(), heads()), "one dtype"),
        ((heads().long(),) * 3, "q to be floating point"),
        ((heads()[0],) * 3, "q to be a tensor with 4 dimensions"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_arguments_that_do_not_fit_are_refused_each_time(tensors: tuple[torch.Tensor, ...], said: str) -> None:
    q = heads()
    terms = LineBias(torch.randn(H, 2 * N - 1), lines(Sequence(N)))
    attention(q, q, q, position=terms)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(said)):
            attention(*tensors, position=terms)
    attention(q, q, q, position=terms)


def test_tensors_of_other_classes_are_planned_every_time(chosen: list[str]) -> None:
    class Own(torch.Tensor):
        """What may answer for sizes in its own way."""

    q, terms = heads().as_subclass(Own), T5Bias(H).terms(Sequence(N))
    for _ in range(2):
        attention(q, q, q, position=terms)
    assert len(chosen) == 2


def test_a_copy_has_the_same_plan_and_a_transform_none(chosen: list[str]) -> None:
    bias, q = RelativePositionBias(H, seq_len=N), heads()
    with torch.no_grad():  # a tensor with a history has no copy
        terms = bias.terms(Sequence(N))
    attention(q, q, q, position=terms)
    for copied in (copy.deepcopy(terms), pickle.loads(pickle.dumps(terms))):
        attention(q, q, q, position=copied)
    assert len(chosen) == 1
    for _ in range(2):
        torch.func.vmap(lambda x: attention(x, q, q, position=terms))(heads(batch=3)[:, None])
    assert len(chosen) == 3


@pytest.mark.parametrize("backend", ["auto", "streaming", "sdpa", "triton"])
def test_a_plan_holds_no_tensor_of_a_call(backend: str) -> None:
    line = lines(Sequence(N))
    given = [heads().requires_grad_(), heads(), heads(), torch.randn(H, line.length, requires_grad=True)]
    mask = relpos.Mask.packed(torch.arange(N) // 3) if backend == "triton" else None
    attention(*given[:3], position=LineBias(given[3], line), mask=mask, backend=backend).sum().backward()
    assert mask is None or mask.query_segments is not None
    held = [weakref.ref(x) for x in (*given, line, line.query, *([] if mask is None else [mask, mask.query_segments]))]
    assert len(PLANS) == 1
    gc.disable()
    try:
        del given, line, mask
        assert not any(one() is not None for one in held)
    finally:
        gc.enable()


def test_the_oldest_plan_goes_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Plans(most=3)
    monkeypatch.setattr(plan, "PLANS", few)
    for tokens in range(1, 7):
        attention(heads(tokens), heads(tokens), heads(tokens))
        assert len(few) <= 3


def test_one_tensor_given_twice_is_another_structure() -> None:
    """Its gradient is a sum, and it is saved once."""
    line = lines(Sequence(N))
    values = torch.randn(H, line.length, requires_grad=True)
    for same in (False, True, False):
        q = heads().requires_grad_()
        k = q if same else q.detach().clone().requires_grad_()
        own = attention(q, k, k, position=LineBias(values, line), backend="streaming")
        wanted = attention(q, k, k, position=LineBias(values, line), backend="reference")
        leaves = [q, values] if same else [q, k, values]
        for x, y in zip(
            torch.autograd.grad(own.sin().sum(), leaves), torch.autograd.grad(wanted.sin().sum(), leaves), strict=True
        ):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
