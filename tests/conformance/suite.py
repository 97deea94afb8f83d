"""What every position mechanism must show, in every engine. A mechanism's test brings two things, the suite the rest:

    class TestMyBias(MechanismSuite):
        axes = (1,)
        translation_invariant = True

        def build(self, site):                                    # a constructor
            return MyBias(site.num_heads)

        def oracle_bias(self, mechanism, queries, keys):          # an independent oracle: loops, or published code
            return ...                                            # [1 or H, N, M] from the mechanism's own parameters

The oracle must import nothing from relpos. It is handed a copy of the mechanism in another dtype, reads its parameters,
and autograd runs through it: values and all gradients are compared by the rule in `tolerance.py`. A mechanism that is
no bias overrides `oracle_attention` or `oracle_embed` instead.

Class attributes say what holds, and what is declared is tested:

    axes                   numbers of axes of the coordinates it takes
    prefixes               whether tokens may be prefixes
    cross                  whether queries and keys may have coordinates of their own
    irregular              whether it takes `Positions`
    translation_invariant  whether moving queries and keys alike changes nothing
    causal                 whether it is only defined for keys that are not in the future
    declared               pairs of engine and dtype that always run
    lacks                  engine to the word that its NotImplementedError names
    preset                 the name under which its module offers it
    row                    what docs/parity.md calls a variant, as "deberta (c2p alone)"; "" keeps it out

Engines that are registered later are sampled without a change here; `engines.py` says what one cannot do at all.

Values, gradients and what is added to tokens are compared in every case. Every other test takes one in `SHARE` of those
that fit it, from a different one on in each suite: all suites together show every such test every case.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import zlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import oracle
import parity
import relpos
from conformance import devices
from conformance.cases import CASES, Case
from conformance.engines import dtypes, engines_of, finest, lacking
from orders import in_orders
from relpos import Grid, Mask, Mechanism, Positions, Sequence, Site
from relpos.core import Coordinates
from relpos.patterns import big_bird, dilated, fixed, local, longformer
from relpos.position.mechanism import AS_IS
from tolerance import assert_close, rms, yardstick_dtype

WIDTH = 4
BATCH = 2
SHARE = 4
"""One in so many cases is that of a test on its own."""


def attention(*tensors: Tensor, position: Mechanism, **arguments: Any) -> Tensor:
    """`relpos.attention` under a mechanism; under the terms, none, of one that acts on tokens alone."""
    given: Any = position
    if position.acts_on_tokens and not position.acts_in_attention:
        with pytest.raises(ValueError, match=r"embed\(\)"):
            relpos.attention(*tensors, position=position, **arguments)  # type: ignore[arg-type]
        given = position.terms(arguments.pop("queries"), arguments.pop("keys", None))
    output = devices.attention(*tensors, position=given, **arguments)
    assert isinstance(output, Tensor)
    return output


@dataclass(frozen=True)
class Run:
    """One comparison: a case in an engine and a dtype."""

    case: Case
    engine: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.case}, {self.engine}, {str(self.dtype).removeprefix('torch.')}"


@dataclass
class Inputs:
    """q, k, v and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        return Inputs(*(x.to(dtype) for x in (self.q, self.k, self.v, self.upstream)))


def inputs(case: Case, dtype: torch.dtype, batch: int = BATCH) -> Inputs:
    keys = case.queries if case.keys is None else case.keys
    groups = case.heads if case.groups is None else case.groups
    torch.default_generator.manual_seed(7)
    return Inputs(
        torch.randn(batch, case.heads, case.queries.count, WIDTH).to(dtype),
        torch.randn(batch, groups, keys.count, WIDTH).to(dtype),
        torch.randn(batch, groups, keys.count, WIDTH).to(dtype),
        torch.randn(batch, case.heads, case.queries.count, WIDTH).to(dtype),
    )


