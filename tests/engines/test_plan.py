"""Calls of one structure are checked and planned once; of what differs in anything they ask, anew."""

import contextlib
import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_steps import with_gradients
from random_calls import sequence

import relpos
from relpos import Grid, LineBias, RelativePositionBias, Sequence, T5Bias, Terms, attention, lines
from relpos.engines import plan
from relpos.engines.plan import PLANS, Plans
from relpos.testing import devices

FAST_CASES = 8  # of each of its tests, in the fast part

N, H, D = 6, 2, 4
LINE = lines(Sequence(N))
BIAS = torch.randn(H, LINE.length)


def heads(tokens: int = N, count: int = H, width: int = D, batch: int = 1) -> torch.Tensor:
    return torch.randn(batch, count, tokens, width)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was chosen, one entry for each choice that was made."""
    made: list[Any] = []
    choose = plan.choose
    monkeypatch.setattr(plan, "choose", lambda *call: (made.append(choose(*call)), made[-1])[1])
    return made


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Terms]:
    """The terms that were checked."""
    made: list[Terms] = []
    check = Terms.check
    monkeypatch.setattr(Terms, "check", lambda self, *tensors: (made.append(self), check(self, *tensors))[1])
    return made


def assert_right(tensors: tuple[torch.Tensor, ...], leaves: list[torch.Tensor] | None = None, **given: Any) -> None:
    """As the reference, with the gradients of the leaves where there are some."""
    ours, theirs = (attention(*tensors, **given, backend=name) for name in ("auto", "reference"))
    found, wanted = (with_gradients(x, leaves) if leaves else x for x in (ours, theirs))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: T5Bias(H), lambda: RelativePositionBias(H, seq_len=N)])
def test_a_call_like_another_is_neither_checked_nor_chosen_again(
    make: Callable[[], relpos.Mechanism], chosen: list[Any], checked: list[Terms]
) -> None:
    bias = make()
    for _ in range(3):
        attention(heads(), heads(), heads(), position=bias, queries=Sequence(N))
    assert len(checked) == len(chosen) == 1


WAYS: dict[str, tuple[Callable[[], relpos.Mechanism], Any]] = {
    "a view turned": (lambda: T5Bias(H).requires_grad_(False), Sequence(N)),
    "q turned": (lambda: T5Bias(H).requires_grad_(False), Sequence(3 * N)),
    "a part of a table": (lambda: RelativePositionBias(H, seq_len=40).requires_grad_(False), Sequence(N)),
    "written out": (lambda: RelativePositionBias(H, (2, 3)).requires_grad_(False), Grid(2, 3)),
    "with a prefix": (lambda: RelativePositionBias(H, (2, 3), prefix=1).requires_grad_(False), Grid(2, 3, prefix=1)),
    "learned": (lambda: T5Bias(H), Sequence(N)),
    "a learned table": (lambda: RelativePositionBias(H, seq_len=N), Sequence(N)),
    "learned in float32 beside float64": (lambda: T5Bias(H), Sequence(N)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_decided_once_is_right_for_other_numbers_strides_and_scales(way: str) -> None:
    make, tokens = WAYS[way]
    bias, dtype = make(), torch.float64 if "float64" in way else torch.float32
    for number, scale in enumerate((None, None, 0.3)):
        q, k, v = (heads(tokens.count).to(dtype).requires_grad_() for _ in range(3))
        asked = q.mT.contiguous().mT if number == 1 else q  # the width is not side by side
        learned = [q, k, v, *(x for x in bias.parameters() if x.requires_grad)]
        assert_right((asked, k, v), learned, position=bias, queries=tokens, scale=scale)
        with torch.no_grad():
            for x in bias.parameters():
                x.add_(number + 1.0)


OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "batch": (lambda q: (heads(batch=2),) * 3, {}),
    "dtype": (lambda q: (q.double(),) * 3, {}),
    "grouped": (lambda q: (q, heads(count=1), heads(count=1)), {}),
    "wide values": (lambda q: (q, q, heads(width=D + 1)), {}),
    "strides of keys": (lambda q: (q, heads(width=2 * D)[..., ::2], q), {}),
    "strides of values": (lambda q: (q, q, heads(width=2 * D)[..., ::2]), {}),
    "no batch": (lambda q: (heads(batch=0),) * 3, {}),
    "a causal mask": (lambda q: (q, q, q), {"mask": relpos.Mask.causal()}),
    "a window": (lambda q: (q, q, q), {"mask": relpos.Mask.window(2, 1)}),
    "padding": (lambda q: (q, q, q), {"mask": relpos.Mask.padding(torch.arange(N) < N - 1)}),
    "a mask as a tensor": (lambda q: (q, q, q), {"mask": torch.ones(N, N).tril().bool()}),
    "the log-sum-exp": (lambda q: (q, q, q), {"return_lse": True}),
    "a scale": (lambda q: (q, q, q), {"scale": 0.3}),
    "another term": (lambda q: (q, q, q), {"position": LineBias(BIAS, LINE) + relpos.Softcap(5.0)}),
    "a rotation": (lambda q: (q, q, q), {"position": relpos.RotaryEmbedding(D).terms(Sequence(N))}),
    "vectors": (lambda q: (q, q, q), {"position": relpos.ShawPosition(D, 3).terms(Sequence(N))}),
    "no position": (lambda q: (q, q, q), {"position": None}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_arguments_are_asked_about_again(name: str, checked: list[Terms]) -> None:
    change, more = OTHERS[name]
    q, given = heads(), {"position": LineBias(BIAS, LINE)}
    for _ in range(2):
        assert_right((q, q, q), **given)
        assert_right(change(q), **(given | more))
        assert len(checked) == 4, "each once an engine"


def test_dropout_is_asked_about() -> None:
    q, terms = heads(), LineBias(BIAS, LINE)
    whole = attention(q, q, q, position=terms)
    for _ in range(2):
        assert not torch.allclose(attention(q, q, q, position=terms, dropout=0.5), whole)


def test_what_gradients_and_autocast_change_is_asked_about_again(checked: list[Terms]) -> None:
    q, fixed = heads(), torch.randn(H, LINE.length)
    learned = fixed.clone().requires_grad_()
    for values, context, dtype, new in (
        (learned, contextlib.nullcontext(), torch.float32, True),
        (learned, torch.autocast("cpu", torch.bfloat16), torch.bfloat16, True),
        (fixed, torch.autocast("cpu", torch.bfloat16), torch.bfloat16, True),
        (fixed, contextlib.nullcontext(), torch.float32, True),
        (learned, contextlib.nullcontext(), torch.float32, False),
        (learned, torch.no_grad(), torch.float32, True),
    ):
        before = len(checked)
        with context:
            found, wanted = (
                attention(q, q, q, position=LineBias(values, LINE), backend=name) for name in ("auto", "reference")
            )
        assert len(checked) == before + 2 * new
        assert found.dtype == dtype
        assert found.requires_grad is wanted.requires_grad
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 2e-2)
        if found.requires_grad:
            assert torch.autograd.grad(found.float().sum(), learned)[0].any()


@pytest.mark.usefixtures("unchecked")
def test_what_autocast_alone_makes_one_dtype_is_refused_without_it() -> None:
    bias, q, k = T5Bias(H), heads().bfloat16(), heads()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert attention(q, k, k, position=bias, queries=Sequence(N)).dtype == torch.bfloat16
        with pytest.raises(ValueError, match="q, k and v in one dtype"):
            attention(q, k, k, position=bias, queries=Sequence(N))


class Says:
    """A mechanism that says one thing, or raises it."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def terms(self, queries: object, keys: object) -> Any:
        if isinstance(self.what, Exception):
            raise self.what
        return self.what


