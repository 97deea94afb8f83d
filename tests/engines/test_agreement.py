"""What the check of a kernel lets pass, rounding in any order, and what it finds: small wrongs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import engine_steps
import pytest
import torch
from test_streaming import COORDINATES, MASKS, H, N
from torch import Tensor

from relpos import (
    AxisVectors,
    DenseBias,
    Grid,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    Positions,
    QueryBias,
    RotaryEmbedding,
    Rotation,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    lines,
)
from relpos.core import Term, axis_lines
from relpos.engines.call import Call
from relpos.engines.engine import Engine
from relpos.engines.reference import REFERENCE as reference
from relpos.engines.sdpa.engine import SDPA as sdpa
from relpos.engines.self_check.agreement import Difference, Expected, _copy, _without_learned
from relpos.engines.self_check.variant import small_call, variant_of
from relpos.engines.streaming import STREAMING as streaming
from relpos.engines.triton.vector_sets import sets_of

FAST_CASES = 8  # of each of its tests, in the fast part

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def call_of(n: int, m: int, dtype: torch.dtype = torch.float32, groups: int = H, **given: Any) -> Call:
    q, k, v = (torch.randn(2, heads, count, 8, dtype=dtype) for heads, count in ((H, n), (groups, m), (groups, m)))
    return engine_steps.call_of(q, k, v, return_lse=True, **given)


def variant(*sizes: Any, **given: Any) -> Any:
    found = variant_of(call_of(*sizes, **given))
    assert found is not None
    return found


def difference(run: Engine | Callable[[Call], Any], found: Any, size: Any = "odd") -> Difference:
    """Of an engine, or of a function that stands for one, from the reference in a small call of a variant."""
    stands_in = mock.Mock(spec=Engine, run=run, unsupported=lambda call: None)
    engine = run if isinstance(run, Engine) else stands_in
    return Expected(reference, lambda: small_call(found, size)).difference(engine, torch.device("cpu"))


def biased(name: str) -> tuple[LineBias, int, int]:
    queries, keys = COORDINATES[name]
    line = lines(queries, keys)
    return LineBias(torch.randn(H, line.length), line), queries.count, (queries if keys is None else keys).count


@pytest.mark.parametrize("size", ["odd", "full"])
@pytest.mark.parametrize("name", [name for name in COORDINATES if name != "unequal grids"])
def test_a_small_call_is_of_the_variant_that_it_was_made_for(name: str, size: Any) -> None:
    position, n, m = biased(name)
    for mask in (None, Mask.causal()) if n == m else (None,):
        found = variant(n, m, position=position, mask=mask)
        assert variant_of(small_call(found, size)) == found


@pytest.mark.parametrize("name", list(MASKS))
def test_a_small_mask_has_the_parts_of_the_one_it_stands_for(name: str) -> None:
    rotation = RotaryEmbedding(8, rotary_dim=6).terms(Sequence(N))
    rest = Sinks(torch.randn(H)) + QueryBias(torch.randn(H, 8)) + Softcap(2.0) + rotation
    found = variant(N, N, groups=1, position=rest, mask=MASKS[name], dropout=0.1)
    small = small_call(found, "odd")
    assert variant_of(small) == found
    seen = small.mask.dense(small.q.shape[2], small.k.shape[2])
    assert seen.any()
    assert not seen.all()


@pytest.mark.parametrize("shapes", [((H, 5, 3), (2, 1, 4, 3)), ((1, 1, 5, 3), (1, 4, 3))], ids=str)
def test_low_rank_biases_are_part_of_the_variant(shapes: Any) -> None:
    query, key = (torch.zeros(shape) for shape in shapes)
    given = [LowRank(query, key), LowRank(query.double(), key), LowRank(query[..., :2], key[..., :2])]
    found = [variant(5, 4, position=Terms(*more)) for more in ([], *([x] for x in given), [given[0]] * 2)]
    assert len(set(found)) == len(found)
    assert [variant_of(small_call(one, "odd")) for one in found] == found


def test_vectors_are_part_of_the_variant() -> None:
    line, other = lines(Sequence(5)), lines(Grid(2, 3))
    axes, solid = (axis_lines(where) for where in (Grid(2, 3), Grid(2, 3, 4)))
    few, index, content = torch.zeros(1, 4, 8), torch.zeros(9, dtype=torch.int32), torch.zeros(1, H, 5, 3)
    given: list[tuple[int, Any]] = [
        (5, LineVectors(few, index, line, side) + LineVectors(few.double(), again, line, "key", scaled=False))
        for side in ("query", "key", "value")
        for again in (index, index.clone())
    ]
    given += [
        (5, LineVectors(few, None, line, "query", bias=torch.zeros(H, 8))),
        (5, LineVectors(few[..., :3], index.long(), line, "query", content=content)),
        (6, LineVectors(few, None, other, "query")),
        (6, AxisVectors((few, few.expand(H, -1, -1)), axes)),
        (24, AxisVectors((few, few, few), solid)),
        (5, AxisVectors((few,), axis_lines(Sequence(5)))),
    ]
    found = [variant(n, n, position=Terms(x) if isinstance(x, Term) else x) for n, x in given]
    assert len(set(found)) == len(found)
    assert [variant_of(small_call(one, "odd")) for one in found] == found


def test_terms_without_a_twin_have_no_variant() -> None:
    assert variant_of(call_of(3, 3, position=DenseBias(torch.zeros(1, 1, 3, 3)))) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", [streaming, sdpa])
def test_engines_that_are_right_agree(engine: Engine, dtype: torch.dtype) -> None:
    position, n, m = biased("grid with prefix")
    seen = difference(engine, variant(n, m, dtype, position=position, mask=Mask.causal()))
    assert seen.fault is None
    assert 0 < seen.output < 16 * torch.finfo(dtype).eps
    assert seen.gradients > 0


class Sequential(torch.autograd.Function):
    """a @ b, summed one product after another in float32: the longest way there is."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return one_by_one(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return one_by_one(gradient, b.mT), one_by_one(a.mT, gradient)


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for index in range(a.shape[-1]):
        total = total + a[..., index, None].float() * b[..., index, None, :].float()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_the_worst_order_and_weights_that_are_rounded_agree(dtype: torch.dtype) -> None:
    """As kernels have them: weights in q's dtype before they meet the values."""

    def run(call: Call) -> Any:
        score = Sequential.apply(call.q.float(), call.k.float().mT) * call.scale
        weights = score.softmax(dim=-1).to(dtype)
        return Sequential.apply(weights, call.v).to(dtype), score.logsumexp(dim=-1)

    assert difference(run, variant(300, 300, dtype)).fault is None


