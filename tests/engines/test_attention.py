"""What `relpos.attention` promises beside the terms: shards, weights, dropout, autocast, memory, choice of engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
from relpos.core.random import keep
from relpos.testing import oracle
from relpos.testing.devices import ON_GPU
from relpos.testing.engines import INTERPRETED, engines
from relpos.testing.tolerance import assert_close

FAST_SHARE = 3  # of its tests, in the fast part

ENGINES = [name for name in engines() if name not in ON_GPU]


def qkv(
    batch: int = 2, heads: int = 4, groups: int = 4, n: int = 5, m: int = 7, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.randn(shape, dtype=dtype, requires_grad=True)
        for shape in ((batch, heads, n, 6), (batch, groups, m, 6), (batch, groups, m, 3))
    )


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_keys_are_repeated_keys(groups: int, backend: str) -> None:
    q, k, v = qkv(groups=groups)
    line = lines(Sequence(5), Sequence(7))
    terms = LineBias(torch.randn(4, line.length, dtype=torch.float64), line) + Rotation(
        torch.randn(1, 4, 5, 1), torch.randn(1, 4, 7, 1), "half"
    )
    grouped = attention(q, k, v, position=terms, backend=backend)
    wide = [torch.stack([x[:, h * groups // 4] for h in range(4)], dim=1) for x in (k, v)]
    repeated = attention(q, *wide, position=terms, backend=backend)
    assert isinstance(grouped, Tensor)
    assert isinstance(repeated, Tensor)
    torch.testing.assert_close(grouped, repeated)
    for one, other in zip(
        torch.autograd.grad(grouped.square().sum(), (q, k, v)),
        torch.autograd.grad(repeated.square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("masked", [False, True])
def test_shards_of_keys_merge(masked: bool) -> None:
    """Two parts, each with its log-sum-exp, make the whole; a part that a row does not see weighs nothing."""
    q, k, v = qkv(n=7, m=7)
    line = lines(Sequence(7))
    bias = LineBias(torch.randn(4, line.length, dtype=torch.float64), line)
    order = torch.arange(7)
    whole, total = attention(
        q, k, v, position=bias, mask=Mask.causal(order, order) if masked else None, return_lse=True
    )
    parts: list[Any] = []
    for part in (slice(0, 3), slice(3, 7)):
        mask = Mask.causal(order, order[part]) if masked else None
        parts.append(
            attention(
                q, k[:, :, part], v[:, :, part], position=bias.narrow(slice(0, 7), part), mask=mask, return_lse=True
            )
        )
    output, joint = merged(parts)
    torch.testing.assert_close(joint, total)
    torch.testing.assert_close(output, whole)


def merged(parts: list[Any]) -> tuple[Tensor, Tensor]:
    """The whole from parts of it, each with its log-sum-exp."""
    total = torch.stack([lse for _, lse in parts]).logsumexp(dim=0)
    return sum(output * (lse - total).exp()[..., None] for output, lse in parts), total  # type: ignore[return-value]


def test_shards_merge_with_sinks_in_one_of_them() -> None:
    """The log-sum-exp holds the sink: shards carry it once, whichever it is; twice would count it twice."""
    q, k, v = qkv()
    logits = torch.tensor([0.3, -1.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    sinks = Sinks(logits)
    whole, lse = attention(q, k, v, position=sinks, return_lse=True)
    _, bare = attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, torch.logaddexp(bare, logits[:, None].expand_as(bare)))
    shards = (slice(0, 3), slice(3, 4), slice(4, 7))
    for carrier in range(3):
        parts = [
            attention(q, k[:, :, p], v[:, :, p], position=sinks if n == carrier else None, return_lse=True)
            for n, p in enumerate(shards)
        ]
        output, total = merged(parts)
        torch.testing.assert_close(output, whole)
        torch.testing.assert_close(total, lse)
        ours, theirs = (
            torch.autograd.grad(x.square().sum(), (q, k, v, logits), retain_graph=True) for x in (output, whole)
        )
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
    doubled, _ = merged([attention(q, k[:, :, p], v[:, :, p], position=sinks, return_lse=True) for p in shards])
    assert (doubled - whole).abs().max() > 0.01  # type: ignore[operator]


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
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_that_sees_nothing(backend: str, dtype: torch.dtype) -> None:
    """0 and zero gradient, also of the bias that only such a row reads."""
    q, k, v = qkv(n=4, m=4, dtype=dtype)
    values = torch.randn(4, 7, requires_grad=True)
    mask = Mask.packed(torch.tensor([[0, -1, 0, 0], [-1, -1, -1, -1]]))
    output = attention(q, k, v, position=LineBias(values, lines(Sequence(4))), mask=mask, backend=backend)
    assert isinstance(output, Tensor)
    assert not output[0, :, 1].any()
    assert not output[1].any()
    assert output[0, :, [0, 2, 3]].all()
    gradients = torch.autograd.grad(output.float().square().sum() + output.float().sum(), (q, k, v, values))
    assert all(gradient.isfinite().all() for gradient in gradients)
    for gradient in gradients[:3]:
        assert not gradient[1].any()
        assert not gradient[0, :, 1].any()
        assert gradient[0].any()


@pytest.mark.parametrize("backend", ENGINES)
def test_large_scores(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    output = attention(q * 1e4, k * 1e4, v, backend=backend)
    assert isinstance(output, Tensor)
    assert output.isfinite().all()
    exact, _ = oracle.attention(q.double() * 1e4, k.double() * 1e4, v.double())
    torch.testing.assert_close(output.double(), exact, rtol=1e-3, atol=1e-3)


# scale


@pytest.mark.parametrize("backend", ENGINES)
def test_scale(backend: str) -> None:
    q, k, v = qkv()
    for scale in (1.0, 0.3):
        exact, _ = oracle.attention(q, k, v, scale=scale)
        torch.testing.assert_close(attention(q, k, v, scale=scale, backend=backend), exact)
        torch.testing.assert_close(attention(q, k, v, position=Scale(scale), backend=backend), exact)
        torch.testing.assert_close(
            attention(q, k, v, position=Scale(9.0), scale=scale, backend=backend), exact, msg="an argument beats a term"
        )


# dropout


def test_dropout_by_loops() -> None:
    q, k, v = qkv()
    torch.manual_seed(5)
    seed = torch.randint(2**32, ())
    kept = keep(seed, 2, 4, torch.arange(5), torch.arange(7), 0.4)
    exact, _ = oracle.attention(q, k, v, kept=kept, dropout=0.4)
    torch.manual_seed(5)
    ours = attention(q, k, v, dropout=0.4, backend="reference")
    torch.testing.assert_close(ours, exact)
    upstream = torch.randn_like(exact)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (q, k, v), upstream), torch.autograd.grad(exact, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


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
    v = torch.zeros(2, 4, 7, 3, dtype=torch.float64)
    line = lines(Sequence(5), Sequence(7))
    vectors = torch.ones(1, line.length, 3, dtype=torch.float64)
    output = attention(q, k, v, position=LineVectors(vectors, None, line, "value"), dropout=0.5)
    assert isinstance(output, Tensor)
    assert output.std() > 0.1, "without dropout every row sums to 1"


# autocast


@pytest.mark.parametrize("backend", ENGINES)
def test_autocast_is_a_cast_of_q_k_v(backend: str) -> None:
    q, k, v = qkv(dtype=torch.float32)
    line = lines(Sequence(5), Sequence(7))
    terms = LineBias(torch.randn(4, line.length), line) + Rotation(
        1000 * torch.rand(1, 1, 5, 2), 1000 * torch.rand(1, 1, 7, 2), "half"
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attention(q, k, v, position=terms, backend=backend)
    own = attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), position=terms, backend=backend)
    assert isinstance(cast, Tensor)
    assert cast.dtype == torch.bfloat16
    assert torch.equal(cast, own)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ENGINES)
def test_the_bias_is_not_rounded_to_half(backend: str) -> None:
    """With equal scores everywhere, weights come from a bias that bfloat16 cannot tell apart."""
    q, k = torch.zeros(2, 1, 1, 4, 8, dtype=torch.bfloat16)
    v = torch.eye(4)[None, None].bfloat16()
    values = 64 + torch.arange(7.0)[None] / 32  # bfloat16 steps by 1/2 here
    output = attention(q, k, v, position=LineBias(values, lines(Sequence(4))), backend=backend)
    exact, _ = oracle.attention(
        q.double(), k.double(), v.double(), bias=values.double()[:, lines(Sequence(4)).index()][None]
    )
    assert isinstance(output, Tensor)
    assert_close(output, exact, exact.bfloat16())


@pytest.mark.parametrize("backend", ENGINES)
def test_autocast_leaves_float64_alone(backend: str) -> None:
    """As PyTorch's own function does."""
    q, k, v = (x.detach() for x in qkv(m=5))
    exact = attention(q, k, v, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = attention(q, k, v, backend=backend)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        weights = attention_weights(q, k)
    assert ours.dtype == theirs.dtype == weights.dtype == torch.float64  # type: ignore[union-attr]
    assert torch.equal(ours, exact)  # type: ignore[arg-type]
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="one dtype"):
        attention(q, k.float(), v, backend=backend)


