"""One factor a query, on the content or on all scores, and a sink of each query: against the formula, written out."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import relpos
from relpos import DenseBias, LineBias, LineVectors, LowRank, Mask, QueryScale, RowRule, Sequence, Sinks, Softcap, Terms
from relpos.testing.devices import attention
from relpos.testing.engines import engines

FAST_CASES = 10  # of each of its tests, in the fast part

B, H, G, N, M, D = 2, 4, 2, 7, 9, 4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def formula(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor, added: Tensor | None, on: str, sinks: Tensor | None, cap: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp under a causal mask whose last query sees the last key, one head at a time."""
    outs, sums = [], []
    for b in range(B):
        for h in range(H):
            own = factor[min(b, factor.shape[0] - 1), min(h, factor.shape[1] - 1)][:, None]
            scores = own * (q[b, h] @ k[b, h // (H // G)].T) / math.sqrt(D)
            scores = cap * torch.tanh(scores / cap) if cap else scores
            if added is not None:
                bias = added[min(b, added.shape[0] - 1), min(h, added.shape[1] - 1)]
                scores = scores + (own * bias if on == "scores" else bias)
            future = torch.arange(M)[None] > torch.arange(N)[:, None] + M - N
            scores = scores.masked_fill(future, -math.inf)
            if sinks is not None:
                sink = sinks[h].expand(N) if sinks.dim() == 1 else sinks[min(b, sinks.shape[0] - 1), h]
                scores = torch.cat([scores, sink[:, None]], dim=1)
            outs.append(scores.softmax(dim=1)[:, :M] @ v[b, h // (H // G)])
            sums.append(scores.logsumexp(dim=1))
    return torch.stack(outs).view(B, H, N, D), torch.stack(sums).view(B, H, N)


def on_lines(q: Tensor, x: Tensor) -> tuple[Terms, Tensor]:
    lines = relpos.lines(Sequence(N, start=M - N), Sequence(M))
    values = x[0, :, 0, :1] * torch.arange(lines.length)
    read = lines.query[:, None] - lines.key[None] + lines.origin
    return Terms(LineBias(values, lines)), values[:, read][None]


def low_rank(q: Tensor, x: Tensor) -> tuple[Terms, Tensor]:
    left, right = x[:, :, :N], x[:, :, :M].flip(-1)
    return Terms(LowRank(left, right)), left @ right.mT


def of_queries(q: Tensor, x: Tensor) -> tuple[Terms, Tensor]:
    lines = relpos.lines(Sequence(N, start=M - N), Sequence(M))
    vectors = x[0, :1, :, :].repeat(1, 2, 1)[:, : lines.length]
    read = lines.query[:, None] - lines.key[None] + lines.origin
    met = (q[:, :, :, None] * vectors[0][read][None, None]).sum(-1)
    return Terms(LineVectors(vectors, None, lines, "query", scaled=False)), met


def of_keys(q: Tensor, x: Tensor) -> tuple[Terms, Tensor]:
    columns = x[:, :, :1, :1].expand(B, H, 1, M)
    return Terms(DenseBias(columns), RowRule(_slope, (x[0, 0, 0],))), columns + _slope(q, q, q, slice(0, N), x[0, 0, 0])


def _slope(q: Tensor, k: Tensor, seen: Tensor, rows: slice, w: Tensor) -> Tensor:
    return (w[0] * torch.arange(rows.start, rows.stop)[:, None] * torch.arange(M)[None])[None, None] / 16


def alone(q: Tensor, x: Tensor) -> tuple[Terms, None]:
    return Terms(), None


@pytest.mark.parametrize("on", ["content", "scores"])
@pytest.mark.parametrize("added", [alone, on_lines, low_rank, of_queries, of_keys])
@pytest.mark.parametrize("engine", [name for name in engines() if name != "triton"])  # that is in `CASES`
def test_a_factor_of_each_query(engine: str, added: Callable[[Tensor, Tensor], tuple[Terms, Tensor]], on: str) -> None:
    """The output and the gradients of q, k, v, the factor, what is added and the sinks; with a soft cap and without."""
    for number, (shape, sinks_shape, cap) in enumerate(
        [((B, H, N), (H,), 0.0), ((1, H, N), (B, H, N), 1.5), ((B, 1, N), (1, H, N), 0.0)]
    ):
        q, k, v = drawn(B, H, N, D), drawn(B, G, M, D, seed=1), drawn(B, G, M, D, seed=2)
        factor, sinks, x = drawn(*shape, seed=3 + number), drawn(*sinks_shape, seed=4), drawn(B, H, M, D, seed=5)
        said, dense = added(q, x)
        terms = said + QueryScale(factor, on) + Sinks(sinks)
        terms = terms + Softcap(cap) if cap else terms
        mask = Mask.causal(torch.arange(N) + M - N, torch.arange(M))
        if engine == "sdpa" and cap:
            with pytest.raises(NotImplementedError, match="Softcap"):
                relpos.attention(q, k, v, position=terms, mask=mask, backend=engine)
            continue
        leaves = [q, k, v, factor, sinks, x]
        ours = relpos.attention(q, k, v, position=terms, mask=mask, backend=engine)
        wanted, _ = formula(q, k, v, factor, dense, on, sinks, cap)
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)
        up = drawn(B, H, N, D, seed=9).detach()
        found, expected = (
            torch.autograd.grad(y, leaves, up, allow_unused=True, retain_graph=True) for y in (ours, wanted)
        )
        for name, mine, other in zip(["q", "k", "v", "factor", "sinks", "added"], found, expected, strict=True):
            assert (mine is None) == (other is None), name
            if mine is not None:
                torch.testing.assert_close(
                    mine, other, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.parametrize("engine", [name for name in engines() if name != "sdpa"])
def test_the_log_sum_exp_has_the_sink_of_its_query(engine: str) -> None:
    q, k, v = drawn(B, H, N, D), drawn(B, G, M, D, seed=1), drawn(B, G, M, D, seed=2)
    factor, sinks = drawn(B, H, N, seed=3), drawn(B, H, N, seed=4)
    mask = Mask.causal(torch.arange(N) + M - N, torch.arange(M))
    given = {"position": Sinks(sinks) + QueryScale(factor), "mask": mask, "return_lse": True, "backend": engine}
    _, lse = attention(q, k, v, **given)
    torch.testing.assert_close(lse, formula(q, k, v, factor, None, "content", sinks, 0.0)[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("prefix", [0, 2])
def test_sinks_of_queries_beside_the_flash_kernel_and_many_blocks(prefix: int) -> None:
    """In float32, at sizes where the streaming engine takes several blocks of rows, threads and its prefix rows."""
    n = 600
    q, k, v = (drawn(1, 2, n, 8, seed=seed).detach().float().requires_grad_() for seed in range(3))
    logits, factor = (drawn(1, 2, n, seed=seed).detach().float().requires_grad_() for seed in (4, 5))
    bias = relpos.T5Bias(2, init_std=1.0).terms(Sequence(n - prefix, prefix=prefix))
    for term in (Sinks(logits), QueryScale(factor), QueryScale(factor, "scores"), Sinks(logits) + QueryScale(factor)):
        results = []
        for engine in ("reference", "streaming"):
            out = relpos.attention(q, k, v, position=bias + term, backend=engine)
            results.append(
                [out, *torch.autograd.grad(out.square().sum(), [q, k, v, logits, factor], allow_unused=True)]
            )
        for one, other in zip(*results, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def test_half_precision_multiplies_by_the_factor_itself() -> None:
    """A factor of 1.01, which bfloat16 would round to 1.0078, is rounded with the product."""
    q = torch.ones(1, 1, 1, 1).bfloat16() * 100
    factor = torch.full((1, 1, 1), 1.01)
    assert float(relpos.core.content(Terms(QueryScale(factor)), q, q)[0]) == float((q.float() * 1.01).bfloat16())
    assert float(q.float() * 1.01 - q.float() * torch.tensor(1.01).bfloat16().float()) != 0


def test_decoding_and_packing_cut_them() -> None:
    terms = QueryScale(drawn(1, 2, 6), "scores") + Sinks(drawn(1, 2, 6, seed=1))
    last = terms.narrow(slice(4, 6), slice(0, 6))
    assert [x.shape for x in (last.one(QueryScale).factor, last.one(Sinks).logits)] == [(1, 2, 2)] * 2  # type: ignore[union-attr]
