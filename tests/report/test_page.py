"""The page: whole, alone, and safe with any text in the data."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from relpos.report.page import breakable, build_page, script_json, sourced, write_report
from relpos.report.results import ResultsError

FAST_SHARE = 4  # of its tests, in the fast part

SECTIONS = (
    "verdict",
    "why",
    "table",
    "robustness",
    "training",
    "learned",
    "attention",
    "costs",
    "claims",
    "method",
    "mechanisms",
    "again",
    "cite",
)
VOID = {"meta", "link", "br", "img", "rect", "line", "path", "use", "image", "input", "hr"}


class Reader(HTMLParser):
    """Collects what a browser would see: elements with attributes, text of scripts, unbalanced ends."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        if self.open and self.open[-1] == "style":
            self.styles.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


@pytest.fixture(scope="module")
def page(make: Any) -> str:
    return build_page(make(("none", "learned", "relative_2d", "relative_1d"), seeds=2))


def test_every_section_stands_in_order_and_elements_balance(page: str) -> None:
    reader = read(page)
    headings = [attributes["id"] for tag, attributes in reader.elements if tag == "h2"]
    assert tuple(headings) == SECTIONS
    assert reader.wrong == []
    assert reader.open == []


def test_nothing_is_asked_of_the_network(page: str) -> None:
    reader = read(page)
    for tag, attributes in reader.elements:
        for name in ("src", "srcset", "href", "xlink:href", "data", "action", "poster"):
            value = attributes.get(name)
            if value is not None and tag != "a":
                assert value.startswith(("#", "data:")), (tag, name, value[:80])
    for style in reader.styles:
        assert "@import" not in style
        assert "url(" not in style.replace("url(#", "")
    for script in reader.scripts:
        assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|importScripts|\bimport\(", script)


def test_identifiers_are_unique(page: str) -> None:
    identifiers = [attributes["id"] for _, attributes in read(page).elements if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_data_cannot_break_out(make: Any) -> None:
    evil = "</script><script>alert(1)</script><!--"
    results = make(("none", "learned"), seeds=1)
    results["mechanisms"][0]["summary"] = evil
    results["mechanisms"][0]["title"] = '"><img src=x onerror=alert(1)>'
    results["environment"]["processor"] = evil
    results["task"]["classes"][0] = evil
    for item in (*results["mechanisms"], *results["records"], *results["costs"]):
        for key in ("name", "position"):
            if item.get(key) == "learned":
                item[key] = evil
    reader = read(build_page(results))
    assert not any("alert(1)" in script and not script.lstrip().startswith("{") for script in reader.scripts)
    assert len(reader.scripts) == 4
    assert not any(tag == "img" for tag, _ in reader.elements)
    data = json.loads(reader.scripts[1])
    assert data["training"][0]["series"][1]["label"] == evil


def test_script_json_has_nothing_to_parse_as_markup() -> None:
    text = script_json({"a": "</script><!-- & "})
    assert not set("<>&") & set(text)
    assert json.loads(text) == {"a": "</script><!-- & "}


def test_charts_hold_means_with_their_intervals(page: str, make: Any) -> None:
    data = json.loads(read(page).scripts[1])
    assert [chart["id"] for chart in data["robustness"]] == ["shift", "canvas-0", "canvas-1", "canvas-2"]
    shift = data["robustness"][0]
    assert shift["x"] == [0, 1, 2, 3]
    assert [series["label"] for series in shift["series"]] == ["none", "learned", "relative_2d", "relative_1d"]
    for chart in data["robustness"]:
        for series in chart["series"]:
            for low, mean, high in zip(series["low"], series["mean"], series["high"], strict=True):
                assert low <= mean <= high
    records = make(("none", "learned", "relative_2d", "relative_1d"), seeds=2)["records"]
    losses = [record["curve"]["loss"][0] for record in records if record["position"] == "none"]
    assert data["training"][0]["series"][0]["mean"][0] == pytest.approx(sum(losses) / 2)


def test_tables_carry_sort_keys_and_state(page: str) -> None:
    reader = read(page)
    sorted_by = [attributes for tag, attributes in reader.elements if tag == "th" and "aria-sort" in attributes]
    assert [attributes["aria-sort"] for attributes in sorted_by] == ["descending"]
    assert any(tag == "td" and attributes.get("data-sort") == "900.0" for tag, attributes in reader.elements)


def test_headings_and_sizes_break_where_they_read_well(page: str) -> None:
    assert "step\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN} at 1,024</button>" in page
    assert '<td class="size">16 &times; 16</td>' in page


def test_quick_has_a_banner_and_a_full_run_has_none(make: Any, page: str) -> None:
    assert "Quick run: not a verdict." in build_page(make(("none",), seeds=1, quick=True))
    assert "Quick run" not in page


def test_a_comparison_that_has_only_begun_has_a_page(make: Any) -> None:
    begun = build_page({**make(("none", "learned")), "records": [], "costs": []})
    assert "There is nothing to compare yet." in begun
    assert "no finished run" in begun


def test_equal_results_give_an_equal_page(make: Any) -> None:
    results = make(("relative_2d",), seeds=1)
    assert build_page(results) == build_page(json.loads(json.dumps(results)))


def test_unknown_schema_is_refused(make: Any) -> None:
    with pytest.raises(ResultsError, match="expected schema_version 1, got 2"):
        build_page({**make(("none",), seeds=1), "schema_version": 2})


def test_write_report_leaves_one_file_and_keeps_the_old_one_on_failure(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "out" / "report.html"
    results = {**make(("none",), seeds=1), "records": []}
    write_report(results, path)
    written = path.read_text()
    assert written.startswith("<!doctype html>")
    with pytest.raises(ResultsError):
        write_report({**results, "schema_version": 2}, path)
    assert path.read_text() == written
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


def test_a_long_sum_may_break_after_its_plus_and_stays_escaped() -> None:
    assert breakable("a_1+<b>") == "a_1+<wbr>&lt;b&gt;"


def test_probes_that_only_some_tasks_have_are_columns_and_curves(make: Any) -> None:
    results = make(("none", "learned"), seeds=1)
    probe = {**results["task"]["probes"][0], "id": "rotation/90", "group": "rotation", "label": "rotated 90", "x": 90}
    results["task"]["probes"].append(probe)
    for record in results["records"]:
        test = next(metric for metric in record["metrics"] if metric["probe"] == "test")
        record["metrics"].append({**test, "probe": "rotation/90"})
    reader = read(page := build_page(results))
    chart = json.loads(reader.scripts[1])["robustness"][-1]
    assert (chart["title"], chart["x"], chart["ticks"]) == (
        "Accuracy by rotation",
        [0, 90],
        {"0": "0, test", "90": "90"},
    )
    assert ">rotated 90</button>" in page


def test_files_left_out_are_told_and_none_is_no_news(make: Any, page: str) -> None:
    results = make(("none",), seeds=1)
    results["task"]["skipped"] = [{"path": "<a>.png", "reason": "cannot be read"}]
    text = build_page(results)
    assert "1 file could not be used (" in text
    assert "1 file of the data could not be used and was left out" in text
    assert "<li>&lt;a&gt;.png (cannot be read)</li>" in text
    assert "had no part" not in text
    results["task"]["ignored"] = ["b/<notes>.txt"]
    assert "1 other file in the folder is no image and had no part: b/&lt;notes&gt;.txt." in build_page(results)
    assert "could not be used" not in page


def test_what_has_no_picture_says_why(make: Any) -> None:
    text = build_page(make(("none", "alibi", "rotary_1d", "rotary_2d", "rotary_2d+relative_2d"), seeds=1))
    assert "Without a picture: rotary_2d and rotary_1d: queries and keys turn" in text
    assert "no number belongs to an offset" in text
    assert "Without a picture: none: there is no position to draw." in text
    assert text.count("Given by a formula, the same in every run") == 1
    assert text.count("Its rotation has no picture") == 1


def test_repeating_is_promised_for_the_cpu_alone(make: Any) -> None:
    results = make(("none", "learned"))
    page = build_page(results)
    assert "On the CPU training repeats bit for bit on the same machine with the same versions and 1 thread" in page
    results["settings"]["device"] = "cuda"
    page = build_page(results)
    assert "On cuda it need not repeat bit for bit" in page


def test_one_seed_says_where_the_other_rate_comes_from(make: Any, page: str) -> None:
    words = "Figures at the rate &times;1 come from two seeds on (<code>--seeds 2</code>)."
    assert words in build_page(make(seeds=1, plain=False))
    assert words not in page
    assert words not in build_page(make(("none",), seeds=1, plain=False))


def test_costs_say_their_threads_and_why_a_figure_is_missing(make: Any, page: str) -> None:
    assert "left out: would need more memory" in page
    assert "Steps were timed on" not in page
    results = make(("none", "relative_1d"))
    for entry in results["costs"]:
        entry["threads"] = 4
    # A failed entry as the comparison writes it before memory is measured.
    for entry in results["costs"]:
        if entry["step_ms"] is None:
            del entry["peak_memory_mib"]
    text = build_page(results)
    assert "Steps were timed on 4 threads." in text
    assert "left out: would need more memory" in text


def test_the_page_tells_unclear_from_no_better_than_chance(make: Any, share: Any) -> None:
    results = make(seeds=2)
    share(results, "relative_2d", "shift/3", (0.98, 0.76))
    share(results, "learned", "shift/3", (0.10, 0.10))
    text = build_page(results)
    assert "best; interval 0.0 to 100.0; cannot be told apart from chance</span>" in text
    assert "; no better than chance</span>" in text


def test_sources_become_links_and_stay_escaped() -> None:
    text = sourced("<b> 2021, arXiv:2103.14030; https://example.org/a?b=1&c")
    assert '<a href="https://arxiv.org/abs/2103.14030" rel="noreferrer">arXiv:2103.14030</a>' in text
    assert 'href="https://example.org/a?b=1&amp;c"' in text
    assert text.startswith("&lt;b&gt; 2021")
