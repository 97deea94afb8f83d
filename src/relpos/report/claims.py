"""What the documents this project started from claim, and what became of each claim in one comparison.

Every claim has a rule, in words here and in code in `claim_rules.py`, that looks up findings; a finding speaks for the
claim, against it, or neither (`evidence.py`). From them, and nothing else, comes the word:

    held                                        all speak for it
    held in part                                some do, others do not
    did not hold                                none speaks for it and some against
    cannot be told from these data              none speaks either way
    not measured in this comparison             there is no finding

Sections are those of the longest of the documents, unless another is named. Nothing is corrected for the number of
claims.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from relpos.report import claim_rules as rules
from relpos.report.evidence import Finding, Speaks
from relpos.report.measure import measure_of
from relpos.report.results import Results

Word = Literal[
    "held", "held in part", "did not hold", "cannot be told from these data", "not measured in this comparison"
]


@dataclass(frozen=True)
class Claim:
    """`quote` from `section`; `rule` is how `look` decides."""

    quote: str
    section: str
    rule: str
    look: Callable[[Results], list[Finding]]


@dataclass(frozen=True)
class Outcome:
    """What became of a claim."""

    claim: Claim
    word: Word
    findings: tuple[Finding, ...]


def judge_claims(results: Results) -> list[Outcome]:
    """Every claim of the documents about such data, in their order."""
    asked = CLAIMS if measure_of(results).is_share else TEXT_CLAIMS
    looked_up = ((claim, tuple(claim.look(results))) for claim in asked)
    return [Outcome(claim, word([finding.speaks for finding in findings]), findings) for claim, findings in looked_up]


def word(speak: Sequence[Speaks]) -> Word:
    """The word for what the findings say together."""
    if not speak:
        return "not measured in this comparison"
    if all(one == "for" for one in speak):
        return "held"
    if "for" in speak:
        return "held in part"
    return "did not hold" if "against" in speak else "cannot be told from these data"


POINTS = f"{100 * rules.NOTICEABLE:.0f} points"
TIGHT = f"{100 * rules.CLOSE:.0f} point"
SMALL = f"at most {POINTS}"
CLAIMS = (
    Claim(
        "Without any positional signal, if you shuffle the tokens, the result doesn't change. That's bad.",
        "section 11.2",
        "The best mechanism is ahead of none on the test images.",
        rules.position_matters,
    ),
    Claim(
        "Absolute (ViT): translation invariance: no. It doesn't generalize well when the object shifts.",
        "sections 4, 6.5 and 7.5",
        f"Each absolute mechanism falls by more than {POINTS} from the test images to the largest shift.",
        rules.absolute_falls,
    ),
    Claim(
        "Relative: translation invariance: yes. The pattern is learned once and reused everywhere.",
        "sections 4, 6.5, 7.5 and 8",
        f"Each bias, rotation, and sum of these falls by {SMALL} from the test images to the largest shift. (Its "
        "scores are invariant by construction; accuracy also meets the canvas's edge and the phase of the patches.)",
        rules.relative_keeps,
    ),
    Claim(
        "Relative methods improve translation invariance.",
        "section 13.7",
        "Each loses less, from the test images to the largest shift, than the absolute mechanism that is best there.",
        rules.relative_falls_less,
    ),
    Claim(
        "Relative: needs no interpolation for new image sizes.",
        "sections 4 and 8.4",
        f"On the largest canvas, a table with its last offsets repeated (clipped) is {SMALL} behind the same table "
        "interpolated. One of the two it needs: offsets beyond training are in no table.",
        rules.no_interpolation_needed,
    ),
    Claim(
        "Relative methods generalize to larger image resolutions (Swin) and to longer sequences.",
        "sections 8.4, 13.7 and 14 (Key intuitions)",
        "Each loses less, from the test images to the largest canvas, than the absolute mechanism that is best there.",
        rules.relative_grows_better,
    ),
    Claim(
        "RoPE: extrapolates best.",
        "sections 13.3 and 14 (Interpretation)",
        "On the largest canvas, the best rotation is ahead of the best bias.",
        rules.rotation_extrapolates_best,
    ),
    Claim(
        "ALiBi: excellent extrapolation (no need to interpolate embeddings).",
        "section 13.4",
        f"From the test images to the largest canvas it falls by {SMALL}, and there it is ahead of none, so that what "
        "it keeps is worth keeping.",
        rules.alibi_extrapolates,
    ),
    Claim(
        "RoPE: no new parameters. ALiBi: zero extra parameters.",
        "sections 13.3, 13.4 and 13.6",
        "No learned number describes position.",
        rules.without_parameters,
    ),
    Claim(
        "Parameter efficiency: a small table (or none with RoPE/ALiBi) replaces absolute embeddings.",
        "sections 4 and 14 (Key intuitions)",
        "Each relative mechanism has fewer learned numbers for position than learned absolute vectors.",
        rules.table_smaller,
    ),
    Claim(
        "Absolute: the cost is trivial (add once).",
        "section 4",
        f"At the smallest and the largest number of tokens a step takes at most {rules.CHEAP:g} times that of none.",
        rules.absolute_is_cheap,
    ),
    Claim(
        "Relative: the cost is minimal (add bias lookup per head). Additive bias: cheap. 2-D bias: small overhead.",
        "sections 4 and 14 (When to use what)",
        "The same for each additive bias. It is a claim about an engine as much as about a mechanism.",
        rules.bias_is_cheap,
    ),
    Claim(
        "RoPE: memory low, speed fast, quality excellent.",
        "performance comparison of the document on advanced concepts",
        f"At the most tokens each rotation takes at most {rules.CHEAP:g} times none's memory, at the fewest and the "
        f"most so much of its time, and on the test images it is the best or behind it by at most {TIGHT}.",
        rules.rotation_in_the_table,
    ),
    Claim(
        "ALiBi: memory low, speed fast, quality good.",
        "performance comparison of the document on advanced concepts",
        f"The same of ALiBi, with at most {POINTS}.",
        rules.alibi_in_the_table,
    ),
    Claim(
        "ALiBi: fastest.",
        "section 14 (Interpretation)",
        "At the largest number of tokens, the middle half of its step times lies below that of the quickest other "
        "relative mechanism.",
        rules.alibi_is_fastest,
    ),
    Claim(
        "Additive bias: simple, stable.",
        "section 14 (When to use what)",
        f"The test accuracies of at least three seeds lie within {100 * rules.STEADY:.0f} points of each other.",
        rules.biases_are_stable,
    ),
    Claim(
        "2-D bias: ideal for images.",
        "section 14 (When to use what)",
        f"On the test images and at the largest shift it is {SMALL} behind the best.",
        rules.grid_bias_is_ideal,
    ),
    Claim(
        "Modern Transformers usually combine RoPE with additive relative bias.",
        "section 13.7 (Summary)",
        "The sum is ahead of the better of its parts, on the test images and at the largest shift.",
        rules.rotation_and_bias_add_up,
    ),
    Claim(
        "Some models combine both: absolute positions for global structure, relative for local relationships.",
        "the document on concepts, Hybrid Approaches",
        "The sum is ahead of the better of its parts, on the test images and at the largest shift.",
        rules.absolute_and_relative_add_up,
    ),
    Claim(
        "Shaw-style vectors: highest expressivity, slightly heavier.",
        "sections 13.2 and 14 (When to use what)",
        "On the test images, the best such mechanism is ahead of the best additive bias.",
        rules.vectors_say_more,
    ),
    Claim(
        "Very long contexts: RoPE and ALiBi extrapolate to longer text, T5's bias works well for long sequences.",
        "sections 13.1, 13.3 and 13.4",
        "It takes text, which a comparison of images does not have: relpos compare --task text.",
        rules.nothing,
    ),
)
"""Those that images can tell, in the order of the documents' argument, in their words as far as these fit one line."""

