"""What is compared costs: time of a training step, all interleaved, and peak memory in a process of its own.

The models are the recipe's, first at the task's own number of tokens, then on larger images or longer texts that come
nearest to 1,024 and 4,096. At more tokens the batch shrinks, and at 4,096 there is one block, so that the dense engines
fit; every entry says its batch and depth. A figure is comparable with those of the same size only.

A model or a step of a person's own is timed at the task's own size alone, on its batches.

Where it is not position that is compared, the larger sizes are three of one block and one input each, so that their
figures tell how cost grows with N.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from relpos.comparison.memory import PeakMemory, keep_freed_memory
from relpos.comparison.run import warm_up
from relpos.comparison.settings import ComparisonSettings
from relpos.core import Mask
from relpos.data import Task
from relpos.engines import explain
from relpos.models import LanguageModel, VisionTransformer
from relpos.models.attending import pattern
from relpos.optim import Sophia
from relpos.position import Sum
from relpos.results import Cost, Time
from relpos.train import AUTOCAST, OURS, Procedure, estimate_hessian, make_optimizer, to_device


@dataclass(frozen=True)
class TimedSize:
    """A grid of tokens to time at, and how: `depth=None` is the recipe's; `warm` rounds are not counted."""

    grid: tuple[int, ...]
    batch_size: int
    depth: int | None
    warm: int
    rounds: int


LARGER = (1024, 4096)
"""Numbers of tokens that are timed besides the task's own; the last from two seeds on."""
GROWING = (1024, 2048, 4096)
"""The same where growth with N is asked for."""
_TOKENS_AT_ONCE = 4096


