"""`report.html`: the comparison as one page that needs nothing but itself, no network, no server, no second file.

The words, the tables and the pictures are made here and stand in the page as HTML and SVG; the curves are data (JSON in
a script element) that the vendored uPlot draws. Without scripts everything but the curves can be read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from relpos.files.writing import write_whole
from relpos.report.again import bibtex, citation, command_line
from relpos.report.cards import costs, counts, standings
from relpos.report.charts import ALL_IN_FRONT, front, robustness_charts, training_charts
from relpos.report.choice_page import choice_context
from relpos.report.claims import judge_claims
from relpos.report.explanations import explain_results
from relpos.report.families import Family, kind, summands
from relpos.report.measure import measure_of
from relpos.report.plots import attention_svgs, learned_svgs
from relpos.report.results import (
    DIVERGED,
    Contender,
    Results,
    check_results,
    contenders,
    diverged,
    far_probe,
    largest_canvas,
    outcomes,
    positions,
    probes,
    runs,
    what,
)
from relpos.report.table import NOTHING, Column, ComparisonTable, build_table
from relpos.report.text_explanations import explain_text
from relpos.report.verdict import chance_of, judge
from relpos.report.wording import (
    QUICK,
    cautions,
    headline,
    listed,
    sentences,
)

HERE = Path(__file__).parent
SCRIPTS = ("markers", "charts", "sort", "filter", "copy")
OPEN_AT_MOST = 3
"""How many mechanisms' pictures stand open; the others wait behind their names."""
SKIPPED_AT_MOST = 12
"""How many files that could not be used are named."""
NO_PICTURE: dict[Family, str] = {
    "none": "there is no position to draw",
    "rotation": "queries and keys turn with their place, so no number belongs to an offset; what an offset means comes "
    "out of both",
    "vectors": "queries or keys meet vectors, so no number belongs to an offset alone",
    "places": "learned places meet one another: a number belongs to two places, not to their offset",
    "bias": "its bias is no number an offset: it also depends on where the query is",
}
FAMILIES: dict[Family, str] = {
    "none": "none",
    "absolute": "absolute: on the tokens",
    "places": "places: absolute, in the scores",
    "bias": "bias: on the scores",
    "rotation": "rotation: of queries and keys",
    "vectors": "vectors: met by queries or keys",
    "sum": "sum of several",
    "other": "other",
}
WORDS = {
    "accuracy": {
        "question": "which position mechanism suits these images?",
        "model": "vision transformer",
        "units": "images",
        "unit": "image",
        "far": "at the largest shift",
        "robustness": "What is left when images move, or the canvas grows, beyond what training showed.",
        "robustness_title": "Robustness",
        "neighbour": "look at the patch above",
        "larger": "Larger grids",
        "costed": "images",
    },
    "bits_per_byte": {
        "question": "which position mechanism reads on beyond what it was trained on?",
        "model": "causal language model",
        "units": "blocks of text",
        "unit": "block",
        "far": "at the longest input",
        "robustness": "The same bytes of test text, read in longer and longer pieces: a model that goes on to longer "
        "inputs needs fewer bits there, for it sees more of what came before. Then: where in the longest they are.",
        "robustness_title": "Longer inputs than trained",
        "neighbour": "look at the byte before",
        "larger": "Longer inputs",
        "costed": "text",
    },
}
"""What the page calls things, by what is measured."""


def write_report(results: Results, path: str | Path) -> None:
    """Write the page, whole; the folder is made."""
    path = Path(path)
    page = build_page(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)


def build_page(results: Results) -> str:
    """The page as text. Raises `ResultsError` for a schema it does not know. Equal results give an equal page."""
    check_results(results)
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    measure = measure_of(results)
    environment.filters.update(figure=measure.figure, gap=measure.gap, bounds=measure.bounds)
    environment.filters.update(sourced=sourced, breakable=breakable, number=measure.number, size=measure.size)
    if what(results) != "position":
        return environment.get_template("choices.html.j2").render(
            {**choice_context(results), "words": WORDS[measure.key], "style": _asset("templates/style.css")}
        )
    return environment.get_template("report.html.j2").render(_context(results))


