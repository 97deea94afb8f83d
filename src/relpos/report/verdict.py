"""The verdict of a comparison: what it recommends, or why it is undecided and which command would decide.

The command repeats the comparison with more seeds, more steps, or both. Its time is estimated from the training times
of this comparison; measuring and timing come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean

from relpos.report.command import command_line, requested
from relpos.results import Results
from relpos_command.requests import CompareRequest

USUAL_STEPS = {"images": 400, "other": 400, "text": 480}
"""The recipes' steps by kind of task: a comparison with fewer is asked to train longer."""
_ENOUGH, _GOOD = 3, 5
"""Seeds that give an answer, and seeds for a publication."""
_LONGER = 4
"""By how many times training is made longer if nothing was learned in the usual steps."""
MOST_AT_ONCE = 8
"""Training runs at once on a CPU, at most, as `comparison.workers` has it."""


@dataclass(frozen=True)
class ComparisonVerdict:
    """What a comparison decides; `print` shows all of it.

    Attributes:
        decided: whether it recommends something.
        choose: the recommended names; empty while undecided.
        why: the reason, in one or two sentences.
        command: the command, or the call in Python, that would decide; None if decided, or if none would.
        seconds: how long that command trains, estimated from this comparison's times; None without times.
    """

    decided: bool
    choose: tuple[str, ...]
    why: str
    command: str | None = None
    seconds: float | None = None

    @property
    def lead(self) -> str:
        """The words before the command."""
        if self.seconds is None:
            return "To decide, run:"
        return f"To decide, run (about {_in_words(self.seconds)} of training, by the times of this run):"

    def __str__(self) -> str:
        return self.why if self.command is None else f"{self.why}\n{self.lead}\n{self.command}"


def undecided(results: Results, why: str, *, longer: bool = False) -> ComparisonVerdict:
    """A verdict with the command that would decide.

    Args:
        longer: whether nothing was learned yet, so that training must be longer.
    """
    request = _further(results, longer=longer)
    return ComparisonVerdict(False, (), why, command_line(results, request), _seconds(results, request))


def _further(results: Results, *, longer: bool) -> CompareRequest:
    """The request of the same comparison with more seeds, and more steps where they are few."""
    settings, usual = results.settings, USUAL_STEPS[results.task.kind]
    seeds, steps = settings.seeds, settings.recipe.steps
    ended = [len(results.runs(name)) + len(results.runs(name, diverged=True)) for name in results.names]
    if settings.quick or seeds == 1 or longer or min(ended) < seeds:
        more = max(_ENOUGH, seeds)
    else:
        more = _GOOD if seeds < _GOOD else 2 * seeds
    if settings.quick or steps < usual:
        steps = usual
    elif longer:
        steps = _LONGER * steps
    return replace(requested(settings), seeds=more, steps=steps, quick=False)


def _seconds(results: Results, request: CompareRequest) -> float | None:
    """The time to train all runs of a request, several at once, by the mean time of a step here.

    None if runs were on machines of several kinds: their times have no common mean.
    """
    runs = [run for run in results.records if run.diverged is None]
    if len({run.environment.kind for run in runs if run.environment is not None}) > 1:
        return None
    each = [run.train_seconds / run.settings["recipe"]["steps"] for run in runs]
    if not each or request.steps is None:
        return None
    kinds = len(results.names)
    if results.settings.what == "position" and results.settings.recipe.position_learning_rate_multiplier != 1:
        kinds += sum(any(run.parameters.position for run in results.runs(name)) for name in results.names)
    at_once = 1 if results.settings.device != "cpu" else min(MOST_AT_ONCE, results.environment.cores)
    return float(mean(each)) * request.steps * kinds * request.seeds / min(at_once, kinds * request.seeds)


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{max(5, 5 * round(seconds / 5))} seconds"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.0f} hours" if seconds >= 5 * 3600 else f"{seconds / 3600:.1f} hours"