class _Step:
    """A model of one size with its optimizer: one call is one training step."""

    def __init__(
        self, name: str, size: TimedSize, settings: ComparisonSettings, task: Task, procedure: Procedure = OURS
    ) -> None:
        recipe, position = settings.of(name)
        self.depth = None if procedure.build else recipe.depth if size.depth is None else size.depth
        self.device = torch.device(settings.device)
        self.dtype = AUTOCAST[settings.precision]
        self.procedure = procedure
        torch.manual_seed(0)
        small = recipe if self.depth is None else replace(recipe, depth=self.depth)
        made = (
            procedure.model(small, task, position) if procedure.build else small.build(task, position, grid=size.grid)
        )
        self.model = made.to(self.device)
        self.tokens = math.prod(size.grid)
        if isinstance(made, VisionTransformer | LanguageModel):
            self.tokens = made.coordinates.count
        self.recipe = small
        self.masked = settings.what != "position"  # those are named as if no token were masked
        self.optimizer: torch.optim.Optimizer
        if settings.what == "position":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        else:
            self.optimizer = make_optimizer(small.optimizer, replace(small, learning_rate=1e-4).groups(self.model))
        own = procedure.build is not None or procedure.step is not None
        batch = next(task.batches(size.batch_size, 0)) if own else task.noise(size.grid, size.batch_size)
        self.batch = to_device(batch, self.device)

    def __call__(self) -> float:
        """Milliseconds of one step, with its share of Sophia's estimate, which is not made at every step."""
        estimating = self._timed(self._estimate) if isinstance(self.optimizer, Sophia) else 0.0
        return self._timed(self._step) + estimating / self.recipe.hessian_every

    def _timed(self, work: Callable[[], None]) -> float:
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return (time.perf_counter() - started) * 1e3

    def _estimate(self) -> None:
        estimate_hessian(self.recipe.optimizer, self.optimizer, self.model, *self.batch)

    def _step(self) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = self.procedure.loss(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def backend(self) -> str:
        """The engine that `auto` takes for this model's attention."""
        if not isinstance(self.model, VisionTransformer | LanguageModel):
            return "the model's own"
        block = self.model.block_config
        q = torch.empty(1, block.num_heads, self.tokens, block.dim // block.num_heads, device=self.device)
        position = self.model.attention_position[0]
        assert isinstance(position, Sum)
        if block.kind != "softmax":
            return "tiles" if block.kind == "flash" else block.kind  # the name that results.json has always had
        terms = position.terms(self.model.coordinates)
        if not self.masked:
            return explain(q, q, q, position=terms).backend
        mask = pattern(self.recipe.attention, self.model.coordinates)
        if isinstance(self.model, LanguageModel):
            mask = Mask.causal() if mask is None else Mask.causal() & mask
        mask = None if mask is None else mask.to(self.device)
        k = q[:, : block.num_kv_heads]
        return explain(q, k, k, position=terms, mask=mask).backend

    def state_per_parameter(self) -> float:
        """Numbers that the optimizer keeps for each parameter."""
        kept = sum(
            x.numel() for state in self.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)
        )
        return kept / sum(p.numel() for p in self.model.parameters() if p.requires_grad)


def _size(grid: tuple[int, ...]) -> TimedSize:
    tokens = math.prod(grid)
    batch_size = max(1, _TOKENS_AT_ONCE // tokens)
    if tokens < 512:
        return TimedSize(grid, batch_size, depth=None, warm=2, rounds=8)
    if tokens < 2048:
        return TimedSize(grid, max(1, batch_size // 2), depth=None, warm=1, rounds=3)
    return TimedSize(grid, batch_size, depth=1, warm=1, rounds=3)


def sizes(settings: ComparisonSettings, task: Task, procedure: Procedure = OURS) -> tuple[TimedSize, ...]:
    """The sizes that are timed: the task's own, alone in a quick comparison, then clearly larger ones.

    The largest takes as long as all others together, and comes from two seeds on: one seed is a first look.
    """
    if procedure.build is not None or procedure.step is not None:
        warm, rounds = (1, 2) if settings.quick else (2, 8)
        return (TimedSize(task.grid, settings.recipe.batch_size, depth=None, warm=warm, rounds=rounds),)
    grids, growing = [task.grid], settings.what != "position"
    larger: tuple[int, ...] = () if settings.quick else LARGER[:1] if settings.seeds == 1 else LARGER
    for tokens in GROWING if growing and not settings.quick else larger:
        by = tokens / math.prod(task.grid)
        if by > 2:
            grids.append(tuple(max(1, round(side * by ** (1 / len(task.grid)))) for side in task.grid))
    if growing:
        return (_size(grids[0]), *(TimedSize(grid, batch_size=1, depth=1, warm=1, rounds=5) for grid in grids[1:]))
    found = (_size(grid) for grid in grids)
    return tuple(replace(size, warm=1, rounds=2) if settings.quick else size for size in found)


def memory_sizes(settings: ComparisonSettings, task: Task, procedure: Procedure = OURS) -> tuple[int, ...]:
    """Which of `sizes` have their memory measured: of positions with one seed the largest alone."""
    every = range(len(sizes(settings, task, procedure)))
    return tuple(every[-1:] if settings.seeds == 1 and settings.what == "position" else every)


def _unable(error: Exception) -> str:
    """Why a size could not be measured; an error that is neither lack of memory nor of an engine is raised."""
    if isinstance(error, NotImplementedError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        return "out of memory"
    raise error


def time_steps(
    settings: ComparisonSettings, task: Task, watch: Callable[[str], None] | None = None, procedure: Procedure = OURS
) -> list[Cost]:
    """Time of a training step of everything at every size, without memory. Alone on the machine, on its own threads;
    freed memory is kept, as the runs keep it."""
    torch.set_num_threads(settings.timing_threads)
    keep_freed_memory()
    return [
        entry
        for size in sizes(settings, task, procedure)
        for entry in _time_size(size, settings, task, procedure, watch)
    ]


def _time_size(
    size: TimedSize,
    settings: ComparisonSettings,
    task: Task,
    procedure: Procedure,
    watch: Callable[[str], None] | None,
) -> list[Cost]:
    steps = {name: _Step(name, size, settings, task, procedure) for name in settings.names}
    milliseconds: dict[str, list[float]] = {name: [] for name in steps}
    reasons: dict[str, str] = {}
    for round_number in range(size.warm + size.rounds):
        for name, step in steps.items():
            if name in reasons:
                continue
            if watch is not None:
                watch(f"{step.tokens} tokens, {name}")
            try:
                elapsed = step()
            except Exception as error:
                reasons[name] = _unable(error)
                continue
            if round_number >= size.warm:
                milliseconds[name].append(elapsed)
    first = "none" if settings.what == "position" else settings.names[0]
    control = milliseconds.get(first, []) if first not in reasons else []
    entries = []
    for name, step in steps.items():
        times, left_out = milliseconds[name], name in reasons
        ratio = (
            None if left_out or not control else statistics.median(a / b for a, b in zip(times, control, strict=True))
        )
        low, median, high = (0.0,) * 3 if left_out else statistics.quantiles(times, n=4, method="inclusive")
        entry = Cost(
            step.tokens,
            size.batch_size,
            step.depth,
            step.backend(),
            position=name if settings.what == "position" else None,
            choice=None if settings.what == "position" else name,
            threads=torch.get_num_threads(),
            step_ms=None if left_out else Time(round(median, 2), round(low, 2), round(high, 2), len(times)),
            ratio=None if ratio is None else round(ratio, 3),
            state_per_parameter=None if settings.what == "position" else round(step.state_per_parameter(), 3),
            reason=reasons.get(name),
        )
        entries.append(entry)
    return entries


def memory_of_step(
    name: str, index: int, settings: ComparisonSettings, task: Task, procedure: Procedure = OURS
) -> float | None:
    """Peak memory of two training steps at a size, in MiB above the process's size before the model was built.

    Run it in a fresh process. None where memory does not suffice or no engine can do it.
    """
    torch.set_num_threads(settings.threads)
    device = torch.device(settings.device)
    first = "none" if procedure.build is None else settings.of(name)[1]
    warm_up(task, settings.recipe, device, settings.precision, first, procedure)
    memory = PeakMemory(device)
    try:
        step = _Step(name, sizes(settings, task, procedure)[index], settings, task, procedure)
        step()
        step()
    except Exception as error:
        _unable(error)
        return None
    return memory.mib()
