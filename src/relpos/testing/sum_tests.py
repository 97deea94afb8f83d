"""Sums: a mechanism plus a bias, and plus a rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos.core import PairRotations, QueryBias, Rotation, Scale
from relpos.engines import attention_weights
from relpos.position import ALiBi, RotaryEmbedding, Sum
from relpos.position.base.states import terms_of
from relpos.testing import devices, oracle
from relpos.testing.base import SuiteBase
from relpos.testing.calls import WIDTH, make_inputs, require_close, require_near, states_of
from relpos.testing.engines import FINEST, lacking


class SumTests(SuiteBase):
    """The sum of a mechanism and another, in every engine."""

    def test_composition(self) -> None:
        """With a bias, scores are the mechanism's plus that bias; with a rotation, q and k are rotated in the content
        product alone. Compared with loops, up to a constant per row, and between all engines that support both."""
        cases = self.cases()
        for case in cases[:: max(1, len(cases) // 3)]:
            mechanism, given = self.made(case, torch.float64), make_inputs(case, torch.float64)
            queries, keys = case.queries, case.queries if case.keys is None else case.keys
            states = states_of(mechanism, given.q, given.k)
            terms = terms_of(mechanism, case.queries, case.keys, states)
            own = attention_weights(given.q, given.k, position=terms).log()
            tokens = oracle.places(queries), oracle.places(keys)
            sums: list[tuple[ALiBi | RotaryEmbedding, Tensor]] = [
                (ALiBi(case.heads), oracle.alibi(case.heads, *tokens, "euclidean")[None].double())
            ]
            turns = any(isinstance(term, Rotation | PairRotations) for term in terms)
            if not turns and case.axes < 3:
                pairs, k = WIDTH // (2 * case.axes), oracle.heads_of(given.k, case.heads)
                q_turned, k_turned = (
                    oracle.rotated(x, where, case.axes, pairs, 100.0, "half")
                    for x, where in zip((given.q, k), tokens, strict=True)
                )
                scale, added_to_queries = terms.one(Scale), terms.of(QueryBias)
                u = sum((term.u[:, None] for term in added_to_queries), torch.zeros(1, 1, 1))  # is not rotated
                turned = (q_turned + u) @ k_turned.mT - (given.q + u) @ k.mT
                turned = turned * (WIDTH**-0.5 if scale is None else scale.value)
                sums.append((RotaryEmbedding(WIDTH, axes=case.axes, base=100.0), turned))
            for other, added in sums:
                wanted = (own + added).softmax(dim=-1)
                for total in (Sum([mechanism, other]), Sum([other, mechanism])):
                    what = f"weights of {' + '.join(type(part).__name__ for part in (mechanism, other))} ({case})"
                    both = total.terms(case.queries, case.keys, states=states)
                    found = attention_weights(given.q, given.k, position=both)
                    require_close(found, wanted, 1e-6, what)  # biases that are not learned are float32
                results = {}
                for engine in self.engines():
                    if engine not in self.lacks and lacking(engine, both) is None:
                        cast = given.to(FINEST)
                        results[engine] = devices.attention(cast.q, cast.k, cast.v, position=both, backend=engine)
                for engine, result in results.items():
                    require_near(result, results["reference"].to(result.dtype), f"{what}: {engine} and the reference")
