"""The conformance suite as this library's own mechanisms run it: what it finds is noted for docs/parity.md."""

import copy
import os
from typing import ClassVar

import torch
from torch import Tensor

import parity
from relpos import Mechanism
from relpos.position import Preset
from relpos.testing import MechanismSuite, SuiteCase, SuiteRun
from relpos.testing.calls import BATCH, WIDTH
from relpos.testing.decoding_tests import DecodingTests
from relpos.testing.engines import INTERPRETED, engines
from relpos.testing.invariance_tests import InvarianceTests
from relpos.testing.mask_tests import MaskTests
from relpos.testing.module_tests import ModuleTests
from relpos.testing.sum_tests import SumTests

ALL_INTERPRETED = os.environ.get("RELPOS_INTERPRETED") == "all"
"""Whether every suite runs interpreted kernels."""


OF_TERMS = (
    DecodingTests.test_decoding_is_the_full_pass,
    DecodingTests.test_decoding_beyond_what_was_built,
    *(test for name, test in vars(MaskTests).items() if name.startswith("test_")),
    SumTests.test_composition,
    InvarianceTests.test_each_of_a_batch_alone,
    ModuleTests.test_the_same_on_every_run,
    ModuleTests.test_terms_do_not_heed_autocast,
    ModuleTests.test_autocast_is_a_cast_of_q_k_v,
)
"""Tests of what knows terms, and not whose they are."""


class LibrarySuite(MechanismSuite):
    """`MechanismSuite` for a mechanism of relpos.

    Attributes:
        row: what docs/parity.md calls a variant, as "deberta (c2p alone)"; "" keeps it out. Default: its preset's name,
            or its class's.
        alike: whether another suite has terms of the same kind, and runs the tests of them: masks, decoding, sums,
            engines. This one runs what its own code decides: values, gradients, state, settings.
        interpreted: whether kernels run in an interpreter: in one suite a kind of terms that they serve.
    """

    row: ClassVar[str | None] = None
    alike: ClassVar[bool] = False
    interpreted: ClassVar[bool] = False

    @classmethod
    def asked(cls) -> dict[str, bool]:
        """Without the tests of terms where another suite runs them."""
        asked = super().asked()
        return {**asked, **{test.__name__: not cls.alike and asked.get(test.__name__, True) for test in OF_TERMS}}

    def runs(self) -> list[SuiteRun]:
        """In the reference, where another suite has its terms in all engines."""
        return [run for run in super().runs() if run.engine == "reference" or not self.alike]

    @classmethod
    def engines(cls) -> list[str]:
        """All but FlexAttention, which has tests of its own; interpreted kernels where the suite says so."""
        left_out = () if cls.interpreted or ALL_INTERPRETED else INTERPRETED
        return [name for name in engines() if name not in left_out]

    def named(self, mechanism: Mechanism) -> str:
        """What docs/parity.md calls it; "" for not at all."""
        preset = self.preset.name if isinstance(self.preset, Preset) else self.preset
        return self.row if self.row is not None else preset or type(mechanism).__name__

    def compared(self, run: SuiteRun, mechanism: Mechanism, found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
        """Note the reference's differences from the loops."""
        silent = mechanism.acts_on_tokens and not mechanism.acts_in_attention
        if run.engine == "reference" and run.dtype in parity.LIMITS and self.named(mechanism) and not silent:
            parity.note(self.named(mechanism), "loops", run.dtype, found, exact)

    def test_embedding(self, case: SuiteCase) -> None:
        """What is added to tokens, and its gradients; noted in each dtype."""
        super().test_embedding(case)
        if self.made(case).acts_on_tokens:
            for dtype in parity.LIMITS:
                self.note_embedding(case, dtype)

    def note_embedding(self, case: SuiteCase, dtype: torch.dtype) -> None:
        """Ours in the dtype and the loops in float64."""
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
