"""Whether an engine agrees with the reference: output, log-sum-exp and every gradient of one call.

The reference runs on the CPU, in float64 and in the dtype of the call (for a float64 call in float32, whose error is
then scaled down). `cost` is the error of the second. `size` is the root mean square of the result; for a gradient, that
of the largest gradient, because gradients through a softmax are differences of larger terms. An engine agrees if

    rms(error) <= 2 * rms(cost) + rounding * size
    max(error) <= 4 * max(cost) + 8 * rounding * max(size, largest result)
    rounding    = eps(dtype) + sqrt(tokens) * eps(dtype of sums)                 twice that in float64

The dtype is that of the call, or of the gradient if that is coarser (a float32 table in a float64 call).

The first summands are the rule of the tests. The others allow for any order of summation: adding n rounded numbers one
by one has an error of about sqrt(n) eps, a random walk, and the order of the reference may have less. Results of a few
numbers only need the second line. NaN disagrees, and so does an infinity that the reference does not have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from relpos.engines.call import Call
from relpos.engines.engine import Engine


@dataclass(frozen=True)
class Difference:
    """How far an engine is from the reference.

    Attributes:
        output, gradients: the largest error of the output and log-sum-exp, and of all gradients, relative to the
            largest value of the same result.
        fault: what differs by more than rounding, in words, or None.
        seconds: the time of the engine's forward and backward, including the compilation of its kernels.
    """

    output: float
    gradients: float
    fault: str | None
    seconds: float


_FEW = 16
"""With fewer values, a root mean square error says nothing."""

_Tensors = dict[str, Tensor | None]


class Expected:
    """The reference's results of one call, to compare any number of engines with.

    Args:
        reference: the reference engine.
        make: makes the call on the CPU, with a seed if it has dropout. Gradients are those of q, k, v and of the
            terms' tensors that require them, except for engines without the latter.
    """

    def __init__(self, reference: Engine, make: Callable[[], Call]) -> None:
        self.reference = reference
        with _isolated(torch.device("cpu")):
            self.call = make()
        self._known: dict[tuple[bool, bool], tuple[_Tensors, _Tensors]] = {}

    def difference(self, engine: Engine, device: torch.device) -> Difference:
        """How far an engine on a device is from the reference. It uses no state of the caller and no random generator.

        Raises:
            NotImplementedError: the engine does not support the call.
        """
        with _isolated(device):
            learned, call = True, self.call
            if engine.unsupported(_copy(call, device)) is not None:  # perhaps because of a gradient of the terms
                learned, call = False, _without_learned(call)
                lack = engine.unsupported(_copy(call, device))
                if lack is not None:
                    raise NotImplementedError(lack)
            start = time.perf_counter()
            mine = {name: None if x is None else x.cpu() for name, x in _results(engine, _copy(call, device)).items()}
            seconds = time.perf_counter() - start
            return self._compare(mine, learned, seconds)

    def _right(self, learned: bool, with_lse: bool) -> tuple[_Tensors, _Tensors]:
        """The reference's results in float64, and in the call's dtype or float32."""
        if (learned, with_lse) not in self._known:
            call = self.call if learned else _without_learned(self.call)
            narrow = torch.float32 if call.q.dtype == torch.float64 else None
            exact, plain = (_results(self.reference, _copy(call, dtype=x), with_lse) for x in (torch.float64, narrow))
            self._known[learned, with_lse] = exact, plain
        return self._known[learned, with_lse]

    def _compare(self, mine: _Tensors, learned: bool, seconds: float) -> Difference:
        exact, plain = self._right(learned, mine["log-sum-exp"] is not None)
        gradients = [x for name, x in exact.items() if name.startswith("gradient") and x is not None]
        terms = max((_rms(x) for x in gradients), default=0.0)
        tokens = max(self.call.q.shape[2], self.call.k.shape[2])
        far = {"output": 0.0, "gradients": 0.0}
        faults = []
        for name, right in exact.items():
            ours, own = mine[name], plain[name]
            if right is None or ours is None or own is None:  # the engine has no log-sum-exp
                continue
            kind = "gradients" if name.startswith("gradient") else "output"
            dtypes = (self.call.q.dtype, ours.dtype) if kind == "gradients" else (self.call.q.dtype,)
            share, fault = _compare(ours, right, own, dtypes, tokens, terms if kind == "gradients" else 0.0)
            if name == "output" and ours.dtype != self.call.q.dtype:
                fault = f"{ours.dtype} instead of {self.call.q.dtype}"
            far[kind] = max(far[kind], share)
            faults += [] if fault is None else [f"{name}: {fault}"]
        more = f", and {len(faults) - 1} more differ" if len(faults) > 1 else ""
        return Difference(far["output"], far["gradients"], faults[0] + more if faults else None, seconds)


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Enable gradients; disable the caller's autocast, inference mode and hooks on saved tensors."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        saved_tensors_hooks(lambda x: x, lambda x: x),  # else a checkpoint around the caller would see ours
        torch.autocast("cpu", enabled=False),
        torch.autocast(device.type, enabled=False),
        torch.cuda.device(device if device.type == "cuda" else -1),
    ):
        yield


def _compare(
    mine: Tensor, exact: Tensor, plain: Tensor, dtypes: tuple[torch.dtype, ...], tokens: int, terms: float
) -> tuple[float, str | None]:
    """The largest relative error, and what is wrong, in words, or None."""
    mine, exact, plain = (x.detach().double().cpu() for x in (mine, exact, plain))
    if mine.shape != exact.shape:
        return math.inf, f"shape {tuple(mine.shape)} instead of {tuple(exact.shape)}"
    if mine.isnan().any():
        return math.inf, "NaN"
    infinite = exact.isinf()
    if not torch.equal(mine[infinite], exact[infinite]):
        return math.inf, "finite where it should be infinite"
    mine, exact, plain = mine[~infinite], exact[~infinite], plain[~infinite]
    sums = torch.finfo(torch.promote_types(dtypes[0], torch.float32)).eps
    unit = sums / torch.finfo(torch.float32).eps
    rounding = max(torch.finfo(dtype).eps for dtype in dtypes) + math.sqrt(tokens) * sums
    if dtypes[0] == torch.float64:  # the expected result is rounded as much
        rounding *= 2
    largest = _largest(exact)
    error = _largest(mine - exact)
    share = error / largest if largest else error
    for what, found, cost, size, factor, units in (
        ("root mean square", _rms(mine - exact), _rms(plain - exact), max(_rms(exact), terms), 2, 1),
        ("largest", error, _largest(plain - exact), max(largest, terms), 4, 8),
    ):
        allowed = factor * unit * cost + units * rounding * size
        if not found <= allowed and (what == "largest" or mine.numel() >= _FEW):
            return share, f"{what} error {found:.2g}, but rounding explains only {allowed:.2g}"
    return share, None


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def _largest(x: Tensor) -> float:
    return float(x.double().abs().max()) if x.numel() else 0.0


def _without_learned(call: Call) -> Call:
    """The call with terms that require no gradient."""

    def fixed(x: Tensor) -> Tensor:
        return x.detach() if x.requires_grad else x

    return replace(call, terms=pytree.tree_map_only(Tensor, fixed, call.terms))


def _copy(call: Call, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Call:
    """The call with copies of its tensors, on a device or in a dtype. An index that terms share stays shared: it
    decides which kernels run."""
    indices: dict[int, Tensor] = {}

    def copy(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in indices:
            return indices[id(x)]
        own = x.detach().to(device or x.device)
        if not own.is_floating_point():
            indices[id(x)] = own
        elif dtype is not None:
            own = own.to(dtype)
        return own.clone().requires_grad_() if x.requires_grad else own

    terms, mask = pytree.tree_map(copy, (call.terms, call.mask))
    return replace(call, q=copy(call.q), k=copy(call.k), v=copy(call.v), terms=terms, mask=mask, seed=copy(call.seed))


def _results(engine: Engine, call: Call, with_lse: bool = True) -> _Tensors:
    """Output, log-sum-exp if the engine has one, and the gradients of a function of both."""
    out, lse = engine.run(call)
    ends, upstream = [out], [_wave(out)]
    if lse is not None and with_lse:
        seen = ~lse.isinf()
        ends.append(torch.where(seen, lse, 0))
        upstream.append(_wave(lse) * seen)
    learned = [
        (type(term).__name__, x) for term in call.terms for x in pytree.tree_leaves(term)
        if isinstance(x, Tensor) and x.requires_grad
    ]  # fmt: skip
    leaves = {"q": call.q, "k": call.k, "v": call.v}
    leaves |= {f"{name} ({number + 1})": x for number, (name, x) in enumerate(learned)}
    found = torch.autograd.grad(ends, list(leaves.values()), upstream, allow_unused=True)
    gradients = {
        f"gradient of {name}": torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(leaves.items(), found, strict=True)
    }
    return {"output": out, "log-sum-exp": lse if with_lse else None, **gradients}


def _wave(x: Tensor) -> Tensor:
    """Values between -1 and 1 in the shape of x, the same for every dtype up to rounding."""
    numbers = torch.arange(x.numel(), dtype=torch.float64, device="cpu").view(x.shape)
    return torch.sin(1.7 * numbers + 0.3).to(torch.bfloat16).to(device=x.device, dtype=x.dtype)
