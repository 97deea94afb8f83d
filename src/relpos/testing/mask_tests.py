"""Masks and batches: padding, packed documents, patterns, rows that see no key, positions of each batch element."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from relpos.core import Coordinates, DenseBias, Grid, Mask, Positions, RowRule, Sequence
from relpos.patterns import big_bird, dilated, fixed, local, longformer
from relpos.position.base.states import terms_of
from relpos.testing import devices
from relpos.testing.base import SuiteBase
from relpos.testing.calls import (
    WIDTH,
    attend_under,
    gradients_of,
    make_inputs,
    require_close,
    require_near,
    require_same_gradients,
    states_of,
    with_parameters,
)
from relpos.testing.engines import FINEST, lacking

PATTERNS = {
    "local": local(3),
    "dilated": dilated(9, 3, 2),
    "fixed": fixed(9, 3),
    "Longformer": longformer(9, 3, [0]),
    "BigBird": big_bird(9, 2, global_blocks=1, random_blocks=1, heads=3),
}
"""Masks of 9 queries and 9 keys, one of each kind."""


class MaskTests(SuiteBase):
    """Attention under masks, in every engine."""

    @classmethod
    def asked(cls) -> dict[str, bool]:
        """Padding and packing need positions on one axis."""
        scattered = 1 in cls.axes and cls.irregular
        return {
            **super().asked(),
            "test_left_padding_is_right_padding": scattered,
            "test_packed_is_separate": scattered,
            "test_batched_places": scattered,
        }

    def test_left_padding_is_right_padding(self, engine: str) -> None:
        """Three and five real tokens in rows of six: the padding's side changes neither values nor gradients."""
        lengths, n = (3, 5), 6
        dtype = FINEST
        mechanism = self.at(Sequence(n), None).to(dtype)
        tokens = [torch.randn(3, length, 3, 3, WIDTH, dtype=dtype) for length in lengths]  # heads, n, qkv, ...
        results: list[dict[str, Tensor]] = []
        for left in (False, True):
            packed = torch.randn(2, 3, n, 3, WIDTH, dtype=dtype)
            positions, valid = torch.zeros(2, n, dtype=torch.long), torch.zeros(2, n, dtype=torch.bool)
            spans = [slice(n - length, n) if left else slice(0, length) for length in lengths]
            for b, (span, real) in enumerate(zip(spans, tokens, strict=True)):
                packed[b, :, span] = real[:, :, 0]
                positions[b, span] = torch.arange(lengths[b])
                valid[b, span] = True
            q, k, v = (packed[:, :, :, part].clone().requires_grad_() for part in range(3))
            mask = Mask.padding(valid)
            if self.causal:
                order = torch.arange(n)
                mask = mask & Mask.causal(order, order)
            coordinates = Positions(positions, low=0, high=n - 1)
            output = self.attend(engine, q, k, v, position=mechanism, queries=coordinates, mask=mask)
            if output is None:
                return
            assert not output[~valid[:, None, :].expand(2, 3, n)].any(), "the output of padding is not 0"
            kept = torch.cat([output[b, :, span].flatten() for b, span in enumerate(spans)])
            upstream = torch.linspace(-1, 1, kept.numel(), dtype=dtype)
            leaves = with_parameters(mechanism, q, k, v)
            grads = torch.autograd.grad((kept * upstream).sum(), list(leaves.values()), allow_unused=True)
            found = {f"gradient of {name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}
            for name in ("gradient of q", "gradient of k", "gradient of v"):
                found[name] = torch.cat([found[name][b, :, span].flatten() for b, span in enumerate(spans)])
            results.append({"output": kept, **found})
        right, other = results
        assert list(right) == list(other)
        for name in right:
            require_near(right[name], other[name], f"{name}, padded right and left")

    def test_packed_is_separate(self, engine: str) -> None:
        """Documents of 2, 1 and 4 tokens in one row, each counting from 0, equal each of them alone."""
        lengths = (2, 1, 4)
        dtype = FINEST
        mechanism = self.at(Sequence(max(lengths)), None).to(dtype)
        n = sum(lengths)
        q, k, v = (torch.randn(1, 3, n, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3))
        segments = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
        positions = torch.cat([torch.arange(length) for length in lengths])
        mask = Mask.packed(segments)
        if self.causal:
            mask = mask & Mask.causal()
        coordinates = Positions(positions, low=0, high=max(lengths) - 1)
        together = self.attend(engine, q, k, v, position=mechanism, queries=coordinates, mask=mask)
        if together is None:
            return
        edges = [0, *itertools.accumulate(lengths)]
        alone = [
            attend_under(
                mechanism,
                *(x[:, :, a:b] for x in (q, k, v)),
                queries=Sequence(b - a),
                mask=Mask.causal() if self.causal else None,
                backend=engine,
            )
            for a, b in itertools.pairwise(edges)
        ]
        leaves = with_parameters(mechanism, q, k, v)
        require_same_gradients(together, torch.cat(alone, dim=2), leaves, "documents packed and alone")

    def test_batched_places(self, engine: str) -> None:
        """Each element of a batch with its own positions, near and far, equals that element alone."""
        dtype = FINEST
        prefix = int(self.prefixes)
        mechanism = self.at(Sequence(100, prefix=prefix), None).to(dtype)
        positions = torch.tensor([[0, 7, 20], [5, 90, 0]])
        q, k, v = torch.randn(3, 2, 3, prefix + 3, WIDTH, dtype=dtype)
        x = torch.randn(2, prefix + 3, 3 * WIDTH, dtype=dtype)
        mask = Mask.causal() if self.causal else None
        every = Positions(positions, low=0, high=99, prefix=prefix)
        together = self.attend(engine, q, k, v, queries=every, position=mechanism, mask=mask)
        if together is None:
            return
        for b in range(2):
            one, own = slice(b, b + 1), Positions(positions[b], low=0, high=99, prefix=prefix)
            alone = attend_under(mechanism, q[one], k[one], v[one], queries=own, backend=engine, mask=mask)
            require_near(together[one], alone, f"element {b} in a batch and alone")
            embedded = mechanism.embed(x, every)[one], mechanism.embed(x[one], own)
            require_near(*embedded, f"tokens of element {b} in a batch and alone")

    def test_under_patterns(self, engine: str) -> None:
        """A pattern equals a dense bias of 0 and -inf. A row rule, which uses the mask, equals the reference."""
        where: Coordinates = Sequence(9) if 1 in self.axes else Grid(*(1,) * (self.axes[0] - 2), 3, 3)
        dtype = FINEST
        mechanism = self.at(where, None).to(dtype)
        q, k, v = leaves = [torch.randn(1, 3, 9, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]
        terms = terms_of(mechanism, where, None, states_of(mechanism, q, k))
        named = with_parameters(mechanism, q, k, v)
        wanted = {name: x for name, x in named.items() if x.requires_grad}
        for pattern_name, pattern in PATTERNS.items():
            mask = pattern & Mask.causal() if self.causal else pattern
            lack = self.lacks.get(engine) or lacking(engine, mechanism, where, None, mask=mask)
            if lack is not None:
                with pytest.raises(NotImplementedError, match=lack):
                    attend_under(mechanism, *leaves, queries=where, mask=mask, backend=engine)
                continue
            ours = attend_under(mechanism, *leaves, queries=where, mask=mask, backend=engine)
            if any(isinstance(term, RowRule) for term in terms):
                theirs = devices.attention(*leaves, position=terms, mask=mask, backend="reference")
            else:
                allowed = mask.dense(9, 9)
                dense = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf)
                theirs = devices.attention(*leaves, position=terms + DenseBias(dense), backend="reference")
            require_close(ours, theirs, 1e-9, f"output under {pattern_name}")
            upstream = torch.linspace(-1, 1, ours.numel(), dtype=dtype).view_as(ours)
            found = [
                torch.autograd.grad(x, list(wanted.values()), upstream, allow_unused=True, retain_graph=True)
                for x in (ours, theirs)
            ]
            for name, mine, other in zip(wanted, *found, strict=True):
                what = f"gradient of {name} under {pattern_name}"
                assert (mine is None) == (other is None), f"{what}: missing on one side"
                if mine is not None and other is not None:
                    require_close(mine, other, 1e-9, what)

    def test_rows_that_see_nothing(self, engine: str) -> None:
        """0 and a gradient of 0, never NaN, for q, k, v and every parameter."""
        case = self.cases()[0] if len(self.cases()) == 1 else self.cases()[1]
        mechanism, given = self.made(case), make_inputs(case, torch.float32)
        leaves = [x.requires_grad_() for x in (given.q, given.k, given.v)]
        blind = torch.full((case.queries.count,), -1)
        mask = Mask.packed(blind, torch.zeros(leaves[1].shape[2]).long())
        arguments: dict[str, Any] = {"position": mechanism, "queries": case.queries, "keys": case.keys}
        output = self.attend(engine, *leaves, mask=mask, **arguments)
        if output is None:
            return
        assert not output.any(), "the output of a query that sees no key is not 0"
        for name, gradient in gradients_of(output, given, mechanism, leaves).items():
            assert not gradient.isnan().any(), f"gradient of {name}: NaN where no query sees a key"
            assert not gradient.any(), f"gradient of {name}: not 0 where no query sees a key"
