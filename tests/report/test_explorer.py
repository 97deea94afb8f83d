"""The explorer in a real browser: chosen by mouse and keyboard, and what it draws held against the engines."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from relpos import Grid, Mask, Sequence, attention_weights
from relpos.position import Site, find
from relpos.report.drawing.explorer_data import explored
from relpos.report.drawing.trained_examples import HEAD_DIM, HEADS, SEED
from relpos.report.explorer import explorer_page

NAMES = ("rotary_1d", "t5", "relative_2d", "learned", "fire", "rotary_2d", "shaw", "none")
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(explorer_page([explored(find(name)) for name in NAMES], version="0"), encoding="utf-8")
    return path.as_uri()


def weights_by_engine(
    name: str, tokens: Sequence | Grid, head: int, query: int, *, causal: bool = False
) -> list[float]:
    """What attention gives to keys that are all alike: computed by the engines, not by the page."""
    torch.manual_seed(SEED)
    grid = isinstance(tokens, Grid)
    spread = 0.5 if grid else 0.1
    mechanism = find(name).make(Site(HEADS, HEAD_DIM, HEADS * HEAD_DIM, tokens, None, not grid, spread)).double()
    same = torch.full((1, HEADS, tokens.count, HEAD_DIM), HEAD_DIM**-0.5, dtype=torch.float64)
    mask = Mask.causal() if causal else None
    with torch.no_grad():
        weights = attention_weights(same, same, position=mechanism.terms(tokens), mask=mask, scale=1.0)
    found: list[float] = weights[0, head, query].tolist()
    return found


def attended(page: Any) -> list[float]:
    """The weights that the page draws."""
    found: list[float] = page.evaluate("(() => { const s = wants(); return attention(scores(s), s.head, s.query); })()")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokens", "head", "query"),
    [
        ("rotary_1d", Sequence(32), 0, 5),
        ("t5", Sequence(32), 2, 30),
        ("relative_2d", Grid(12, 12), 1, 100),
        ("rotary_2d", Grid(8, 8), 0, 17),
        ("shaw", Sequence(32), 0, 9),
    ],
)
def test_the_page_draws_what_the_engines_compute(
    visit: Open, name: str, tokens: Sequence | Grid, head: int, query: int
) -> None:
    grid = isinstance(tokens, Grid)
    size = tokens.sizes[0] if grid else tokens.count
    part = f"#name={name}&tokens={'grid' if grid else 'sequence'}&size={size}&query={query}&head={head}"
    page = visit(part=part)
    wanted = weights_by_engine(name, tokens, head, query)
    flat = 1 / len(wanted)
    assert attended(page) == pytest.approx(wanted, abs=2e-3 * flat)  # the page holds thousandths of a score
    assert f"{max(wanted):.3f}" in page.locator("#attention-caption").inner_text()
    assert max(abs(one - flat) for one in wanted) > 1e-2 * flat, "this case would not tell a position from none"


@pytest.mark.slow
def test_a_causal_mask_hides_what_comes_later(visit: Open) -> None:
    page = visit(part="#name=rotary_1d&query=9&size=32")
    page.get_by_label("causal mask").check()
    assert attended(page) == pytest.approx(weights_by_engine("rotary_1d", Sequence(32), 0, 9, causal=True), abs=2e-4)
    assert sum(one > 0 for one in attended(page)) == 10
    fire = visit(part="#name=fire&size=16&query=3")
    assert not fire.get_by_label("causal mask").is_visible()
    assert [one > 0 for one in attended(fire)] == [True] * 4 + [False] * 12


@pytest.mark.slow
def test_by_keyboard(visit: Open) -> None:
    page = visit()
    page.locator("#mechanism").focus()
    page.keyboard.type("relative")
    page.keyboard.press("Tab")
    assert page.locator("#title").inner_text() == find("relative_2d").title
    assert page.locator("#tokens").input_value() == "grid"
    page.locator("#map").focus()
    before = page.locator("#query-shown").inner_text()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert (before, page.locator("#query-shown").inner_text()) == ("(4, 4)", "(3, 5)")
    page.locator("#size").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#size-shown").inner_text() == "9 x 9"
    assert "size=9" in page.url


@pytest.mark.slow
def test_by_mouse(visit: Open) -> None:
    page = visit(part="#name=t5")
    box = page.locator("#map").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * (10.5 / 32))
    assert page.locator("#query-shown").inner_text() == "10"
    page.mouse.move(box["x"] + box["width"] * (4.5 / 32), box["y"] + box["height"] * (20.5 / 32))
    assert page.locator("#readout").inner_text().startswith("Query 20, key 4, offset 16:")
    page.locator("#head").select_option("3")
    assert "head 3" in page.locator("#map-caption").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
def test_every_mechanism_without_a_complaint_or_a_request(visit: Open, width: int, scheme: str) -> None:
    page = visit(width, color_scheme=scheme)
    for name in NAMES:
        page.locator("#mechanism").select_option(name)
        for tokens in ("sequence", "grid"):
            if page.locator(f"#tokens option[value={tokens}]").is_enabled():
                page.locator("#tokens").select_option(tokens)
                assert page.locator("#map-caption").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.said == []
    assert [url for url in page.asked if not url.startswith("data:")] == [page.url.partition("#")[0]]


def test_data_are_whole_numbers_by_offset_where_that_decides() -> None:
    entry = json.loads(json.dumps(explored(find("t5"))))
    line = entry["sequence"]["start"]["offsets"][0]
    assert len(line) == HEADS
    assert all(len(row) == 255 and all(isinstance(one, int) for one in row) for row in line)
    learned = explored(find("learned"))["sequence"]["start"]
    assert set(learned) == {"pairs"}, "what depends on both places is kept by pairs"
    fire = explored(find("fire"))["sequence"]["start"]["pairs"]["16"][0][0]
    assert fire[1] is None, "a causal query does not see the next key"
    assert fire[16] is not None


def test_trained_numbers_stand_beside_those_of_the_start() -> None:
    def zeroed(site: Site) -> Any:
        mechanism = find("t5").make(site)
        for one in mechanism.parameters():
            torch.nn.init.zeros_(one)
        return mechanism

    entry = explored(find("t5"), zeroed)
    assert not any(any(row) for row in entry["sequence"]["trained"]["offsets"][0])
    assert any(any(row) for row in entry["sequence"]["start"]["offsets"][0])
    assert "trained" not in explored(find("t5"), lambda site: None)["sequence"]


@pytest.mark.parametrize("name", ["rotary_linear", "rotary_ntk", "rotary_yarn", "rotary_llama3", "rotary_dynamic_ntk"])
def test_rotations_that_act_beyond_their_training_are_drawn_there(name: str) -> None:
    plain, other = (explored(find(one))["sequence"]["start"] for one in ("rotary_1d", name))
    assert other["offsets"] != plain["offsets"]
    assert other["cosine"] != plain["cosine"]
