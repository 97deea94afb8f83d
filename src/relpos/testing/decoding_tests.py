"""Starts and growth: decoding one token at a time, and sequences longer than what the mechanism was built for."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from relpos.core import Coordinates, Mask, Sequence
from relpos.position import Mechanism
from relpos.position.base.mechanism import AS_IS
from relpos.testing.base import SuiteBase
from relpos.testing.calls import WIDTH, attend_under, require_same_gradients, with_parameters
from relpos.testing.engines import FINEST


class DecodingTests(SuiteBase):
    """Decoding and growth along one axis, in every engine."""

    @classmethod
    def asked(cls) -> dict[str, bool]:
        """Sequences; decoding has other coordinates for keys than for queries."""
        line = 1 in cls.axes
        return {
            **super().asked(),
            "test_decoding_is_the_full_pass": line and cls.cross,
            "test_decoding_beyond_what_was_built": line and cls.cross,
            "test_extend": line,
        }

    def test_decoding_is_the_full_pass(self, engine: str) -> None:
        """One query at a time, `Sequence(1, start=t)` against a cache of t + 1 keys, as the causal whole."""
        n = 4
        dtype = FINEST
        mechanism = self.at(Sequence(n), None).to(dtype)
        q, k, v = (torch.randn(2, 3, n, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3))
        whole = self.attend(engine, q, k, v, position=mechanism, queries=Sequence(n), mask=Mask.causal())
        if whole is None:
            return
        steps = [
            attend_under(
                mechanism,
                q[:, :, t : t + 1],
                k[:, :, : t + 1],
                v[:, :, : t + 1],
                queries=Sequence(1, start=t),
                keys=Sequence(t + 1),
                backend=engine,
            )
            for t in range(n)
        ]
        leaves = with_parameters(mechanism, q, k, v)
        require_same_gradients(whole, torch.cat(steps, dim=2), leaves, "the causal whole and decoding")

    def test_decoding_beyond_what_was_built(self, engine: str) -> None:
        """Built for 3 tokens and grown to 5 by each of its rules for sequences, every step is the last row of the pass
        over the tokens so far. The same holds for vectors added to tokens."""
        n, far = 3, 5
        built = self.at(Sequence(n), None).to(FINEST)
        grown = {}
        for rule in built.growth:
            with contextlib.suppress(ValueError):  # a rule for grids alone
                grown[rule] = built.grow(Sequence(far), rule)
        assert bool(grown) == bool(built.growth), f"none of the rules {', '.join(built.growth)} grows a sequence"
        for rule, mechanism in grown.items():
            self.decodes(mechanism, engine, n, far, f"grown by the rule {rule!r}")

    def decodes(self, mechanism: Mechanism, engine: str, n: int, far: int, what: str) -> None:
        """Assert that steps n to far - 1, one query at a time, are the last rows of the passes up to them."""
        dtype = FINEST
        q, k, v = (torch.randn(2, 3, far, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3))
        rows: list[Tensor] = []
        steps: list[Tensor] = []
        for t in range(n, far):
            seen = slice(0, t + 1)
            passes: list[tuple[slice, Coordinates, Mask | None]] = [
                (seen, Sequence(t + 1), Mask.causal()),
                (slice(t, t + 1), Sequence(1, start=t), None),
            ]
            for results, (asked, queries, mask) in zip((rows, steps), passes, strict=True):
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
        leaves = with_parameters(mechanism, q, k, v)
        require_same_gradients(torch.stack(rows), torch.stack(steps), leaves, f"full passes and decoding, {what}")
        if mechanism.acts_on_tokens:
            x = torch.randn(2, far, 3 * WIDTH, dtype=dtype)
            added = [mechanism.embed(x[:, t : t + 1], Sequence(1, start=t)) for t in range(far)]
            same = torch.equal(torch.cat(added, dim=1), mechanism.embed(x, Sequence(far)))
            assert same, f"embed of one token at a time differs from embed of all, {what}"

    def test_extend(self) -> None:
        """Extended, it is bit for bit the same on its original length, and supports the longer one."""
        mechanism = self.at(Sequence(3), None)
        if AS_IS not in mechanism.growth and type(mechanism).extend is Mechanism.extend:
            with pytest.raises(ValueError, match="defined on longer sequences"):
                mechanism.extend(6)
            return
        longer = mechanism.extend(6)
        q, k, v = torch.randn(3, 1, 3, 6, WIDTH)
        short = (q[:, :, :3], k[:, :, :3], v[:, :, :3])
        one, other = (attend_under(each, *short, queries=Sequence(3)) for each in (mechanism, longer))
        assert torch.equal(one, other), "extended to 6 tokens, attention on 3 differs"
        attend_under(longer, q, k, v, queries=Sequence(6))
        x = torch.randn(1, 6, 3 * WIDTH)
        same = torch.equal(mechanism.embed(x[:, :3], Sequence(3)), longer.embed(x[:, :3], Sequence(3)))
        assert same, "extended to 6 tokens, embed of 3 differs"
        assert longer.embed(x, Sequence(6)).shape == x.shape
