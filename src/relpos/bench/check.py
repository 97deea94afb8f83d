"""Check that a peer computes its case correctly: output and gradients against the reference in float64.

A small case is checked whole. A larger one is shrunk to 512 tokens and two elements of the batch; relpos's engines are
also checked with one head at full length up to 4,096 tokens. `auto` is checked by the engine that it chooses for the
whole case, as it may choose another for a small one. An error is green if

    rms(error) <= factor * rms(cost) + eps * rms(size)
    max(error) <= 2 * factor * max(cost) + 8 * eps * max(size)

where `cost` is the error of the reference in the case's own dtype, and the factor is 2, or 1.1 in half precision.
Nothing here is more exact than float64, so its cost also includes 1.5 times float32's error, scaled to float64's eps;
the additional half covers the error of the float64 reference. `size` is the result's, or the root mean square of the
largest gradient if that is larger: behind a softmax a gradient is a difference of terms of that size. The tests of this
project use the same rule. NaN is red. For a layer, the attention inside is checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from relpos.bench.cases import Case
from relpos.bench.inputs import make
from relpos.bench.modules import op_case
from relpos.bench.peers import Peer, engine_peer, is_small, taken

SMALL, LARGE = 512, 4096
_FACTOR = {torch.float32: 2.0, torch.float64: 2.0, torch.bfloat16: 1.1, torch.float16: 1.1}


class Exact:
    """The reference's results for one small case: in float64, and in the case's dtype."""

    def __init__(self, case: Case) -> None:
        self.case = case
        reference = engine_peer("reference")
        self.exact = reference.build(make(case, torch.float64))()
        self.plain = reference.build(make(case))()
        if case.dtype == "float64":
            unit = 1.5 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
            coarse = reference.build(make(case, torch.float32))()
            results = zip(self.exact, self.plain, coarse, strict=True)
            self.plain = tuple(x + (own - x).abs() + (rough - x).abs() * unit for x, own, rough in results)

    def fault(self, results: Sequence[Tensor]) -> str | None:
        """The first fault of the results, or None."""
        learned = [f"gradient of parameter {index}" for index in range(1, len(results) - 3)]
        names = ["output", "gradient of q", "gradient of k", "gradient of v", *learned][: len(results)]
        terms = max((_rms(x.detach().double()) for x in self.exact[1:]), default=0.0)
        for name, actual, exact, plain in zip(names, results, self.exact, self.plain, strict=True):
            fault = _fault(actual, exact, plain, getattr(torch, self.case.dtype), 0.0 if name == "output" else terms)
            if fault is not None:
                return f"{name} of {self.case.name}: {fault}"
        return None


def _fault(actual: Tensor, exact: Tensor, plain: Tensor, dtype: torch.dtype, terms: float = 0.0) -> str | None:
    actual, exact, plain = (x.detach().double() for x in (actual, exact, plain))
    if actual.shape != exact.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(exact.shape)}"
    factor, eps = _FACTOR[dtype], torch.finfo(dtype).eps
    for name, size, times, units in (("RMS", _rms, factor, 1), ("largest", _largest, 2 * factor, 8)):
        error = size(actual - exact)
        allowed = times * size(plain - exact) + units * eps * max(size(exact), terms)
        if not error <= allowed:
            return f"{name} error {error:.2g}, allowed {allowed:.2g}"
    return None


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def small_cases(case: Case, *, ours: bool) -> tuple[Case, ...]:
    """The smaller cases that check a case."""
    op = op_case(case)
    if is_small(op):
        return (op,)
    small = op.shrunk(SMALL)
    long = SMALL < op.count - op.prefix <= LARGE
    return (small, op.one_head()) if ours and long else (small,)


def faults(case: Case, peers: Sequence[Peer], engines: Sequence[str]) -> dict[str, str]:
    """The red peers, each with its fault. A peer that cannot run a small case is red too."""
    whole = op_case(case)
    ours = {f"relpos-{engine}": engine_peer(taken(whole, engine) or engine) for engine in engines}
    exact: dict[Case, Exact] = {}
    red: dict[str, str] = {}
    for peer in peers:
        if not peer.exact:
            continue
        runner = ours.get(peer.name, peer)
        for small in small_cases(case, ours=peer.name in ours):
            known = exact.setdefault(small, exact.get(small) or Exact(small))
            try:
                fault = known.fault(runner.build(make(small))())
            except Exception as error:
                fault = first_line(error)
            if fault is not None:
                red[peer.name] = fault
                break
    return red


def first_line(error: Exception) -> str:
    """An error as one line."""
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0] if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {lines[0]}"
