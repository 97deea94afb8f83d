"""What the conformance tests share: what a mechanism's suite declares and brings, and the cases that are run for it."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from relpos.core import Coordinates
from relpos.position import Mechanism, Preset, Site
from relpos.testing import engines, oracle
from relpos.testing.calls import WIDTH, attend_under
from relpos.testing.cases import CASES, SuiteCase

SHARE = 4
"""A test that is not about values runs in one of so many cases."""

FUNCTIONAL_SHARE = 8
"""A test of `terms_from` in one of so many: which tensors are read does not depend on where tokens are."""


@dataclass(frozen=True)
class SuiteRun:
    """One comparison: a case in an engine and a dtype."""

    case: SuiteCase
    engine: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.case}, {self.engine}, {str(self.dtype).removeprefix('torch.')}"


class HiddenTest:
    """A test that a suite does not ask for: pytest, which collects what can be called, passes over it.

    Read from a class or an instance it is the test itself, for `super()`.
    """

    def __init__(self, test: Callable[..., None]) -> None:
        self.test = test

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self.test if instance is None else self.test.__get__(instance, owner)


class SuiteBase:
    """Attributes, hooks and cases of a mechanism's suite; see `MechanismSuite` for what each of them means."""

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
    preset: ClassVar[str | Preset | None] = None
    sampled: ClassVar[int] = 10

    # what a mechanism's suite brings

    def build(self, site: Site) -> Mechanism:
        """The mechanism for a site, its parameters not at zero. Every suite overrides this."""
        raise NotImplementedError(f"{type(self).__name__} needs build(self, site), which returns the mechanism")

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
        """Attention under the mechanism, `[B, H, N, V]`, by loops; override it where position is more than a bias."""
        bias = self.oracle_bias(mechanism, queries, keys)
        return oracle.attention(q, k, v, bias=None if bias is None else bias[None], allowed=allowed)[0]

    def oracle_embed(self, mechanism: Any, x: Tensor, coordinates: Coordinates) -> Tensor:
        """Tokens `[B, N, E]` with the mechanism's absolute position; override it where there is one."""
        return x

    def compared(self, run: SuiteRun, mechanism: Mechanism, found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
        """Called with every comparison of values and gradients before it is judged; does nothing.

        Override it to record figures. Both dicts have "output" and, by the name of the tensor, gradients.
        """

    # what is run

    def takes(self, case: SuiteCase) -> bool:
        """Whether the case is within what the class attributes declare; override it to leave out more."""
        return (
            case.axes in self.axes
            and (self.prefixes or not case.prefix)
            and (self.cross or case.keys is None)
            and (self.irregular or not case.irregular)
        )

    def cases(self) -> list[SuiteCase]:
        """The cases that fit the mechanism."""
        return [case for case in CASES if self.takes(case)]

    def fitting(self, test: str) -> list[SuiteCase]:
        """The cases in which a test of that name can fail."""
        return self.cases()

    def share(self, test: str) -> list[SuiteCase]:
        """The cases in which a test of that name runs: one in `SHARE` of those that fit (`FUNCTIONAL_SHARE`), from
        another first one on in each suite and test; all where what is added to tokens is compared with an oracle."""
        cases = self.fitting(test)
        if test == "test_embedding" and type(self).oracle_embed is not SuiteBase.oracle_embed:
            return cases
        share = FUNCTIONAL_SHARE if test.startswith("test_terms_from") else SHARE
        first = zlib.crc32(f"{type(self).__name__}.{test}".encode()) % share
        return cases[first::share] or cases[first % max(len(cases), 1) :][:1]

    @classmethod
    def engines(cls) -> list[str]:
        """The engines that are tested: all that run on this machine without an interpreter."""
        return [name for name in engines.engines() if name not in engines.INTERPRETED]

    def runs(self) -> list[SuiteRun]:
        """Every case in the reference in float64; each declared pair in four; `sampled` of all the rest, by a seed."""
        cases = self.cases()
        chance = random.Random(type(self).__name__)
        always = [SuiteRun(case, "reference", torch.float64) for case in cases]
        for engine, dtype in self.declared:
            always += [SuiteRun(case, engine, dtype) for case in chance.sample(cases, min(4, len(cases)))]
        here = self.engines()
        pairs = [(engine, dtype) for engine in here for dtype in engines.DTYPES]
        product = (SuiteRun(case, *pair) for case in cases for pair in pairs)
        rest = [run for run in product if run not in always]
        return always + chance.sample(rest, min(self.sampled, len(rest)))

    @classmethod
    def asked(cls) -> dict[str, bool]:
        """Test to whether the class attributes ask for it; a test without an entry is always run."""
        return {}

    @classmethod
    def undeclared(cls) -> set[str]:
        """The tests that the class attributes do not ask for; they are not collected."""
        return {name for name, asked in cls.asked().items() if not asked}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hide the tests that the subclass does not ask for, and show those that only a base has hidden."""
        super().__init_subclass__(**kwargs)
        for name, asked in cls.asked().items():
            test = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
            if asked and isinstance(test, HiddenTest):
                setattr(cls, name, test.test)
            elif not asked and callable(test):
                setattr(cls, name, HiddenTest(test))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test its runs, cases or engines; pytest calls this."""
        if "run" in metafunc.fixturenames:
            metafunc.parametrize("run", self.runs(), ids=str)
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.share(metafunc.function.__name__), ids=str)
        if "engine" in metafunc.fixturenames:
            metafunc.parametrize("engine", self.engines())

    @pytest.fixture(autouse=True)
    def seed_of_a_test(self) -> None:
        """Every test starts from the same state of PyTorch's generator, whatever ran before it."""
        torch.default_generator.manual_seed(0)

    # what tests call

    def made(self, case: SuiteCase, dtype: torch.dtype = torch.float32) -> Mechanism:
        """The mechanism of a case in the dtype, with the same parameters in every call."""
        torch.default_generator.manual_seed(13)
        return self.at(case.queries, case.keys, case.heads).to(dtype)

    def at(self, queries: Coordinates, keys: Coordinates | None, heads: int = 3) -> Mechanism:
        """The mechanism for these coordinates."""
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
        """`relpos.attention`, or None where the engine lacks something, as declared, and says so."""
        tokens = arguments.get("queries"), arguments.get("keys")
        lack = self.lacks.get(engine) or engines.lacking(engine, arguments["position"], *tokens)
        if lack is not None:
            with pytest.raises(NotImplementedError, match=lack):
                attend_under(arguments.pop("position"), *tensors, backend=engine, **arguments)
            return None
        return attend_under(arguments.pop("position"), *tensors, backend=engine, **arguments)
