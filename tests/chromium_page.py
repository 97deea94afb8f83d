"""A real browser for tests of pages, without a network."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
]
MUST = bool(os.environ.get("CI") or os.environ.get("RELPOS_REQUIRE_BROWSER"))
"""Where a browser has to be there, its absence fails the tests instead of skipping them."""

Open = Callable[..., Any]


def unavailable(reason: str) -> Any:
    return pytest.fail(reason) if MUST else pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """It ends with its module, whose tests its seconds then count to."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        unavailable("playwright is not installed: pip install relpos[test]")
    with sync_playwright() as playwright:
        system = next(filter(None, map(shutil.which, NAMES)), None)
        try:
            started = playwright.chromium.launch(executable_path=system, args=ARGUMENTS)
        except Error as error:
            advice = "install Chromium, or run `playwright install chromium`"
            unavailable(f"no browser to look at the page with ({str(error).splitlines()[0]}): {advice}")
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Open the `address`; `page.said` has what console and page complain of, `page.asked` every request."""
    address: str = request.getfixturevalue("address")
    contexts = []

    def visit(width: int = 1280, part: str = "", **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(address + part)
        return page

    yield visit
    for context in contexts:
        context.close()
