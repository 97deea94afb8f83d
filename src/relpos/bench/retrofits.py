"""A published model and its retrofitted copy, timed alternately: time and memory of a step, at each length."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.common.inputs import ModelInputs, inputs_for, takes_images
from relpos.adapters.common.retrofitted import is_swapped, route
from relpos.adapters.reporting import RetrofitReport
from relpos.adapters.retrofitting import retrofit
from relpos.comparison.memory import PeakMemory


@dataclass(frozen=True)
class RetrofitTiming:
    """The timing at one size.

    Attributes:
        length: tokens, frames or samples; None for images, which have the model's own size.
        published_ms, retrofit_ms: medians.
        ratio: median of published over retrofit, per round: above 1 the retrofit is faster.
        published_mib, retrofit_mib: peak memory above the starting level.
        tokens: those that the largest layer attends among, which a border is compared with; None if no layer was asked.
    """

    length: int | None
    published_ms: float
    retrofit_ms: float
    ratio: float
    published_mib: float
    retrofit_mib: float
    tokens: int | None = None


class RetrofitPair:
    """A model and its retrofitted copy.

    Args:
        border: of the copy; None for that of the device.
        always: let relpos compute at any size, in all layers that a retrofit with this border replaces.
        verify: the copy.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        border: int | None = None,
        always: bool = False,
        verify: bool = True,
        progress: Callable[[str], object] = lambda what: None,
    ) -> None:
        self.model, self.copy, self.progress = model, copy.deepcopy(model), progress
        self.report = retrofit(
            self.copy, verify=verify, border=border, progress=lambda name: progress(f"verify {name}")
        )
        self.routes = [route(one) for one in self.copy.modules() if is_swapped(one)]
        if always:
            for one in self.routes:
                one.border = 0

    def timings(
        self,
        lengths: Sequence[int],
        *,
        train: bool,
        rounds: int = 5,
        batch: int = 1,
        inputs: Callable[[int | None], dict[str, Any]] | None = None,
        half: bool = False,
    ) -> list[RetrofitTiming]:
        """Both, timed alternately; arguments as those of `compare_retrofit`."""
        for one in (self.model, self.copy):
            one.train(train)
        sized = takes_images(self.model) if inputs is None else not lengths
        return [
            self._timing(
                length, train, rounds, half, inputs_for(self.model, length, batch) if inputs is None else inputs(length)
            )
            for length in ([None] if sized else lengths)
        ]

    def _timing(
        self, length: int | None, train: bool, rounds: int, half: bool, given: dict[str, Any]
    ) -> RetrofitTiming:
        where, pair, memory = "images" if length is None else length, (self.model, self.copy), []
        for layer in self.routes:
            layer.asked = []
        for index, one in enumerate(pair):  # the first calls are not timed, only their memory is measured
            self.progress(f"{where}, memory, {('published', 'retrofit')[index]}")
            peak = PeakMemory(next(one.parameters()).device)
            _step(one, given, train, half)
            memory.append(peak.mib())
        pairs = max((size for layer in self.routes for size in layer.asked or ()), default=0)
        for layer in self.routes:
            layer.asked = None
        times: tuple[list[float], list[float]] = [], []
        for turn in range(rounds):
            self.progress(f"{where}, {'step' if train else 'forward'}, round {turn + 1} of {rounds}")
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                times[index].append(_timed(pair[index], given, train, half))
        ratio = statistics.median(theirs / ours for theirs, ours in zip(*times, strict=True))
        published, ours = (statistics.median(one) for one in times)
        return RetrofitTiming(length, published, ours, ratio, memory[0], memory[1], math.isqrt(pairs) or None)


def compare_retrofit(
    model: nn.Module,
    lengths: Sequence[int],
    *,
    train: bool,
    rounds: int = 5,
    batch: int = 1,
    border: int | None = None,
    inputs: Callable[[int | None], dict[str, Any]] | None = None,
    progress: Callable[[str], object] = lambda what: None,
) -> tuple[RetrofitReport, list[RetrofitTiming]]:
    """Retrofit a copy of a model, verify it, and time both alternately.

    Args:
        lengths: ignored for an image model.
        train: whether to run forward and backward; else a forward pass without gradients.
        inputs: a model's keyword arguments for a length, or for None without lengths; by default those of models of
            transformers, timm and torchvision.
    """
    compared = RetrofitPair(model, border=border, progress=progress)
    timings = compared.timings(lengths, train=train, rounds=rounds, batch=batch, inputs=inputs)
    return compared.report, timings


def border_by(timings: Sequence[RetrofitTiming]) -> int | None:
    """The border that timings of relpos at every length give: the tokens from which on it was never slower. None if it
    was slower at the longest, or no layer was asked."""
    found = None
    for one in reversed(timings):
        if one.ratio < 1.0:
            break
        found = one.tokens
    return found


def _timed(model: nn.Module, inputs: ModelInputs, train: bool, half: bool) -> float:
    """Milliseconds of a step."""
    device = next(model.parameters()).device
    start = time.perf_counter()
    _step(model, inputs, train, half)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _step(model: nn.Module, inputs: ModelInputs, train: bool, half: bool) -> None:
    """A forward pass, under autocast if in half precision; with `train`, also the gradients of all parameters."""
    kind = next(model.parameters()).device.type
    with torch.set_grad_enabled(train):
        with torch.autocast(kind, torch.bfloat16, enabled=half):
            output = model(**inputs)
        if train:
            sum(x.float().square().mean() for x in _tensors(output) if x.requires_grad).backward()  # type: ignore[union-attr]
            model.zero_grad(set_to_none=True)


def _tensors(output: Any) -> list[Tensor]:
    """The floating-point tensors in an output of nested dicts, tuples and lists; caches are not searched."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return [x for part in parts for x in _tensors(part)]