def with_inputs(change: Callable[[Tensor], Tensor]) -> Callable[[Call], Any]:
    return lambda call: reference.run(replace(call, q=change(call.q), k=change(call.k), v=change(call.v)))


def tensor_float(x: Tensor) -> Tensor:
    """With the ten bits of a mantissa that a GPU's TF32 has."""
    return x + ((x * 1025 - (x * 1025 - x)) - x).detach() if x.dtype == torch.float32 else x


SMALL_WRONGS: dict[str, tuple[Callable[[Call], Any], tuple[torch.dtype, ...]]] = {
    "TF32": (with_inputs(tensor_float), (torch.float32,)),
    "half precision": (with_inputs(lambda x: x.half().to(x.dtype)), (torch.float32, torch.float64)),
    "without the last key": (
        lambda call: reference.run(replace(call, k=call.k[:, :, :-1], v=call.v[:, :, :-1])), DTYPES
    ),
    "a scale off by 2%": (lambda call: reference.run(replace(call, scale=call.scale * 1.02)), DTYPES),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, (_, dtypes) in SMALL_WRONGS.items() for dtype in dtypes]
)
def test_small_wrongs_are_found(name: str, dtype: torch.dtype) -> None:
    run, _ = SMALL_WRONGS[name]
    assert difference(run, variant(300, 300, dtype)).fault is not None


def test_a_gradient_that_an_engine_lacks_is_not_asked_for() -> None:
    """Irregular lines of many tokens: Triton's engine reads them, and has no gradient of their bias."""
    asked, made = [], []

    def learns(call: Call) -> bool:
        return any(term.values.requires_grad for term in call.terms.of(LineBias))

    def lacks(call: Call) -> str | None:
        asked.append(learns(call))
        return "a gradient" if asked[-1] else None

    def run(call: Call) -> Any:
        made.append(learns(call))
        return reference.run(call)

    line = lines(Sequence(5))
    found = variant(5, 5, position=LineBias(torch.randn(H, line.length), line))
    engine = mock.Mock(spec=Engine, run=run, unsupported=lacks)
    assert difference(engine, found).fault is None
    assert asked == [True, False]
    assert made == [False]


@pytest.mark.parametrize("layout", ["half", "interleaved", "xpos"])
def test_rotations_a_head_and_an_element_have_twins(layout: str) -> None:
    angles, magnitude = torch.randn(2, H, 5, 3), torch.rand(1, 1, 5, 3)
    rotation = {
        "half": Rotation(angles, angles[:1], "half"),
        "interleaved": Rotation(angles, None, "interleaved"),
        "xpos": Rotation(angles, angles, "half", 1.0, magnitude, magnitude),
    }[layout]
    found = variant(5, 5, position=Terms(rotation))
    assert variant_of(small_call(found, "full")) == found
    assert difference(streaming, found, "full").fault is None


@pytest.mark.parametrize("places", [Sequence(70), Positions(torch.arange(70), low=0, high=69)], ids=["line", "places"])
def test_small_calls_read_vectors_together_as_the_call_does(places: Any) -> None:
    """Kernels of queries and keys that read one column differ from those of two."""
    line, (by_query, by_key) = lines(places), torch.randn(2, H, 9, 8)
    index = torch.arange(line.length) % 9
    position = LineVectors(by_query, index, line, "query") + LineVectors(by_key, index, line, "key")
    call = call_of(70, 70, position=position)
    assert [len(sets_of(one)) for one in (call, *map(_on_a_device, small_calls(call)))] == [1, 1, 1]


def small_calls(call: Call) -> list[Call]:
    found = variant_of(call)
    assert found is not None
    return [small_call(found, size) for size in ("odd", "full")]


def _on_a_device(call: Call) -> Call:
    return _copy(_without_learned(call), torch.device("cpu"))
