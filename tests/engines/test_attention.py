"""What `relpos.attention` promises beside the terms: shards, weights, dropout, autocast, memory, choice of engine."""

from typing import Any

import pytest
import torch
from engine_steps import Sizes, with_gradients
from torch import Tensor

import relpos
from relpos import (
    DenseBias,
    LineBias,
    LineVectors,
    Mask,
    Rotation,
    Scale,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    attention,
    attention_weights,
    explain,
    lines,
)
from relpos.core.random import kept_pairs
from relpos.testing import oracle
from relpos.testing.devices import ON_GPU
from relpos.testing.engines import INTERPRETED, engines
from relpos.testing.tolerance import assert_close

FAST_SHARE = 5  # of its tests, in the fast part

ENGINES = [name for name in engines() if name not in ON_GPU]


def qkv(
    batch: int = 2, heads: int = 4, groups: int = 4, n: int = 5, m: int = 7, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(
        torch.randn(shape, dtype=dtype, requires_grad=True)
        for shape in ((batch, heads, n, 6), (batch, groups, m, 6), (batch, groups, m, 3))
    )


@pytest.mark.parametrize("masked", [False, True])
def test_shards_of_keys_merge(masked: bool) -> None:
    """Two parts, each with its log-sum-exp, make the whole; a part that a row does not see weighs nothing."""
    q, k, v = qkv(n=7, m=7)
    line, order = lines(Sequence(7)), torch.arange(7)
    bias = LineBias(torch.randn(4, line.length, dtype=torch.float64), line)

    def of_keys(part: slice) -> Any:
        mask = Mask.causal(order, order[part]) if masked else None
        position = bias.narrow(slice(0, 7), part)
        return attention(q, k[:, :, part], v[:, :, part], position=position, mask=mask, return_lse=True)

    torch.testing.assert_close(merged([of_keys(slice(0, 3)), of_keys(slice(3, 7))]), of_keys(slice(0, 7)))


def merged(parts: list[Any]) -> tuple[Tensor, Tensor]:
    """The whole from parts of it, each with its log-sum-exp."""
    total = torch.stack([lse for _, lse in parts]).logsumexp(dim=0)
    return sum(output * (lse - total).exp()[..., None] for output, lse in parts), total


def test_shards_merge_with_sinks_in_one_of_them() -> None:
    """The log-sum-exp holds the sink: shards carry it once, whichever it is; twice would count it twice."""
    q, k, v = qkv()
    logits = torch.tensor([0.3, -1.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)

    def of_keys(part: slice, sunk: bool) -> Any:
        return attention(
            q, k[:, :, part], v[:, :, part], position=Sinks(logits) if sunk else None, return_lse=True
        )  # fmt: skip

    whole, lse = of_keys(slice(0, 7), True)
    _, bare = of_keys(slice(0, 7), False)
    torch.testing.assert_close(lse, torch.logaddexp(bare, logits[:, None].expand_as(bare)))
    shards = (slice(0, 3), slice(3, 4), slice(4, 7))
    leaves = (q, k, v, logits)
    wanted = with_gradients(whole, leaves)
    for carrier in shards:
        output, total = merged([of_keys(part, part == carrier) for part in shards])
        torch.testing.assert_close(total, lse)
        torch.testing.assert_close(with_gradients(output, leaves), wanted)
    doubled, _ = merged([of_keys(part, True) for part in shards])
    assert (doubled - whole).abs().max() > 0.01


def test_weights() -> None:
    q, k, v = qkv()
    bias = DenseBias(torch.randn(2, 4, 5, 7, dtype=torch.float64))
    mask = Mask.padding(torch.tensor([True] * 5 + [False] * 2), queries=torch.tensor([True] * 4 + [False]))
    weights = attention_weights(q, k, position=bias, mask=mask)
    assert weights.shape == (2, 4, 5, 7)
    torch.testing.assert_close(weights.sum(-1)[:, :, :4], torch.ones(2, 4, 4, dtype=torch.float64))
    assert not weights[:, :, 4].any()
    assert not weights[..., 5:].any()
    torch.testing.assert_close(weights @ v, attention(q, k, v, position=bias, mask=mask))
    sunk = attention_weights(q, k, position=Sinks(torch.zeros(4, dtype=torch.float64)))
    assert (sunk.sum(-1) < 1).all()


@pytest.mark.parametrize("backend", ENGINES)
def test_large_scores(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    output = attention(q * 1e4, k * 1e4, v, backend=backend)
    exact, _ = oracle.attention(q.double() * 1e4, k.double() * 1e4, v.double())
    torch.testing.assert_close(output.double(), exact, rtol=1e-3, atol=1e-3)


# scale


@pytest.mark.parametrize("backend", ENGINES)
def test_scale(backend: str) -> None:
    q, k, v = qkv()
    for scale in (1.0, 0.3):
        exact, _ = oracle.attention(q, k, v, scale=scale)
        for given in ({"scale": scale}, {"position": Scale(scale)}, {"position": Scale(9.0), "scale": scale}):
            torch.testing.assert_close(attention(q, k, v, **given, backend=backend), exact)  # argument before term


# dropout


def test_dropout_by_loops() -> None:
    q, k, v = qkv()
    torch.manual_seed(5)
    kept = kept_pairs(torch.randint(2**32, ()), 2, 4, torch.arange(5), torch.arange(7), 0.4)
    exact, _ = oracle.attention(q, k, v, kept=kept, dropout=0.4)
    torch.manual_seed(5)
    ours = attention(q, k, v, dropout=0.4, backend="reference")
    torch.testing.assert_close(with_gradients(ours, (q, k, v)), with_gradients(exact, (q, k, v)))


@pytest.mark.parametrize("backend", ENGINES)
def test_dropout_is_reproducible_and_fair(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    plain = attention(q, k, v, backend=backend)

    def drawn(seed: int) -> Any:
        torch.manual_seed(seed)
        return attention(q, k, v, dropout=0.3, backend=backend)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    if backend in INTERPRETED:  # its own tests show that it drops the pairs that the definition drops
        return
    many = torch.stack([drawn(seed) for seed in range(300)])
    error = (many.mean(0) - plain) / (many.std(0) / 300**0.5)
    assert error.abs().max() < 5


@pytest.mark.parametrize("backend", ENGINES)
def test_the_backward_drops_the_same_pairs(backend: str) -> None:
    q, k, v = qkv(batch=1, heads=1, groups=1, n=3, m=3)

    def run(*tensors: Tensor) -> Any:
        torch.manual_seed(11)
        return attention(*tensors, dropout=0.5, backend=backend)

    assert torch.autograd.gradcheck(run, (q, k, v), fast_mode=backend in INTERPRETED)


def test_value_vectors_are_dropped_with_their_weights() -> None:
    q, k, _ = qkv()
    line = lines(Sequence(5), Sequence(7))
    vectors = LineVectors(torch.ones(1, line.length, 3, dtype=torch.float64), None, line, "value")
    output = attention(q, k, torch.zeros(2, 4, 7, 3, dtype=torch.float64), position=vectors, dropout=0.5)
    assert output.std() > 0.1, "without dropout every row sums to 1"


# autocast


@pytest.mark.parametrize("backend", ENGINES)
def test_autocast_is_a_cast_of_q_k_v(backend: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    line = lines(Sequence(5), Sequence(7))
    angles = (1000 * torch.rand(1, 1, count, 2) for count in (5, 7))
    terms = LineBias(torch.randn(4, line.length), line) + Rotation(*angles, "half")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attention(q, k, v, position=terms, backend=backend)
    own = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), position=terms, backend=backend)
    torch.testing.assert_close(cast, own, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ENGINES)
def test_the_bias_is_not_rounded_to_half(backend: str) -> None:
    """With equal scores everywhere, weights come from a bias that bfloat16 cannot tell apart."""
    q, k = torch.zeros(2, 1, 1, 4, 8, dtype=torch.bfloat16)
    v, line = torch.eye(4)[None, None].bfloat16(), lines(Sequence(4))
    values = 64 + torch.arange(7.0)[None] / 32  # bfloat16 steps by 1/2 here
    output = attention(q, k, v, position=LineBias(values, line), backend=backend)
    exact, _ = oracle.attention(q.double(), k.double(), v.double(), bias=values.double()[:, line.index()][None])
    assert_close(output, exact, exact.bfloat16())


@pytest.mark.parametrize("backend", ENGINES)
def test_autocast_leaves_float64_alone(backend: str) -> None:
    """As PyTorch's own function does."""
    q, k, v = (x.detach() for x in qkv(m=5))
    exact = attention(q, k, v, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = attention(q, k, v, backend=backend)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert ours.dtype == theirs.dtype == attention_weights(q, k).dtype == torch.float64
        with pytest.raises(ValueError, match="one dtype"):
            attention(q, k.float(), v, backend=backend)
    assert torch.equal(ours, exact)


# memory


@pytest.mark.parametrize("side", ["query", "key", "value"])
@pytest.mark.parametrize("backend", [name for name in ENGINES if name != "triton"])
def test_line_vectors_are_never_stored_for_every_pair(side: Any, backend: str) -> None:
    """Nothing of N x M x D, forward or backward."""
    n, width = 24, 64
    q, k, v = (torch.randn(1, 2, n, width, requires_grad=True) for _ in range(3))
    line = lines(Sequence(n))
    term = LineVectors(torch.randn(1, line.length, width, requires_grad=True), None, line, side)
    if side == "value" and backend == "sdpa":
        with pytest.raises(NotImplementedError, match="LineVectors"):
            attention(q, k, v, position=term, backend=backend)
        return
    with Sizes() as made:
        attention(q, k, v, position=term, backend=backend).sum().backward()
    assert 2 * n * n <= max(made.stored) < n * n * width


# the choice of engine


def test_asking_draws_nothing() -> None:
    q, k, v = qkv()
    before = torch.get_rng_state()
    explain(q, k, v, dropout=0.1)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(NotImplementedError):
        attention(q, k, v, dropout=0.1, position=Softcap(1.0), backend="sdpa")
    assert torch.equal(before, torch.get_rng_state()), "a call that is refused"


def test_explain_names_the_engine_and_the_reasons() -> None:
    q, k, v = qkv()
    for given in ({}, {"backend": "reference"}):
        said = explain(q, k, v, **given)
        assert said.backend == given.get("backend", said.backend)
        assert set(said.passed_over) == set(relpos.backends()) - {said.backend}
    capped = explain(q, k, v, position=Softcap(3.0))
    assert "Softcap" in capped.passed_over["sdpa"]
    assert str(capped).startswith(f"backend: {capped.backend}\n")
    assert "not sdpa" in str(capped)
    assert "sdpa" in explain(q, k, v, return_lse=True).passed_over


def test_auto_takes_what_explain_says() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    for position in (None, Softcap(1.5), Terms()):
        chosen = explain(q, k, v, position=position).backend
        taken, named = (attention(q, k, v, position=position, backend=backend) for backend in ("auto", chosen))
        assert torch.equal(taken, named)


def test_backends_say_what_they_are_for() -> None:
    assert {"reference", "sdpa"} <= set(relpos.backends())
    assert all(len(summary) > 20 for summary in relpos.backends().values())


# function transforms


@pytest.mark.parametrize("backend", ["auto", *ENGINES])
@pytest.mark.parametrize("sequence", [Sequence(5), Sequence(4, prefix=1)], ids=["affine", "nested"])
def test_vmap_over_queries_and_tables(backend: str, sequence: Sequence) -> None:
    line = lines(sequence)
    q, values = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64), torch.randn(3, 2, line.length, dtype=torch.float64)

    def run(q: Tensor, values: Tensor) -> Any:
        return attention(q, q, q, position=LineBias(values, line), backend=backend)

    def gradient(q: Tensor, values: Tensor) -> Any:
        return torch.func.grad(lambda x: run(q, x).square().sum())(values)

    if backend in ("streaming", "triton", "sdpa"):
        for transformed in (torch.func.vmap(run), lambda *given: gradient(*(x[0] for x in given))):
            with pytest.raises(NotImplementedError, match=r"lacks torch.func .*'reference'"):
                transformed(q, values)
        return
    for function in (run, gradient):
        torch.testing.assert_close(torch.func.vmap(function)(q, values), torch.stack([*map(function, q, values)]))
    shared = torch.func.vmap(run, in_dims=(0, None))(q, values[0])
    torch.testing.assert_close(shared, torch.stack([run(each, values[0]) for each in q]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of PyTorch, for its forward mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_transforms_of_queries(biased: bool, dtype: torch.dtype) -> None:
    """The bias is learned outside of the transform, which PyTorch's own function does not see."""
    line = lines(Sequence(5))
    values = torch.randn(2, line.length, dtype=dtype, requires_grad=True)
    position = LineBias(values, line) if biased else Scale(0.5)
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=dtype)

    def loss(q: Tensor, backend: str = "auto") -> Any:
        return attention(q, k, v, position=position, backend=backend).square().sum()

    (wanted,) = torch.autograd.grad(loss(q.requires_grad_(), "reference"), q)
    torch.testing.assert_close(torch.func.grad(loss)(q), wanted)
    torch.testing.assert_close(torch.func.jvp(loss, (q,), (q,))[1], (wanted * q).sum())
    if biased:
        with pytest.raises(NotImplementedError, match=r"'sdpa', which lacks torch.func .*'reference'"):
            torch.func.grad(loss)(q, "sdpa")
    else:
        torch.testing.assert_close(torch.func.grad(loss)(q, "sdpa"), wanted)
        with pytest.raises(NotImplementedError, match=r"'sdpa', which lacks forward-mode derivatives.*'reference'"):
            torch.func.jvp(lambda x: loss(x, "sdpa"), (q,), (q,))
