"""The links of a built site that lead nowhere, and what a page would load from another host."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """What a page links to, loads, and can be linked to at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        has = {name: value for name, value in attributes if value is not None}
        self.anchors |= {has[name] for name in ("id", "name") if name in has}
        if tag == "a" and "href" in has:
            self.links.append(has["href"])
        elif tag == "link" and has.get("rel") not in ("canonical", "prev", "next"):
            self.loads += [has["href"]] if "href" in has else []
        elif tag in ("script", "img", "iframe", "source") and "src" in has:
            self.loads.append(has["src"])


def broken_links(site: Path) -> list[str]:
    """One line for each; none is as it should be. `#name=value` is what a page shows, no place on it."""
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        where = path.relative_to(site)
        for goal in [*page.links, *page.loads]:
            parts = urlsplit(goal)
            if parts.scheme in ("http", "https", "data", "mailto", "javascript") or parts.netloc:
                if goal in page.loads and parts.scheme != "data":
                    found.append(f"{where} loads {goal} from another host")
                continue
            file = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if parts.path.startswith("/"):
                file = site / unquote(parts.path).lstrip("/")
            if file.is_dir():
                file = file / "index.html"
            if not file.exists():
                found.append(f"{where} links to {goal}, which is not there")
            elif (
                parts.fragment
                and "=" not in parts.fragment
                and file in pages
                and unquote(parts.fragment) not in pages[file].anchors
            ):
                found.append(f"{where} links to {goal}, which has no such place")
    return found