@pytest.mark.usefixtures("unchecked")
def test_a_mechanism_that_returns_no_terms_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Terms from a mechanism's terms\(queries, keys\); got dict {} from Says"):
        attention(heads(), heads(), heads(), position=Says({}), queries=Sequence(N))


@pytest.mark.usefixtures("unchecked")
def test_tokens_are_counted_before_a_mechanism_is_asked() -> None:
    held = Says(T5Bias(H).terms(Sequence(N)))
    attention(heads(), heads(), heads(), position=held, queries=Sequence(N))
    for position in (Says(RuntimeError("it was asked")), held):
        with pytest.raises(ValueError, match=f"queries coordinates for {N} tokens"):
            attention(heads(), heads(), heads(), position=position, queries=Sequence(N + 3))


@pytest.mark.parametrize("make", [lambda: T5Bias(H), lambda: RelativePositionBias(H, seq_len=N - 2)])
@pytest.mark.usefixtures("unchecked")
def test_keys_and_values_that_do_not_fit_are_named_before_coordinates(make: Callable[[], relpos.Mechanism]) -> None:
    """Also where the mechanism does not serve these coordinates."""
    with pytest.raises(ValueError, match="k and v with the same heads and tokens"):
        attention(heads(), heads(N - 1), heads(), position=make(), queries=Sequence(N))


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
    q, terms = heads(), LineBias(torch.randn(H, LINE.length), LINE)
    attention(q, q, q, position=terms)
    for _ in range(2):
        with pytest.raises(ValueError, match=re.escape(said)):
            attention(*tensors, position=terms)
    attention(q, q, q, position=terms)


def test_what_may_be_anything_is_planned_every_time(chosen: list[Any]) -> None:
    class Own(torch.Tensor):
        """What may answer for sizes in its own way."""

    rule = relpos.RowRule(lambda q, k, allowed, rows: torch.zeros(1, 1, len(range(*rows.indices(N))), N))
    for q, position in ((heads().as_subclass(Own), LineBias(BIAS, LINE)), (heads(), rule)):
        before = len(chosen)
        for _ in range(2):
            attention(q, q, q, position=position)
        assert len(chosen) == before + 2


def test_a_copy_has_the_same_plan_and_a_transform_none(chosen: list[Any]) -> None:
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
    devices.attention(*given[:3], position=LineBias(given[3], line), mask=mask, backend=backend).sum().backward()
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
    for same in (True, False, True):
        q = heads().requires_grad_()
        k = q if same else q.detach().clone().requires_grad_()
        own = attention(q, k, k, position=LineBias(values, line), backend="streaming")
        wanted = attention(q, k, k, position=LineBias(values, line), backend="reference")
        leaves = [q, values] if same else [q, k, values]
        for x, y in zip(
            torch.autograd.grad(own.sin().sum(), leaves), torch.autograd.grad(wanted.sin().sum(), leaves), strict=True
        ):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("seed", range(20))
def test_sequences_of_calls(seed: int) -> None:
    threads = torch.get_num_threads()
    try:
        sequence(seed)
    finally:
        torch.set_num_threads(threads)