# memory


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operator returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.untyped_storage().size() // x.element_size())
        return out


@pytest.mark.parametrize("side", ["query", "key", "value"])
@pytest.mark.parametrize("backend", ENGINES)
def test_line_vectors_are_never_stored_for_every_pair(side: str, backend: str) -> None:
    """Nothing of N x M x D, forward or backward."""
    n, width = 24, 64
    q, k, v = (torch.randn(1, 2, n, width, requires_grad=True) for _ in range(3))
    line = lines(Sequence(n))
    vectors = torch.randn(1, line.length, width, requires_grad=True)
    term = LineVectors(vectors, None, line, side)  # type: ignore[arg-type]
    if (side == "value" and backend == "sdpa") or backend == "triton":
        with pytest.raises(NotImplementedError, match="LineVectors"):
            attention(q, k, v, position=term, backend=backend)
        return
    with Largest() as largest:
        output = attention(q, k, v, position=term, backend=backend)
        assert isinstance(output, Tensor)
        output.sum().backward()
    assert 2 * n * n <= largest.numel < n * n * width


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
    plain = explain(q, k, v)
    assert set(plain.passed_over) == set(relpos.backends()) - {plain.backend}
    capped = explain(q, k, v, position=Softcap(3.0))
    assert capped.backend != "sdpa"
    assert "Softcap" in capped.passed_over["sdpa"]
    assert explain(q, k, v, return_lse=True).backend != "sdpa"
    assert str(capped).startswith(f"backend: {capped.backend}\n")
    assert "not sdpa" in str(capped)
    asked = explain(q, k, v, backend="reference")
    assert asked.backend == "reference"
    assert set(asked.passed_over) == set(relpos.backends()) - {"reference"}


