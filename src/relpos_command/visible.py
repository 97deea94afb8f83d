"""Make user-given names safe to show: invisible characters and terminal commands are escaped.

A folder, class, label, column or model may have any name. ESC and other control characters command a terminal. A
bidirectional one reverses the text after it. A zero-width one makes two names look the same. Half of a surrogate pair
(a byte of a file name that is not UTF-8) cannot be encoded. Everything else stays: letters of any script, with the
joiners between them, and emoji.

This module imports nothing of relpos, so that the command's parsing is quick; all of relpos may import it. Apply it
where text is output: printing, pages, drawings and error messages.
"""

from __future__ import annotations

import re

_JOINED = "[\u0600-\u109f\u1780-\u18af\u2190-\u2bff\ufe0f\U0001f000-\U0001faff\U00011000-\U00011fff]"
"""Characters that U+200C and U+200D may join: letters of Arabic, of the scripts in and around India, and emoji."""
_HIDDEN = re.compile(
    # Some flags, such as Scotland's, are a flag and tags. These and the joiners stay; the rest is escaped.
    "(\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f|"
    f"(?<={_JOINED})[\u200c\u200d](?={_JOINED}))"
    "|[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
    "|[\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str, *, keep: str = "") -> str:
    r"""Text with invisible characters as Python escapes: `\x1b`, `\u202e`.

    Args:
        keep: layout characters to keep, such as "\n" for text of several lines.
    """

    def written(match: re.Match[str]) -> str:
        stays = match[1] or match[0] in keep
        return match[0] if stays else match[0].encode("unicode_escape").decode("ascii")

    return _HIDDEN.sub(written, text)
