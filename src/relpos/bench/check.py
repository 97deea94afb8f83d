"""Whether a peer computes what it is timed at: output and gradients against the reference in float64.

Checked is the case shrunk to 512 tokens and, of relpos' engines and up to 4,096 tokens, one head of it at full length.
`auto` is checked by the engine that it takes for the whole case, which may not be the one it takes for a small one. An
error is green where, by its root mean square and by its largest number,

    error <= 4 * error of the reference in the case's own dtype + eps * size of the result

NaN is red. Of a layer the product inside is checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from relpos.bench.cases import Case
from relpos.bench.inputs import make
from relpos.bench.modules import op_case
from relpos.bench.peers import Peer, engine_peer, taken

SMALL, LARGE = 512, 4096
_FACTOR = 4.0


class Exact:
    """What the reference says of one small case: in float64, and in the case's dtype."""

    def __init__(self, case: Case) -> None:
        self.case = case
        reference = engine_peer("reference")
        self.exact = reference.build(make(case, torch.float64))()
        self.plain = reference.build(make(case))()

    def fault(self, results: Sequence[Tensor]) -> str | None:
        """What is wrong with results, or None."""
        learned = [f"gradient of parameter {index}" for index in range(1, len(results) - 3)]
        names = ["output", "gradient of q", "gradient of k", "gradient of v", *learned][: len(results)]
        for name, actual, exact, plain in zip(names, results, self.exact, self.plain, strict=True):
            fault = _fault(actual, exact, plain, torch.finfo(getattr(torch, self.case.dtype)).eps)
            if fault is not None:
                return f"{name} of {self.case.name}: {fault}"
        return None


def _fault(actual: Tensor, exact: Tensor, plain: Tensor, eps: float) -> str | None:
    actual, exact, plain = (x.detach().double() for x in (actual, exact, plain))
    if actual.shape != exact.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(exact.shape)}"
    for name, size in (("RMS", _rms), ("largest", _largest)):
        error, allowed = size(actual - exact), _FACTOR * size(plain - exact) + eps * size(exact)
        if not error <= allowed:
            return f"{name} error {error:.2g}, allowed {allowed:.2g}"
    return None


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def small_cases(case: Case, *, ours: bool) -> tuple[Case, ...]:
    """The cases by which a case is checked."""
    op = op_case(case)
    small = op.shrunk(SMALL)
    long = SMALL < op.count - op.prefix <= LARGE
    return (small, op.one_head()) if ours and long else (small,)


def faults(case: Case, peers: Sequence[Peer], engines: Sequence[str]) -> dict[str, str]:
    """The peers that are red, and why. A peer that cannot run a small case is red too."""
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
    """An error in one line."""
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0] if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {lines[0]}"