def test_auto_takes_what_explain_says() -> None:
    q, k, v = qkv(dtype=torch.bfloat16)
    for position in (None, Softcap(1.5), Terms()):
        chosen = explain(q, k, v, position=position).backend
        assert torch.equal(
            attention(q, k, v, position=position),  # type: ignore[arg-type]
            attention(q, k, v, position=position, backend=chosen),  # type: ignore[arg-type]
        )


def test_an_engine_asked_for_by_name_never_falls_back() -> None:
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match=r"'sdpa' lacks Softcap.*'reference'"):
        attention(q, k, v, position=Softcap(2.0), backend="sdpa")
    with pytest.raises(ValueError, match="Did you mean 'sdpa'"):
        attention(q, k, v, backend="spda")


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
        for transformed in (lambda: torch.func.vmap(run)(q, values), lambda: gradient(q[0], values[0])):
            with pytest.raises(NotImplementedError, match=r"lacks torch.func .*'reference'"):
                transformed()
        return
    for function in (run, gradient):
        together = torch.func.vmap(function)(q, values)
        torch.testing.assert_close(together, torch.stack([function(*each) for each in zip(q, values, strict=True)]))
    shared = torch.func.vmap(run, in_dims=(0, None))(q, values[0])
    torch.testing.assert_close(shared, torch.stack([run(each, values[0]) for each in q]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of PyTorch, for its forward mode
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_transforms_of_queries_under_a_learned_bias(dtype: torch.dtype) -> None:
    """The bias is learned outside of the transform, which PyTorch's own function does not see."""
    line = lines(Sequence(5))
    values = torch.randn(2, line.length, dtype=dtype, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=dtype) for _ in range(3))

    def loss(q: Tensor, backend: str = "auto") -> Any:
        return attention(q, k, v, position=LineBias(values, line), backend=backend).square().sum()  # type: ignore[union-attr]

    wanted = torch.autograd.grad(loss(q.requires_grad_(), "reference"), q)[0]
    torch.testing.assert_close(torch.func.grad(loss)(q), wanted)
    torch.testing.assert_close(torch.func.jvp(loss, (q,), (q,))[1], (wanted * q).sum())
    with pytest.raises(NotImplementedError, match=r"'sdpa' lacks torch.func .*'reference'"):
        torch.func.grad(loss)(q, "sdpa")


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of PyTorch, for its forward mode
def test_transforms_without_a_bias() -> None:
    q = torch.randn(1, 2, 5, 4)

    def loss(q: Tensor, backend: str = "auto") -> Any:
        return attention(q, q, q, position=Scale(0.5), backend=backend).square().sum()  # type: ignore[union-attr]

    wanted = torch.func.grad(loss)(q, "reference")
    torch.testing.assert_close(torch.func.grad(loss)(q), wanted)
    torch.testing.assert_close(torch.func.grad(loss)(q, "sdpa"), wanted)
    torch.testing.assert_close(torch.func.jvp(loss, (q,), (q,))[1], (wanted * q).sum())
    with pytest.raises(NotImplementedError, match=r"'sdpa' lacks forward-mode derivatives.*'reference'"):
        torch.func.jvp(lambda x: loss(x, "sdpa"), (q,), (q,))
