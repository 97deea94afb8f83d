"""What the page of a comparison of anything but position shows; its words and figures are made elsewhere."""

from typing import Any

from relpos.report.again import bibtex, citation, command_line
from relpos.report.cards import costs, counts, standings
from relpos.report.choice_claims import judge_choices
from relpos.report.choice_words import NAMES, choice_cautions, choice_headline, choice_sentences
from relpos.report.choices import grown_sizes, rows
from relpos.report.measure import measure_of
from relpos.report.results import Results, positions, probes, token_counts, what
from relpos.report.verdict import judge_probe


def choice_context(results: Results) -> dict[str, Any]:
    """What the page of anything but position needs: no pictures, no growth rules, no curves."""
    measure, claims, sizes = measure_of(results), judge_choices(results), token_counts(results)
    verdict = judge_probe(results, probes(results, "test")[0])
    names = positions(results)
    return {
        "results": results,
        "settings": results["settings"],
        "task": results["task"],
        "environment": results["environment"],
        "measure": measure,
        "names": names,
        "kinds": NAMES[what(results)],
        "headline": choice_headline(results),
        "cautions": choice_cautions(results),
        "sentences": choice_sentences(results),
        "standings": [standings(results, verdict)] if verdict.standings else [],
        "rows": rows(results),
        "most": sizes[-1] if sizes else None,
        "grown": [f"{tokens:,}" for tokens in grown_sizes(results)],
        "claims": claims,
        "claim_counts": counts(claims),
        "costs": costs(results, names),
        "command": command_line(results),
        "citation": citation(results),
        "bibtex": bibtex(results),
    }
