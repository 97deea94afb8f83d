"""The text of docs/examples.md. Every figure comes from `computed.py`, what the documents print from `printed.py`."""

# ruff: noqa: E501
# Lines of text are as long as they read best.

from __future__ import annotations

import re
import textwrap

import computed
import images
import sequences
from corrections import corrections
from layout import code


def page() -> str:
    """The whole page."""
    parts = (
        opening,
        images.two_by_two,
        images.two_by_two_absolute,
        images.two_by_two_relative,
        images.directions,
        images.shifts,
        images.heads,
        images.override,
        sequences.permutation,
        sequences.clipping,
        sequences.four_mechanisms,
        corrections,
    )
    return reflow("\n\n".join(part().strip() for part in parts)) + "\n"


def reflow(text: str) -> str:
    """Paragraphs in lines of 120 letters; code, tables, lists, headings and pictures as they are."""
    blocks, inside = [], False
    for block in text.split("\n\n"):
        plain = not inside and not re.match(r"[#|`!<-]|    ", block)
        if block.count("```") % 2:
            inside = not inside
        blocks.append(textwrap.fill(block, 120, break_long_words=False, break_on_hyphens=False) if plain else block)
    return "\n\n".join(blocks)


def opening() -> str:
    """What the page is, and the one convention."""
    return f"""
<!-- Made by `python docs/examples`; change docs/examples/*.py, not this file. -->
# The worked examples, computed

The documents this project started from explain position by small examples that can be checked by hand. Here they are again,
in their order, with every number computed by relpos. Where the documents differ, the page shows both and gives the reason;
[all corrections](#corrections) are at the end. Section numbers are those of the documents.

**One sign.** Queries are rows and written i, keys are columns and written j. `offset = query - key` = i - j, everywhere. On a
sequence a positive offset means that the key came *before* the query: it lies in the past. On an image the offset is
(row, column), and offset (0, -1) means that the key is the *right* neighbour. The documents mix this sign with its opposite,
which causes several of their errors.

A **score** is an input of the softmax. In each example queries, keys and values are the tokens themselves, so

    score[i, j] = <x[i], x[j]> / sqrt(width) + what position adds

and two functions compute everything below:

{code(computed.scores, computed.bias_of)}
"""