def script_json(value: object) -> Markup:
    """JSON for a script element: nothing in the data can end the element or open a comment in it."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def sourced(text: str) -> Markup:
    """A mechanism's source with its addresses and arXiv numbers as links, which only a reader's click follows."""
    found = re.split(r"(https?://[^\s<>\"')]+|arXiv:\d{4}\.\d{4,5})", text)
    parts = []
    for part in found:
        if part.startswith(("http://", "https://", "arXiv:")):
            address = part if part.startswith("http") else f"https://arxiv.org/abs/{part.removeprefix('arXiv:')}"
            parts.append(Markup('<a href="{}" rel="noreferrer">{}</a>').format(address, part))
        else:
            parts.append(escape(part))
    return Markup("").join(parts)


def breakable(name: str) -> Markup:
    """A mechanism's name; a long sum may break after a plus."""
    return Markup("+<wbr>").join(name.split("+"))


def _context(results: Results) -> dict[str, Any]:
    verdict = judge(results)
    spoken = sentences(verdict)
    table = build_table(results)
    canvas, far, measure = largest_canvas(results), far_probe(results), measure_of(results)
    chosen = [c for c in table.group("canvas") if canvas is not None and c.key == canvas["id"]]
    ranked = [row.position for row in table.rows]
    shown = front(ranked, ends=not measure.is_share)
    main_columns = [
        *table.group("name", "parameters", "test", "shift", "length"),
        *table.others(),
        *chosen,
        *table.group("x1", "step", "memory"),
    ]
    return {
        "results": results,
        "settings": results["settings"],
        "task": results["task"],
        "measure": measure,
        "chance": chance_of(results),
        "words": WORDS[measure.key],
        "environment": results["environment"],
        "headline": headline(verdict),
        # The page says that a run was quick in a banner of its own, above everything.
        "cautions": [caution for caution in cautions(verdict) if caution != QUICK],
        "sentences": spoken,
        "verdict": verdict,
        "explanations": explain_results(results) if measure.is_share else explain_text(results),
        "claims": (claims := judge_claims(results)),
        "claim_counts": counts(claims),
        "families": _families(results),
        "places": {name: index for index, name in enumerate(positions(results))},
        "family_of": {name: kind(name).family for name in positions(results)},
        "skipped": _skipped(results),
        "ignored": _few(results["task"].get("ignored") or []),
        "faded": len(ranked) > ALL_IN_FRONT,
        "standings": [standings(results, probe) for probe in verdict.probes if probe.standings],
        "table": table,
        "main_columns": main_columns,
        "gaps": _gaps(table, main_columns),
        "plain_needs_seeds": _plain_needs_seeds(results),
        "canvas_columns": [*table.group("name"), *table.group("canvas")] if table.group("canvas") else [],
        "sorted_by": far["id"] if far is not None else "test",
        "robustness": (robustness := robustness_charts(results, shown)),
        "training": (training := training_charts(results, shown)),
        "chart_data": script_json(
            {
                "robustness": robustness,
                "training": training,
                "allInFront": ALL_IN_FRONT,
                "families": {name: kind(name).family for name in positions(results)},
            }
        ),
        "learned": _learned(results, ranked),
        "without_picture": _without_picture(results, ranked),
        "attention": _attention(results, ranked),
        "samples": _samples(results, ranked),
        "open_at_most": OPEN_AT_MOST,
        "costs": costs(results, ranked),
        "cost_threads": sorted({int(entry["threads"]) for entry in results["costs"] if entry.get("threads")}),
        "by_seed": _by_seed(results, ranked),
        "command": command_line(results),
        "citation": citation(results),
        "bibtex": bibtex(results),
        "style": _asset("templates/style.css"),
        "script": Markup("").join(_asset(f"templates/{name}.js") for name in SCRIPTS),
        "uplot_script": _asset("vendor/uplot/uPlot.iife.min.js"),
        "uplot_style": _asset("vendor/uplot/uPlot.min.css"),
        "uplot_licence": _asset("vendor/uplot/LICENSE"),
    }


def _asset(name: str) -> Markup:
    return Markup((HERE / name).read_text(encoding="utf-8"))


def _gaps(table: ComparisonTable, columns: list[Column]) -> list[str]:
    """Why the table has no figure where it has none: "reason: names", once for each reason."""
    found: dict[str, list[str]] = {}
    for row in table.rows:
        for column in columns:
            for value in row.cells[column.key].values:
                if value.reason and value.reason != DIVERGED and row.position not in found.setdefault(value.reason, []):
                    found[value.reason].append(row.position)
    return [f"{reason}: {listed(names)}" for reason, names in found.items()]


