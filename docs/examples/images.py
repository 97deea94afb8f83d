"""The page's sections on images: 6 to 10 of the documents."""

# ruff: noqa: E501
# Lines of text are as long as they read best.

from __future__ import annotations

import math

import computed
import printed
from layout import beside, block, code, number, table, vector


def two_by_two() -> str:
    """Section 6.2."""
    a = computed.without_position()
    x = computed.PATCHES
    patches = table(
        ["patch", "(row, column)", "x"],
        [[n, place, vector(x[n], 0)] for n, place in enumerate(computed.PLACES)],
    )
    return f"""
## Two by two patches, no position (6.1, 6.2)

{patches}

The width is 2, so each product is divided by sqrt(2) = {number(2**0.5)}. Query 0 and key 2: (1 x 1 + 0 x 1) / {number(2**0.5)}
= {number(a[0, 2].item())}. Query 2 with itself: (1 x 1 + 1 x 1) / {number(2**0.5)} = {number(a[2, 2].item())}. Patch 3 is the
zero vector: its product with any vector is 0, so row 3 and column 3 are all zeros.

{block(a)}

The document has {number(printed.WITHOUT_POSITION[2][3])} for queries and keys (2, 3) and (3, 2):

{beside(a, printed.WITHOUT_POSITION)}
"""


def two_by_two_absolute() -> str:
    """Section 6.3."""
    a, y = computed.absolute(), computed.coordinates_added()
    with_vectors = table(
        ["patch", "x", "p = (row, column) / 2", "x + p"],
        [
            [n, vector(computed.PATCHES[n], 0), vector([c / 2 for c in place], 1), vector(y[n], 1)]
            for n, place in enumerate(computed.PLACES)
        ],
    )
    return f"""
## An absolute position: one vector per position (6.3)

Every patch gets its own vector before attention.

{with_vectors}

{code(computed.coordinates_added)}

The document's first row is right although it writes K2 as [1.5, 0]: patch 2 is [1, 1], so K2 is {vector(y[2], 1)}, and the query
[1, 0] ignores the second number. The rows below were "similar arithmetic" and mostly repeat the scores without these vectors:

{beside(a, printed.ABSOLUTE)}

For example query 1 with itself: [0, 1.5] with [0, 1.5] is 2.25, divided by sqrt(2) {number(a[1, 1].item())}.
"""


def two_by_two_relative() -> str:
    """Section 6.4."""
    a, content = computed.relative(), computed.without_position()
    bias = a - content
    entries = table(
        ["offset = query - key", "the key is", "bias"],
        [[offset, where(offset), number(value, 1)] for offset, value in computed.TABLE.items()]
        + [[offset, where(offset), "missing; here 0"] for offset in ((-1, 1), (1, -1))],
    )
    return f"""
## A relative position: a number per offset (6.4)

Tokens stay as they are; each score gets a number that depends on the offset alone.

{entries}

The two missing offsets are those between patches 1 and 2, so the printed table cannot give the whole matrix. With 0 for both,
the bias is

{block(bias, digits=1)}

and the scores follow. Query 2 at (1, 0) and key 0 at (0, 0): offset (1, 0), bias {number(bias[2, 0].item(), 1)}, score
{number(content[2, 0].item())} - 0.1 = {number(a[2, 0].item())}.

{beside(a, printed.RELATIVE)}

The wrong entries: the content of patch 3 was taken for {number(printed.WITHOUT_POSITION[2][3])} as in 6.2, signs were read the other way
round, or no bias was added. In relpos this is `RelativePositionBias(num_heads=1, window_size=(2, 2))`, Swin's table of 3 x 3
offsets; `relpos show relative_2d --grid 2x2` draws such a table.

![Scores of the 2 x 2 image without position, with absolute and with relative position](examples/image.png)
"""


def where(offset: tuple[int, int]) -> str:
    """Where the key lies, seen from the query."""
    if offset == (0, 0):
        return "the query itself"
    down = {-1: "below", 0: "", 1: "above"}[offset[0]]
    across = {-1: "to the right", 0: "", 1: "to the left"}[offset[1]]
    return " and ".join(word for word in (down, across) if word)


