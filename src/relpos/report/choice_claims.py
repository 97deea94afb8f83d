"""What the document on advanced concepts claims of attention, norms and optimizers, beside what was measured of it.

Its table says "low", "fast", "good" and names nothing to compare with; here everything is held to the first of its
kind: full attention, LayerNorm, AdamW. A finding speaks for a claim, against it or neither:

    memory      at the most tokens, at most so many times the first's speaks for "low", a tenth more against it: a peak
                is one figure without an interval
    speed       at the most tokens, the middle half of its step times against the first's: apart, or neither
    quality     the interval of its distance from the first: within what counts as little, beyond it, or neither
    state       numbers that the optimizer keeps for each parameter

From findings the word follows as `claims.py` has it.
"""

from relpos.report.choices import ahead, amount, rows
from relpos.report.claim_rules import CLOSE, NOTICEABLE
from relpos.report.claims import Claim, Outcome, word
from relpos.report.evidence import Finding, Speaks, ahead_words, lost, more_than
from relpos.report.measure import measure_of
from relpos.report.results import Results, cost, positions, token_counts, what

GOOD, EXCELLENT = NOTICEABLE, CLOSE
"""Five points or a twentieth of a bit behind is still good; one point or a hundredth still excellent."""
LESS, NO_MORE = 0.9, 1.0
"""Memory that a technique saves, and memory that a replacement does not add, as a multiple of the first's."""
TABLE = "Performance Comparison"


FIRST = {"attention": "full", "norm": "layernorm", "optimizer": "adamw"}
"""What the claims are held against."""


def judge_choices(results: Results) -> list[Outcome]:
    """Every claim about what is compared; none can be judged where the first of its kind took no part."""
    there = positions(results)[0] == FIRST[what(results)]
    looked_up = ((claim, tuple(claim.look(results) if there else ())) for claim in CLAIMS[what(results)])
    return [Outcome(claim, word([finding.speaks for finding in findings]), findings) for claim, findings in looked_up]


def memory(results: Results, name: str, most: float) -> list[Finding]:
    """Whether a step's peak at the most tokens is at most so many times the first's."""
    first = positions(results)[0]
    row = next((row for row in rows(results) if row.name == name), None)
    if row is None or row.memory_ratio is None or name == first:
        return []
    ratio, mebibytes = row.memory_ratio, amount(row.largest, "memory")
    speaks: Speaks = "for" if ratio <= most else "against" if ratio > most + 0.1 else "open"
    figure = f"takes {ratio:.2f} times the memory of {first} at {row.largest['tokens']:,} tokens ({mebibytes:,.0f} MiB)"
    return [Finding(name, figure, speaks)]


def speed(results: Results, name: str, most: float = 1.0) -> list[Finding]:
    """Whether a step at the most tokens takes less than so many times the first's."""
    counts, first = token_counts(results), positions(results)[0]
    entries = [cost(results, one, counts[-1]) or {} for one in (name, first)] if counts else [{}]
    if name == first or not all(entry.get("step_ms") for entry in entries):
        return []
    (own, other), ratio = (entry["step_ms"] for entry in entries), entries[0]["ratio"]
    below, above = own["high"] < most * other["low"], own["low"] > most * other["high"]
    figure = f"takes {ratio:.2f} times the time of {first} at {counts[-1]:,} tokens"
    return [Finding(name, figure, "for" if below else "against" if above else "open")]


def quality(results: Results, name: str, little: float) -> list[Finding]:
    """Whether it is behind the first by no more than what counts as little; 0 asks whether it is ahead."""
    first, *others = positions(results)
    interval = ahead(results, name) if name in others else None
    if interval is None:
        beside = [Finding(name, f"has no {first} beside it, which diverged", "open")] if lost(results, first) else []
        return (lost(results, name) or beside) if name in others else []
    words = ahead_words(interval, first, measure_of(results))
    return [Finding(name, f"is {words} on the test", more_than(results, interval, -little))]


