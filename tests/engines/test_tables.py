"""Learned tables that the Triton engine reads by itself: no gather before its kernels, no gradient of one after."""

import copy
import gc
import importlib
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import relpos
from relpos import Grid, Mask, RelativePositionBias, Sequence, T5Bias, reading_once
from relpos.core.terms import table_lookup
from relpos.core.terms.table_lookup import TableLookup
from relpos.engines.plan import PLANS
from relpos.position.base import table_bias
from relpos.testing.devices import attention

limits = importlib.import_module("relpos.engines.triton.limits")
H, D = 2, 16
WHERE = Sequence(7)


def t5(**given: Any) -> T5Bias:
    return T5Bias(H, **{"num_buckets": 8, "max_distance": 16, "init_std": 1.0} | given)


CASES: dict[str, tuple[relpos.Mechanism, Any, Any]] = {
    "buckets": (t5(), Sequence(19), None),
    "other keys": (t5(scaled=True), Sequence(5, start=4), Sequence(19)),
    "one column for all heads": (T5Bias(1, num_buckets=8, max_distance=16, init_std=1.0), Grid(4, 5), None),
    "rows in order": (RelativePositionBias(H, (3, 4), init_std=1.0), Grid(3, 4), None),
    "some rows": (RelativePositionBias(H, (5, 4), init_std=1.0), Grid(3, 4), None),
    "a prefix": (RelativePositionBias(H, (3, 4), prefix=1, init_std=1.0), Grid(3, 4, prefix=1), None),
    "half precision": (t5().to(torch.bfloat16), Sequence(19), None),
    "one tile": (RelativePositionBias(H, (4, 4), init_std=1.0), Grid(4, 4), None),
}


