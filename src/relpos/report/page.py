"""`report.html`: the comparison as one self-contained page, without network, server or other files.

It starts with at most three lines of advice and a picture of figures against cost. Then come the table, the curves,
the learned positions, and, folded, how it was measured, how to reproduce it and how to cite it. All pictures are SVG
in the page, so that it works without scripts.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from relpos.files.writing import write_whole
from relpos.report.advice import advise, listed
from relpos.report.command import as_given, bibtex, citation, command_line, tokenizer_of
from relpos.report.curves import curves, overview
from relpos.report.drawing.attention_maps import attention_svgs
from relpos.report.drawing.canvas import LAID_OUT, to_png, to_svg
from relpos.report.drawing.charts import Chart, draw, paired_figures
from relpos.report.drawing.learned_positions import learned_svgs
from relpos.report.drawing.palette import styles, stylesheet
from relpos.report.machines import machines
from relpos.report.measure import by_tokens, measure_of, unit_of
from relpos.report.reproduce import reproduce
from relpos.report.standings import Contender, chance_of, far_probe, outcomes
from relpos.report.table import NOTHING, Table, build_table, grown_sizes, listed_sizes
from relpos.results import Results, SettingsRecord, plain, read
from relpos_command.visible import visible

HERE = Path(__file__).parent / "templates"
OPEN_AT_MOST = 2
"""How many mechanisms show their learned positions; the others are folded."""
LOOKED_AT = 3
"""How many mechanisms' attention and samples are shown, folded."""
FILES_AT_MOST = 12
"""How many unusable files are named."""
NO_PICTURE = {
    "none": "there is no position to draw",
    "rotation": "queries and keys rotate, so no value belongs to an offset alone",
    "vectors": "queries or keys are multiplied by vectors, so no value belongs to an offset alone",
}
KINDS = {
    "position": "position mechanisms",
    "attention": "kinds of attention",
    "norm": "norms",
    "optimizer": "optimizers",
}


def write_report(results: Results | Mapping[str, Any], path: str | Path) -> None:
    """Write the page as a whole; create the folder."""
    path = Path(path)
    page = build_page(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)


def save_overview(results: Results | Mapping[str, Any], path: str | Path) -> None:
    """Write the first two pictures of the page as PNG, 1600 pixels wide; without costs they are its first curves."""
    results = read(results)
    advice = advise(results)
    charts = [*overview(results, advice).values(), *curves(results, advice).values()][:2]
    to_png(paired_figures(charts, _looks(results), advice.lines[0]), Path(path), dots_per_inch=125)


def notebook_html(results: Results | Mapping[str, Any]) -> str:
    """The start of the page for a notebook: the advice, the first pictures, and the table's text."""
    results = read(results)
    advice, looks = advise(results), _looks(results)
    charts = [] if results.settings.quick else _drawn(overview(results, advice), looks, "notebook")
    table = build_table(results)
    heads = Markup("").join(Markup("<th>{}</th>").format(one) for one in ("", *(c.title for c in table.columns)))
    rows = [Markup("<tr>{}</tr>").format(heads)]
    for row in table.rows:
        cells = [f"{cell.text} {cell.half}".strip() for cell in row.cells]
        name = f"{row.contender.name} {row.rule}".strip()
        rows.append(
            Markup("<tr><th>{}</th>{}</tr>").format(
                name, Markup("").join(Markup("<td>{}</td>").format(cell) for cell in cells)
            )
        )
    lines = Markup("").join(Markup("<p><b>{}</b></p>").format(line) for line in advice.lines)
    pictures = Markup("").join(chart["svg"] for chart in charts)
    head = Markup("<div>{}{}<table>{}</table></div>").format(lines, pictures, Markup("").join(rows))
    return visible(str(head), keep=LAID_OUT)


def build_page(results: Results | Mapping[str, Any]) -> str:
    """The page as text. Raises `ResultsError` for a schema it does not know. Equal results give an equal page."""
    results = read(results)
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    measure = measure_of(results)
    environment.filters.update(figure=measure.figure, sourced=sourced, breakable=breakable, by=_by)
    return visible(environment.get_template("page.html.j2").render(_context(results)), keep=LAID_OUT)


def sourced(text: str) -> Markup:
    """A mechanism's source, with addresses and arXiv numbers as links; nothing loads before a click."""
    parts = []
    for part in re.split(r"(https?://[^\s<>\"')]+|arXiv:\d{4}\.\d{4,5})", text):
        if part.startswith(("http://", "https://", "arXiv:")):
            address = part if part.startswith("http") else f"https://arxiv.org/abs/{part.removeprefix('arXiv:')}"
            parts.append(Markup('<a href="{}" rel="noreferrer">{}</a>').format(address, part))
        else:
            parts.append(escape(part))
    return Markup("").join(parts)


