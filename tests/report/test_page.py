"""The page: whole, closed against its data, and asking nothing of the network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from choice_results import make as make_choices
from image_results import ELEVEN, diverge
from text_results import BITS, make_text

from relpos.report import ResultsError, build_page, save_overview, write_report
from relpos.report.page import _OF_MODEL, breakable, sourced
from relpos.train import OF_THE_MODEL

VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}
HEADINGS = ["overview", "table", "curves", "learned", "method", "reproduce", "cite"]


class Elements(HTMLParser):
    """Every element that opens closes, in order; ids, addresses and headings are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if named.get("id"):
            self.ids.append(str(named["id"]))
            if tag in ("h2", "details"):
                self.headings.append(str(named["id"]))
        self.addresses += [str(named[key]) for key in ("src", "href", "xlink:href") if named.get(key)]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Elements:
    found = Elements()
    found.feed(page)
    assert found.open == []
    return found


@pytest.fixture(scope="module")
def page(make: Any) -> str:
    return build_page(make(ELEVEN))


@pytest.mark.slow
def test_sections_stand_in_order_and_elements_balance(page: str) -> None:
    found = parsed(page)
    assert found.headings == HEADINGS
    assert len(found.ids) == len(set(found.ids))


def test_the_page_knows_what_of_a_recipe_is_the_models() -> None:
    """It reads results alone, and so has a list of its own."""
    assert set(_OF_MODEL) == OF_THE_MODEL


@pytest.mark.slow
def test_nothing_is_asked_of_the_network(page: str) -> None:
    for address in parsed(page).addresses:
        assert address.startswith(("#", "data:", "https://arxiv.org/abs/")), address
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


@pytest.mark.slow
def test_it_opens_with_at_most_three_lines_and_says_nothing_unmeasured(page: str) -> None:
    answer = page[page.index('class="answer"') : page.index("</header>")]
    assert 1 <= answer.count("<p>") <= 3
    for gone in ("claim", "What may surprise", "uPlot", "numbers learned", "no difference from the best"):
        assert gone not in page


@pytest.mark.slow
def test_at_most_eight_stand_in_a_picture_and_one_line_each(page: str) -> None:
    pictures = re.findall(r'<figure class="card">(.*?)</figure>', page, re.DOTALL)
    assert len(pictures) == 5
    for picture in pictures:
        names = [text.rsplit(" ", 1)[0] for text in re.findall(r">([a-z0-9_+]+ [\d.]+)</text>", picture)]
        assert len(names) == len(set(names)) == 8


@pytest.mark.slow
def test_pictures_follow_light_and_dark(page: str) -> None:
    picture = page[page.index("<figure") : page.index("</figure>")]
    colours = set(re.findall(r"var\(--(c[0-9a-f]{6})\)", picture))
    assert len(colours) >= 5
    style = page[page.index("<style>") : page.index("</style>")]
    for colour in colours:
        light, dark = re.findall(rf"--{colour}:(#[0-9a-f]+)", style)
        assert light != dark
    assert "currentColor" in picture


@pytest.mark.slow
def test_data_cannot_break_out(make: Any) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    results = make(("none", "learned"))
    results["task"]["title"] = results["task"]["description"] = evil
    results["mechanisms"][0]["summary"] = results["mechanisms"][0]["source"] = evil
    page = build_page(results)
    assert "<img" not in page
    parsed(page)
    assert "<img" not in build_page(make_text(("none",)))


@pytest.mark.slow
def test_a_quick_run_shows_no_ranking(make: Any) -> None:
    page = build_page(make(quick=True))
    assert "It works: 3 of 3" in page
    assert "overview" not in parsed(page).headings
    assert 'class="named"' not in page


@pytest.mark.slow
def test_all_kinds_of_comparison_have_a_page(make: Any, tmp_path: Path) -> None:
    text = build_page(make_text(tuple(BITS)))
    assert parsed(text).headings == HEADINGS
    assert "Bits per byte against cost" in text
    assert "statement is the" in text, "what it wrote"
    choices = build_page(make_choices())
    assert parsed(choices).headings == [one for one in HEADINGS if one not in ("curves", "learned")]
    begun = {**make(), "records": [], "costs": []}
    assert "nothing to compare yet" in build_page(begun)
    alone = diverge(make(("learned",), seeds=1), "learned")
    assert "Every training run diverged" in build_page(alone)
    for name, results in (("a", make(ELEVEN)), ("b", make_text(tuple(BITS))), ("c", begun), ("d", alone)):
        save_overview(results, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_other_conditions_are_columns_and_curves(make: Any) -> None:
    probe = {"id": "rotation/90", "group": "rotation", "label": "rotated 90 degrees", "variant": None, "x": 90}
    probe |= {"image_size": [16, 16], "trials": 4, "description": "Turned by a quarter."}
    results = make(("none", "learned"))
    results["task"]["probes"].append(probe)
    for record in results["records"]:
        record["metrics"].append({**record["metrics"][0], "probe": "rotation/90"})
    page = build_page(results)
    assert "rotated 90 degrees" in page
    assert "degrees counter-clockwise" in page


def test_what_was_done_to_the_images_is_said(make: Any) -> None:
    results = make(("none",))
    results["task"]["description"] = "Each is scaled and cropped to 32 x 32."
    head = build_page(results).split('id="method"')[0]
    assert "Each is scaled and cropped to 32 x 32." in head, "without unfolding anything"


@pytest.mark.slow
def test_equal_results_give_an_equal_page(make: Any) -> None:
    assert build_page(make(seeds=2)) == build_page(make(seeds=2))


def test_a_page_is_written_whole_or_not_at_all(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    results = make(("none",), seeds=1)
    write_report(results, path)
    before = path.read_text()
    with pytest.raises(ResultsError, match="expected schema_version 2, got 3"):
        write_report({**results, "schema_version": 3}, path)
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_names_break_and_sources_link_without_losing_their_guard() -> None:
    assert breakable("a+<b>") == "a+<wbr>&lt;b&gt;"
    assert sourced("Su 2021, arXiv:2104.09864 <b>") == (
        'Su 2021, <a href="https://arxiv.org/abs/2104.09864" rel="noreferrer">arXiv:2104.09864</a> &lt;b&gt;'
    )
