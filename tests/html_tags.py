"""A page as its elements: what it refers to, and that whatever opens closes."""

from html.parser import HTMLParser

_VOID = {"meta", "link", "br", "wbr", "img", "input", "hr"}


class Tags(HTMLParser):
    """Ids, addresses, and the ids of headings and of what unfolds, in the order of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.headings: list[str] = []
        self.feed(page)
        assert not self.open, "these are never closed"
        assert len(self.ids) == len(set(self.ids)), "an id names one element"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag not in _VOID:
            self.open.append(tag)
        if own := named.get("id"):
            self.ids.append(own)
            if tag in ("h2", "details"):
                self.headings.append(own)
        self.addresses += [address for key in ("src", "href", "xlink:href") if (address := named.get(key))]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