def breakable(name: str) -> Markup:
    """A mechanism's name with line breaks allowed after each plus and tilde."""
    return Markup("").join(
        Markup("{}<wbr>").format(part) if part in "+~" else part for part in re.split("([+~])", name)
    )


def _by(value: Any) -> str:
    """A setting's value as text: sizes as "64 x 96", names joined by commas."""
    if isinstance(value, list | tuple):
        joint = " \N{MULTIPLICATION SIGN} " if value and isinstance(value[0], int) else ", "
        return joint.join(str(one) for one in value)
    return str(value)


def _context(results: Results) -> dict[str, Any]:
    advice, measure, table = advise(results), measure_of(results), build_table(results)
    ranked = list(dict.fromkeys(row.contender.name for row in table.rows))
    settings, looks = results.settings, _looks(results)
    first = {} if settings.quick else overview(results, advice)
    return {
        "results": results,
        "settings": settings,
        "task": results.task,
        "recipe": _recipe(settings),
        "own": {name: text for name in ("model", "step", "evaluate") if (text := getattr(settings, name))},
        "advice": advice,
        "measure": measure,
        "kinds": KINDS[settings.what],
        "counted": _counted(len(results.names), KINDS[settings.what]),
        "is_position": settings.what == "position",
        "grows": any(one.growth for one in results.mechanisms),
        "chance": chance_of(results),
        "unit": "block of text" if measure.key == "bits_per_byte" else measure.unit,
        "trained": _trained(results),
        "by_tokens": by_tokens(results.task) if measure.key == "bits_per_byte" else "",
        "units": unit_of(results.task),
        "metric": {"accuracy": "Accuracy", "bits_per_byte": "Bits per byte", "figure": "The figure"}[measure.key],
        "direction": {"accuracy": "in percent", "bits_per_byte": "lower is better"}.get(
            measure.key, f"{measure.better} is better"
        ),
        "overview": _drawn(first, looks, "overview"),
        "table": table,
        "gaps": _gaps(table),
        "every": build_table(results, every=True) if settings.what == "position" else None,
        "curves": _drawn(curves(results, advice), looks, "curve") if settings.what == "position" else [],
        "learned": (learned := _learned(results, ranked)),
        "open_at_most": OPEN_AT_MOST,
        "without_picture": _without_picture(
            results, [name for name in ranked if name not in {one["name"] for one in learned}]
        ),
        "attention": _attention(results, [*advice.named, *ranked]),
        "samples": _samples(results, [*advice.named, *ranked]),
        "by_seed": _by_seed(results, ranked),
        "machines": machines(results),
        "skipped": _few([f"{one['path']} ({one['reason']})" for one in results.task.skipped]),
        "ignored": _few(results.task.ignored),
        "grown": listed_sizes(results) if len(grown_sizes(results)) > 2 and settings.what != "position" else "",
        "command": command_line(results),
        "python": program_of(results, [*advice.named, *ranked]),
        "citation": citation(results),
        "bibtex": bibtex(results),
        "style": Markup(stylesheet() + (HERE / "style.css").read_text(encoding="utf-8")),
        "script": Markup((HERE / "page.js").read_text(encoding="utf-8")),
    }


_OF_MODEL = (
    "embed_dim", "depth", "num_heads", "mlp_ratio", "shared_position", "position_init_std", "attention", "num_kv_heads",
    "norm", "qk_norm", "global_pool", "class_token", "mlp", "window",
)  # fmt: skip


def _recipe(settings: SettingsRecord) -> dict[str, Any]:
    """The recipe's fields; for the user's own model only those of training."""
    fields: dict[str, Any] = plain(settings.recipe)
    return {name: value for name, value in fields.items() if settings.model is None or name not in _OF_MODEL}


def _trained(results: Results) -> str:
    """The model's description."""
    if results.settings.model == "swin":
        return "small Swin Transformer"
    if results.settings.model is not None:
        return f"model of {as_given(results.settings, 'model')}"
    return "small causal language model" if results.task.kind == "text" else "small vision transformer"


def _counted(count: int, kinds: str) -> str:
    return f"{count} {kinds}" if count > 1 else f"one of the {kinds}"


def _looks(results: Results) -> dict[str, Any]:
    return styles(results.names)