def gradients(output: Tensor, given: Inputs, module: Mechanism, leaves: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of q, k, v and every parameter, zeros where nothing depends on one."""
    names = ["q", "k", "v", *(name for name, _ in module.named_parameters())]
    tensors = [*leaves, *module.parameters()]
    found = torch.autograd.grad(output, tensors, given.upstream.to(output.dtype), allow_unused=True)
    return {
        name: (torch.zeros_like(x) if gradient is None else gradient).cpu()
        for name, x, gradient in zip(names, tensors, found, strict=True)
    }


PATTERNS = {
    "local": local(3),
    "dilated": dilated(9, 3, 2),
    "fixed": fixed(9, 3),
    "Longformer": longformer(9, 3, [0]),
    "BigBird": big_bird(9, 2, global_blocks=1, random_blocks=1, heads=3),
}


class MechanismSuite:
    """Base of a mechanism's conformance test; see the file's head."""

    axes: ClassVar[tuple[int, ...]] = (1, 2, 3)
    prefixes: ClassVar[bool] = True
    cross: ClassVar[bool] = True
    irregular: ClassVar[bool] = True
    translation_invariant: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    declared: ClassVar[tuple[tuple[str, torch.dtype], ...]] = (
        ("reference", torch.float32),
        ("reference", torch.bfloat16),
        ("sdpa", torch.float32),
        ("sdpa", torch.bfloat16),
    )
    lacks: ClassVar[dict[str, str]] = {}
    preset: ClassVar[str | None] = None
    row: ClassVar[str | None] = None
    sampled: ClassVar[int] = 10

    # what a mechanism's test brings

    def build(self, site: Site) -> Mechanism:
        """The mechanism for a site, its parameters not at zero."""
        raise NotImplementedError

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor | None:
        """The bias of every pair, `[1 or H, N, M]`, from the parameters of `mechanism`; None for no bias."""
        return None

    def oracle_attention(
        self,
        mechanism: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Coordinates,
        keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:
        """Attention under the mechanism, by loops; override where it is more than a bias."""
        bias = self.oracle_bias(mechanism, queries, keys)
        return oracle.attention(q, k, v, bias=None if bias is None else bias[None], allowed=allowed)[0]

    def oracle_embed(self, mechanism: Any, x: Tensor, coordinates: Coordinates) -> Tensor:
        """Tokens `[B, N, E]` with the mechanism's absolute position; override where it has one."""
        return x

    # what is run

    def takes(self, case: Case) -> bool:
        """Whether the case is within what the class attributes declare."""
        return (
            case.axes in self.axes
            and (self.prefixes or not case.prefix)
            and (self.cross or case.keys is None)
            and (self.irregular or not case.irregular)
        )

    def cases(self) -> list[Case]:
        return [case for case in CASES if self.takes(case)]

    def runs(self) -> list[Run]:
        """Every case by the definition in float64; each declared pair on a few; a seeded sample of all the rest."""
        cases = self.cases()
        chance = random.Random(type(self).__name__)
        always = [Run(case, "reference", torch.float64) for case in cases]
        for engine, dtype in self.declared:
            always += [Run(case, engine, dtype) for case in chance.sample(cases, min(4, len(cases)))]
        here = engines_of(type(self))
        product = (Run(case, engine, dtype) for case in cases for engine in here for dtype in dtypes(engine))
        rest = [run for run in product if run not in always]
        return always + chance.sample(rest, min(self.sampled, len(rest)))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "run" in metafunc.fixturenames:
            metafunc.parametrize("run", self.runs(), ids=str)
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.share(metafunc.function.__name__), ids=str)
        if "engine" in metafunc.fixturenames:
            metafunc.parametrize("engine", engines_of(type(self)))

    def fitting(self, test: str) -> list[Case]:
        """The cases in which a test can say something."""
        match test:
            case "test_gradcheck":
                return [case for case in self.cases() if case.queries.count <= 13]
            case "test_translation":
                return [case for case in self.cases() if _moved(case) is not None]
            case "test_preset":
                return [case for case in self.cases() if case.keys is None and not case.irregular]
        return self.cases()

    def share(self, test: str) -> list[Case]:
        """The cases in which a test runs: what is added to tokens in all, another test in one of `SHARE`."""
        cases = self.fitting(test)
        if test == "test_embedding" and type(self).oracle_embed is not MechanismSuite.oracle_embed:
            return cases
        first = zlib.crc32(f"{type(self).__name__}.{test}".encode()) % SHARE
        return cases[first::SHARE] or cases[:1]

    @classmethod
    def undeclared(cls) -> set[str]:
        """The tests of what the class attributes do not declare; they are not collected (tests/conftest.py)."""
        line = 1 in cls.axes
        declared = {
            "test_left_padding_is_right_padding": line and cls.irregular,
            "test_packed_is_separate": line and cls.irregular,
            "test_decoding_is_the_full_pass": line and cls.cross,
            "test_decoding_beyond_what_was_built": line and cls.cross,
            "test_extend": line,
            "test_translation": cls.translation_invariant,
            "test_preset": cls.preset is not None,
            "test_batched_places": line and cls.irregular,
            "test_a_part_of_a_grid_reads_the_same_numbers": 2 in cls.axes
            and cls.translation_invariant
            and cls.irregular,
            "test_prefixes_are_the_same_whatever_the_others_are": cls.prefixes
            and cls.cross
            and line
            and cls.translation_invariant,
        }
        without = {name for name in ("test_gradcheck", "test_translation", "test_preset") if not cls().fitting(name)}
        return without | {name for name, there in declared.items() if not there}

    def named(self, mechanism: Mechanism) -> str:
        """What docs/parity.md calls it: its row, else its preset, else its class; "" for not at all."""
        return self.row if self.row is not None else self.preset or type(mechanism).__name__

    def made(self, case: Case, dtype: torch.dtype = torch.float32) -> Mechanism:
        """The mechanism of a case, always the same, in the dtype."""
        torch.default_generator.manual_seed(13)
        return self.at(case.queries, case.keys, case.heads).to(dtype)

    def at(self, queries: Coordinates, keys: Coordinates | None, heads: int = 3) -> Mechanism:
        return self.build(
            Site(
                num_heads=heads,
                head_dim=WIDTH,
                embed_dim=heads * WIDTH,
                queries=queries,
                keys=keys,
                causal=self.causal,
                init_std=1.0,
            )
        )

    def attend(self, engine: str, *tensors: Tensor, **arguments: Any) -> Tensor | None:
        """`relpos.attention`, or None where the engine declares that it lacks something and says so."""
        sides = arguments.get("queries"), arguments.get("keys")
        lack = self.lacks.get(engine) or lacking(engine, arguments["position"], *sides)
        if lack is not None:
            with pytest.raises(NotImplementedError, match=lack):
                attention(*tensors, backend=engine, **arguments)
            return None
        output = attention(*tensors, backend=engine, **arguments)
        assert isinstance(output, Tensor)
        return output

    # values and gradients

    def test_values_and_gradients(self, run: Run) -> None:
        """Output and the gradients of q, k, v and every parameter."""
        case, dtype = run.case, run.dtype
        keys = case.queries if case.keys is None else case.keys
        given, mechanism = inputs(case, dtype), self.made(case, dtype)
        leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
        output = self.attend(run.engine, *leaves, position=mechanism, queries=case.queries, keys=case.keys)
        if output is None:
            return
        assert output.dtype == dtype
        found = {"output": output, **gradients(output, given, mechanism, leaves)}

        def by_loops(wide: torch.dtype) -> dict[str, Tensor]:
            own, twin = given.to(wide), copy.deepcopy(mechanism).cpu().to(wide)
            leaves = [x.detach().requires_grad_() for x in (own.q, own.k, own.v)]
            output = self.oracle_attention(twin, *leaves, case.queries, keys, None)
            return {"output": output, **gradients(output, own, twin, leaves)}

        exact, cost = by_loops(torch.float64), in_orders(lambda: by_loops(yardstick_dtype(dtype)))
        silent = mechanism.acts_on_tokens and not mechanism.acts_in_attention
        if run.engine == "reference" and dtype in parity.LIMITS and self.named(mechanism) and not silent:
            parity.note(self.named(mechanism), "loops", dtype, found, exact)
        size = max(rms(exact[name]) for name in exact if name != "output")
        for name, actual in found.items():
            terms = 0.0 if name == "output" else size
            assert_close(actual, exact[name], cost[name], what=name, terms=terms, dtype=dtype)

    def test_embedding(self, case: Case) -> None:
        """What is added to tokens, and its gradient."""
        mechanism = self.made(case, torch.float64)
        x = torch.randn(BATCH, case.queries.count, case.heads * WIDTH, dtype=torch.float64, requires_grad=True)
        twin = copy.deepcopy(mechanism)
        ours, theirs = mechanism.embed(x, case.queries), self.oracle_embed(twin, x, case.queries)
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
        assert mechanism.acts_on_tokens == (not torch.equal(ours, x))
        if mechanism.acts_on_tokens:
            upstream = torch.randn_like(ours)
            mine = torch.autograd.grad(ours, [x, *mechanism.parameters()], upstream, allow_unused=True)
            other = torch.autograd.grad(theirs, [x, *twin.parameters()], upstream, allow_unused=True)
            for a, b in zip(mine, other, strict=True):
                if b is None:
                    assert a is None or not a.any()
                else:
                    torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
            for dtype in parity.LIMITS:
                self.note_embedding(case, dtype)

    def note_embedding(self, case: Case, dtype: torch.dtype) -> None:
        """The same for docs/parity.md, ours in the dtype and the loops in float64."""
        mechanism = self.made(case, dtype)
        if not self.named(mechanism):
            return
        twin = copy.deepcopy(mechanism).double()
        x, upstream = torch.randn(2, BATCH, case.queries.count, case.heads * WIDTH, dtype=dtype)
        mine, other = x.clone().requires_grad_(), x.double().requires_grad_()
        ours = mechanism.embed(mine, case.queries), {"x": mine, **dict(mechanism.named_parameters())}
        theirs = self.oracle_embed(twin, other, case.queries), {"x": other, **dict(twin.named_parameters())}
        found, wanted = (parity.with_gradients(*side, upstream) for side in (ours, theirs))
        parity.agree(self.named(mechanism), "loops", found, wanted, dtype=dtype)

    def test_gradcheck(self, case: Case) -> None:
        """Numerical derivatives of attention with respect to every parameter, in float64."""
        mechanism = self.made(case, torch.float64)
        parameters = dict(mechanism.named_parameters())
        if not parameters or not mechanism.acts_in_attention:
            return
        given = inputs(case, torch.float64, batch=1)

        def run(*values: Tensor) -> Tensor:
            swapped = dict(zip(parameters, values, strict=True))
            return torch.func.functional_call(
                _Attends(mechanism), {f"own.{n}": x for n, x in swapped.items()}, (given, case)
            )

        leaves = [x.detach().clone().requires_grad_() for x in parameters.values()]
        assert torch.autograd.gradcheck(run, leaves, fast_mode=True)

    # masks

    def test_left_padding_is_right_padding(self, engine: str) -> None:
        """Three and five real tokens in rows of six: the padding's side changes neither values nor gradients."""
        lengths, n = (3, 5), 6
        dtype = finest(engine)
        mechanism = self.at(Sequence(n), None).to(dtype)
        tokens = [torch.randn(3, length, 3, 3, WIDTH, dtype=dtype) for length in lengths]  # heads, n, qkv, ...
        results = []
        for left in (False, True):
            packed = torch.randn(2, 3, n, 3, WIDTH, dtype=dtype)
            places, valid = torch.zeros(2, n, dtype=torch.long), torch.zeros(2, n, dtype=torch.bool)
            spans = [slice(n - length, n) if left else slice(0, length) for length in lengths]
            for b, (span, real) in enumerate(zip(spans, tokens, strict=True)):
                packed[b, :, span] = real[:, :, 0]
                places[b, span] = torch.arange(lengths[b])
                valid[b, span] = True
            q, k, v = (packed[:, :, :, part].clone().requires_grad_() for part in range(3))
            mask = Mask.padding(valid)
            if self.causal:
                order = torch.arange(n)
                mask = mask & Mask.causal(order, order)
            coordinates = Positions(places, low=0, high=n - 1)
            output = self.attend(engine, q, k, v, position=mechanism, queries=coordinates, mask=mask)
            if output is None:
                return
            assert not output[~valid[:, None, :].expand(2, 3, n)].any()
            kept = torch.cat([output[b, :, span].flatten() for b, span in enumerate(spans)])
            upstream = torch.linspace(-1, 1, kept.numel(), dtype=dtype)
            grads = torch.autograd.grad((kept * upstream).sum(), [q, k, v, *mechanism.parameters()], allow_unused=True)
            own = [torch.cat([g[b, :, span].flatten() for b, span in enumerate(spans)]) for g in grads[:3]]
            results.append([kept, *own, *(g for g in grads[3:] if g is not None)])
        for right, other in zip(*results, strict=True):
            _near(right, other)

    def test_packed_is_separate(self, engine: str) -> None:
        """Documents of 2, 1 and 4 tokens in one row, each counting from 0, as each of them alone."""
        lengths = (2, 1, 4)
        dtype = finest(engine)
        mechanism = self.at(Sequence(max(lengths)), None).to(dtype)
        n = sum(lengths)
        q, k, v = (torch.randn(1, 3, n, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3))
        segments = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
        places = torch.cat([torch.arange(length) for length in lengths])
        mask = Mask.packed(segments)
        if self.causal:
            mask = mask & Mask.causal()
        coordinates = Positions(places, low=0, high=max(lengths) - 1)
        together = self.attend(engine, q, k, v, position=mechanism, queries=coordinates, mask=mask)
        if together is None:
            return
        edges = [0, *itertools.accumulate(lengths)]
        alone = torch.cat(
            [
                attention(  # type: ignore[misc]
                    *(x[:, :, a:b] for x in (q, k, v)),
                    position=mechanism,
                    queries=Sequence(b - a),
                    mask=Mask.causal() if self.causal else None,
                    backend=engine,
                )
                for a, b in itertools.pairwise(edges)
            ],
            dim=2,
        )
        _same(together, alone, [q, k, v, *mechanism.parameters()])

    def test_decoding_is_the_full_pass(self, engine: str) -> None:
        """One query at a time, `Sequence(1, start=t)` against a cache of t + 1 keys, as the causal whole."""
        n = 5
        dtype = finest(engine)
        mechanism = self.at(Sequence(n), None).to(dtype)
        q, k, v = (torch.randn(2, 3, n, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3))
        whole = self.attend(engine, q, k, v, position=mechanism, queries=Sequence(n), mask=Mask.causal())
        if whole is None:
            return
        steps = [
            attention(
                q[:, :, t : t + 1],
                k[:, :, : t + 1],
                v[:, :, : t + 1],
                position=mechanism,
                queries=Sequence(1, start=t),
                keys=Sequence(t + 1),
                backend=engine,
            )
            for t in range(n)
        ]
        _same(whole, torch.cat(steps, dim=2), [q, k, v, *mechanism.parameters()])  # type: ignore[arg-type]

    def test_decoding_beyond_what_was_built(self, engine: str) -> None:
        """Built for 3 tokens and grown by each of its rules for sequences, every step up to 6 is the last row of the
        pass over the tokens so far; and so is what is added to tokens."""
        n, far = 3, 6
        built = self.at(Sequence(n), None).to(finest(engine))
        grown = []
        for rule in built.growth:
            with contextlib.suppress(ValueError):  # a rule for grids alone
                grown.append(built.grow(Sequence(far), rule))
        assert bool(grown) == bool(built.growth)
        for mechanism in grown:
            self.decodes(mechanism, engine, n, far)

    def decodes(self, mechanism: Mechanism, engine: str, n: int, far: int) -> None:
        """Steps n to far - 1, one query at a time, are the last rows of the passes over the tokens so far."""
        dtype = finest(engine)
        q, k, v = (torch.randn(2, 3, far, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3))
        rows, steps = [], []
        for t in range(n, far):
            seen = slice(0, t + 1)
            sides: list[tuple[slice, Coordinates, Mask | None]] = [
                (seen, Sequence(t + 1), Mask.causal()),
                (slice(t, t + 1), Sequence(1, start=t), None),
            ]
            for results, (asked, queries, mask) in zip((rows, steps), sides, strict=True):
                own = self.attend(
                    engine,
                    q[:, :, asked],
                    k[:, :, seen],
                    v[:, :, seen],
                    position=mechanism,
                    queries=queries,
                    keys=Sequence(t + 1),
                    mask=mask,
                )
                if own is None:
                    return
                results.append(own[:, :, -1])
        _same(torch.stack(rows), torch.stack(steps), [q, k, v, *mechanism.parameters()])
        if mechanism.acts_on_tokens:
            x = torch.randn(2, far, 3 * WIDTH, dtype=dtype)
            added = [mechanism.embed(x[:, t : t + 1], Sequence(1, start=t)) for t in range(far)]
            assert torch.equal(torch.cat(added, dim=1), mechanism.embed(x, Sequence(far)))

    def test_extend(self) -> None:
        """Extended, it says bit for bit the same on the length it was built for, and serves the longer one."""
        mechanism = self.at(Sequence(3), None)
        if AS_IS not in mechanism.growth and type(mechanism).extend is Mechanism.extend:
            with pytest.raises(ValueError, match="defined on longer sequences"):
                mechanism.extend(6)
            return
        longer = mechanism.extend(6)
        q, k, v = torch.randn(3, 1, 3, 6, WIDTH)
        short = (q[:, :, :3], k[:, :, :3], v[:, :, :3])
        one, other = (attention(*short, position=each, queries=Sequence(3)) for each in (mechanism, longer))
        assert torch.equal(one, other)
        attention(q, k, v, position=longer, queries=Sequence(6))
        x = torch.randn(1, 6, 3 * WIDTH)
        assert torch.equal(mechanism.embed(x[:, :3], Sequence(3)), longer.embed(x[:, :3], Sequence(3)))
        assert longer.embed(x, Sequence(6)).shape == x.shape

    def test_batched_places(self, engine: str) -> None:
        """Each element of a batch with places of its own, near and far, as that element alone."""
        dtype = finest(engine)
        prefix = int(self.prefixes)
        mechanism = self.at(Sequence(100, prefix=prefix), None).to(dtype)
        places = torch.tensor([[0, 7, 20], [5, 90, 0]])
        q, k, v = torch.randn(3, 2, 3, prefix + 3, WIDTH, dtype=dtype)
        x = torch.randn(2, prefix + 3, 3 * WIDTH, dtype=dtype)
        arguments: dict[str, Any] = {"position": mechanism, "mask": Mask.causal() if self.causal else None}
        every = Positions(places, low=0, high=99, prefix=prefix)
        together = self.attend(engine, q, k, v, queries=every, **arguments)
        if together is None:
            return
        for b in range(2):
            one, own = slice(b, b + 1), Positions(places[b], low=0, high=99, prefix=prefix)
            alone = attention(q[one], k[one], v[one], queries=own, backend=engine, **arguments)
            _near(together[one], alone)
            _near(mechanism.embed(x, every)[one], mechanism.embed(x[one], own))

    # sums

    def test_composition(self) -> None:
        """With a bias, the scores are its own plus that bias; with a rotation, its own with q and k turned in the
        content product alone. By loops, up to a constant a row, and the same in every engine that can do it."""
        cases = self.cases()
        for case in cases[:: max(1, len(cases) // 3)]:
            mechanism, given = self.made(case, torch.float64), inputs(case, torch.float64)
            queries, keys = case.queries, case.queries if case.keys is None else case.keys
            terms = mechanism.terms(case.queries, case.keys)
            own = relpos.attention_weights(given.q, given.k, position=terms).log()
            sides = oracle.places(queries), oracle.places(keys)
            sums = [(relpos.ALiBi(case.heads), oracle.alibi(case.heads, *sides, "euclidean")[None].double())]
            if terms.one(relpos.Rotation) is None and case.axes < 3:
                pairs, k = WIDTH // (2 * case.axes), oracle.heads_of(given.k, case.heads)
                q_turned, k_turned = (
                    oracle.rotated(x, side, case.axes, pairs, 100.0, "half")
                    for x, side in zip((given.q, k), sides, strict=True)
                )
                scale, added_to_queries = terms.one(relpos.Scale), terms.of(relpos.QueryBias)
                u = sum((term.u[:, None] for term in added_to_queries), torch.zeros(1, 1, 1))  # is not turned
                turned = (q_turned + u) @ k_turned.mT - (given.q + u) @ k.mT
                turned = turned * (WIDTH**-0.5 if scale is None else scale.value)
                sums.append((relpos.RotaryEmbedding(WIDTH, axes=case.axes, base=100.0), turned))
            for other, added in sums:
                wanted = (own + added).softmax(dim=-1)
                for total in (mechanism + other, other + mechanism):
                    both = total.terms(case.queries, case.keys)
                    torch.testing.assert_close(
                        relpos.attention_weights(given.q, given.k, position=both), wanted, rtol=1e-6, atol=1e-6
                    )  # biases that are not learned are float32
                results = {}
                for engine in engines_of(type(self)):
                    if engine not in self.lacks and lacking(engine, both) is None:
                        cast = given.to(finest(engine))
                        results[engine] = devices.attention(cast.q, cast.k, cast.v, position=both, backend=engine)
                for result in results.values():
                    assert isinstance(result, Tensor)
                    _near(result, results["reference"].to(result.dtype))  # type: ignore[union-attr]

    # patterns

    def test_under_patterns(self, engine: str) -> None:
        """As a dense bias of 0 and -inf in place of the mask; a rule by row, which heeds the mask, as the reference."""
        where: Coordinates = Sequence(9) if 1 in self.axes else Grid(*(1,) * (self.axes[0] - 2), 3, 3)
        dtype = finest(engine)
        mechanism = self.at(where, None).to(dtype)
        leaves = [torch.randn(1, 3, 9, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]
        terms = mechanism.terms(where)
        wanted = [*leaves, *(x for x in mechanism.parameters() if x.requires_grad)]
        for pattern in PATTERNS.values():
            mask = pattern & Mask.causal() if self.causal else pattern
            lack = self.lacks.get(engine) or lacking(engine, mechanism, where, None, mask=mask)
            if lack is not None:
                with pytest.raises(NotImplementedError, match=lack):
                    attention(*leaves, position=mechanism, queries=where, mask=mask, backend=engine)
                continue
            ours = attention(*leaves, position=mechanism, queries=where, mask=mask, backend=engine)
            if any(isinstance(term, relpos.RowRule) for term in terms):
                theirs = devices.attention(*leaves, position=terms, mask=mask, backend="reference")
            else:
                allowed = mask.dense(9, 9)
                dense = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf)
                theirs = devices.attention(*leaves, position=terms + relpos.DenseBias(dense), backend="reference")
            assert isinstance(ours, Tensor)
            assert isinstance(theirs, Tensor)
            upstream = torch.linspace(-1, 1, ours.numel(), dtype=dtype).view_as(ours)
            found = [
                torch.autograd.grad(x, wanted, upstream, allow_unused=True, retain_graph=True) for x in (ours, theirs)
            ]
            for mine, other in zip([ours, *found[0]], [theirs, *found[1]], strict=True):
                assert (mine is None) == (other is None)
                if mine is not None and other is not None:
                    torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)

    # rows without keys

    def test_rows_that_see_nothing(self, engine: str) -> None:
        """0 and a gradient of 0, never NaN, for q, k, v and every parameter."""
        case = self.cases()[0] if len(self.cases()) == 1 else self.cases()[1]
        mechanism, given = self.made(case), inputs(case, torch.float32)
        leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
        blind = torch.full((case.queries.count,), -1)
        mask = Mask.packed(blind, torch.zeros(leaves[1].shape[2]).long())
        arguments: dict[str, Any] = {"position": mechanism, "queries": case.queries, "keys": case.keys}
        output = self.attend(engine, *leaves, mask=mask, **arguments)
        if output is None:
            return
        assert not output.any()
        for gradient in gradients(output, given, mechanism, leaves).values():
            assert not gradient.isnan().any()
            assert not gradient.any()

    # invariances

    def test_translation(self, case: Case) -> None:
        """Moving both sides alike changes nothing, where that is declared."""
        moved = _moved(case)
        assert moved is not None
        mechanism, given = self.made(case, torch.float64), inputs(case, torch.float64)
        here, there = (
            attention(given.q, given.k, given.v, position=mechanism, queries=each.queries, keys=each.keys)
            for each in (case, moved)
        )
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)

    def test_a_part_of_a_grid_reads_the_same_numbers(self) -> None:
        """A 2 x 3 corner of a 4 x 5 grid, wherever it lies, is a 2 x 3 grid to a translation-invariant mechanism."""
        mechanism = self.at(Grid(4, 5), None).double()
        q, k, v = torch.randn(3, 1, 3, 6, WIDTH, dtype=torch.float64)
        cells = Grid(2, 3).tokens()
        alone = attention(q, k, v, position=mechanism, queries=Positions(cells, low=(0, 0), high=(3, 4)))
        for corner in ((1, 0), (2, 2), (0, 1)):
            moved = Positions(cells + torch.tensor(corner), low=(0, 0), high=(3, 4))
            torch.testing.assert_close(attention(q, k, v, position=mechanism, queries=moved), alone)
        if self.axes != (1, 2):  # in raster order a smaller grid counts differently
            small = attention(q, k, v, position=mechanism, queries=Grid(2, 3))
            torch.testing.assert_close(small, alone)

    def test_each_of_a_batch_alone(self, case: Case) -> None:
        mechanism, given = self.made(case, torch.float64), inputs(case, torch.float64, batch=3)
        arguments: dict[str, Any] = {"position": mechanism, "queries": case.queries, "keys": case.keys}
        together = attention(given.q, given.k, given.v, **arguments)
        for b in range(3):
            one = slice(b, b + 1)
            alone = attention(given.q[one], given.k[one], given.v[one], **arguments)
            torch.testing.assert_close(alone, together[one], rtol=1e-13, atol=1e-13)  # type: ignore[index]

    def test_prefixes_are_the_same_whatever_the_others_are(self) -> None:
        """Prefix tokens have no place: what they say to tokens does not depend on where the tokens are."""
        mechanism = self.at(Sequence(5, prefix=2), None).double()
        q, k, v = torch.randn(3, 1, 3, 6, WIDTH, dtype=torch.float64)
        outputs = [
            attention(q[:, :, :2], k, v, position=mechanism, queries=Sequence(0, prefix=2), keys=keys)
            for keys in (Sequence(4, prefix=2), Sequence(4, start=1, prefix=2))
        ]
        torch.testing.assert_close(*outputs)

    # a module like any other

    def test_state_dict_round_trip(self, case: Case) -> None:
        mechanism = self.made(case)
        torch.manual_seed(99)
        other = self.at(case.queries, case.keys, case.heads)
        assert list(other.state_dict()) == list(mechanism.state_dict())
        other.load_state_dict(copy.deepcopy(mechanism.state_dict()), strict=True)
        given = inputs(case, torch.float32)
        arguments: dict[str, Any] = {"queries": case.queries, "keys": case.keys}
        first, second = (
            attention(given.q, given.k, given.v, position=each, **arguments) for each in (mechanism, other)
        )
        assert torch.equal(first, second)  # type: ignore[arg-type]
        assert {name for name, _ in mechanism.named_parameters()} == set(mechanism.state_dict()), (
            "what is no parameter is computed, not stored"
        )

    def test_the_same_on_every_run(self, case: Case) -> None:
        """Bit for bit, values and gradients."""
        results = []
        for _ in range(2):
            mechanism, given = self.made(case), inputs(case, torch.float32)
            leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
            output = attention(*leaves, position=mechanism, queries=case.queries, keys=case.keys)
            assert isinstance(output, Tensor)
            results.append({"output": output, **gradients(output, given, mechanism, leaves)})
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])

    def test_structure_survives_a_cast(self, case: Case) -> None:
        """Cast to bfloat16, only learned numbers are rounded: everything else of the terms is what it was."""
        mechanism = self.made(case)
        with torch.no_grad():
            for parameter in mechanism.parameters():
                parameter.copy_(parameter.bfloat16())  # so that the cast itself loses nothing
        before = _leaves(mechanism.terms(case.queries, case.keys))
        after = _leaves(copy.deepcopy(mechanism).to(torch.bfloat16).terms(case.queries, case.keys))
        assert len(before) == len(after)
        for a, b in zip(before, after, strict=True):
            if isinstance(a, Tensor):
                assert a.dtype == b.dtype, "values are computed in float32 and reach the engine so"
                assert torch.equal(a, b)

    def test_terms_do_not_heed_autocast(self, case: Case) -> None:
        """Under autocast the terms are the very same numbers."""
        mechanism = self.made(case)
        plain = _leaves(mechanism.terms(case.queries, case.keys))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = _leaves(mechanism.terms(case.queries, case.keys))
        for a, b in zip(plain, cast, strict=True):
            if isinstance(a, Tensor):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)

    def test_autocast_is_a_cast_of_q_k_v(self, case: Case) -> None:
        """Under autocast the output is, bit for bit, that of q, k and v in bfloat16."""
        mechanism, given = self.made(case), inputs(case, torch.float32)
        arguments: dict[str, Any] = {"position": mechanism, "queries": case.queries, "keys": case.keys}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = attention(given.q, given.k, given.v, **arguments)
        own = attention(*(x.bfloat16() for x in (given.q, given.k, given.v)), **arguments)
        assert isinstance(cast, Tensor)
        assert isinstance(own, Tensor)
        assert cast.dtype == torch.bfloat16
        assert torch.equal(cast, own)

    def test_preset(self, case: Case) -> None:
        """The preset builds it, for a site whose queries and keys are the same tokens, and it serves them."""
        assert self.preset is not None
        preset = relpos.position.find(self.preset)
        if case.axes not in preset.token_axes:
            return
        usual = preset.make(Site(case.heads, WIDTH, case.heads * WIDTH, case.queries, causal=self.causal))
        assert type(usual) is type(self.made(case))
        given = inputs(case, torch.float32)
        attention(given.q, given.k, given.v, position=usual, queries=case.queries)
        x = torch.randn(BATCH, case.queries.count, case.heads * WIDTH)
        assert usual.embed(x, case.queries).shape == x.shape
        assert preset.title
        assert preset.summary
        assert preset.source


