"""The page in a real browser: wide and narrow, light and dark, with scripts and without, and with no network at all."""

from collections.abc import Callable
from typing import Any

import pytest

import chromium_page

FAST_SHARE = 60  # of its tests, in the fast part

WIDTHS = (1280, 400)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def address(page: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page, encoding="utf-8")
    return path.as_uri()


def shown(page: Any, selector: str) -> list[str]:
    """The texts of the visible elements, in the order of the page."""
    found: list[str] = page.locator(selector).filter(visible=True).all_inner_texts()
    return [text.strip() for text in found]


def mechanisms(page: Any) -> list[str]:
    found = shown(page, "table.sortable >> nth=0 >> tbody tr:not(.other) th")
    return [text.replace("\n", "").split()[0] for text in found]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_no_complaint_no_request_and_nothing_beside_the_page(visit: Open, width: int, scheme: str) -> None:
    page = visit(width, color_scheme=scheme)
    page.mouse.wheel(0, 3000)
    assert page.said == []
    assert [url for url in page.asked if not url.startswith("data:")] == [page.url]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) > 400) == (scheme == "light")


@pytest.mark.parametrize("width", WIDTHS)
def test_headings_sort_by_mouse_and_by_keyboard(visit: Open, width: int) -> None:
    page = visit(width)
    heading = page.locator("table.sortable >> nth=0 >> thead th").filter(has_text="test").first
    before = mechanisms(page)
    heading.locator("button").click()
    column = heading.evaluate("heading => heading.cellIndex")
    keys = page.locator("table.sortable >> nth=0 >> tbody tr:not(.other)").evaluate_all(
        "(rows, column) => rows.map(row => Number(row.cells[column].dataset.sort))", column
    )
    assert keys == sorted(keys, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    assert page.locator("#sort-status").inner_text() == "Sorted by test, highest first."
    heading.locator("button").press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    assert mechanisms(page) != before
    page.locator("table.sortable >> nth=0 >> thead th button >> nth=0").click()
    assert mechanisms(page) == sorted(before)


def test_what_was_not_measured_stays_at_the_end(visit: Open) -> None:
    page = visit()
    button = page.locator("table.sortable >> nth=0 >> thead th").filter(has_text="4,096").first.locator("button")
    for _ in range(2):
        button.click()
        assert mechanisms(page)[-1] == "relative_1d"


def test_without_scripts_everything_can_be_read(visit: Open) -> None:
    page = visit(java_script_enabled=False)
    text = page.locator("body").inner_text()
    for words in ("Choose ", "sinusoidal_2d", "To cite"):
        assert words in text
    assert len(mechanisms(page)) == 11
    assert page.locator(".charts svg").count() == 6


def test_the_page_is_short_and_its_details_are_folded(visit: Open) -> None:
    page = visit()
    assert page.evaluate("document.documentElement.scrollHeight") <= 6000
    assert page.locator("details[open]").count() == 0
    page.locator("#method > summary").click()
    text = page.locator("#method").inner_text()
    assert "20 broken files were left out: class/0.png (cannot be read);" in text
    assert "and 8 more" in text


def test_pictures_controls_and_regions_have_names(visit: Open) -> None:
    page = visit()
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('svg, canvas, img')].filter(element => {
          if (element.closest('[aria-hidden=true]')) return false;
          const named = element.closest('[role=img]');
          return !named || !named.getAttribute('aria-label');
        }).map(element => element.outerHTML.slice(0, 120))"""
    )
    nameless += page.evaluate(
        """() => [...document.querySelectorAll('button, input, [role=region]')].filter(e =>
          !(e.getAttribute('aria-label') || e.textContent || e.labels?.[0]?.textContent || '').trim()
        ).map(element => element.outerHTML.slice(0, 120))"""
    )
    assert nameless == []


@pytest.mark.parametrize(("allowed", "word"), [("true", "Copied"), ("false", "Selected: copy it with the keyboard")])
def test_code_is_copied_or_else_selected(visit: Open, allowed: str, word: str) -> None:
    page = visit()
    page.evaluate(
        f"""() => Object.defineProperty(navigator, "clipboard", {{ value: {{ writeText: async (text) => {{
          if (!{allowed}) throw new Error("not allowed");
          window.copied = text;
        }} }} }})"""
    )
    page.locator("#reproduce > summary").click()
    button = page.locator("pre.copyable + button.copy").first
    button.click()
    button.filter(has_text=word).wait_for(timeout=2000)
    text = page.evaluate("window.copied || getSelection().toString()")
    assert text.startswith("relpos compare --data digits ")


@pytest.mark.parametrize(("must", "raised"), [(True, pytest.fail.Exception), (False, pytest.skip.Exception)])
def test_a_missing_browser_skips_or_fails_as_asked(monkeypatch: pytest.MonkeyPatch, must: bool, raised: Any) -> None:
    monkeypatch.setattr(chromium_page, "MUST", must)
    with pytest.raises(raised, match="why"):
        chromium_page.unavailable("why")