def _plain_needs_seeds(results: Results) -> bool:
    """Whether runs at rate x 1 are absent because one seed was asked for, with something that learns in it."""
    records, settings = results["records"], results["settings"]
    learns = any(record["parameters"]["position"] for record in records)
    differs = settings["recipe"]["position_learning_rate_multiplier"] != 1
    return settings["seeds"] == 1 and learns and differs and all(record["variant"] != "x1" for record in records)


def _families(results: Results) -> list[dict[str, Any]]:
    """The families that are in the comparison, with their members."""
    found = []
    for family, words in FAMILIES.items():
        names = [name for name in positions(results) if kind(name).family == family]
        if names:
            found.append({"family": family, "words": words, "names": names})
    return found


def _skipped(results: Results) -> dict[str, Any]:
    """Files of the data that could not be used, by reason: a count, and the first names."""
    entries = results["task"].get("skipped") or []
    return _few([f"{entry['path']} ({entry['reason']})" for entry in entries])


def _few(names: Sequence[str]) -> dict[str, Any]:
    """How many, the first of them, and how many more."""
    shown = list(names[:SKIPPED_AT_MOST])
    return {"count": len(names), "shown": shown, "more": len(names) - len(shown)}


def _learned(results: Results, ranked: list[str]) -> list[dict[str, Any]]:
    """The first seed's pictures of each mechanism that has some, best mechanism first."""
    found = []
    for index, position in enumerate(ranked):
        finished = runs(results, position)
        if not finished or not finished[0]["learned"]:
            continue
        first = finished[0]
        pictures = learned_svgs(first["learned"], name=f"learned-{index}", mechanism=position)
        fixed = int(first["parameters"]["position"]) == 0
        rotates = "rotation" in {kind(part).family for part in summands(position)}
        notes = ["Given by a formula, the same in every run: nothing of it is learned."] if fixed else []
        notes += [f"Its rotation has no picture: {NO_PICTURE['rotation']}"] if rotates else []
        safe = [(caption, Markup(svg)) for caption, svg in pictures]
        found.append({"position": position, "pictures": safe, "notes": notes})
    return found


def _without_picture(results: Results, ranked: list[str]) -> list[str]:
    """Whose position has no picture, and why: "names: reason", once for each reason."""
    found: dict[str, list[str]] = {}
    for position in ranked:
        finished = runs(results, position)
        if finished and not finished[0]["learned"]:
            reason = NO_PICTURE.get(kind(position).family, "nothing was recorded")
            found.setdefault(reason, []).append(position)
    return [f"{listed(names)}: {reason}" for reason, names in found.items()]


def _attention(results: Results, ranked: list[str]) -> list[dict[str, Any]]:
    found = []
    for index, position in enumerate(ranked):
        finished = runs(results, position)
        if not finished or not finished[0].get("attention"):
            continue
        attention: Mapping[str, Any] = finished[0]["attention"]
        pictures = attention_svgs(attention, results["task"]["classes"], name=f"look-{index}", mechanism=position)
        found.append({"position": position, "query": attention["query"], "pictures": [Markup(svg) for svg in pictures]})
    return found


def _samples(results: Results, ranked: list[str]) -> list[dict[str, str]]:
    """What the first seed of each mechanism wrote, where the task is text."""
    found = []
    for position in ranked:
        finished = runs(results, position)
        if finished and finished[0].get("sample"):
            found.append({"position": position, **finished[0]["sample"]})
    return found


def _by_seed(results: Results, ranked: list[str]) -> dict[str, Any]:
    """What every seed reached on the plain test and farthest from it: how much luck there is."""
    far = far_probe(results)
    shown = [*probes(results, "test")[:1], *([far] if far is not None else [])]
    seeds = sorted({int(record["seed"]) for record in results["records"]})
    figure, rows = measure_of(results).figure, []
    for position in ranked:
        lost = {int(record["seed"]) for record in diverged(results, position)}
        for probe in shown:
            own = [entry for entry in contenders(results, probe["id"]) if entry.position == position]
            for contender in own or ([Contender(position)] if lost else []):
                scored = outcomes(results, contender, probe["id"])
                without = {seed: DIVERGED if seed in lost else NOTHING for seed in seeds}
                reached = [figure(float(scored[seed].mean())) if seed in scored else without[seed] for seed in seeds]
                rule = "" if contender.growth is None else f", {contender.growth}"
                rows.append({"position": position, "probe": f"{probe['label']}{rule}", "reached": reached})
    return {"seeds": seeds, "rows": rows}
