"""The cost of each choice: time of a training step, all interleaved, and peak memory, in a separate process.

The models follow the recipe, first at the task's own number of tokens, then on larger images or longer texts with
nearly 1,024 and 4,096 tokens. More tokens mean a smaller batch, and 4,096 mean one block, so that the dense engines
fit in memory. Every entry states its batch and depth. Compare only figures of the same size.

The user's own model or step is timed at the task's own size only, on the task's batches.

If something other than position is compared, there are three larger sizes, with one block and one input each, so that
their figures show how cost grows with N.
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
from relpos.models.attention_choice import pattern
from relpos.optim import Sophia
from relpos.position import Sum
from relpos.position.base.states import terms_at_rest
from relpos.results import Cost, Time
from relpos.train import AUTOCAST, OURS, Procedure, estimate_hessian, make_optimizer, to_device


@dataclass(frozen=True)
class TimedSize:
    """A grid of tokens to time, and how: `depth=None` is the recipe's depth; `warm` rounds are not counted."""

    grid: tuple[int, ...]
    batch_size: int
    depth: int | None
    warm: int
    rounds: int


LARGER = (1024, 4096)
"""Token counts to time besides the task's own; the last only with two or more seeds."""
GROWING = (1024, 2048, 4096)
"""The same if growth with N is measured."""
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
        self.masked = settings.what != "position"  # for position, `backend` ignores masks
        self.optimizer: torch.optim.Optimizer
        if settings.what == "position":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        else:
            self.optimizer = make_optimizer(small.optimizer, replace(small, learning_rate=1e-4).groups(self.model))
        own = procedure.build is not None or procedure.step is not None
        batch = next(task.batches(size.batch_size, 0)) if own else task.noise(size.grid, size.batch_size)
        self.batch = to_device(batch, self.device)

    def __call__(self) -> float:
        """Milliseconds of one step, plus its share of Sophia's estimate, which most steps skip."""
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
        """The engine that `auto` chooses for this model's attention."""
        if not isinstance(self.model, VisionTransformer | LanguageModel):
            return "the model's own"
        block = self.model.block_config
        q = torch.empty(1, block.num_heads, self.tokens, block.dim // block.num_heads, device=self.device)
        position = self.model.attention_position[0]
        assert isinstance(position, Sum)
        if block.kind != "softmax":
            return "tiles" if block.kind == "flash" else block.kind  # results.json keeps its old name
        terms = terms_at_rest(position, self.model.coordinates)
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
    """The sizes to time: the task's own, then, unless the comparison is quick, clearly larger ones.

    The largest takes as long as all others together. It needs two seeds, as one seed is a first look.
    """
    if procedure.build is not None or procedure.step is not None:
        warm, rounds = (1, 2) if settings.quick else (2, 8)
        return (TimedSize(task.grid, settings.recipe.batch_size, depth=None, warm=warm, rounds=rounds),)
    grids, growing = [task.grid], settings.what != "position"
    larger: tuple[int, ...] = () if settings.quick else LARGER[:1] if settings.seeds == 1 else LARGER
    for tokens in GROWING if growing and not settings.quick else larger:
        by = tokens / math.prod(task.grid)
        if by > 2:
            grids.append(tuple(max(1, round(size * by ** (1 / len(task.grid)))) for size in task.grid))
    if growing:
        return (_size(grids[0]), *(TimedSize(grid, batch_size=1, depth=1, warm=1, rounds=5) for grid in grids[1:]))
    found = (_size(grid) for grid in grids)
    return tuple(replace(size, warm=1, rounds=2) if settings.quick else size for size in found)


def memory_sizes(settings: ComparisonSettings, task: Task, procedure: Procedure = OURS) -> tuple[int, ...]:
    """The indices of `sizes` to measure memory at: all, or the largest for positions with one seed."""
    every = range(len(sizes(settings, task, procedure)))
    return tuple(every[-1:] if settings.seeds == 1 and settings.what == "position" else every)


def _unable(error: Exception) -> str:
    """Why a size could not be measured: no memory or no engine; any other error is raised again."""
    if isinstance(error, NotImplementedError):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
        return "out of memory"
    raise error


def time_steps(
    settings: ComparisonSettings, task: Task, watch: Callable[[str], None] | None = None, procedure: Procedure = OURS
) -> list[Cost]:
    """Time a training step of every choice at every size, without memory. Nothing else may run on the machine.

    It uses `timing_threads` and keeps freed memory, as training runs do."""
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

    Call it in a fresh process. None if memory is too small or no engine supports it.
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