@pytest.fixture
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls are planned with another limit of few tokens, and forgotten."""
    monkeypatch.setattr(limits, "FEW", request.param)
    PLANS.clear()
    yield
    PLANS.clear()


def step(
    mechanism: relpos.Mechanism, queries: Any = WHERE, keys: Any = None, backend: str = "triton", batch: int = 1
) -> list[Tensor]:
    """The output of a call, and its gradients."""
    torch.manual_seed(3)
    n, m = queries.count, (keys or queries).count
    leaves = [torch.randn(batch, H, count, D).requires_grad_() for count in (n, m, m)]
    out = attention(*leaves, position=mechanism, queries=queries, keys=keys, backend=backend)
    learned = [x for x in mechanism.parameters() if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [*leaves, *learned])]


def assert_right(mechanism: relpos.Mechanism, *where: Any, batch: int = 1) -> None:
    ours, theirs = (step(mechanism, *where, backend=name, batch=batch) for name in ("triton", "reference"))
    for one, other in zip(ours, theirs, strict=True):
        near = {"rtol": 0.02, "atol": 0.1} if one.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(one, other, **near)


def is_unread(mechanism: Any, where: Any = WHERE) -> bool:
    return isinstance(mechanism._unread_terms(where).items[0], TableLookup)


@pytest.mark.parametrize("few", [0, 256], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, few: None) -> None:
    mechanism, *where = CASES[name]
    assert isinstance(mechanism._unread_terms(*where).items[0], TableLookup)  # type: ignore[attr-defined]
    assert_right(mechanism, *where, batch=2)


LAYOUTS = {
    "transposed": torch.randn(H, 8).T,
    "every second column": torch.randn(8, 2 * H)[:, ::2],
    "one row for all": torch.randn(1, H).expand(8, H),
    "where 16 does not divide": torch.randn(8 * H + 1)[1:].view(8, H),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_table_may_lie_anyhow(name: str) -> None:
    mechanism = t5()
    mechanism.relative_attention_bias = nn.Parameter(LAYOUTS[name])
    assert mechanism.relative_attention_bias.stride() == LAYOUTS[name].stride()
    assert is_unread(mechanism)
    assert_right(mechanism)


def test_grouped_keys_and_an_empty_batch() -> None:
    mechanism = t5()
    for batch, key_heads in ((2, 1), (0, H)):
        leaves = [torch.randn(batch, heads, 7, D).requires_grad_() for heads in (H, key_heads, key_heads)]
        learned = [*leaves, mechanism.relative_attention_bias]
        given = {"position": mechanism, "queries": WHERE}
        outs = [attention(*leaves, backend=backend, **given) for backend in ("triton", "reference")]
        found = [torch.autograd.grad(out.square().sum(), learned) for out in outs]
        torch.testing.assert_close([outs[0], *found[0]], [outs[1], *found[1]], rtol=1e-4, atol=1e-4)


def test_no_operator_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, reads = t5(), []
    step(mechanism)  # a plan is made with tables read
    for module in (table_bias, table_lookup):
        real = module.read
        monkeypatch.setattr(module, "read", lambda *given, real=real: reads.append(given) or real(*given))
    step(mechanism)
    assert not reads
    step(mechanism, backend="streaming")
    assert reads


def _weights_in_place(mechanism: T5Bias) -> None:
    with torch.no_grad():
        mechanism.relative_attention_bias.add_(1)


def _weights_by_data(mechanism: T5Bias) -> None:
    mechanism.relative_attention_bias.data = torch.randn(8, H)


def _more_rows_by_data(mechanism: T5Bias) -> None:
    mechanism.relative_attention_bias.data = torch.randn(9, H)


def _another_parameter(mechanism: T5Bias) -> None:
    mechanism.relative_attention_bias = nn.Parameter(torch.randn(8, H))


def _a_state(mechanism: T5Bias, assign: bool = False) -> None:
    mechanism.load_state_dict({name: x.clone() + 1 if x.is_floating_point() else x
                               for name, x in mechanism.state_dict().items()}, assign=assign)  # fmt: skip


def _assigned(mechanism: T5Bias) -> None:
    _a_state(mechanism, assign=True)


def _half(mechanism: T5Bias) -> None:
    mechanism.to(torch.bfloat16)


def _the_scale(mechanism: T5Bias) -> None:
    mechanism.scaled = True


def _frozen(mechanism: T5Bias) -> None:
    mechanism.requires_grad_(False)


def _another_bias(mechanism: T5Bias) -> None:
    mechanism.bias = lambda offsets: 3 * T5Bias.bias(mechanism, offsets)  # type: ignore[method-assign]


def _a_parametrization(mechanism: T5Bias) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    nn.utils.parametrize.register_parametrization(mechanism, "relative_attention_bias", Twice())


CHANGES = (
    _weights_in_place, _weights_by_data, _more_rows_by_data, _another_parameter, _a_state, _assigned, _half,
    _the_scale, _frozen, _another_bias, _a_parametrization,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_between_two_calls_is_seen(change: Any) -> None:
    mechanism = t5()
    assert_right(mechanism)
    change(mechanism)
    assert_right(mechanism)
    if change is _weights_by_data:
        assert_right(copy.deepcopy(mechanism))


def test_who_says_terms_otherwise_is_asked() -> None:
    class Doubled(T5Bias):
        def bias(self, offsets: Any) -> Tensor:
            return 2 * super().bias(offsets)

    class Two(T5Bias):
        def terms(self, queries: Any, keys: Any = None) -> relpos.Terms:
            return super().terms(queries, keys) + super().terms(queries, keys)

    class Wrapped:
        def __init__(self) -> None:
            self.inner = t5()

        def terms(self, queries: Any, keys: Any = None) -> relpos.Terms:
            return self.inner.terms(queries, keys) + self.inner.terms(queries, keys)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    for kind in (Doubled, Two):
        mechanism = kind(H, num_buckets=8, max_distance=16, init_std=1.0)
        assert not is_unread(mechanism)
        assert_right(mechanism)
    assert_right(Wrapped())  # type: ignore[arg-type]


def test_a_table_that_does_not_fit_is_refused_as_ever() -> None:
    mechanism = t5()
    for shape in ((9, H), (7, H), (8, 3)):
        mechanism.relative_attention_bias = nn.Parameter(torch.randn(shape))
        messages = []
        for backend in ("triton", "reference"):
            try:
                step(mechanism, backend=backend)
            except (ValueError, IndexError) as error:
                messages.append(str(error))
        assert messages[:1] == messages[1:], messages


def test_weights_of_a_functional_call() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = t5()

        def forward(self, q: Tensor) -> Tensor:
            return attention(q, q, q, position=self.position, queries=WHERE, backend="triton")

    layer, q = Layer(), torch.randn(1, H, 7, D)
    layer(q)
    weights = {"position.relative_attention_bias": torch.randn(8, H).requires_grad_()}
    found = torch.func.functional_call(layer, weights, (q,))
    terms = layer.position.terms_from({"relative_attention_bias": weights["position.relative_attention_bias"]}, WHERE)
    torch.testing.assert_close(found, attention(q, q, q, position=terms, backend="reference"))
    assert torch.autograd.grad(found.sum(), list(weights.values()))[0].abs().max() > 0


def test_terms_of_a_scope_are_read_once() -> None:
    mechanism = t5()
    model = nn.Module()
    model.bias = mechanism
    wanted = step(mechanism)
    with reading_once(model):
        assert not is_unread(mechanism)
        assert_right(mechanism)
    torch.testing.assert_close(step(mechanism), wanted)


@pytest.mark.parametrize("mode", [nullcontext, lambda: FlopCounterMode(display=False)], ids=["eager", "under a mode"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint(reentrant: bool, mode: Any) -> None:
    """Its second run saves what the first did, whatever looks on by then."""
    mechanism, q = t5(), torch.randn(1, H, 7, D).requires_grad_()

    def call(q: Tensor) -> Tensor:
        return attention(q, q, q, position=mechanism, queries=WHERE, backend="triton")

    learned = [q, mechanism.relative_attention_bias]
    wanted = torch.autograd.grad(call(q).square().sum(), learned)
    out = checkpoint(call, q, use_reentrant=reentrant)
    with mode():
        out.square().sum().backward()
    torch.testing.assert_close([x.grad for x in learned], list(wanted))


@pytest.mark.parametrize("around", ["both", "backward"])
def test_a_mode(around: str) -> None:
    mechanism, q = t5(), torch.randn(1, H, 7, D).requires_grad_()
    learned = [q, mechanism.relative_attention_bias]

    def call() -> Tensor:
        return attention(q, q, q, position=mechanism, queries=WHERE, backend="triton").square().sum()

    wanted = torch.autograd.grad(call(), learned)
    ready = call() if around == "backward" else None
    with FlopCounterMode(display=False):
        found = torch.autograd.grad(call() if ready is None else ready, learned)
    torch.testing.assert_close(found, wanted)


def test_second_derivatives_are_refused_in_words() -> None:
    mechanism, q = t5(), torch.randn(1, H, 7, D).requires_grad_()
    out = attention(q, q, q, position=mechanism, queries=WHERE, backend="triton")
    (first,) = torch.autograd.grad(out.square().sum(), mechanism.relative_attention_bias, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        first.sum().backward()


@pytest.mark.parametrize("backend", ["triton", "streaming"])
def test_what_was_made_in_inference_mode(backend: str) -> None:
    with torch.inference_mode():
        mechanism, k = t5(), torch.randn(1, H, 7, D, requires_grad=True)
    q = torch.randn(1, H, 7, D).requires_grad_()
    outs = [attention(q, k, q, position=mechanism, queries=WHERE, backend=name) for name in (backend, "reference")]
    gradients = [torch.autograd.grad(out.square().sum(), q)[0] for out in outs]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_terms_beside_a_table_are_made_anew() -> None:
    class WithSinks(T5Bias):
        def __init__(self) -> None:
            super().__init__(H, num_buckets=8, max_distance=16, init_std=1.0)
            self.raw = nn.Parameter(torch.zeros(H))

        def _extra_terms(self) -> tuple[Any, ...]:
            return (*super()._extra_terms(), relpos.Sinks(2 * self.raw))

    mechanism = WithSinks()
    for _ in range(2):
        assert is_unread(mechanism)
        assert_right(mechanism)
        _weights_in_place(mechanism)
        mechanism.raw.data += 1


def test_lines_and_rows_are_made_once_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, made = t5(), []
    real = table_bias.TableBias._line_and_rows
    monkeypatch.setattr(table_bias.TableBias, "_line_and_rows", lambda *given: made.append(given) or real(*given))
    for _ in range(2):
        for count in range(5, 15):
            mechanism._unread_terms(Sequence(count))
    assert len(made) == 10


def test_two_layers_and_two_forwards_before_two_backwards() -> None:
    one, two = t5(), t5()
    wanted = [step(one), step(two)]
    leaves, outs = [], []
    for mechanism in (one, two):
        torch.manual_seed(3)
        leaves.append([torch.randn(1, H, 7, D).requires_grad_() for _ in range(3)])
        outs.append(attention(*leaves[-1], position=mechanism, queries=WHERE, backend="triton"))
    for mechanism, own, out, right in zip((one, two), leaves, outs, wanted, strict=True):
        found = torch.autograd.grad(out.square().sum(), [*own, mechanism.relative_attention_bias])
        torch.testing.assert_close([out.detach(), *found], right)


def test_a_table_dies_with_its_mechanism() -> None:
    mechanism = t5()
    step(mechanism)
    known = weakref.ref(mechanism.relative_attention_bias)
    gc.disable()
    try:
        del mechanism
        assert known() is None
    finally:
        gc.enable()


def test_a_table_that_is_computed_is_not_kept() -> None:
    mechanism = t5()
    _a_parametrization(mechanism)
    known = weakref.ref(mechanism._unread_terms(WHERE).items[0].table)
    assert known() is None


def test_a_mask_and_a_sum_of_mechanisms() -> None:
    torch.manual_seed(0)
    both = relpos.RotaryEmbedding(D) + t5(scaled=True)
    assert_right(both)
    mechanism, q = t5(), torch.randn(1, H, 7, D)
    for mask in (Mask.causal(), Mask.packed(torch.arange(7) // 3), Mask.padding(torch.arange(7)[None] < 5)):
        given = {"position": mechanism, "queries": WHERE, "mask": mask}
        one, other = (attention(q, q, q, backend=backend, **given) for backend in ("triton", "reference"))
        torch.testing.assert_close(one, other)
