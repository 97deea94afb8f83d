"""A name of a person's own as no one should choose it, and how it has to be shown."""

_LETTERS = "\N{CJK UNIFIED IDEOGRAPH-732B}\xe9"
ODD = f"\x1b[31ma\x07\u202eb\u200b\x9b[red]x[/red]:cat:{_LETTERS}"
SEEN = rf"\x1b[31ma\x07\u202eb\u200b\x9b[red]x[/red]:cat:{_LETTERS}"
"""Escapes are written out; brackets and colons are not taken for rich's; letters of any script stay."""
HIDDEN = ("\x07", "\u202e", "\u200b", "\x9b", "\x1b[31m")


def assert_shown(text: str, what: str = "it") -> None:
    """Assert that the name can be read in a text and commands nothing there."""
    assert not [one for one in HIDDEN if one in text], f"{what} shows the name raw: {text!r:.500}"
    assert SEEN in text, f"{what} does not show the name: {text!r:.500}"