def directions() -> str:
    """Section 7 under one sign."""
    a, b, content = computed.relative(), computed.other_sign(), computed.without_position()
    told = ("patch 2, below", "patch 0 or 2, left or down", "itself or patch 1, up", "patch 2, left")
    ties = [", ".join(f"{j} ({computed.direction(i, j)})" for j in best) for i, best in enumerate(computed.highest(a))]
    other = [", ".join(f"{j} ({computed.direction(i, j)})" for j in best) for i, best in enumerate(computed.highest(b))]
    rows = [[i, vector(a[i]), ties[i], told[i], other[i]] for i in range(4)]
    neighbours = table(
        ["query 0 and key", "where it is", "offset", "content", "bias", "score"],
        [
            [j, computed.direction(0, j), str(tuple(-c for c in computed.PLACES[j]))]
            + [number(x, 3) for x in (content[0, j].item(), (a - content)[0, j].item(), a[0, j].item())]
            for j in range(4)
        ],
    )
    reading = table(["query", "scores", "looks most at", "the document says", "if offsets were key - query"], rows)
    return f"""
## Which way does a patch look? (6.6, 7, 8)

Section 6.4 computes offsets as query - key: from patch 2 to patch 0 above it (+1, 0). Sections 6.6, 7 and 8 read the same table
as key - query: (+1, 0) is "the neighbour below". Only one of them can hold. With query - key:

{neighbours}

Patch 0 does look below itself most, as section 7 says, but for two reasons that the text does not give: patch 2 resembles it
(content {number(content[0, 2].item())}), and the offset to a key below is (-1, 0), whose bias is +0.1. Read with the sign of section 7,
that bias would be -0.1, the score {number(b[0, 2].item())}, and patch 0 would look at itself most. All four:

{reading}

Patches 1 and 3 look neither left nor down: to patch 1 its left neighbour is at offset (0, 1), bias -0.2, and has the *lowest*
score of its row. Patch 3 is the zero vector, so only its biases count, and each of its neighbours has a negative one.

The point of section 8 holds with either sign: one offset has one bias at every patch. The right neighbour of patch 0 (patch 1) and
that of patch 2 (patch 3) are both at offset (0, -1), and both get {number((a - content)[0, 1].item(), 1)} and
{number((a - content)[2, 3].item(), 1)}. The same head discourages looking left: patch 0 from patch 1, and patch 2 from patch 3, get
{number((a - content)[1, 0].item(), 1)} and {number((a - content)[3, 2].item(), 1)}.
"""


def shifts() -> str:
    """Section 6.5."""
    found = computed.shifted()
    rows = []
    for name, (left, right) in found.items():
        change = (left - right).abs().max().item()
        rows.append([name, number(left[0, 1].item()), number(right[0, 1].item()), number(change)])
    moved = table(
        ["position", "patch 0 to patch 1, at the left", "one column to the right", "largest change of all 16"], rows
    )
    return f"""
## When the image moves (6.5, 7.5)

Put the four patches at the left of an image of two rows and three columns, then one column further right, and look at the scores
among the four.

{moved}

With the relative bias nothing changes at all: the offsets stay the same. With absolute vectors every score changes, because each
patch now has another vector. Strictly this is *equivariance*: scores move along with the image. It holds up to the
image's edge: patches that leave or enter the image still change the softmax.

{code(computed.shifted)}
"""


def heads() -> str:
    """Section 9.4."""
    weights = computed.head_weights()
    where_to = ((1, 2), (1, 0), (2, 1), (2, 2))
    rows = []
    for head, ((name, entries), (r, c)) in enumerate(zip(computed.HEADS, where_to, strict=True)):
        ((offset, value),) = entries.items()
        rows.append(
            [head, name, f"{(-offset[0], -offset[1])}: +{value}", f"{offset}: +{value}", f"{weights[head, r, c]:.1%}"]
        )
    return f"""
## Heads specialise (9.4)

Each head has a table of its own. The document writes the four heads with key - query; in query - key the offsets change sign. On
an image of nine equal patches content says nothing, and the middle patch divides its attention by the bias alone: without one,
{1 / 9:.1%} to each.

{table(["head", "", "as printed", "query - key", "attention to that neighbour"], rows)}

A bias of +0.2 is a nudge: e^0.2 = {number(math.exp(0.2), 2)}, so that neighbour counts for
{number(100 * (math.exp(0.2) - 1), 0)}% more than any other.

![The bias of four heads for the middle patch: each prefers one neighbour](examples/heads.png)
"""


def override() -> str:
    """Sections 9.1 and 10."""
    parts, strong = computed.override(), computed.override(-2.0)
    return f"""
## Content overrides a negative bias (9.1, 9.5, 10)

A head that prefers not to look right, with the biases of section 8: to the right -0.2, below -0.1, below to the right -0.3, and the
opposite on the other side. In this image of three by three patches an edge runs from the middle to the right: the middle patch
is {vector(computed.SCENE[computed.CENTRE], 0)}, its right neighbour {vector(computed.SCENE[computed.RIGHT], 0)}, the others are faint.

{code(computed.override)}

| for the middle patch | its right neighbour | itself |
| --- | --- | --- |
| content score | {number(parts["content"][1, 2].item())} | {number(parts["content"][1, 1].item())} |
| bias | {number(parts["bias"][1, 2].item(), 1)} | {number(parts["bias"][1, 1].item(), 1)} |
| score | {number(parts["sum"][1, 2].item())} | {number(parts["sum"][1, 1].item())} |
| attention | **{parts["weights"][1, 2]:.1%}** | {parts["weights"][1, 1]:.1%} |

The bias is against the right neighbour, the content for it, and the content is larger. This is not a rule: at a bias of
{number(computed.override_threshold())}, minus the difference of their content scores, the two patches tie. At -2 the
right neighbour falls to {strong["weights"][1, 2]:.1%} and the middle patch itself rises to {strong["weights"][1, 1]:.1%}.

![Content scores, bias, their sum and the attention weights of the middle patch](examples/override.png)
"""