class _Attends(torch.nn.Module):
    """A mechanism inside attention, so that `functional_call` can swap its parameters."""

    def __init__(self, own: Mechanism) -> None:
        super().__init__()
        self.own = own

    def forward(self, given: Inputs, case: Case) -> Any:
        return attention(
            given.q, given.k, given.v, position=self.own, queries=case.queries, keys=case.keys, backend="reference"
        )


def _same(one: Tensor, other: Tensor, leaves: list[Tensor]) -> None:
    """Equal values and gradients, up to the order of sums."""
    _near(one, other)
    upstream = torch.randn_like(one)
    pairs = [torch.autograd.grad(x, leaves, upstream, allow_unused=True) for x in (one, other)]
    for a, b in zip(*pairs, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            _near(a, b)


def _near(one: Tensor, other: Tensor) -> None:
    """Equal up to the order of sums: about 5,000 units in the last place of 1."""
    slack = 2**12 * torch.finfo(one.dtype).eps
    torch.testing.assert_close(one, other, rtol=slack, atol=slack)


def _leaves(terms: relpos.Terms) -> list[Any]:
    return torch.utils._pytree.tree_leaves(terms)


def _moved(case: Case) -> Case | None:
    """The case with both sides three places on, where its coordinates can be moved."""
    sides: list[Coordinates | None] = []
    for side in (case.queries, case.keys):
        match side:
            case Sequence():
                sides.append(replace(side, start=side.start + 3))
            case Positions():
                values = side.values[..., 0] if side.axes == 1 else side.values
                low, high = (tuple(x + 3 for x in bounds) for bounds in (side.low, side.high))
                sides.append(
                    Positions(
                        values + 3,
                        low=low[0] if side.axes == 1 else low,
                        high=high[0] if side.axes == 1 else high,
                        prefix=side.prefix,
                    )
                )
            case None:
                sides.append(None)
            case _:
                return None
    assert sides[0] is not None
    return replace(case, queries=sides[0], keys=sides[1])
