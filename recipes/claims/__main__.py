"""Write `docs/claims.md`: what the documents that started relpos claim, beside what comparisons measured.

    relpos compare --seeds 3 --out runs/digits
    python recipes/claims runs/digits runs/text ...

The verdict on a claim follows from its findings alone: "held" if all are for it, "held in part" if some are, "did not
hold" if none is for it and some are against it, "undecided" if all are open, "not measured" without findings. Sections
are those of the longest document. Nothing is corrected for the number of claims.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import findings as look
from findings import Finding

from relpos.report.command import citation
from relpos.report.measure import measure_of
from relpos.report.standings import Contender, far_probe, grown_probe
from relpos.results import Results, load_results

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
LITTLE, CLOSE = 0.05, 0.01
"""Five points, or a twentieth of a bit, is little; a fifth of that is excellent."""
Look = Callable[[Results], list[Finding]]


def sums(*families: str) -> Look:
    """Sums with a part of each of these families against the better of their parts, on the plain test and farthest."""

    def found(results: Results) -> list[Finding]:
        names = [name for name in look.of_family(results, "sum")
                 if {look.find(part).family for part in name.split("+")} == set(families)]  # fmt: skip
        probes = [look.test(results), *filter(None, [far_probe(results)])]
        return [
            one
            for name in names
            for probe in probes
            for one in look.ahead(results, look.own_rule(results, name, probe),
                                  look.best(results, name.split("+"), probe), probe)
        ]  # fmt: skip

    return found


def best_of(first: str, second: str, where: Callable[[Results], object]) -> Look:
    """The best of one family against the best of another."""

    def found(results: Results) -> list[Finding]:
        probe = where(results)
        if not isinstance(probe, look.Probe):
            return []
        pair = (look.best(results, look.of_family(results, family), probe) for family in (first, second))
        return look.ahead(results, *pair, probe)

    return found


def position_matters(results: Results) -> list[Finding]:
    others = [name for name in results.names if name != "none"]
    return look.ahead(results, look.best(results, others, look.test(results)), Contender("none"), look.test(results))


def clipped(results: Results) -> list[Finding]:
    pairs = [(Contender(name, "clipped"), Contender(name, "interpolated")) for name in look.of_family(results, "bias")]
    return [one for first, second in pairs for one in look.ahead(results, first, second, grown_probe(results), -LITTLE)]


def alibi_grows(results: Results) -> list[Finding]:
    names, probe = look.alibis(results), grown_probe(results)
    found = look.falls(results, names, probe, LITTLE, little=True)
    for name in names if probe is not None and "none" in results.names else ():
        own, none = (look.own_rule(results, one, probe) for one in (name, "none"))
        found += look.ahead(results, own, none, probe)
    return found


def table_smaller(results: Results) -> list[Finding]:
    vectors = next((run.parameters.position for run in results.records if run.name == "learned"), None)
    return [] if vectors is None else look.parameters(results, look.relative(results), vectors)


def in_the_table(names: Callable[[Results], list[str]], limit: float) -> Look:
    """Memory and step beside none's, and how far behind the best."""

    def found(results: Results) -> list[Finding]:
        own, probe = names(results), look.test(results)
        first = look.best(results, results.names, probe)
        near = [one for name in own for one in look.ahead(results, Contender(name), first, probe, -limit)]
        return [*look.light(results, own), *look.cheap(results, own), *near]

    return found


def family(*families: str) -> Callable[[Results], list[str]]:
    return lambda results: look.of_family(results, *families)


