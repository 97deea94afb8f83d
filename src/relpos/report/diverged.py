"""Training runs that diverged: whose, where, and what that leaves of a mechanism, in a sentence.

A run diverges where its loss or a gradient is nan or inf; it stops there and has no figure (docs/results.md).
"""

from dataclasses import dataclass

from relpos.report.results import Results, name_of, positions


@dataclass(frozen=True)
class Diverged:
    """The runs of one mechanism, or choice, that diverged.

    Attributes:
        count: how many, out of `runs` that are there. seed, step, rate: of the first. what: "loss" or "gradient".
        value: what that was, "nan" or "inf".
    """

    position: str
    count: int
    runs: int
    seed: int
    step: int
    rate: float
    what: str
    value: str

    def words(self) -> str:
        """Who, where, and what is left."""
        every = self.count == self.runs
        many = f"in all {self.runs} of its runs" if every else f"in {self.count} of its {self.runs} runs"
        many = "in its only run" if self.runs == 1 else many
        first = "first with" if self.count > 1 else "with"
        left = "it has no figure" if every else "its figures are of the others alone"
        return (
            f"{self.position} diverged {many}, {first} seed {self.seed} at step {self.step}, at the learning rate "
            f"{self.rate:.1e}, where the {self.what} was {self.value}: {left}."
        )


def find_diverged(results: Results) -> tuple[Diverged, ...]:
    """Everyone with such a run, in the order of the comparison."""
    found = []
    for name in positions(results):
        own = [record for record in results["records"] if name_of(record) == name]
        lost = [record for record in own if "diverged" in record]
        if lost:
            where = lost[0]["diverged"]
            named = {key: where[key] for key in ("step", "rate", "what", "value")}
            found.append(Diverged(name, len(lost), len(own), int(lost[0]["seed"]), **named))
    return tuple(found)


def all_diverged(results: Results) -> bool:
    """Whether there is no run but such."""
    return bool(results["records"]) and all("diverged" in record for record in results["records"])
