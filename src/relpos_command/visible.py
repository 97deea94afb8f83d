"""Names of a person's own as they can be shown: what a terminal obeys or nobody sees is written out.

A folder, class, label, column or model may be called anything. ESC and other control characters command a terminal, a
bidirectional one turns the text after it round, one of no width makes two names look alike, and half of a pair of
surrogates (a byte of a file's name that is no UTF-8) cannot be written at all. All else stays: letters of any script,
with the joiners between them, and emoji.

It stands here, and imports nothing of relpos, for the command's parsing has to be quick; all of relpos may import it.
It is applied where text leaves: in what prints, makes a page or draws, and in messages of errors.
"""

from __future__ import annotations

import re

_JOINED = "[\u0600-\u109f\u1780-\u18af\u2190-\u2bff\ufe0f\U0001f000-\U0001faff\U00011000-\U00011fff]"
"""What U+200C and U+200D belong between: letters of Arabic and of the scripts of India and around it, and emoji."""
_HIDDEN = re.compile(
    # The flag of Scotland, say, is a flag and tags. This and the joiners stay; the rest is written out.
    "(\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f|"
    f"(?<={_JOINED})[\u200c\u200d](?={_JOINED}))"
    "|[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
    "|[\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str, *, keep: str = "") -> str:
    r"""Text with characters that cannot be seen as Python writes them: `\x1b`, `\u202e`.

    Args:
        keep: characters that the text is laid out by, such as "\n" where it has several lines.
    """

    def written(found: re.Match[str]) -> str:
        stays = found[1] or found[0] in keep
        return found[0] if stays else found[0].encode("unicode_escape").decode("ascii")

    return _HIDDEN.sub(written, text)
