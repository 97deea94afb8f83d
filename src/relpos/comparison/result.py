"""What `relpos.compare` returns: the table, the best, the page and the trained models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from io import StringIO
from pathlib import Path

from torch import nn

from relpos.comparison import Comparison
from relpos.report.advice import advise, decided
from relpos.report.terminal import render_terminal
from relpos.report.verdict import ComparisonVerdict
from relpos.results import Results
from relpos_command.visible import visible

_WIDTH = 112


class ResultTable(str):
    """A comparison's table and advice as text; its `repr` is the text itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class TrainedModels(Mapping[tuple[str, int], nn.Module]):
    """The trained models by name and seed, in evaluation mode. Each access builds one and loads its weights."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison

    def __getitem__(self, key: tuple[str, int]) -> nn.Module:
        name, seed = key
        return self._comparison.model(name, seed)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter([(job.name, job.seed) for job in self._comparison.trained()])

    def __len__(self) -> int:
        return len(self._comparison.trained())


class ComparisonResult:
    """A finished comparison.

    Attributes:
        results: all measurements, as in `results.json`.
        page: the path of the page.
        folder: the folder of all files.
        models: the trained models by name and seed: `models["rotary_2d", 0]`.

    Examples:
        >>> result = relpos.compare(seeds=3)  # doctest: +SKIP
        >>> result.best  # doctest: +SKIP
        >>> model = result.models["rotary_2d", 0]  # doctest: +SKIP
    """

    def __init__(self, results: Results, page: Path, comparison: Comparison) -> None:
        self.results, self.page, self.folder = results, page, page.parent
        self.models = TrainedModels(comparison)

    @property
    def best(self) -> str | None:
        """The name of the one that is better than all others on the test data, beyond the differences' 95% intervals.

        None while undecided: after a quick run or one seed, if others are tied with it, or if nothing beats chance.
        """
        return decided(self.results)

    @property
    def verdict(self) -> ComparisonVerdict:
        """What the page says first: `decided`, `choose` (names), `why`, and while undecided `command` and `seconds`.

        `command` is the one that would decide, with more seeds or steps; `seconds` estimates its training from the
        times of this comparison. Undecided: a quick run, one seed, all tied, or nothing better than chance.
        """
        return advise(self.results).verdict

    @property
    def advice(self) -> tuple[str, ...]:
        """The first lines of the page."""
        return advise(self.results).lines

    def table(self) -> ResultTable:
        """The table and the advice, as the command prints them."""
        from rich.console import Console

        console = Console(file=StringIO(), width=_WIDTH, color_system=None)
        console.print(render_terminal(self.results, width=_WIDTH), crop=False)
        assert isinstance(console.file, StringIO)
        return ResultTable(console.file.getvalue().rstrip())

    def figure(self, path: str | Path, plot: str = "cost", *, width: float = 3.25) -> Path:
        """Write one figure for a paper: vectors with embedded fonts, for which no colour is needed.

        Args:
            path: ends in .pdf, .svg or .png. An existing file is replaced.
            plot: `"cost"`, figures on the test data against the time of a step; `"far-cost"`, the same at the largest
                shift or the longest text; `"shift"`, `"canvas"`, `"rotation"` of images; `"length"`, `"place"` of text;
                `"training"`, validation over steps.
            width: in inches, from 2 to 20; text has 8 points at any width.

        Returns:
            The path.

        Raises:
            ValueError: another ending, name or width, or these results lack what the figure shows; one line.
        """
        from relpos.report.export import save_figure

        return save_figure(self.results, path, plot, width)

    def __repr__(self) -> str:
        return f"{self.table()}\nPage: {visible(str(self.page))}"

    def _repr_html_(self) -> str:
        """The picture of figures against cost, the advice and the table, for notebooks."""
        from relpos.report.page import notebook_html

        return notebook_html(self.results)
