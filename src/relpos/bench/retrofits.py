"""A published model and its retrofitted copy, timed alternately: time and memory of a step, at each length."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.common.inputs import ModelInputs, inputs_for, takes_images
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
    """

    length: int | None
    published_ms: float
    retrofit_ms: float
    ratio: float
    published_mib: float
    retrofit_mib: float


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
    other = copy.deepcopy(model)
    report = retrofit(other, border=border, progress=lambda name: progress(f"verify {name}"))
    for one in (model, other):
        one.train(train)
    timings = []
    sized = takes_images(model) if inputs is None else not lengths
    for length in [None] if sized else lengths:
        given = inputs_for(model, length, batch) if inputs is None else inputs(length)
        pair = (model, other)
        memory = []
        for index, one in enumerate(pair):  # the first calls are not timed, only their memory is measured
            progress(f"{'images' if length is None else length}, memory, {('published', 'retrofit')[index]}")
            peak = PeakMemory(next(one.parameters()).device)
            _step(one, given, train)
            memory.append(peak.mib())
        times: tuple[list[float], list[float]] = [], []
        for turn in range(rounds):
            progress(f"{'images' if length is None else length}, round {turn + 1} of {rounds}")
            for index in (0, 1) if turn % 2 == 0 else (1, 0):
                times[index].append(_timed(pair[index], given, train))
        ratio = statistics.median(theirs / ours for theirs, ours in zip(*times, strict=True))
        medians = [statistics.median(one) for one in times]
        timings.append(RetrofitTiming(length, medians[0], medians[1], ratio, memory[0], memory[1]))
    return report, timings


def _timed(model: nn.Module, inputs: ModelInputs, train: bool) -> float:
    """Milliseconds of a step."""
    device = next(model.parameters()).device
    start = time.perf_counter()
    _step(model, inputs, train)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _step(model: nn.Module, inputs: ModelInputs, train: bool) -> None:
    """A forward pass; with `train`, also the gradients of all parameters."""
    with torch.set_grad_enabled(train):
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