def state(results: Results, name: str) -> list[Finding]:
    """Whether the optimizer keeps fewer numbers for each parameter than the first."""
    kept = {row.name: row.state for row in rows(results)}
    first = positions(results)[0]
    own, other = kept.get(name), kept.get(first)
    if own is None or other is None or name == first:
        return []
    figure = f"keeps {own:.2f} numbers for each parameter, {first} {other:.2f}"
    return [Finding(name, figure, "for" if own < other - 0.01 else "against")]


def _technique(label: str, name: str, memory_most: float, speed_most: float, little: float, words: str) -> Claim:
    """A row of the document's table."""

    def look(results: Results) -> list[Finding]:
        return [
            *memory(results, name, memory_most),
            *speed(results, name, speed_most),
            *quality(results, name, little),
        ]

    fast = "less time" if speed_most == 1 else f"less than {speed_most:g} times the time"
    rule = (
        f"At the most tokens at most {memory_most:g} times the first's memory, {fast}; on the test at most "
        f"{100 * little:.0f} points or {little:g} bits a byte behind it."
    )
    return Claim(f"{label}: {words}.", TABLE, rule, look)


LOW_FAST_GOOD = "memory low, speed fast, quality good"
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "attention": (
        _technique("Linear Attention", "linear", LESS, 1.0, GOOD, LOW_FAST_GOOD),
        _technique("Sparse Attention", "sparse", LESS, 1.0, GOOD, LOW_FAST_GOOD),
        _technique("Local Attention", "local", LESS, 1.0, GOOD, LOW_FAST_GOOD),
        Claim(
            "Flash Attention: memory low, speed very fast, quality excellent.",
            TABLE,
            f"At the most tokens at most {LESS:g} times the first's memory, less than 0.5 times the time; on the test "
            f"at most {100 * EXCELLENT:.0f} point or {EXCELLENT:g} bits a byte behind it. What is measured is the "
            "paper's algorithm in plain PyTorch, and no fused kernel of it.",
            lambda results: [
                *memory(results, "flash", LESS),
                *speed(results, "flash", 0.5),
                *quality(results, "flash", EXCELLENT),
            ],
        ),
        Claim(
            "Flash attention and multi-query attention enable larger models.",
            "Key Takeaways",
            f"At the most tokens each takes at most {LESS:g} times the first's memory.",
            lambda results: [*memory(results, "flash", LESS), *memory(results, "multi-query", LESS)],
        ),
    ),
    "norm": (
        _technique("RMSNorm", "rmsnorm", NO_MORE, 1.0, GOOD, LOW_FAST_GOOD),
        Claim(
            "RMSNorm and GroupNorm offer alternatives to LayerNorm.",
            "Key Takeaways",
            f"On the test each is at most {100 * GOOD:.0f} points or {GOOD:g} bits a byte behind it.",
            lambda results: [*quality(results, "rmsnorm", GOOD), *quality(results, "groupnorm", GOOD)],
        ),
    ),
    "optimizer": (
        Claim(
            "Lion is a memory-efficient optimizer.",
            "Lion Optimizer",
            "It keeps fewer numbers for each parameter than AdamW.",
            lambda results: state(results, "lion"),
        ),
        Claim(
            "Sophia uses second-order information for better optimization.",
            "Sophia Optimizer",
            "After as many steps each is ahead of AdamW on the test.",
            lambda results: [*quality(results, "sophia-g", 0.0), *quality(results, "sophia-h", 0.0)],
        ),
        Claim(
            "New optimizers like Lion and Sophia show promising results.",
            "Key Takeaways",
            f"On the test each is at most {100 * GOOD:.0f} points or {GOOD:g} bits a byte behind AdamW.",
            lambda results: [
                found for name in ("lion", "sophia-g", "sophia-h") for found in quality(results, name, GOOD)
            ],
        ),
    ),
}