BITS = f"{rules.NOTICEABLE:g} bits a byte"
FINE_BITS = f"{rules.CLOSE:g} bits a byte"
TEXT_CLAIMS = (
    Claim(
        "Without any positional signal, if you shuffle the tokens, the result doesn't change. That's bad.",
        "section 11.2",
        "The best mechanism is ahead of none at the trained length. (Under a causal mask none is not blind: a token "
        "can count how many it sees.)",
        rules.position_matters,
    ),
    Claim(
        "Absolute embeddings: don't generalize to longer sequences than trained on.",
        "sections 4 and 13.7",
        f"From the trained length to the longest, each absolute mechanism needs more than {BITS} more.",
        rules.absolute_does_not_go_on,
    ),
    Claim(
        "Relative methods generalize to longer sequences.",
        "sections 13.7 and 14 (Key intuitions)",
        "Each loses less, from the trained length to the longest, than the absolute mechanism that is best there.",
        rules.relative_grows_better,
    ),
    Claim(
        "RoPE: extrapolates best.",
        "sections 13.3 and 14 (Interpretation)",
        "At the longest input, the best rotation, by whatever rule, is ahead of the best bias.",
        rules.rotation_extrapolates_best,
    ),
    Claim(
        "ALiBi: excellent extrapolation (no need to interpolate embeddings).",
        "section 13.4",
        f"From the trained length to the longest it needs at most {BITS} more, and there it is ahead of none.",
        rules.alibi_extrapolates,
    ),
    Claim(
        "T5's bias works well for long sequences.",
        "section 13.1",
        f"From the trained length to the longest it needs at most {BITS} more.",
        rules.buckets_go_on,
    ),
    Claim(
        "RoPE: no new parameters. ALiBi: zero extra parameters.",
        "sections 13.3, 13.4 and 13.6",
        "No learned number describes position.",
        rules.without_parameters,
    ),
    Claim(
        "Parameter efficiency: a small table (or none with RoPE/ALiBi) replaces absolute embeddings.",
        "sections 4 and 14 (Key intuitions)",
        "Each relative mechanism has fewer learned numbers for position than learned absolute vectors.",
        rules.table_smaller,
    ),
    Claim(
        "Absolute: the cost is trivial (add once).",
        "section 4",
        f"At the smallest and the largest number of tokens a step takes at most {rules.CHEAP:g} times that of none.",
        rules.absolute_is_cheap,
    ),
    Claim(
        "Relative: the cost is minimal (add bias lookup per head). Additive bias: cheap.",
        "sections 4 and 14 (When to use what)",
        "The same for each additive bias. It is a claim about an engine as much as about a mechanism.",
        rules.bias_is_cheap,
    ),
    Claim(
        "RoPE: memory low, speed fast, quality excellent.",
        "performance comparison of the document on advanced concepts",
        f"At the most tokens each rotation takes at most {rules.CHEAP:g} times none's memory, at the fewest and the "
        f"most so much of its time, and at the trained length it is the best or behind it by at most {FINE_BITS}.",
        rules.rotation_in_the_table,
    ),
    Claim(
        "ALiBi: memory low, speed fast, quality good.",
        "performance comparison of the document on advanced concepts",
        f"The same of ALiBi, with at most {BITS}.",
        rules.alibi_in_the_table,
    ),
    Claim(
        "ALiBi: fastest.",
        "section 14 (Interpretation)",
        "At the largest number of tokens, the middle half of its step times lies below that of the quickest other "
        "relative mechanism.",
        rules.alibi_is_fastest,
    ),
    Claim(
        "Modern Transformers usually combine RoPE with additive relative bias.",
        "section 13.7 (Summary)",
        "The sum is ahead of the better of its parts, at the trained length and at the longest.",
        rules.rotation_and_bias_add_up,
    ),
    Claim(
        "Shaw-style vectors: highest expressivity, slightly heavier.",
        "sections 13.2 and 14 (When to use what)",
        "At the trained length, the best such mechanism is ahead of the best additive bias.",
        rules.vectors_say_more,
    ),
)
"""Those that text can tell."""
