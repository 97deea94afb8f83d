"""One call through engines, each compared with the oracle."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

import relpos
from fuzz import plain
from fuzz.building import Built, build
from fuzz.description import Described
from fuzz.plain_bounds import Bounds, bounds
from fuzz.tiles import set_to

ENGINES = ("reference", "sdpa", "streaming")
NOT_SERVED = "expected a backend that supports this call"


@dataclass
class Outcome:
    """What became of one call.

    Attributes:
        served: the engines that did it. failures: engine to what was wrong.
        worst: engine to the largest share of what was allowed.
    """

    served: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)


def check(call: Described, engines: tuple[str, ...] = ENGINES) -> Outcome:
    """Run a call through the engines that serve it and compare all they return with the oracle."""
    outcome = Outcome()
    try:
        built = build(call)
    except Exception:  # a description that is no valid call is a fault of the fuzzer, or of the library
        outcome.failures["building"] = traceback.format_exc(limit=-3)
        return outcome
    truth: Judged | None = None
    for engine in engines:
        try:
            with set_to(call.tiles):
                results = run(built, engine, call.autocast)
        except NotImplementedError as error:
            if not str(error).startswith(NOT_SERVED):
                outcome.failures[engine] = traceback.format_exc(limit=-2)
            continue
        except Exception:
            outcome.served.append(engine)
            outcome.failures[engine] = traceback.format_exc(limit=-2)
            continue
        outcome.served.append(engine)
        if call.dropout > 0 and engine == "sdpa":  # PyTorch's own, of other pairs
            continue
        try:
            truth = truth_of(built) if truth is None else truth
        except Exception:
            outcome.failures["oracle"] = traceback.format_exc(limit=-2)
            return outcome
        wrong, share = _compare(built, results, truth)
        outcome.worst[engine] = share
        if wrong:
            outcome.failures[engine] = "; ".join(wrong)
    return outcome


Results = tuple[Tensor, Tensor | None, dict[str, Tensor]]


def run(built: Built, engine: str, autocast: bool) -> Results:
    torch.default_generator.manual_seed(built.seed)
    before = {name: x._version for name, x in built.tensors.items()}
    with torch.autocast(built.arguments["q"].device.type, torch.bfloat16, enabled=autocast):
        found = relpos.attention(**built.arguments, backend=engine)
    out, lse = found if isinstance(found, tuple) else (found, None)
    results = [(x, up) for x, up in ((out, built.d_out), (lse, built.d_lse)) if x is not None and up is not None]
    results = [(x, up) for x, up in results if x.requires_grad]
    gradients: dict[str, Tensor] = {}
    if results and built.leaves:
        ends, upstream = zip(*results, strict=True)
        leaves = list(built.leaves.values())
        every = torch.autograd.grad(ends, leaves, upstream, allow_unused=True)
        for name, leaf, gradient in zip(built.leaves, leaves, every, strict=True):
            gradients[name] = torch.zeros_like(leaf) if gradient is None else gradient
    for name, x in built.tensors.items():
        assert x._version == before[name], f"{name} was changed in place"
    return out.detach(), None if lse is None else lse.detach(), gradients


Judged = tuple[plain.Truth, Bounds]


def truth_of(built: Built) -> Judged:
    """The oracle's results, and by how much each may be missed."""
    d_out, d_lse = (None if x is None else x.double() for x in (built.d_out, built.d_lse))
    wanted = list(built.leaves)
    truth, inside = plain.exact(built.plain, wanted, d_out, d_lse)
    return truth, bounds(built.plain, truth, inside, wanted, d_out, d_lse, built.precision)


def _compare(built: Built, results: Results, judged: Judged) -> tuple[list[str], float]:
    """What differs by more than it may, and the largest share of what is allowed."""
    (out, lse, gradients), (truth, allowed) = results, judged
    wrong: list[str] = []
    worst = 0.0
    own = built.dtype
    wide = torch.promote_types(own, torch.float32)
    asked = [("output", out, truth.out, allowed.out, own)]
    if built.arguments["return_lse"]:
        if lse is None:
            return ["no log-sum-exp"], 0.0
        asked.append(("log-sum-exp", lse, truth.lse, allowed.lse, wide))
    for name, exact in truth.gradients.items():
        if name not in gradients:
            if exact.any():
                wrong.append(f"no gradient of {name}")
            continue
        asked.append((f"gradient of {name}", gradients[name], exact, allowed.gradients[name], built.leaves[name].dtype))
    for what, actual, exact, most, dtype in asked:
        if actual.dtype != dtype or actual.shape != exact.shape:
            wrong.append(f"{what}: {actual.dtype} {tuple(actual.shape)}, expected {dtype} {tuple(exact.shape)}")
            continue
        one = _differs(what, actual.double(), exact, most, torch.finfo(dtype))
        worst = max(worst, one[1])
        if one[0] is not None:
            wrong.append(one[0])
    return wrong, worst


def _differs(what: str, actual: Tensor, exact: Tensor, allowed: Tensor, dtype: torch.finfo) -> tuple[str | None, float]:
    if not exact.numel():
        return None, 0.0
    infinite = exact.isinf()
    if not torch.equal(actual[infinite], exact[infinite]):
        return f"{what}: infinities differ", torch.inf
    actual, exact = torch.where(infinite, 0.0, actual), torch.where(infinite, 0.0, exact)
    allowed = torch.where(infinite, 0.0, allowed) + dtype.eps * exact.abs() + dtype.tiny * dtype.eps
    error = (actual - exact).abs()
    if error.isnan().any():
        return f"{what}: NaN in {int(error.isnan().sum())} of {error.numel()}", torch.inf
    share = error / allowed
    worst = float(share.max())
    if worst <= 1:
        return None, worst
    place = tuple(torch.unravel_index(share.argmax(), share.shape))
    index = tuple(int(x) for x in place)
    largest = float(exact.abs().max())
    return (
        f"{what}: {float(actual[place]):.6g} at {index}, exactly {float(exact[place]):.6g}; "
        f"error {float(error[place]):.3g}, allowed {float(allowed[place]):.3g}; "
        f"largest error {float(error.max()):.3g} of numbers up to {largest:.3g}"
    ), worst


def share_of_allowed(judged: Judged, name: str, x: Tensor) -> float:
    """How near to its bound a result comes: "output", or the gradient of a tensor by its name."""
    truth, allowed = judged
    pair = (truth.out, allowed.out) if name == "output" else (truth.gradients[name], allowed.gradients[name])
    return _differs(name, x.double(), *pair, torch.finfo(x.dtype))[1]


@dataclass
class Tally:
    """How many calls each engine did, which failed and how near to its bound it came."""

    calls: int = 0
    served: Counter[str] = field(default_factory=Counter)
    worst: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.calls += 1
        self.served.update(outcome.served)
        for engine, share in outcome.worst.items():
            self.worst[engine] = max(share, self.worst.get(engine, 0.0))
