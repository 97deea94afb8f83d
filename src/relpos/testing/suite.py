"""`MechanismSuite`: the tests that every position mechanism must pass, in every engine and dtype."""

from __future__ import annotations

from relpos.testing.decoding_tests import DecodingTests
from relpos.testing.functional_tests import FunctionalTests
from relpos.testing.invariance_tests import InvarianceTests
from relpos.testing.mask_tests import MaskTests
from relpos.testing.module_tests import ModuleTests
from relpos.testing.sum_tests import SumTests
from relpos.testing.value_tests import ValueTests


class MechanismSuite(ValueTests, MaskTests, DecodingTests, SumTests, InvarianceTests, ModuleTests, FunctionalTests):
    """Base class of a position mechanism's test. It brings the tests; a subclass gives a constructor and an oracle:

        class TestMyBias(MechanismSuite):
            axes = (1,)
            translation_invariant = True

            def build(self, site):                              # the mechanism for a `relpos.Site`
                return MyBias(site.num_heads)

            def oracle_bias(self, mechanism, queries, keys):    # [1 or H, N, M], by loops or published code
                ...

    The oracle must not call relpos: `relpos.testing.oracle` has loops to build it from. It gets a copy of the mechanism
    in float64 or in the dtype under test, and must be differentiable; `build` must leave no parameter at zero.
    A mechanism that is more than a bias overrides `oracle_attention`, one that is added to tokens `oracle_embed`. The
    tolerance is derived from the rounding error of the oracle itself (`relpos.testing.tolerance`).

    The tests compare values and all gradients with the oracle, for sequences and grids, offsets and starts, prefixes,
    and unequal queries and keys. They also check that results agree for padded, packed or batched tokens, in decoding
    with a cache, on longer sequences, under masks, in a sum with another mechanism, after a state dict, after a cast,
    under autocast and with given parameters. pytest collects the tests that the class attributes ask for, so none is
    skipped.

    Attributes:
        axes: numbers of axes of the coordinates it takes: 1 sequences, 2 grids, 3 video. Default: (1, 2, 3).
        prefixes: whether tokens may be prefixes, such as a class token. Default: True.
        cross: whether queries and keys may have different coordinates, as in decoding. Default: True.
        irregular: whether it takes `Positions`, so any coordinates in any order. Default: True.
        translation_invariant: whether moving queries and keys alike changes nothing. Default: False.
        causal: whether it is only defined for keys that are not in the future. Default: False.
        declared: pairs of engine and dtype that are run in four cases each. Default: reference and sdpa, in float32 and
            bfloat16.
        sampled: how many of all other cases, engines and dtypes are run; a seed from the class's name chooses them.
            Default: 10.
        lacks: engine to a word of its NotImplementedError, for engines that cannot run this mechanism. Default: {}.
        preset: its `Preset`, or the name of one in relpos. Default: None.

    Every case is compared in the reference in float64. A test that is not about values runs in one case of four, one of
    `terms_from` in one of eight; the cases differ between classes. Override `takes(case)` to leave out single cases,
    `cases()` to thin them out, `engines()` to choose engines, and `compared(...)` to record figures.
    """