POSITION: tuple[tuple[str, str, str, Look], ...] = (
    ("Without any positional signal, if you shuffle the tokens, the result doesn't change. That's bad.", "11.2",
     "the best mechanism is ahead of none on the plain test", position_matters),
    ("Absolute (ViT): it doesn't generalize well when the object shifts, nor to longer sequences.", "4, 7.5, 13.7",
     "each absolute mechanism loses more than 5 points or 0.05 bits at the largest shift or length",
     lambda r: look.falls(r, look.of_family(r, "absolute"), far_probe(r), LITTLE, little=False)),
    ("Relative: the pattern is learned once and reused everywhere.", "4, 7.5, 8",
     "each relative mechanism loses at most 5 points or 0.05 bits there",
     lambda r: look.falls(r, look.relative(r), far_probe(r), LITTLE, little=True)),
    ("Relative methods improve translation invariance.", "13.7",
     "each loses less there than the absolute mechanism that is best there",
     lambda r: look.falls_less(r, far_probe(r))),
    ("Relative: needs no interpolation for new image sizes.", "4, 8.4",
     "at the largest size, clipped is at most 5 points behind interpolated", clipped),
    ("Relative methods generalize to larger images and longer sequences.", "8.4, 13.7, 14",
     "each loses less at the largest size than the absolute mechanism that is best there",
     lambda r: look.falls_less(r, grown_probe(r))),
    ("RoPE: extrapolates best.", "13.3, 14", "at the largest size the best rotation is ahead of the best bias",
     best_of("rotation", "bias", grown_probe)),
    ("ALiBi: excellent extrapolation.", "13.4",
     "it loses at most 5 points or 0.05 bits at the largest size, and is ahead of none there", alibi_grows),
    ("RoPE: no new parameters. ALiBi: zero extra parameters.", "13.3, 13.4", "no position parameters",
     lambda r: look.parameters(r, [*look.of_family(r, "rotation"), *look.alibis(r)], None)),
    ("A small table replaces absolute embeddings.", "4, 14",
     "each relative mechanism has fewer position parameters than learned absolute vectors", table_smaller),
    ("Absolute: the cost is trivial.", "4", "a step takes at most 1.1 times that of none",
     lambda r: look.cheap(r, look.of_family(r, "absolute"))),
    ("Relative: the cost is minimal. Additive bias: cheap.", "4, 14", "a step takes at most 1.1 times that of none",
     lambda r: look.cheap(r, look.of_family(r, "bias"))),
    ("RoPE: memory low, speed fast, quality excellent.", "performance comparison",
     "at most 1.1 times none's memory and time, at most 1 point or 0.01 bits behind the best",
     in_the_table(family("rotation"), CLOSE)),
    ("ALiBi: memory low, speed fast, quality good.", "performance comparison",
     "the same with 5 points or 0.05 bits", in_the_table(look.alibis, LITTLE)),
    ("2-D bias: ideal for images.", "14", "on the plain test and farthest it is at most 5 points behind the best",
     lambda r: [one for probe in (look.test(r), far_probe(r)) if probe is not None and "relative_2d" in r.names
                for one in look.ahead(r, Contender("relative_2d"), look.best(r, r.names, probe), probe, -LITTLE)]),
    ("Modern Transformers usually combine RoPE with additive relative bias.", "13.7",
     "the sum is ahead of the better of its parts", sums("rotation", "bias")),
    ("Some models combine both: absolute positions and relative ones.", "Hybrid Approaches",
     "the sum is ahead of the better of its parts", sums("absolute", "bias")),
    ("Shaw-style vectors: highest expressivity.", "13.2, 14",
     "on the plain test the best such mechanism is ahead of the best additive bias",
     best_of("vectors", "bias", look.test)),
)  # fmt: skip


def technique(name: str, limit: float = LITTLE, memory: float = 0.9) -> Look:
    """A row of the documents' table: memory, time and quality beside the first of its kind."""
    return lambda r: [*look.light(r, [name], memory), *look.cheap(r, [name], 1.0), *look.behind_first(r, [name], limit)]


CHOICES: dict[str, tuple[tuple[str, str, str, Look], ...]] = {
    "attention": tuple(
        (f"{label}: memory low, speed fast, quality {quality}.", "Performance Comparison",
         "at most 0.9 times the memory of full attention, no more time, "
         f"at most {100 * limit:.0f} points or {limit:g} bits behind",
         technique(name, limit))
        for label, name, quality, limit in (
            ("Linear Attention", "linear", "good", LITTLE), ("Sparse Attention", "sparse", "good", LITTLE),
            ("Local Attention", "local", "good", LITTLE), ("Flash Attention", "flash", "excellent", CLOSE),
        )
    ),
    "norm": (
        ("RMSNorm and GroupNorm offer alternatives to LayerNorm.", "Key Takeaways",
         "each is at most 5 points or 0.05 bits behind it",
         lambda r: look.behind_first(r, ["rmsnorm", "groupnorm"], LITTLE)),
    ),
    "optimizer": (
        ("Sophia uses second-order information for better optimization.", "Sophia Optimizer", "each is ahead of AdamW",
         lambda r: look.behind_first(r, ["sophia-g", "sophia-h"], 0.0)),
        ("New optimizers like Lion and Sophia show promising results.", "Key Takeaways",
         "each is at most 5 points or 0.05 bits behind AdamW",
         lambda r: look.behind_first(r, ["lion", "sophia-g", "sophia-h"], LITTLE)),
    ),
}  # fmt: skip


def word(found: list[Finding]) -> str:
    """The word for what findings say together."""
    speak = {one.speaks for one in found}
    if not found:
        return "not measured"
    if speak == {"for"}:
        return "held"
    return "held in part" if "for" in speak else "did not hold" if "against" in speak else "undecided"


def section(results: Results) -> str:
    """The claims beside one comparison."""
    what, units = results.settings.what, measure_of(results).tested
    head = f"## {what.capitalize()}: {results.task.title}\n\n{citation(results)} Compared over {units}.\n"
    rows = ["| claim | section | criterion | verdict | findings |", "|---|---|---|---|---|"]
    for quote, where, rule, found in POSITION if what == "position" else CHOICES[what]:
        findings = found(results)
        said = "; ".join(f"`{one.who}` {one.figure} ({one.speaks})" for one in findings)
        rows.append(f"| {quote} | {where} | {rule} | **{word(findings)}** | {said} |")
    return head + "\n" + "\n".join(rows) + "\n"


def main(folders: list[str]) -> None:
    """Read the comparisons and write the page."""
    words = (__doc__ or "").partition("...\n")[2].strip()
    written = "Written by `python recipes/claims DIR ...`."
    head = f"# What the documents claimed, and what was measured\n\n{words}\n\n{written}\n"
    PAGE.write_text("\n".join([head, *(section(load_results(folder)) for folder in folders)]))
    print(PAGE)


if __name__ == "__main__":
    main(sys.argv[1:])
