"""The page: whole, closed against its data, and asking nothing of the network."""

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
from choice_results import make as make_choices
from image_results import diverge
from rich.console import Console
from text_results import BITS, make_text

from html_tags import Tags
from relpos.report.page import _OF_MODEL, breakable, build_page, save_overview, sourced, write_report
from relpos.report.terminal import render_terminal
from relpos.results import ResultsError
from relpos.train import OF_THE_MODEL

HEADINGS = ["overview", "table", "curves", "learned", "method", "reproduce", "cite"]


@pytest.mark.slow
def test_sections_stand_in_order_and_elements_balance(page: str) -> None:
    assert Tags(page).headings == HEADINGS


def test_the_page_knows_what_of_a_recipe_is_the_models() -> None:
    """It reads results alone, and so has a list of its own."""
    assert set(_OF_MODEL) == OF_THE_MODEL


@pytest.mark.slow
def test_nothing_is_asked_of_the_network(page: str) -> None:
    for address in Tags(page).addresses:
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
    assert len(pictures) == 6
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


def unpictured(results: dict[str, Any]) -> dict[str, Any]:
    """Without what was learned and looked at, whose pictures take most of a page's time."""
    for record in results["records"]:
        record |= {"learned": [], "attention": None}
    return results


@pytest.mark.slow
def test_data_cannot_break_out(make: Any) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    results = make(("none", "learned"))
    results["task"]["title"] = results["task"]["description"] = evil
    results["mechanisms"][0]["summary"] = results["mechanisms"][0]["source"] = evil
    page = build_page(results)
    assert "<img" not in page
    Tags(page)


@pytest.mark.slow
def test_it_says_by_which_tokens_bits_per_byte_are() -> None:
    results = unpictured(make_text(("none", "t5"), seeds=1))
    assert "tokens by" not in build_page(results), "bytes need no tokenizer"
    results["task"] |= {"tokenizer": "hf:words", "vocabulary": 1001, "documents": "packed", "bytes_per_token": 2.5}
    page, by = build_page(results), "Bits per byte, tokens by hf:words (vocabulary 1,000, 2.50 bytes a token), lower is"
    assert by in page
    assert "every probe scores the same tokens" in page
    assert "attention stays within a document" in page
    assert "tokens read at once" in page
    told = io.StringIO()
    Console(file=told, width=200).print(render_terminal(results, width=200))
    assert by in " ".join(told.getvalue().split())
    results["settings"]["task_options"] = {"contents": "0", "tokenizer": "MyTokenizer", "tokens": "0"}
    page = build_page(results)
    assert "tokenizer=tokenizer," in page, "an object of Python is handed over there"
    assert "import relpos" not in page, "no program has it"


@pytest.mark.slow
def test_a_quick_run_shows_no_ranking(make: Any) -> None:
    page = build_page(unpictured(make(quick=True)))
    assert "It works: 3 of 3" in page
    assert "overview" not in Tags(page).headings
    assert 'class="named"' not in page


@pytest.mark.slow
def test_other_kinds_of_comparison_have_a_page() -> None:
    text = build_page(make_text(tuple(BITS)))
    assert Tags(text).headings == HEADINGS
    assert "Bits per byte against cost" in text
    assert "statement is the" in text, "what it wrote"
    assert "<import>" not in text
    choices = build_page(make_choices())
    assert Tags(choices).headings == [one for one in HEADINGS if one not in ("curves", "learned")]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["images", "text", "begun", "diverged"])
def test_every_outcome_has_a_picture_and_a_page(what: str, make: Any, whole: Any, tmp_path: Path) -> None:
    made = {
        "images": lambda: whole,
        "text": lambda: make_text(tuple(BITS)),
        "begun": lambda: {**make(), "records": [], "costs": []},
        "diverged": lambda: diverge(make(("learned",), seeds=1), "learned"),
    }
    results = made[what]()
    save_overview(results, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    said = {"begun": "nothing to compare yet", "diverged": "Every training run diverged"}
    if what in said:
        assert said[what] in build_page(results)


def test_other_conditions_are_columns_and_curves_and_what_was_done_to_images_is_said(page: str) -> None:
    assert "rotated 90 degrees" in page
    assert "degrees counter-clockwise" in page
    assert "placed on a canvas of 16 x 16" in page.split('id="method"')[0], "without unfolding anything"


@pytest.mark.slow
def test_a_page_is_written_whole_or_not_at_all_and_equal_results_give_an_equal_one(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    results = make(("none", "relative_2d"), seeds=1)
    write_report(results, path)
    before = path.read_text()
    assert build_page(copy.deepcopy(results)) == before
    with pytest.raises(ResultsError, match="expected schema_version 2, got 3"):
        write_report({**results, "schema_version": 3}, path)
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]


def test_names_break_and_sources_link_without_losing_their_guard() -> None:
    assert breakable("a+<b>") == "a+<wbr>&lt;b&gt;"
    assert sourced("Su 2021, arXiv:2104.09864 <b>") == (
        'Su 2021, <a href="https://arxiv.org/abs/2104.09864" rel="noreferrer">arXiv:2104.09864</a> &lt;b&gt;'
    )
