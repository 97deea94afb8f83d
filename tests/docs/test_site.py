"""The documentation site: what is generated, how links are written, and that it builds offline without a warning."""

import functools
import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from relpos.position import presets

ROOT = Path(__file__).parents[2]
WEBSITE = ROOT / "website"
sys.path.append(str(WEBSITE))

import atlas_pages  # noqa: E402
import make_site  # noqa: E402
from site_links import broken_links  # noqa: E402


def test_the_atlas_has_notes_of_every_mechanism_and_of_no_other() -> None:
    notes = tomllib.loads((WEBSITE / "atlas.toml").read_text(encoding="utf-8"))
    assert set(notes) == set(presets())
    for name, one in notes.items():
        of_parts = set() if "+" in name else {"formula"}
        assert set(one) == {"used_by", "relatives", "pitfalls"} | of_parts, name
        assert one["pitfalls"], name
        assert set(one["relatives"]) <= set(presets()) - {name}, name


@pytest.mark.parametrize("name", presets())
def test_the_code_on_a_page_makes_the_mechanism(name: str) -> None:
    text = atlas_pages.code_of(presets()[name])
    code = text.removeprefix("```python\n").removesuffix("\n```")
    first, mark, second = code.partition("# the same by its constructor")
    assert mark
    known: dict[str, Any] = {}
    exec(first, known)
    by_name = known["position"]
    exec(second, known)
    assert repr(known["position"]) == repr(by_name)


def test_every_mechanism_was_timed() -> None:
    costs = json.loads((ROOT / "benchmarks" / "results" / "mechanisms-cpu.json").read_text(encoding="utf-8"))["layers"]
    assert set(costs) == set(presets())


def test_every_page_that_people_write_is_in_the_navigation() -> None:
    named = set(re.findall(r'= "([\w/-]+\.md)"', (WEBSITE / "zensical.toml").read_text(encoding="utf-8")))
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert written <= named, f"not in website/zensical.toml: {sorted(written - named)}"
    assert named - written <= {"atlas/index.md", "explorer.md", *make_site.OUTSIDE.values()}


@pytest.mark.parametrize(
    ("link", "wanted"),
    [
        ("[a](parity.md)", "[a](../parity.md)"),
        ("[a](parity.md#x)", "[a](../parity.md#x)"),
        ("![a](comparison.png)", "![a](../comparison.png)"),
        ("[b](../CONTRIBUTING.md)", "[b](../contributing.md)"),
        ("[c](../benchmarks/README.md)", "c (`benchmarks/README.md`)"),
        ("[d](https://example.org/x)", "[d](https://example.org/x)"),
        ("[e](#here)", "[e](#here)"),
        ("```\n[a](parity.md)\n```", "```\n[a](parity.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site_or_name_the_file(link: str, wanted: str) -> None:
    found = make_site.relinked(link, ROOT / "docs" / "index.md", make_site.PAGES / "atlas" / "x.md")
    assert found == wanted


def test_broken_links_and_foreign_hosts_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there">1</a><a href="b.html#not">2</a><a href="c.html">3</a><a href="https://x.org">4</a>'
        '<img src="https://x.org/a.png"><script src="gone.js"></script><a href="#own" id="own">5</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1>')
    assert broken_links(tmp_path) == [
        "a.html links to b.html#not, which has no such place",
        "a.html links to c.html, which is not there",
        "a.html loads https://x.org/a.png from another host",
        "a.html links to gone.js, which is not there",
    ]


def built_site() -> Path:
    """The site, built anew."""
    done = subprocess.run([sys.executable, str(WEBSITE / "make_site.py")], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stderr == ""
    assert "no broken link inside" in done.stdout
    return make_site.SITE


def require_whole_pages(built: Path) -> None:
    for name in presets():
        page = (built / "atlas" / f"{name.replace('+', '-and-')}.html").read_text(encoding="utf-8")
        for heading in (
            "In code",
            "What it looks like",
            "How it works",
            "What it costs",
            "What it does, as measured here",
        ):
            assert f">{heading}<" in page, (name, heading)


@pytest.mark.slow
@pytest.mark.site
def test_the_site_builds_and_is_searched_and_filtered_without_another_host(browser: Any) -> None:
    built = built_site()  # in one test, since there is one place for it
    require_whole_pages(built)
    handler = functools.partial(_Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{address}/index.html")
        page.get_by_role("button", name="Search").first.click()
        page.wait_for_timeout(500)  # the dialog opens
        page.keyboard.type("disentangled", delay=30)
        page.get_by_text("DisentangledPosition", exact=False).first.wait_for(timeout=20_000)
        page.goto(f"{address}/atlas/index.html")
        page.locator("#atlas-kind").select_option("rotation")
        page.locator("#atlas-axes").select_option("2")
        rows = page.locator("#atlas tbody tr:visible")
        of_grids = {one.name for one in presets().values() if one.family == "rotation" and 2 in one.token_axes}
        assert {text.split()[0] for text in rows.all_inner_texts()} == of_grids
        page.locator("#atlas-kind").select_option("")
        page.get_by_role("button", name="time, grid").click()
        times = [float(cell) for cell in page.locator("#atlas tbody tr:visible td:nth-child(6)").all_inner_texts()]
        assert times == sorted(times)
        page.goto(f"{address}/explorer.html")
        explorer = page.locator(".explorer")
        explorer.locator("#title").filter(has_text="Rotary").wait_for()
        assert page.locator("h1").count() == 1
        drawn = "() => document.getElementById('map').toDataURL()"
        light = page.evaluate(drawn)
        page.locator("label[title='Dark']").first.click()
        page.wait_for_timeout(500)
        assert page.evaluate(drawn) != light, "it follows the switch of the site"
        server.shutdown()
        assert all(url.startswith((address, "data:", "blob:")) for url in asked)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""