def _drawn(charts: Mapping[str, Chart], looks: dict[str, Any], name: str) -> list[dict[str, Any]]:
    drawn = []
    for index, chart in enumerate(charts.values()):
        svg = to_svg(draw(chart, looks), name=f"{name}-{index}", title=chart.title)
        drawn.append({"title": chart.title[:1].upper() + chart.title[1:], "svg": Markup(svg)})
    return drawn


def _gaps(table: Table) -> list[str]:
    """The reasons for missing figures in the table, each once: "reason: names"."""
    by_reason: dict[str, dict[str, None]] = {}
    for row in table.rows:
        for cell in row.cells:
            if cell.reason and cell.text == NOTHING:
                by_reason.setdefault(cell.reason, {})[row.contender.name] = None
    return [f"{reason}: {listed(list(names))}" for reason, names in by_reason.items()]


def _learned(results: Results, ranked: Sequence[str]) -> list[dict[str, Any]]:
    """The first seed's pictures of every mechanism that has any, best mechanism first."""
    entries = []
    firsts = [(name, run) for name in ranked for run in results.runs(name)[:1] if run.learned]
    firsts.sort(key=lambda pair: pair[1].parameters.position == 0)  # formulas come last
    for index, (name, run) in enumerate(firsts):
        pictures = learned_svgs(run.learned, name=f"learned-{index}", mechanism=name)
        note = "" if run.parameters.position else "Given by a formula, not learned."
        entries.append({"name": name, "note": note, "pictures": [(text, Markup(svg)) for text, svg in pictures]})
    return entries


def _without_picture(results: Results, names: Sequence[str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name in names:
        if results.runs(name):
            reason = NO_PICTURE.get(results.mechanism(name).family, "nothing was recorded")
            by_reason.setdefault(reason, []).append(name)
    return (
        [f"{listed(same)}: {reason}" for reason, same in by_reason.items()]
        if results.settings.what == "position"
        else []
    )


def _attention(results: Results, names: Sequence[str]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for name in dict.fromkeys(names):
        run = next(iter(results.runs(name)), None)
        if run is not None and run.attention is not None and len(entries) < LOOKED_AT:
            svgs = attention_svgs(run.attention, name=f"look-{len(entries)}", mechanism=name)
            entries.append({"name": name, "pictures": [Markup(svg) for svg in svgs]})
    return entries


def _samples(results: Results, names: Sequence[str]) -> list[dict[str, Any]]:
    samples = [(name, run.sample) for name in dict.fromkeys(names) for run in results.runs(name)[:1] if run.sample]
    return [{"name": name, **plain(sample)} for name, sample in samples[:LOOKED_AT]]


def _by_seed(results: Results, ranked: Sequence[str]) -> dict[str, Any]:
    """The figures of every seed on the plain test, and on the probe farthest from it, by every growth rule."""
    tried = {run.seed for run in results.records} | {one.seed for one in results.failed if one.seed is not None}
    seeds, figure, rows = sorted(tried), measure_of(results).figure, []
    for name in ranked:
        lost = {run.seed: "diverged" for run in results.runs(name, diverged=True)}
        lost |= {one.seed: "failed" for one in results.failures(name) if one.seed is not None}
        for probe in [results.task.probes[0], *filter(None, [far_probe(results)])]:
            rules = dict.fromkeys(m.growth for run in results.runs(name) for m in run.metrics if m.probe == probe.id)
            for rule in rules or [None]:
                scored = outcomes(results, Contender(name, rule), probe)
                without = {seed: lost.get(seed, NOTHING) for seed in seeds}
                reached = [figure(float(scored[seed].mean())) if seed in scored else without[seed] for seed in seeds]
                rows.append({"name": name, "probe": probe.label + (f", {rule}" if rule else ""), "reached": reached})
    return {"seeds": seeds, "rows": rows}


def program_of(results: Results, names: Sequence[str]) -> dict[str, str] | None:
    """Python that trains the first of these without the command; None with the user's own functions, datasets
    or tokenizer."""
    settings = results.settings
    own = settings.model or settings.better or settings.task == "datasets"
    if own or tokenizer_of(settings) not in (None, settings.task_options.get("tokenizer")):
        return None
    name = next((name for name in names if results.runs(name)), None)
    return None if name is None else {"name": name, "source": reproduce(results, name)}


def _few(names: Sequence[str]) -> dict[str, Any]:
    """The number of names, the first ones, and how many more there are."""
    shown = list(names[:FILES_AT_MOST])
    return {"count": len(names), "shown": shown, "more": len(names) - len(shown)}
